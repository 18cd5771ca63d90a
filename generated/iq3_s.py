"""iq3_s: GGML IQ3_S, rows of 4 magnitudes from a grid of 512, with a sign each and 4-bit scales.

    w = d * (2 * sc + 1) * (grid[g, k % 4] * (1 - 2 * s))
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/32]
    g      u9  [N, K/4]
    s      u1  [N, K]

    gguf: 3.4375 bits per weight
    planar: 4.3125 bits per weight

Built from the spec iq3_s (sha256 524afbbf49131b3e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import grid_signs
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_float, as_type, empty, joined, spread)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


CODES = (0, 1, 2, 5, 7, 8, 9, 10, 12, 14, 16, 17, 21, 27, 32, 34, 37, 39, 41, 43, 48, 50, 57, 60, 63, 64, 65, 66, 68, 72, 73, 77,
        80, 83, 87, 89, 93, 100, 113, 117, 122, 128, 129, 133, 135, 136, 139, 142, 145, 149, 152, 156, 162, 165, 167, 169, 171,
        184, 187, 195, 201, 205, 208, 210, 217, 219, 222, 228, 232, 234, 247, 249, 253, 256, 267, 271, 273, 276, 282, 288, 291,
        297, 312, 322, 324, 336, 338, 342, 347, 353, 357, 359, 374, 379, 390, 393, 395, 409, 426, 441, 448, 450, 452, 464, 466,
        470, 475, 488, 492, 512, 513, 514, 516, 520, 521, 523, 525, 527, 528, 530, 537, 540, 542, 556, 558, 561, 570, 576, 577,
        579, 582, 584, 588, 593, 600, 603, 609, 616, 618, 632, 638, 640, 650, 653, 655, 656, 660, 666, 672, 675, 685, 688, 698,
        705, 708, 711, 712, 715, 721, 727, 728, 732, 737, 754, 760, 771, 773, 778, 780, 793, 795, 802, 806, 808, 812, 833, 840,
        843, 849, 856, 858, 873, 912, 916, 919, 932, 934, 961, 963, 968, 970, 977, 989, 993, 1010, 1016, 1024, 1025, 1027, 1029,
        1031, 1032, 1034, 1036, 1038, 1041, 1043, 1047, 1048, 1050, 1057, 1059, 1061, 1064, 1066, 1079, 1080, 1083, 1085, 1088,
        1090, 1096, 1099, 1103, 1106, 1109, 1113, 1116, 1122, 1129, 1153, 1156, 1159, 1169, 1171, 1176, 1183, 1185, 1195, 1199,
        1209, 1212, 1216, 1218, 1221, 1225, 1234, 1236, 1241, 1243, 1250, 1256, 1270, 1281, 1287, 1296, 1299, 1306, 1309, 1313,
        1338, 1341, 1348, 1353, 1362, 1375, 1376, 1387, 1400, 1408, 1410, 1415, 1425, 1453, 1457, 1477, 1481, 1494, 1496, 1507,
        1512, 1538, 1545, 1547, 1549, 1551, 1554, 1561, 1563, 1565, 1570, 1572, 1575, 1577, 1587, 1593, 1601, 1603, 1605, 1612,
        1617, 1619, 1632, 1648, 1658, 1662, 1664, 1674, 1680, 1690, 1692, 1704, 1729, 1736, 1740, 1745, 1747, 1751, 1752, 1761,
        1763, 1767, 1773, 1787, 1795, 1801, 1806, 1810, 1817, 1834, 1840, 1844, 1857, 1864, 1866, 1877, 1882, 1892, 1902, 1915,
        1934, 1953, 1985, 1987, 2000, 2002, 2013, 2048, 2052, 2058, 2064, 2068, 2071, 2074, 2081, 2088, 2104, 2114, 2119, 2121,
        2123, 2130, 2136, 2141, 2147, 2153, 2157, 2177, 2179, 2184, 2189, 2193, 2203, 2208, 2223, 2226, 2232, 2244, 2249, 2251,
        2256, 2258, 2265, 2269, 2304, 2306, 2324, 2335, 2336, 2361, 2373, 2375, 2385, 2418, 2443, 2460, 2480, 2504, 2509, 2520,
        2531, 2537, 2562, 2568, 2572, 2578, 2592, 2596, 2599, 2602, 2614, 2620, 2625, 2627, 2629, 2634, 2641, 2650, 2682, 2688,
        2697, 2707, 2712, 2718, 2731, 2754, 2759, 2760, 2775, 2788, 2793, 2805, 2811, 2817, 2820, 2832, 2842, 2854, 2890, 2902,
        2921, 2923, 2978, 3010, 3012, 3026, 3081, 3083, 3085, 3097, 3099, 3120, 3136, 3152, 3159, 3188, 3210, 3228, 3234, 3245,
        3250, 3256, 3264, 3276, 3281, 3296, 3349, 3363, 3378, 3392, 3395, 3420, 3440, 3461, 3488, 3529, 3531, 3584, 3588, 3591,
        3600, 3602, 3614, 3616, 3628, 3634, 3650, 3657, 3668, 3683, 3685, 3713, 3716, 3720, 3726, 3729, 3736, 3753, 3778, 3802,
        3805, 3819, 3841, 3845, 3851, 3856, 3880, 3922, 3938, 3970, 3993, 4032)


GRID = Table("i8", *(2 * (CODES[i] // 8 ** j % 8) + 1 for i in range(512) for j in range(4)), columns=4)


ROW_CODES = RowCodes((15, 13, 11, 9, 7, 5, 3, 1, 0, 2, 4, 6, 8, 10, 12, 14,), g=GRID, s=(2, 1))


ROW_FUNCTIONS = """
/* w = d * (2 * sc + 1) * (grid[g, k % 4] * (1 - 2 * s)) */
#define BITS 4
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f, 0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f,
        6.5f, 7.5f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-15)
#define UNIT 0.5f
static const uint8_t byte_numbers[16] = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    *scale = 4.0f * d * sc + 2.0f * d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 110*K/256]."""
    r = blocks.unflatten(-1, (-1, 110))
    g_low = (r[..., 2:66]).flatten(1)
    g_high = spread(r[..., 66:74], 1).to(torch.int32).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": spread(r[..., 106:110], 4).flatten(1),
            "g": g_low.to(torch.int32) | g_high.to(torch.int32) << 8, "s": spread(r[..., 74:106], 1).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 110), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:66] = (g.unflatten(-1, (-1, 64)) & 255).to(torch.uint8)
    g_split = g.unflatten(-1, (-1, 8, 8))
    r[..., 66:74] = sum((g_split[..., i] >> 8) << 1 * i for i in range(8)).to(torch.uint8)
    s_split = s.unflatten(-1, (-1, 32, 8))
    r[..., 74:106] = joined(s_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 4, 2))
    r[..., 106:110] = joined(sc_split, 4).squeeze(-1)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/256]; sc uint8 [N, K/32]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 4, 2, 2))
    return {"d": d, "sc": sc & 15,
            **ROW_CODES.fields(torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1))}


def pack_planar(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q, d, sc of the fields; the inverse of unpack_planar."""
    q = ROW_CODES.codes(g=g, s=s)
    q_split = q.unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_bytes = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, g: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (2 * sc + 1) * (grid[g, k % 4] * (1 - 2 * s)).  d [N,
    K/256], sc [N, K/32], g [N, K/4], s [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 8, 4))
    d = d.float()[..., None, None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 8))[..., None, None]
    s = s.view(torch.int8).unflatten(1, (-1, 8, 8, 4))
    grid = GRID[g.unflatten(-1, (-1, 8, 8))]
    return torch.mul(d * (2 * sc + 1), as_float(grid * (1 - 2 * s), out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: rows, signs and scales by search for the least error; super-scale by a fit to them.
    importance: float32 [K].
    """
    g, s, sc, d = grid_signs(weight, code="u9", sign="u1", scale="u4", super_scale="f16", columns=32, super_columns=256,
            steps=(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), grid=GRID, importance=importance)
    return {"g": g, "s": s, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, grid = tensors
    blocks += 110 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    i = u % 32
    d = tl.load(blocks_f16 + 55 * t, live, 0).to(tl.float32)
    sc = (tl.load(blocks + 110 * t + i // 4 // 2 + 106, live, 0) >> 4 * (i // 4 % 2) & 15).to(tl.int32)
    g_word = tl.load(blocks + 110 * t + i // 4 + 66, live, 0)
    s_word = tl.load(blocks + 110 * t + i + 74, live, 0)
    for h in tl.static_range(8):
        g_low = (tl.load(blocks + 110 * t + 2 * i + h // 4 + 2, live, 0)).to(tl.int32)
        g_high = (g_word >> 2 * (i % 4) + h // 4 & 1).to(tl.int32)
        g = (g_low | g_high << 8).to(tl.int32)
        s = (s_word >> h & 1).to(tl.int32)
        column = h % 4
        state = use(state, 256 * t + 8 * i + h, d * (2 * sc + 1) * (tl.load(grid + 4 * g + column) * (1 - 2 * s)), live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, sc = tensors
    d += n * (K // 256)
    sc += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    d1 = tl.load(d + t // 2, live, 0).to(tl.float32)
    sc1 = (tl.load(sc + 4 * t + j, live, 0) & 15).to(tl.int32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            q1 = (q_word >> 16 * i + 4 * h & 15).to(tl.int32)
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, d1 * (2 * sc1 + 1) * (2 * q1 - 15), live)
    return state


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (4.0 * d * sc + 2.0 * d) * (q - 7.5)."""
    d, sc = fields
    sum += (-7.5 - BASE) * ones
    return lanes.plus(total, sum * (4.0 * d * sc + 2.0 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/8", last="k", digits=(32,), lanes=(8,),
                order=(0, 1, 2, 3), tables=(GRID,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 32, 4)),
                    blocks=("256", "32")), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "", 4, ("d", "sc"), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "iq3_s", "title": "GGML IQ3_S, rows of 4 magnitudes from a grid of 512, with a sign each and 4-bit scales",
    "source": "ggml-common.h block_iq3_s", "formula": "d * (2 * sc + 1) * (grid[g, k % 4] * (1 - 2 * s))",
    "bits": "3.4375 to 4.3125", "digest": "524afbbf49131b3e",
    "detect": {"gguf": "IQ3_S"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/32"), "g": ("u9", "N", "K/4"), "s": ("u1", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "110*K/256",
                {"slices": (("d", 0, [0, [(0, 110, 1)]]), ("g", 16, [0, [(64, 1, 1), (0, 110, 1)]], 0, 8),
                ("g", 528, [0, [(8, 1), (8, 1, 1), (0, 110, 1)]], 8, 1), ("s", 592, [0, [(8, 1), (32, 1, 1), (0, 110, 1)]]),
                ("sc", 848, [0, [(2, 4), (4, 1, 1), (0, 110, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"row_codes": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
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
