"""ik_iq5_k: ik_llama.cpp IQ5_K, 5-bit codes into two tables of levels, 6-bit scales of blocks of 16.

    w = d * (sc - 32) * levels[32 * h + q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u6  [N, K/16]
    h      u1  [N, K/16]
    q      u5  [N, K]

    ik_llama: 5.5 bits per weight
    planar: 5.5625 bits per weight

Built from the spec ik_iq5_k (sha256 cfb853c1aad2602c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, empty, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6, -1, 5, 11, 17, 23, 29, 36,
        43, 51, 59, 68, 77, 87, 97, 109, 121, -124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16, -10, -4, 1,
        7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123)


ROW_FUNCTIONS = """
/* w = d * (sc - 32) * levels[32 * h + q] */
#define BITS 5
#define FIELDS 3
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[32] = {-126.0f, -114.0f, -103.0f, -92.0f, -83.0f, -74.0f, -65.0f, -57.0f, -50.0f, -43.0f, -36.0f,
        -30.0f, -24.0f, -18.0f, -12.0f, -6.0f, -1.0f, 5.0f, 11.0f, 17.0f, 23.0f, 29.0f, 36.0f, 43.0f, 51.0f, 59.0f, 68.0f, 77.0f,
        87.0f, 97.0f, 109.0f, 121.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_32(numbers, codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    const vf h = FIELD(2);
    *scale = d * sc - 32.0f * d;
    *offset = *scale * (2.0f * h);
}
"""


def unpack_ik_llama(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 176*K/256]."""
    r = blocks.unflatten(-1, (-1, 176))
    sc_low = spread(r[..., 8:16], 4).flatten(1)
    sc_high = spread(r[..., 4:8], 2).flatten(1)
    q_bytes = r[..., 16:144].unflatten(-1, (4, 32)).contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_bytes2 = r[..., 144:176].contiguous()
    q_high = torch.stack([q_bytes2 >> 1 * i & 1 for i in range(8)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": sc_low | sc_high << 4, "h": spread(r[..., 2:4], 1).flatten(1),
            "q": q_low | q_high << 4}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_ik_llama."""
    r = empty((d.shape[0], d.shape[1], 176), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    h_split = h.unflatten(-1, (-1, 2, 8))
    r[..., 2:4] = joined(h_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 8:16] = joined(sc_split & 15, 4).squeeze(-1)
    sc_split2 = sc.unflatten(-1, (-1, 4, 4))
    r[..., 4:8] = joined(sc_split2 >> 4, 2).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 4, 2, 32))
    r[..., 16:144] = ((q_split[:, :, :, 0] & 15) | (q_split[:, :, :, 1] & 15) << 4).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 8, 32))
    r[..., 144:176] = sum((q_split2[:, :, i] >> 4) << 1 * i for i in range(8))
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, sc: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/256]; sc uint8 [N, K/16]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 8, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -4).unflatten(2, (4, 2)).permute(0, 1, 2, 5, 3, 4, 6).flatten(1)[:, :K]
    return {"d": d, "sc": sc & 63, "h": sc >> 6 & 1, "q": q_low | q_high << 4}


def pack_planar(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 8, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, 0] & 15) | (q_split[:, :, :, 1] & 15) << 4).permute(0, 1, 3, 2, 4).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 4, 8, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, 0] >> 4) | (q_split2[:, :, 0, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, 0] >> 4) << 1
        | (q_split2[:, :, 1, :, 1] >> 4) << 5 | (q_split2[:, :, 2, :, 0] >> 4) << 2 | (q_split2[:, :, 2, :, 1] >> 4) << 6
        | (q_split2[:, :, 3, :, 0] >> 4) << 3 | (q_split2[:, :, 3, :, 1] >> 4) << 7).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] |= sc.unsqueeze(-1)
    sc_bytes[...] |= (h << 6).unsqueeze(-1)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d,
            "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc - 32) * levels[32 * h + q].  d [N, K/256], sc [N,
    K/16], h [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    h = h.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * (sc - 32), LEVELS[32 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u5", choice="u1", scale="u6", super_scale="f16", columns=16, super_axes=2,
            super_columns=256,
            steps=(-32, -31, -30, -29, -28, -27, -26, -25, -24, -23, -22, -21, -20, -19, -18, -17, -16, -15, -14, -13, -12, -11,
                -10, -9, -8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19,
                20, 21, 22, 23, 24, 25, 26, 27, 28, 29, 30, 31),
            values=(-126, -114, -103, -92, -83, -74, -65, -57, -50, -43, -36, -30, -24, -18, -12, -6, -1, 5, 11, 17, 23, 29, 36,
                43, 51, 59, 68, 77, 87, 97, 109, 121, -124, -112, -101, -90, -81, -72, -63, -55, -48, -41, -34, -28, -22, -16,
                -10, -4, 1, 7, 13, 19, 25, 31, 38, 45, 53, 61, 70, 79, 89, 99, 111, 123),
            importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 176 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    c = u % 32
    d = tl.load(blocks_f16 + 88 * t, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 176 * t + c + 144, live, 0)
    for i in tl.static_range(4):
        sc_word = tl.load(blocks + 176 * t + i + 4, live, 0)
        h_word = tl.load(blocks + 176 * t + i // 2 + 2, live, 0)
        q_word = tl.load(blocks + 176 * t + 32 * i + c + 16, live, 0)
        for j in tl.static_range(2):
            sc_low = tl.load(blocks + 176 * t + 2 * i + j + 8, live, 0) >> 4 * (c // 16) & 15
            sc_high = sc_word >> 4 * j + 2 * (c // 16) & 3
            sc = (sc_low | sc_high << 4).to(tl.int32)
            h = (h_word >> 4 * (i % 2) + 2 * j + c // 16 & 1).to(tl.int32)
            q_low = q_word >> 4 * j & 15
            q_high = q_word1 >> 2 * i + j & 1
            q = (q_low | q_high << 4).to(tl.int32)
            state = use(state, 256 * t + 64 * i + 32 * j + c, d * (sc - 32) * tl.load(levels + 32 * h + q), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = (tl.load(sc + k // 16, live, 0) & 63).to(tl.int32)
    h = (tl.load(sc + k // 16, live, 0) >> 6 & 1).to(tl.int32)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 // 16 % 2) + 8 * (k % 128 % 2) + 4 * (k % 128 // 8 % 2) & 15
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 // 16 % 2) + 8 * (k % 512 % 2) + 4 * (k % 512 // 8 % 2) + k % 512 // 128 & 1
    q = (q_low | q_high << 4).to(tl.int32)
    return use(state, k, d1 * (sc1 - 32) * tl.load(levels + 32 * h + q), live)


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0,
            (0x22170c00, 0x453d342b, 0x605a534c, 0x78726c66, -0x70767c83, -0x565d646b, -0x343d464f, -0x814202b))
    else:
        return codebook.table(g, N, 0x0,
            (-0x47311b04, 0x648294a6, -0xfefd3b8, -0x3fbf6f40, -0x77cf5f80, 0x2c10e8b8, -0x657793b4, -0xd253d52, -0x3d3d3d3e,
            -0x3d3d3d3e, -0x3e3d3d3e, -0x3f3e3e3f, 0x414140bf, 0x42424141, 0x42424242, 0x42424242))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (d * sc - 32.0 * d) * (levels[q] + 2.0 * h)."""
    d, sc, h = fields
    sum += (2.0 * h - BASE) * ones
    return lanes.plus(total, sum * (d * sc - 32.0 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "ik_llama": Storage(unpack_ik_llama, pack_ik_llama, Kernels(_decode_ik_llama, rows="N", units="K/8", last="k",
                digits=(32,), lanes=(4, 2), order=(0, 1, 3, 4, 2), tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k", tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.wide_entries_of_32, words=bitplanes.words_5, width=8, bits=0,
                    base=(126, 0), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 6, at=0), GroupField("sc", 1, 16, 1, at=6)),
                    blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-126, 0), "sums": True, "spans": (0, 1)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 5, ("d", "sc", "h")),
)

PROGRAM = {
    "name": "ik_iq5_k", "title": "ik_llama.cpp IQ5_K, 5-bit codes into two tables of levels, 6-bit scales of blocks of 16",
    "source": "ik_llama.cpp ggml-common.h block_iq5_k, iqk_quantize.cpp dequantize_row_iq5_k",
    "formula": "d * (sc - 32) * levels[32 * h + q]", "bits": "5.5 to 5.5625", "digest": "cfb853c1aad2602c",
    "detect": {"gguf": "IQ5_K"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u6", "N", "K/16"), "h": ("u1", "N", "K/16"), "q": ("u5", "N", "K")},
        "storages": {
            "ik_llama": {"tensors": {"blocks": ("u8", "N", "176*K/256",
                {"slices": (("d", 0, [0, [(0, 176, 1)]]), ("h", 16, [0, [(8, 1), (2, 1, 1), (0, 176, 1)]]),
                ("sc", 64, [0, [(2, 4), (8, 1, 1), (0, 176, 1)]], 0, 4), ("sc", 32, [0, [(4, 2), (4, 1, 1), (0, 176, 1)]], 4, 2),
                ("q", 128, [0, [(32, 1, 1), (2, 4), (4, 32, 1), (0, 176, 1)]], 0, 4),
                ("q", 1152, [0, [(32, 1, 1), (8, 1), (0, 176, 1)]], 4, 1))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (4, 1), (0, 16, 1)]], 4, 1),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"padding": 128, "slices": (("sc", 0, [0, 1]), ("h", 6, [0, 1]))}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
