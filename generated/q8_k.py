"""q8_k: GGML Q8_K, 8-bit codes with one scale per 256, and sums of codes.

    w = d * q
    float32, rounded after each operation

    d      f32 [N, K/256]
    bs     i16 [N, K/16]
    q      i8  [N, K]

    gguf: 9.125 bits per weight

Built from the spec q8_k (sha256 a37cb980c36632af) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import signmax
from qdsl.runtime import Format, Kernels, Storage, Variant, as_float, as_type, empty, integer
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 292*K/256]."""
    r = blocks.unflatten(-1, (-1, 292))
    return {"d": as_type(r, torch.float32)[..., 0],
            "bs": (((integer(r[..., 260:292].unflatten(-1, (16, 2))) & 65535).flatten(1).to(torch.int32)) ^ 32768) - 32768,
            "q": as_type(r[..., 4:260], torch.int8).flatten(1)}


def pack_gguf(d: Tensor, bs: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 292), torch.uint8, d.device)
    r[..., 0:4] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 4:260] = q.unflatten(-1, (-1, 256)).view(torch.uint8)
    bs_packed = (bs.unflatten(-1, (-1, 16)) & 65535).to(torch.int32)
    r[..., 260:292] = bs_packed.unsqueeze(-1).view(torch.uint8)[..., :2].flatten(2)
    return {"blocks": r.flatten(1)}


def decode(d: Tensor, bs: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * q.  d [N, K/256], bs [N, K/16], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 256))
    d = d.unsqueeze(-1)
    q = q.unflatten(1, (-1, 256))
    return torch.mul(d, as_float(q, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = the value of largest magnitude, sign and all, / divisor.  options: by, ties."""
    q, d, bs = signmax(weight, code="i8", scale="f32", sums="i16", rows=1, columns=256, axes=2, sums_columns=16, divisor=-127,
            **{"by": "ratio", **options})
    return {"q": q, "d": d, "bs": bs}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 292 * (n * (K // 256))
    blocks_f32 = blocks.to(tl.pointer_type(tl.float32))
    t = k // 256
    h = k % 256
    d = tl.load(blocks_f32 + 73 * t, live, 0)
    q = tl.load(blocks + 292 * t + h + 4, live, 0).to(tl.int8, bitcast=True)
    return use(state, k, d * q, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode, scheme="signmax", roles={"code": "q", "scale": "d", "sums": "bs"},
    settings={"divisor": -127, "by": "ratio"},
)

PROGRAM = {
    "name": "q8_k", "title": "GGML Q8_K, 8-bit codes with one scale per 256, and sums of codes",
    "source": "ggml-common.h block_q8_K", "formula": "d * q", "bits": "9.125", "digest": "a37cb980c36632af",
    "detect": {"gguf": "Q8_K"},
    "variants": {(): {
        "fields": {"d": ("f32", "N", "K/256"), "bs": ("i16", "N", "K/16"), "q": ("i8", "N", "K")},
        "storages": {"gguf": {"tensors": {"blocks": ("u8", "N", "292*K/256",
            {"slices": (("d", 0, [0, [(0, 292, 1)]]), ("q", 32, [0, [(256, 1, 1), (0, 292, 1)]]),
            ("bs", 2080, [0, [(16, 2, 1), (0, 292, 1)]]))})}}},
        "options": {"by": ("stored", "exact", "inverse", "ratio"), "ties": ("even", "away", "up")},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
