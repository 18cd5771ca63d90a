"""q5_0: GGML Q5_0, 5-bit codes around 16 with one scale per 32.

    w = d * (q - 16)
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      u5  [N, K]

    gguf: 5.5 bits per weight
    planar: 5.5 bits per weight

Built from the spec q5_0 (sha256 1f909d9ff94551af) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import signmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * (q - 16) */
#define BITS 5
#define FIELDS 1
#define BRAIN_NUMBERS
static const float numbers[32] = {-16.0f, -15.0f, -14.0f, -13.0f, -12.0f, -11.0f, -10.0f, -9.0f, -8.0f, -7.0f, -6.0f, -5.0f,
        -4.0f, -3.0f, -2.0f, -1.0f, 0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_32(numbers, codes); }
#define BASE (-16)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    *scale = d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 22*K/32]."""
    r = blocks.unflatten(-1, (-1, 22))
    q_bytes = r[..., 6:22].contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_high = spread(r[..., 2:6], 1).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "q": q_low | q_high << 4}


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 22), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 6:22] = (q_split[:, :, 0] & 15) | (q_split[:, :, 1] & 15) << 4
    q_split2 = q.unflatten(-1, (-1, 4, 8))
    r[..., 2:6] = joined(q_split2 >> 4, 1).squeeze(-1)
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/32]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -5).unflatten(2, (4, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"d": d, "q": q_low | q_high << 4}


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 4, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 1 | (q_split2[:, :, 1, :, :, 1] >> 4) << 5 | (q_split2[:, :, 2, :, :, 0] >> 4) << 2
        | (q_split2[:, :, 2, :, :, 1] >> 4) << 6 | (q_split2[:, :, 3, :, :, 0] >> 4) << 3 | (q_split2[:, :, 3, :, :, 1] >> 4)
        << 7).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d}


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (q - 16).  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d, as_float(q - 16, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = the value of largest magnitude, sign and all, / divisor.  importance: float32
    [K].  options: by, ties.
    """
    q, d = signmax(weight, code="u5", scale="f16", rows=1, columns=32, axes=2, divisor=-16, offset=16, importance=importance,
            **{"by": "exact", "ties": "up", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 22 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 2
    j = u % 2
    d = tl.load(blocks_f16 + 11 * t, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q_word = tl.load(blocks + 22 * t + 2 * h + j + 2, live, 0)
        for i in tl.static_range(8):
            q_low = tl.load(blocks + 22 * t + 8 * j + i + 6, live, 0) >> 4 * h & 15
            q_high = q_word >> i & 1
            q = (q_low | q_high << 4).to(tl.int32)
            state = use(state, 32 * t + 16 * h + 8 * j + i, d * (q - 16), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d = tensors
    d += n * (K // 32)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 32, live, 0).to(tl.float32)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live, 0) >> 16 * (k % 512 % 2) + 4 * (k % 512 // 8 % 4) + k % 512 // 128 & 1
    q = (q_low | q_high << 4).to(tl.int32)
    return use(state, k, d1 * (q - 16), live)


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = d * (q - 16.0)."""
    d, = fields
    if BASE is not None:                             # else operands have no zero point any more
        sum += (-16.0 - BASE) * ones
    return lanes.plus(total, sum * d)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/16", last="k", digits=(2,), lanes=(2, 8),
                order=(0, 1, 3, 2, 4))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u5, words=bitplanes.words_5, width=4, bits=5),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 32),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-16, -144), "exact": True, "spans": (0, 1)}}))),
    },
    decode=decode, encode=encode, importance=True, scheme="signmax", roles={"code": "q", "scale": "d"},
    settings={"divisor": -16, "by": "exact", "ties": "up", "offset": 16}, row_loops=RowLoops(ROW_FUNCTIONS, "q", 5, ("d",)),
)

PROGRAM = {
    "name": "q5_0", "title": "GGML Q5_0, 5-bit codes around 16 with one scale per 32", "source": "ggml-common.h block_q5_0",
    "formula": "d * (q - 16)", "bits": "5.5", "digest": "1f909d9ff94551af",
    "detect": {"gguf": "Q5_0"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "q": ("u5", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "22*K/32",
                {"slices": (("d", 0, [0, [(0, 22, 1)]]), ("q", 48, [0, [(16, 1, 1), (2, 4), (0, 22, 1)]], 0, 4),
                ("q", 16, [0, [(8, 1), (4, 1, 1), (0, 22, 1)]], 4, 1))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (4, 1), (0, 16, 1)]], 4, 1),)}),
                "d": ("f16", "N", "K/32", {"field": "d"}),
            }},
        },
        "options": {"by": ("stored", "exact", "inverse", "ratio"), "ties": ("even", "away", "up")},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
