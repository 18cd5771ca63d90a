"""q8_1: GGML Q8_1, 8-bit codes with one scale per 32, and what their sum comes to.

    w = d * q
    float32, rounded after each operation

    d      f16 [N, K/32]
    s      f16 [N, K/32]
    q      i8  [N, K]

    gguf: 9 bits per weight

Built from the spec q8_1 (sha256 25302f5dab79de2f) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Format, Kernels, Storage, Variant, as_float, as_type, empty
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 36*K/32]."""
    r = blocks.unflatten(-1, (-1, 36))
    return {"d": as_type(r, torch.float16)[..., 0], "s": as_type(r, torch.float16)[..., 1],
            "q": as_type(r[..., 4:36], torch.int8).flatten(1)}


def pack_gguf(d: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 36), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:4] = as_type(s.unsqueeze(-1), torch.uint8)
    r[..., 4:36] = q.unflatten(-1, (-1, 32)).view(torch.uint8)
    return {"blocks": r.flatten(1)}


def decode(d: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * q.  d [N, K/32], s [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.unflatten(1, (-1, 32))
    return torch.mul(d, as_float(q, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least."""
    q, d, s = absmax(weight, code="i8", scale="f16", sums="f16", rows=1, columns=32, axes=2, sums_columns=32,
            **{"divisor": 127, "by": "exact", "ties": "away", **options})
    return {"q": q, "d": d, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 36 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = k // 32
    h = k % 32
    d = tl.load(blocks_f16 + 18 * t, live, 0).to(tl.float32)
    q = tl.load(blocks + 36 * t + h + 4, live, 0).to(tl.int8, bitcast=True)
    return use(state, k, d * q, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "d", "sums": "s"},
    settings={"divisor": 127, "by": "exact", "ties": "away"},
)

PROGRAM = {
    "name": "q8_1", "title": "GGML Q8_1, 8-bit codes with one scale per 32, and what their sum comes to",
    "source": "ggml-common.h block_q8_1", "formula": "d * q", "bits": "9", "digest": "25302f5dab79de2f",
    "detect": {"gguf": "Q8_1"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "s": ("f16", "N", "K/32"), "q": ("i8", "N", "K")},
        "storages": {"gguf": {"tensors": {"blocks": ("u8", "N", "36*K/32",
            {"slices": (("d", 0, [0, [(0, 36, 1)]]), ("s", 16, [0, [(0, 36, 1)]]), ("q", 32, [0, [(32, 1, 1), (0, 36, 1)]]))})}}},
        "options": {"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
