"""ik_iq2_k: ik_llama.cpp IQ2_K, 2-bit codes into two tables of levels, 4-bit scales of blocks of 16.

    w = d * (sc - 8) * levels[4 * h + q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/16]
    h      u1  [N, K/16]
    q      u2  [N, K]

    ik_llama: 2.375 bits per weight
    planar: 2.5625 bits per weight

Built from the spec ik_iq2_k (sha256 bf33de139d500c05) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, empty, joined, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -31, -13, 1, 17, -26, -8, 6, 22)


ROW_FUNCTIONS = """
/* w = d * (sc - 8) * levels[4 * h + q] */
#define BITS 2
#define FIELDS 3
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {-31.0f, -13.0f, 1.0f, 17.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-31)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {0, 18, 32, 48};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    const vf h = FIELD(2);
    *scale = d * sc - 8.0f * d;
    *offset = *scale * (5.0f * h);
}
"""


def unpack_ik_llama(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 76*K/256]."""
    r = blocks.unflatten(-1, (-1, 76))
    q_bytes = r[..., 12:76].unflatten(-1, (2, 32)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "sc": spread(r[..., 4:12], 4).flatten(1),
            "h": spread(r[..., 2:4], 1).flatten(1), "q": torch.stack([q_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(1)}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_ik_llama."""
    r = empty((d.shape[0], d.shape[1], 76), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    h_split = h.unflatten(-1, (-1, 2, 8))
    r[..., 2:4] = joined(h_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 4:12] = joined(sc_split, 4).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 12:76] = sum(q_split[:, :, :, i] << 2 * i for i in range(4)).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/256)]; d float16 [N, K/256]; sc uint8 [N, K/16]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 8, 2))
    return {"d": d, "sc": sc & 15, "h": sc >> 4 & 1,
            "q": torch.stack([q_bytes2 & 3, q_bytes2 >> 4 & 3, q_bytes2 >> 2 & 3, q_bytes2 >> 6], -4).unflatten(2,
                (2, 2)).permute(0, 1, 2, 5, 3, 4, 6).flatten(1)}


def pack_planar(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 2, 8, 2, 4, 2))
    q_bytes = (q_split[:, :, 0, :, 0] | q_split[:, :, 0, :, 1] << 4 | q_split[:, :, 1, :, 0] << 2 | q_split[:, :, 1, :, 1]
        << 6).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] |= sc.unsqueeze(-1)
    sc_bytes[...] |= (h << 4).unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc - 8) * levels[4 * h + q].  d [N, K/256], sc [N, K/16],
    h [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    h = h.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * (sc - 8), LEVELS[4 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u2", choice="u1", scale="u4", super_scale="f16", columns=16, super_axes=2,
            super_columns=256, steps=(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7),
            values=(-31, -13, 1, 17, -26, -8, 6, 22), importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 76 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 64
    j = u // 32 % 2
    c = u % 32
    d = tl.load(blocks_f16 + 38 * t, live, 0).to(tl.float32)
    h_word = tl.load(blocks + 76 * t + j + 2, live, 0)
    q_word = tl.load(blocks + 76 * t + 32 * j + c + 12, live, 0)
    for i in tl.static_range(4):
        sc = (tl.load(blocks + 76 * t + 4 * j + i + 4, live, 0) >> 4 * (c // 16) & 15).to(tl.int32)
        h = (h_word >> 2 * i + c // 16 & 1).to(tl.int32)
        q = (q_word >> 2 * i & 3).to(tl.int32)
        state = use(state, 256 * t + 128 * j + 32 * i + c, d * (sc - 8) * tl.load(levels + 4 * h + q), live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    q, d, sc, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q += 16 * (n * tl.cdiv(K, 256))
    t = u // 16
    a = u // 4 % 4
    e = u % 4
    d1 = tl.load(d + t, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * e + a, live, 0)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            sc1 = (tl.load(sc + 16 * t + 8 * i + 2 * a + j, live, 0) & 15).to(tl.int32)
            h = (tl.load(sc + 16 * t + 8 * i + 2 * a + j, live, 0) >> 4 & 1).to(tl.int32)
            for c in tl.static_range(2):
                for b in tl.static_range(2):
                    q1 = (q_word >> 16 * j + 8 * b + 4 * c + 2 * i & 3).to(tl.int32)
                    state = use(state, 256 * t + 128 * i + 32 * a + 16 * j + 8 * c + 2 * e + b, d1 * (sc1 - 8)
                        * tl.load(levels + 4 * h + q1), live)
    return state


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0, (0x30201200,))
    else:
        return codebook.table(g, N, 0x43434343, (0x30201200,))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (d * sc - 8.0 * d) * (levels[q] + 5.0 * h)."""
    d, sc, h = fields
    sum += (5.0 * h - BASE) * ones
    return lanes.plus(total, sum * (d * sc - 8.0 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "ik_llama": Storage(unpack_ik_llama, pack_ik_llama, Kernels(_decode_ik_llama, rows="N", units="K/4", last="k",
                digits=(2, 32), lanes=(4,), order=(0, 1, 2, 4, 3), tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/256)", last="k",
                digits=(4, 4), lanes=(2, 2, 2, 2), order=(0, 1, 4, 2, 5, 6, 3, 7), tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.entries_of_4, words=bitplanes.words_2, width=8, bits=0,
                    base=(31, 159), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 4, at=0), GroupField("sc", 1, 16, 1, at=4)),
                    blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-31, -159), "sums": True, "spans": (2,)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 2, ("d", "sc", "h")),
)

PROGRAM = {
    "name": "ik_iq2_k", "title": "ik_llama.cpp IQ2_K, 2-bit codes into two tables of levels, 4-bit scales of blocks of 16",
    "source": "ik_llama.cpp ggml-common.h block_iq2_k, iqk_quantize.cpp dequantize_row_iq2_k",
    "formula": "d * (sc - 8) * levels[4 * h + q]", "bits": "2.375 to 2.5625", "digest": "bf33de139d500c05",
    "detect": {"gguf": "IQ2_K"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/16"), "h": ("u1", "N", "K/16"), "q": ("u2", "N", "K")},
        "storages": {
            "ik_llama": {"tensors": {"blocks": ("u8", "N", "76*K/256",
                {"slices": (("d", 0, [0, [(0, 76, 1)]]), ("h", 16, [0, [(8, 1), (2, 1, 1), (0, 76, 1)]]),
                ("sc", 32, [0, [(2, 4), (8, 1, 1), (0, 76, 1)]]),
                ("q", 96, [0, [(32, 1, 1), (4, 2), (2, 32, 1), (0, 76, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"padding": 224, "slices": (("sc", 0, [0, 1]), ("h", 4, [0, 1]))}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
