"""ik_iq3_k: ik_llama.cpp IQ3_K, 3-bit codes into two tables of levels, 4-bit scales and signs of blocks of 16.

    w = d * scales[sc] * levels[8 * h + q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u5  [N, K/16]
    h      u1  [N, K/16]
    q      u3  [N, K]

    ik_llama: 3.4375 bits per weight
    planar: 3.5625 bits per weight

Built from the spec ik_iq3_k (sha256 2e1b366f968b71ed) by qdsl 0.1.0.
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


LEVELS = Table("f32", -63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51)


SCALES = Table("f32", *((2 * (i % 16) + 1) * (1 - 2 * (i // 16)) for i in range(32)))


ROW_FUNCTIONS = """
/* w = d * scales[sc] * levels[8 * h + q] */
#define BITS 3
#define FIELDS 3
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {-63.0f, -40.0f, -23.0f, -10.0f, 1.0f, 13.0f, 28.0f, 47.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-63)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {0, 23, 40, 53, 64, 76, 91, 110};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    const vf h = FIELD(2);
    *scale = d * sc;
    *offset = *scale * (4.0f * h);
}
"""


def unpack_ik_llama(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 110*K/256]."""
    r = blocks.unflatten(-1, (-1, 110))
    sc_low = spread(r[..., 6:14], 4).flatten(1)
    sc_high = spread(r[..., 4:6], 1).flatten(1)
    q_bytes = r[..., 14:78].unflatten(-1, (2, 32)).contiguous()
    q_low = torch.stack([q_bytes >> 2 * i & 3 for i in range(4)], -2).flatten(1)
    q_bytes2 = r[..., 78:110].contiguous()
    q_high = torch.stack([q_bytes2 >> 1 * i & 1 for i in range(8)], -2).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": sc_low | sc_high << 4, "h": spread(r[..., 2:4], 1).flatten(1),
            "q": q_low | q_high << 2}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_ik_llama."""
    r = empty((d.shape[0], d.shape[1], 110), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    h_split = h.unflatten(-1, (-1, 2, 8))
    r[..., 2:4] = joined(h_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 6:14] = joined(sc_split & 15, 4).squeeze(-1)
    sc_split2 = sc.unflatten(-1, (-1, 2, 8))
    r[..., 4:6] = joined(sc_split2 >> 4, 1).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 4, 32))
    r[..., 14:78] = sum((q_split[:, :, :, i] & 3) << 2 * i for i in range(4)).flatten(2)
    q_split2 = q.unflatten(-1, (-1, 8, 32))
    r[..., 78:110] = sum((q_split2[:, :, i] >> 2) << 1 * i for i in range(8))
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, sc: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/256]; sc uint8 [N, K/16]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 8, 2))
    q_low = torch.stack([q_bytes & 3, q_bytes >> 4 & 3, q_bytes >> 2 & 3, q_bytes >> 6], -4).unflatten(2, (2, 2)).permute(0, 1,
        2, 5, 3, 4, 6).flatten(1)
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 8, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -4).unflatten(2, (2, 2, 2)).permute(0, 1, 2, 3, 6, 4, 5, 7).flatten(1)[:, :K]
    return {"d": d, "sc": sc & 31, "h": sc >> 5 & 1, "q": q_low | q_high << 2}


def pack_planar(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 2, 8, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, 0, :, 0] & 3) | (q_split[:, :, 0, :, 1] & 3) << 4 | (q_split[:, :, 1, :, 0] & 3) << 2
        | (q_split[:, :, 1, :, 1] & 3) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 2, 2, 8, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, 0, :, 0] >> 2) | (q_split2[:, :, 0, 0, :, 1] >> 2) << 4 | (q_split2[:, :, 0, 1, :, 0] >> 2)
        << 2 | (q_split2[:, :, 0, 1, :, 1] >> 2) << 6 | (q_split2[:, :, 1, 0, :, 0] >> 2) << 1
        | (q_split2[:, :, 1, 0, :, 1] >> 2) << 5 | (q_split2[:, :, 1, 1, :, 0] >> 2) << 3 | (q_split2[:, :, 1, 1, :, 1] >> 2)
        << 7).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] |= sc.unsqueeze(-1)
    sc_bytes[...] |= (h << 5).unsqueeze(-1)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d,
            "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * scales[sc] * levels[8 * h + q].  d [N, K/256], sc [N,
    K/16], h [N, K/16], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 16))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    h = h.view(torch.int8).unflatten(1, (-1, 16)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16, 16))
    return torch.mul(d * SCALES[sc], LEVELS[8 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u3", choice="u1", scale="u5", super_scale="f16", columns=16, super_axes=2,
            super_columns=256,
            steps=(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, -1, -3, -5, -7, -9, -11, -13, -15, -17, -19, -21,
                -23, -25, -27, -29, -31),
            values=(-63, -40, -23, -10, 1, 13, 28, 47, -59, -36, -19, -6, 5, 17, 32, 51), importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, scales, levels = tensors
    blocks += 110 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    c = u % 32
    d = tl.load(blocks_f16 + 55 * t, live, 0).to(tl.float32)
    q_word1 = tl.load(blocks + 110 * t + c + 78, live, 0)
    for i in tl.static_range(2):
        sc_word = tl.load(blocks + 110 * t + i + 4, live, 0)
        h_word = tl.load(blocks + 110 * t + i + 2, live, 0)
        q_word = tl.load(blocks + 110 * t + 32 * i + c + 14, live, 0)
        for j in tl.static_range(4):
            sc_low = tl.load(blocks + 110 * t + 4 * i + j + 6, live, 0) >> 4 * (c // 16) & 15
            sc_high = sc_word >> 2 * j + c // 16 & 1
            sc = (sc_low | sc_high << 4).to(tl.int32)
            h = (h_word >> 2 * j + c // 16 & 1).to(tl.int32)
            q_low = q_word >> 2 * j & 3
            q_high = q_word1 >> 4 * i + j & 1
            q = (q_low | q_high << 2).to(tl.int32)
            state = use(state, 256 * t + 128 * i + 32 * j + c, d * tl.load(scales + sc) * tl.load(levels + 8 * h + q), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc, scales, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = (tl.load(sc + k // 16, live, 0) & 31).to(tl.int32)
    h = (tl.load(sc + k // 16, live, 0) >> 5 & 1).to(tl.int32)
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 // 16 % 2) + 8 * (k % 256 % 2) + 4 * (k % 256 // 8 % 2) + 2 * (k % 256 // 128) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 // 16 % 2) + 8 * (k % 512 % 2) + 4 * (k % 512 // 8 % 2) + 2 * (k % 512 // 128 % 2) + k % 512 // 256 & 1
    q = (q_low | q_high << 2).to(tl.int32)
    return use(state, k, d1 * tl.load(scales + sc1) * tl.load(levels + 8 * h + q), live)


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0, (0x35281700, 0x6e5b4c40))
    else:
        return codebook.table(g, N, 0x43434343, (0x35281700, 0x6e5b4c40))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = d * scales[sc] * (levels[q] + 4.0 * h)."""
    d, sc, h = fields
    sum += (4.0 * h - BASE) * ones
    return lanes.plus(total, sum * (d * sc))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "ik_llama": Storage(unpack_ik_llama, pack_ik_llama, Kernels(_decode_ik_llama, rows="N", units="K/8", last="k",
                digits=(32,), lanes=(2, 4), order=(0, 1, 3, 4, 2), tables=(SCALES, LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                tables=(SCALES, LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.entries_of_8, words=bitplanes.words_3, width=8, bits=0,
                    base=(63, 191), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar,
                    group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 5, table=SCALES, at=0),
                    GroupField("sc", 1, 16, 1, at=5)), blocks=("256", "16")),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-63, -191), "sums": True, "spans": (2, 2)}}))),
    },
    decode=decode, encode=encode, importance=True,
    row_loops=RowLoops(ROW_FUNCTIONS, "q", 3, ("d", "sc", "h"), lookups={"sc": SCALES}),
)

PROGRAM = {
    "name": "ik_iq3_k",
    "title": "ik_llama.cpp IQ3_K, 3-bit codes into two tables of levels, 4-bit scales and signs of blocks of 16",
    "source": "ik_llama.cpp ggml-common.h block_iq3_k, iqk_quantize.cpp dequantize_row_iq3_k",
    "formula": "d * scales[sc] * levels[8 * h + q]", "bits": "3.4375 to 3.5625", "digest": "2e1b366f968b71ed",
    "detect": {"gguf": "IQ3_K"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u5", "N", "K/16"), "h": ("u1", "N", "K/16"), "q": ("u3", "N", "K")},
        "storages": {
            "ik_llama": {"tensors": {"blocks": ("u8", "N", "110*K/256",
                {"slices": (("d", 0, [0, [(0, 110, 1)]]), ("h", 16, [0, [(8, 1), (2, 1, 1), (0, 110, 1)]]),
                ("sc", 48, [0, [(2, 4), (8, 1, 1), (0, 110, 1)]], 0, 4), ("sc", 32, [0, [(8, 1), (2, 1, 1), (0, 110, 1)]], 4, 1),
                ("q", 112, [0, [(32, 1, 1), (4, 2), (2, 32, 1), (0, 110, 1)]], 0, 2),
                ("q", 624, [0, [(32, 1, 1), (8, 1), (0, 110, 1)]], 2, 1))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/256)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]], 0, 2),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (2, 1), (0, 16, 1)]], 2,
                    1),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"padding": 192, "slices": (("sc", 0, [0, 1]), ("h", 5, [0, 1]))}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
