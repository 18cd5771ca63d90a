"""q2_0: GGML Q2_0, 2-bit codes around 1 with one scale per 64.

    w = d * (q - 1)
    float32, rounded after each operation

    d      f16 [N, K/64]
    q      u2  [N, K]

    gguf: 2.25 bits per weight
    planar: 2.25 bits per weight

Built from the spec q2_0 (sha256 873b48ad7645a541) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * (q - 1) */
#define BITS 2
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[16] = {-1.0f, 0.0f, 1.0f, 2.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-1)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    *scale = d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 18*K/64]."""
    r = blocks.unflatten(-1, (-1, 18))
    return {"d": as_type(r, torch.float16)[..., 0], "q": spread(r[..., 2:18], 2).flatten(1)}


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 18), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 16, 4))
    r[..., 2:18] = joined(q_split, 2).squeeze(-1)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; d float16 [N, K/64]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"d": d,
            "q": torch.stack([q_bytes & 3, q_bytes >> 2 & 3, q_bytes >> 4 & 3, q_bytes >> 6], -5).unflatten(2, (2, 2)).permute(0,
                1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]}


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 256, 0, 0)).unflatten(-1, (-1, 2, 4, 2, 2, 4, 2))
    r = (q_split[:, :, 0, :, :, 0] | q_split[:, :, 0, :, :, 1] << 2 | q_split[:, :, 1, :, :, 0] << 4 | q_split[:, :, 1, :, :, 1]
        << 6).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "d": d}


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (q - 1).  d [N, K/64], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 64))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 64))
    return torch.mul(d, as_float(q - 1, out), out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: divisor, by, ties, least."""
    q, d = absmax(weight, code="u2", scale="f16", rows=1, columns=64, axes=2, offset=1,
            **{"divisor": 1, "by": "exact", "ties": "away", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 18 * (n * (K // 64))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 16
    i = u % 16
    d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
    for h in tl.static_range(4):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        state = use(state, 64 * t + 4 * i + h, d * (q - 1), live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, d = tensors
    d += n * (K // 64)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (256 * t + 32 * b + 2 * a < K)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                for c in tl.static_range(2):
                    inside = live & (256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                    d1 = tl.load(d + 4 * t + 2 * h + b // 2, inside, 0).to(tl.float32)
                    q1 = (q_word >> 16 * c + 8 * i + 4 * h + 2 * j & 3).to(tl.int32)
                    state = use(state, 256 * t + 128 * h + 32 * b + 16 * i + 8 * j + 2 * a + c, d1 * (q1 - 1), inside)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = d * (q - 1.0)."""
    d, = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-1.0 - BASE) * ones
    return lanes.plus(total, sum * d)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/4", last="k", digits=(16,), lanes=(4,),
                order=(0, 1, 2, 3))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u2, words=bitplanes.words_2, width=2, bits=2),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 64),), blocks=("64",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-1, -129), "exact": True, "spans": (4,)}}))),
    },
    decode=decode, encode=encode, scheme="absmax", roles={"code": "q", "scale": "d"},
    settings={"divisor": 1, "by": "exact", "ties": "away", "offset": 1}, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("d",)),
)

PROGRAM = {
    "name": "q2_0", "title": "GGML Q2_0, 2-bit codes around 1 with one scale per 64", "source": "ggml-common.h block_q2_0",
    "formula": "d * (q - 1)", "bits": "2.25", "digest": "873b48ad7645a541",
    "detect": {"gguf": "Q2_0"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/64"), "q": ("u2", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "18*K/64",
                {"slices": (("d", 0, [0, [(0, 18, 1)]]), ("q", 16, [0, [(4, 2), (16, 1, 1), (0, 18, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (2, 2), (2, 8), (4, 1, 1), (2, 4), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/64", {"field": "d"}),
            }},
        },
        "options": {"divisor": (), "by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up"), "least": ()},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
