"""nvfp4_ct: NVFP4, 4-bit floats with an 8-bit float per 16 divided by a scale of the whole weight.

    w = s / g * q
    float32, rounded after each operation

    s      e4m3 [N, K/16]
    g      f32  []
    q      e2m1 [N, K]

    compressed_tensors: 4.5 bits per weight
    planar: 4.5 bits per weight

Built from the spec nvfp4_ct (sha256 15dce39d350484bc) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
from torch import Tensor

from qdsl.encode import nested_absmax
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, cdiv, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, group_sums, lanes
from qdsl.runtime.libraries.triton import tl, triton
from qdsl.runtime.weight.numbers import e2m1, e4m3


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = s / g * q */
#define BITS 4
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f, 0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f,
        -6.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-12)
#define UNIT 0.5f
static const uint8_t byte_numbers[16] = {12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf g = FIELD(0);
    const vf s = FIELD(1);
    *scale = s / g;
}
"""


def unpack_compressed_tensors(weight_packed: Tensor, weight_scale: Tensor, weight_global_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight_packed uint8 [N, K/2]; weight_scale float8_e4m3fn [N, K/16]; weight_global_scale float32 [1]."""
    return {"s": weight_scale, "g": weight_global_scale.squeeze(0), "q": spread(weight_packed, 4).flatten(1)}


def pack_compressed_tensors(s: Tensor, g: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight_packed, weight_scale, weight_global_scale of the fields; the inverse of unpack_compressed_tensors."""
    q_split = q.unflatten(-1, (-1, 2))
    r = joined(q_split, 4).squeeze(-1)
    return {"weight_packed": r, "weight_scale": s, "weight_global_scale": g.unsqueeze(-1)}


def unpack_planar(q: Tensor, g: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; g float32 []; s float8_e4m3fn [N, K/16]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 2 & 3], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    q_high = torch.stack([q_bytes >> 4 & 3, q_bytes >> 6], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]
    return {"s": s, "g": g, "q": q_low | q_high << 2}


def pack_planar(s: Tensor, g: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, g, s of the fields; the inverse of unpack_planar."""
    r = torch.zeros(q.shape[0], cdiv(q.shape[1], 128), 64, dtype=torch.uint8, device=q.device)
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r[...] |= ((q_split[:, :, :, 0] & 3) | (q_split[:, :, :, 1] & 3) << 2).permute(0, 1, 3, 2, 4).flatten(2)
    r[...] |= ((q_split[:, :, :, 0] >> 2) << 4 | (q_split[:, :, :, 1] >> 2) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "g": g, "s": s}


def decode(s: Tensor, g: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = s / g * q.  s [N, K/16], g [], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 16))
    s = e4m3(s).unsqueeze(-1)
    q = e2m1(q).unflatten(1, (-1, 16))
    return torch.mul(s / g, q, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: super-scale from the largest magnitude of the weight; scale = largest of the block /
    divisor, in its units.  options: empty, least, amax, by, ties, zeros.
    """
    q, s, g = nested_absmax(weight, code="e2m1", scale="e4m3", super_scale="f32", rows=1, columns=16, axes=2, divisor=6,
            precision="own", divided=1, **{"empty": 0.125, "zeros": "positive", **options})
    return {"q": q, "s": s, "g": g}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_compressed_tensors(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    weight_packed, weight_scale, weight_global_scale = tensors
    weight_scale += n * (K // 16)
    g = tl.load(weight_global_scale)
    weight_packed += n * (K // 2)
    s = device.e4m3(tl.load(weight_scale + t // 8, live, 0))
    q_word = tl.load(weight_packed + t, live, 0)
    for h in tl.static_range(2):
        q = device.e2m1(q_word >> 4 * h & 15)
        state = use(state, 2 * t + h, tl.div_rn(s, g) * q, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, g, s = tensors
    s += n * (K // 16)
    g1 = tl.load(g)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                s1 = device.e4m3(tl.load(s + 8 * t + 2 * c + h, inside, 0))
                q_low = q_word >> 16 * h + 8 * j + 2 * i & 3
                q_high = q_word >> 16 * h + 8 * j + 2 * i + 4 & 3
                q1 = device.e2m1(q_low | q_high << 2)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, tl.div_rn(s1, g1) * q1, inside)
    return state


@triton.jit
def _finish_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a row adds up to, with w = s / g * q."""
    g_, = fields
    return lanes.plus(total, sum * (1.0 / g_))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "compressed_tensors": Storage(unpack_compressed_tensors, pack_compressed_tensors, Kernels(_decode_compressed_tensors,
                rows="N", units="K/2", last="k", lanes=(2,), order=(0, 1, 2), divides=True)),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), divides=True,
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.e2m1, words=bitplanes.words_4, width=8, bits=0,
                    unit=(16384.0, 1.0), base=(0, 0), levels=Levels(codebook.two_part_table)),
                    Sums(scale=group_sums.scaled, finish=_finish_planar, group_fields=(GroupField("s", 1, 16, "e4m3"),),
                    row_fields=(GroupField("g", 0, 0),), blocks=("16",)),
                    {"skinny": {}, "gemv": {"raw": bitplanes.raw_e2m1}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("g", "s")),
)

PROGRAM = {
    "name": "nvfp4_ct", "title": "NVFP4, 4-bit floats with an 8-bit float per 16 divided by a scale of the whole weight",
    "source": "compressed-tensors nvfp4-pack-quantized (weight_global_scale)", "formula": "s / g * q", "bits": "4.5",
    "digest": "15dce39d350484bc",
    "variants": {(): {
        "fields": {"s": ("e4m3", "N", "K/16"), "g": ("f32",), "q": ("e2m1", "N", "K")},
        "storages": {
            "compressed_tensors": {"tensors": {
                "weight_packed": ("u8", "N", "K/2", {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]]),)}),
                "weight_scale": ("e4m3", "N", "K/16", {"field": "s"}),
                "weight_global_scale": ("f32", "1", {"slices": (("g", 0, []),)}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 0, 2),
                    ("q", 4, [0, [(2, 8), (4, 4, 1), (2, 2), (2, 16), (4, 1, 1), (0, 16, 1)]], 2, 2))}),
                "g": ("f32", {"field": "g"}),
                "s": ("e4m3", "N", "K/16", {"field": "s"}),
            }},
        },
        "options": {
            "empty": (), "least": (), "amax": (), "by": ("stored", "inverse"), "ties": ("even", "zero"),
            "zeros": ("signed", "negative", "positive"),
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
