"""iq3_xxs: GGML IQ3_XXS, rows of 4 magnitudes from a grid of 256, with signs and 4-bit scales.

    w = d * (sc + 0.5) * 0.5 * (grid[g, k % 4] * sign[s, k % 8])
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/32]
    g      u8  [N, K/4]
    s      u7  [N, K/8]

    gguf: 3.0625 bits per weight
    planar: 4.3125 bits per weight

Built from the spec iq3_xxs (sha256 57f308266d1cee33) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import grid_signs
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_float, as_type, integer)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


CODES = (0, 2, 4, 9, 11, 15, 16, 18, 25, 34, 59, 61, 65, 67, 72, 74, 81, 85, 88, 90, 97, 108, 120, 128, 130, 132, 137, 144, 146,
        153, 155, 159, 169, 175, 189, 193, 199, 200, 202, 213, 248, 267, 287, 292, 303, 315, 317, 321, 327, 346, 362, 413, 436,
        456, 460, 462, 483, 497, 513, 515, 520, 522, 529, 531, 536, 538, 540, 551, 552, 576, 578, 585, 592, 594, 641, 643, 648,
        650, 657, 664, 698, 704, 706, 720, 729, 742, 758, 769, 773, 808, 848, 852, 870, 889, 901, 978, 992, 1024, 1026, 1033,
        1035, 1040, 1042, 1046, 1049, 1058, 1089, 1091, 1093, 1096, 1098, 1105, 1112, 1139, 1143, 1144, 1152, 1154, 1161, 1167,
        1168, 1170, 1183, 1184, 1197, 1217, 1224, 1228, 1272, 1276, 1309, 1323, 1347, 1367, 1377, 1404, 1473, 1475, 1486, 1509,
        1537, 1544, 1546, 1553, 1555, 1576, 1589, 1594, 1600, 1602, 1616, 1625, 1636, 1638, 1665, 1667, 1672, 1685, 1706, 1722,
        1737, 1755, 1816, 1831, 1850, 1856, 1862, 1874, 1901, 1932, 1950, 1971, 2011, 2032, 2052, 2063, 2077, 2079, 2091, 2095,
        2172, 2192, 2207, 2208, 2224, 2230, 2247, 2277, 2308, 2345, 2356, 2389, 2403, 2424, 2501, 2504, 2506, 2520, 2570, 2593,
        2616, 2624, 2630, 2646, 2669, 2700, 2714, 2746, 2754, 2795, 2824, 2835, 2839, 2874, 2882, 2905, 2984, 3028, 3042, 3092,
        3108, 3110, 3124, 3153, 3185, 3215, 3252, 3288, 3294, 3364, 3397, 3434, 3483, 3523, 3537, 3587, 3589, 3591, 3592, 3610,
        3626, 3670, 3680, 3722, 3749, 3754, 3776, 3789, 3803, 3824, 3857, 3873, 3904, 3906, 3924, 3992)


LEVEL = (4, 12, 20, 28, 36, 44, 52, 62)


GRID = Table("i8", *(LEVEL[CODES[i] // 8 ** j % 8] for i in range(256) for j in range(4)), columns=4)


SIGN = Table("i8", *(1 - 2 * ((i + 128 * (i.bit_count() % 2)) // 2 ** j % 2) for i in range(128) for j in range(8)), columns=8)


LEVELS = Table("f32", -62, -52, -44, -36, -28, -20, -12, -4, 4, 12, 20, 28, 36, 44, 52, 62)


ROW_CODES = RowCodes((14, 12, 10, 8, 6, 4, 2, 0, 1, 3, 5, 7, 9, 11, 13, 15,), g=GRID, s=SIGN)


ROW_FUNCTIONS = """
/* w = d * (sc + 0.5) * 0.5 * (grid[g, k % 4] * sign[s, k % 8]) */
#define BITS 4
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {-62.0f, -52.0f, -44.0f, -36.0f, -28.0f, -20.0f, -12.0f, -4.0f, 4.0f, 12.0f, 20.0f, 28.0f, 36.0f,
        44.0f, 52.0f, 62.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-62)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {0, 10, 18, 26, 34, 42, 50, 58, 66, 74, 82, 90, 98, 106, 114, 124};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    *scale = 0.5f * d * sc + 0.25f * d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 98*K/256]."""
    r = blocks.unflatten(-1, (-1, 98))
    s_words = integer(r[..., 66:98].unflatten(-1, (8, 4)))
    return {"d": as_type(r, torch.float16)[..., 0], "sc": (r[..., 69:98:4] >> 4).flatten(1), "g": r[..., 2:66].flatten(1),
            "s": torch.stack([s_words >> 7 * i & 127 for i in range(4)], -1).to(torch.uint8).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = torch.zeros(d.shape[0], d.shape[1], 98, dtype=torch.uint8, device=d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:66] = g.unflatten(-1, (-1, 64))
    s_split = s.unflatten(-1, (-1, 8, 4))
    s_packed = sum(s_split[..., i].to(torch.int64) << 7 * i for i in range(4))
    r[..., 66:98] |= s_packed.unsqueeze(-1).view(torch.uint8)[..., :4].flatten(2)
    r[..., 69:98:4] |= sc.unflatten(-1, (-1, 8)) << 4
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/256]; sc uint8 [N, K/32]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 8, 2))
    return {"d": d, "sc": sc & 15,
            **ROW_CODES.fields(torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1))}


def pack_planar(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q, d, sc of the fields; the inverse of unpack_planar."""
    q = ROW_CODES.codes(g=g, s=s)
    q_split = q.unflatten(-1, (-1, 8, 2, 4, 2))
    q_bytes = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, g: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc + 0.5) * 0.5 * (grid[g, k % 4] * sign[s, k % 8]).  d
    [N, K/256], sc [N, K/32], g [N, K/4], s [N, K/8].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 4, 2, 4))
    d = d.float()[..., None, None, None, None]
    sc = sc.unflatten(1, (-1, 8))[..., None, None, None]
    grid = GRID[g.unflatten(-1, (-1, 8, 4, 2))]
    sign = SIGN[s.unflatten(-1, (-1, 8, 4))].unflatten(-1, (2, 4))
    return torch.mul(d * (sc + 0.5) * 0.5, as_float(grid * sign, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: rows, signs and scales by search for the least error; super-scale by a fit to them.
    importance: float32 [K].
    """
    g, s, sc, d = grid_signs(weight, code="u8", sign="u7", scale="u4", super_scale="f16", columns=32, super_columns=256,
            steps=(0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3.25, 3.75, 4.25, 4.75, 5.25, 5.75, 6.25, 6.75, 7.25, 7.75), grid=GRID,
            signs=SIGN, importance=importance)
    return {"g": g, "s": s, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, grid, sign = tensors
    blocks += 98 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 49 * (k // 256), live, 0).to(tl.float32)
    sc = tl.load(blocks + 98 * (k // 32 // 8) + 4 * (k // 32 % 8) + 69, live, 0) >> 4 & 15
    g = tl.load(blocks + 98 * (k // 4 // 64) + k // 4 % 64 + 2, live, 0).to(tl.int32)
    s = device.stream(blocks + 98 * (k // 8 // 32), 1, 32 * (k // 8 % 32 // 4) + 7 * (k // 8 % 32 % 4)
        + 528, 7, 8, live).to(tl.int32)
    column = k % 4
    column1 = k % 8
    return use(state, k, d * (sc + 0.5) * 0.5 * (tl.load(grid + 4 * g + column) * tl.load(sign + 8 * s + column1)), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, sc, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    d1 = tl.load(d + t // 2, live, 0).to(tl.float32)
    sc1 = tl.load(sc + 4 * t + c, live, 0) & 15
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, d1 * (sc1 + 0.5) * 0.5
                    * tl.load(levels + q1), live)
    return state


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0, (0x1a120a00, 0x3a322a22, 0x5a524a42, 0x7c726a62))
    else:
        return codebook.table(g, N, 0x43434343, (0x1a120a00, 0x3a322a22, 0x5a524a42, 0x7c726a62))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (0.5 * d * sc + 0.25 * d) * levels[q]."""
    d, sc = fields
    if BASE != 0:
        sum -= BASE * ones
    return lanes.plus(total, sum * (0.5 * d * sc + 0.25 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K", last="k", tables=(GRID, SIGN,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.entries_of_16, words=bitplanes.words_4, width=8, bits=0,
                    base=(62, 190), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 32, 4)),
                    blocks=("256", "32")), {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-62, -190)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "", 4, ("d", "sc"), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "iq3_xxs", "title": "GGML IQ3_XXS, rows of 4 magnitudes from a grid of 256, with signs and 4-bit scales",
    "source": "ggml-common.h block_iq3_xxs", "formula": "d * (sc + 0.5) * 0.5 * (grid[g, k % 4] * sign[s, k % 8])",
    "bits": "3.0625 to 4.3125", "digest": "57f308266d1cee33",
    "detect": {"gguf": "IQ3_XXS"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/32"), "g": ("u8", "N", "K/4"), "s": ("u7", "N", "K/8")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "98*K/256",
                {"slices": (("d", 0, [0, [(0, 98, 1)]]), ("g", 16, [0, [(64, 1, 1), (0, 98, 1)]]),
                ("s", 528, [0, [(4, 7), (8, 4, 1), (0, 98, 1)]]), ("sc", 556, [0, [(8, 4, 1), (0, 98, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"row_codes": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/32", {"padding": 240, "field": "sc"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
