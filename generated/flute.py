"""flute: FLUTE, 4-bit codes into a stored table of levels with a scale per group, in tiles of matrix units.

    w = lut[q] * s
    float32, rounded after each operation

    lut    level_type [16]
    s      level_type [N, ceil(K/group)]
    q      u4         [N, K]

    flute: 4.25 bits per weight with group = 64
    planar: 4.25 bits per weight with group = 64

Built from the spec flute (sha256 1c53064ec1f4b5cc) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import scaled_kmeans
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_type, joined, lookup, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = lut[q] * s */
#define BITS 4
#define FIELDS 1
INLINE vf number(const Weight *w, vu codes) { return lookup_16((const float *)w->levels, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = s;
}
"""


def unpack_flute(weight: Tensor, scales: Tensor, tables: Tensor) -> dict[str, Tensor]:
    """Fields of weight int16 [32*N/128, K/2, 2]; scales level_type [N, K/group]; tables level_type [16]."""
    r = as_type(weight.unflatten(0, (-1, 32)).permute(0, 3, 2, 1), torch.uint8)
    return {"lut": tables, "s": scales,
            "q": spread(r.unflatten(-1, (32, 2)), 4, high_first=True).permute(0, 1, 4, 3, 2, 5).flatten(0, 3).flatten(1)}


def pack_flute(lut: Tensor, s: Tensor, q: Tensor, *, N: int) -> dict[str, Tensor]:
    """weight, scales, tables of the fields; the inverse of unpack_flute."""
    q_split = q.unflatten(-1, (-1, 2)).unflatten(0, (N // 128, 2, 2, 32))
    r = joined(q_split, 4, high_first=True).squeeze(-1).permute(0, 1, 4, 3, 2).flatten(3)
    return {"weight": as_type(r, torch.int16).permute(0, 3, 2, 1).contiguous().flatten(0, 1), "scales": s, "tables": lut}


def unpack_planar(q: Tensor, s: Tensor, lut: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s level_type [N, ceil(K/group)]; lut level_type [16]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {"lut": lut, "s": s, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(lut: Tensor, s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, lut of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "lut": lut}


def decode(lut: Tensor, s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = lut[q] * s.  lut [16], s [N, ceil(K/group)], q [N, K]."""
    out = out if out is None else out.unflatten(1, (s.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (s.shape[1], -1))
    lut = lut.float()
    s = s.float().unsqueeze(-1)
    return torch.mul(lookup(lut, q), s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, level_type: str, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block; levels of the one stored table by k-means of
    all weights over their scales; codes of the nearest levels.  importance: float32 [K].
    """
    q, s, lut = scaled_kmeans(weight, code="u4", scale=level_type, levels=level_type, rows=1, columns=group, axes=2,
            importance=importance)
    return {"q": q, "s": s, "lut": lut}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_flute(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, scales, tables = tensors
    group, = sizes
    scales += n * (K // group)
    weight += 64 * (n // 64 // 2 * (K // 2)) + n // 64 % 2
    s = tl.load(scales + k // group, live, 0).to(tl.float32)
    q = (tl.load(weight + 2 * (k // 2) + 2 * (n % 64 % 32 * (K // 2)), live, 0) >> 8 * (n % 64 // 32) - 4 * (k % 2) + 4
        & 15).to(tl.int32)
    lut = tl.load(tables + q, live, 0).to(tl.float32)
    return use(state, k, lut * s, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, lut = tensors
    group, = sizes
    s += n * tl.cdiv(K, group)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    s1 = tl.load(s + (4 * t + c) // (group // 32), live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                lut1 = tl.load(lut + q1, inside, 0).to(tl.float32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, lut1 * s1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "flute": Storage(unpack_flute, pack_flute, Kernels(_decode_flute, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.float_entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    unit=(1.0, 1.0), base=(0, 0), levels=Levels(stored=GroupField("lut", 0, 0), entries=16)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("s", 1, "group"),), blocks=("group",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s",), levels="lut"),
)

PROGRAM = {
    "name": "flute", "title": "FLUTE, 4-bit codes into a stored table of levels with a scale per group, in tiles of matrix units",
    "source": "flute-kernel 0.4.2, flute/utils.py _pack_4bit with tile_P of 32, flute/integrations/base.py FluteLinear",
    "formula": "lut[q] * s", "bits": "4.25", "digest": "1c53064ec1f4b5cc",
    "params": {"group": (64, 32, 128, 256), "level_type": ("f16", "bf16")},
    "sizes": {"group": "K"},
    "variants": {(): {
        "fields": {"lut": ("level_type", "16"), "s": ("level_type", "N", "ceil(K/group)"), "q": ("u4", "N", "K")},
        "cuts": ("N", "ceil(K/group)"),
        "storages": {
            "flute": {"tensors": {
                "weight": ("i16", "32*N/128", "K/2", "2",
                    {"seen": ("N/4", "K"),
                    "slices": (("q", 4, [[(32, 1, 0), (2, 8), (2, 1, 2), (0, 32, 0)], [(2, -4), (0, 1, 1)]]),)}),
                "scales": ("level_type", "N", "K/group", {"field": "s"}),
                "tables": ("level_type", "16", {"field": "lut"}),
            }},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "s": ("level_type", "N", "ceil(K/group)", {"field": "s"}),
                "lut": ("level_type", "16", {"field": "lut"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
