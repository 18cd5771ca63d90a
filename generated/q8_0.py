"""q8_0: GGML Q8_0, 8-bit codes with one scale per 32.

    w = d * q
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      i8  [N, K]

    gguf: 8.5 bits per weight
    planar: 8.5 bits per weight

Built from the spec q8_0 (sha256 27e7007f65a4d856) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, pad)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * q */
#define BITS 8
#define FIELDS 1
INLINE vf number(const Weight *w, vu codes) { return signed_number(codes); }
#define BASE (-128)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes ^ 128; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    *scale = d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 34*K/32]."""
    r = blocks.unflatten(-1, (-1, 34))
    return {"d": as_type(r, torch.float16)[..., 0], "q": as_type(r[..., 2:34], torch.int8).flatten(1)}


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 34), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:34] = q.unflatten(-1, (-1, 32)).view(torch.uint8)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; d float16 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"d": d, "q": as_type(r, torch.int8).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K]}


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "d": d}


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * q.  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.unflatten(1, (-1, 32))
    return torch.mul(d, as_float(q, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least."""
    q, d = absmax(weight, code="i8", scale="f16", rows=1, columns=32, axes=2,
            **{"divisor": 127, "by": "exact", "ties": "away", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, = tensors
    blocks += 34 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = k // 32
    h = k % 32
    d = tl.load(blocks_f16 + 17 * t, live, 0).to(tl.float32)
    q = tl.load(blocks + 34 * t + h + 2, live, 0).to(tl.int8, bitcast=True)
    return use(state, k, d * q, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, d = tensors
    d += n * (K // 32)
    q += 32 * (n * tl.cdiv(K, 128))
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    d1 = tl.load(d + 4 * t + j, live, 0).to(tl.float32)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = ((q_word >> 16 * i + 8 * h & 255).to(tl.int32) ^ 128) - 128
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, d1 * q1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304)),
                    Sums(scale=group_sums.scaled_codes, group_fields=(GroupField("d", 1, 32),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-128, 0)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "d"},
    settings={"divisor": 127, "by": "exact", "ties": "away"}, row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("d",)),
)

PROGRAM = {
    "name": "q8_0", "title": "GGML Q8_0, 8-bit codes with one scale per 32", "source": "ggml-common.h block_q8_0",
    "formula": "d * q", "bits": "8.5", "digest": "27e7007f65a4d856",
    "detect": {"gguf": "Q8_0"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "q": ("i8", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "34*K/32",
                {"slices": (("d", 0, [0, [(0, 34, 1)]]), ("q", 16, [0, [(32, 1, 1), (0, 34, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "d": ("f16", "N", "K/32", {"field": "d"}),
            }},
        },
        "options": {"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
