"""iq2_s: GGML IQ2_S, rows of 8 magnitudes from a grid of 1024, with a sign each and 4-bit scales.

    w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * (1 - 2 * s))
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/16]
    g      u10 [N, K/8]
    s      u1  [N, K]

    gguf: 2.5625 bits per weight
    planar: 3.5625 bits per weight

Built from the spec iq2_s (sha256 a92753afafce54b1) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import grid_signs
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_float, as_type, empty, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


CODES = (0, 2, 5, 8, 10, 17, 20, 22, 25, 32, 34, 37, 40, 65, 68, 70, 73, 80, 82, 85, 88, 97, 100, 102, 105, 128, 130, 133, 136,
        145, 148, 160, 165, 170, 257, 260, 262, 265, 272, 274, 277, 280, 289, 292, 320, 322, 325, 328, 337, 340, 342, 345, 352,
        357, 360, 385, 388, 400, 402, 405, 417, 420, 512, 514, 517, 520, 529, 532, 544, 554, 577, 580, 582, 585, 592, 597, 640,
        645, 650, 660, 674, 1025, 1028, 1030, 1033, 1040, 1042, 1045, 1048, 1057, 1060, 1062, 1065, 1088, 1090, 1093, 1096, 1098,
        1105, 1108, 1110, 1113, 1120, 1122, 1125, 1153, 1156, 1158, 1161, 1168, 1173, 1176, 1185, 1188, 1280, 1282, 1285, 1288,
        1290, 1297, 1300, 1302, 1305, 1312, 1317, 1320, 1345, 1348, 1350, 1353, 1360, 1362, 1365, 1368, 1377, 1380, 1408, 1410,
        1413, 1416, 1425, 1428, 1440, 1537, 1540, 1542, 1545, 1552, 1557, 1600, 1605, 1608, 1617, 1620, 1632, 1665, 1668, 1680,
        2048, 2050, 2053, 2056, 2065, 2068, 2070, 2073, 2080, 2085, 2090, 2113, 2116, 2118, 2121, 2128, 2130, 2133, 2136, 2145,
        2148, 2176, 2181, 2196, 2218, 2305, 2308, 2320, 2322, 2325, 2328, 2337, 2368, 2373, 2376, 2385, 2388, 2400, 2433, 2448,
        2560, 2577, 2580, 2594, 2600, 2602, 2640, 2713, 4097, 4100, 4102, 4105, 4112, 4114, 4117, 4120, 4129, 4132, 4134, 4160,
        4162, 4165, 4168, 4177, 4180, 4182, 4185, 4192, 4194, 4197, 4200, 4225, 4228, 4230, 4240, 4245, 4248, 4257, 4260, 4352,
        4354, 4357, 4360, 4362, 4369, 4372, 4374, 4377, 4384, 4386, 4389, 4392, 4417, 4420, 4422, 4425, 4432, 4434, 4437, 4440,
        4449, 4452, 4480, 4482, 4485, 4488, 4497, 4500, 4609, 4612, 4617, 4624, 4629, 4641, 4644, 4672, 4677, 4689, 4692, 4737,
        4740, 4752, 5120, 5122, 5125, 5128, 5137, 5140, 5142, 5145, 5152, 5157, 5160, 5185, 5188, 5190, 5193, 5200, 5202, 5205,
        5208, 5217, 5220, 5248, 5250, 5253, 5256, 5265, 5268, 5280, 5377, 5380, 5382, 5385, 5392, 5394, 5397, 5400, 5409, 5412,
        5440, 5442, 5445, 5448, 5457, 5460, 5472, 5505, 5508, 5520, 5632, 5637, 5640, 5649, 5652, 5664, 5697, 5700, 5712, 5760,
        5802, 6145, 6148, 6150, 6153, 6160, 6165, 6168, 6177, 6208, 6210, 6213, 6216, 6225, 6228, 6240, 6273, 6276, 6400, 6402,
        6405, 6408, 6417, 6420, 6432, 6465, 6468, 6480, 6505, 6562, 6660, 6672, 6720, 6742, 8192, 8194, 8197, 8200, 8209, 8212,
        8214, 8217, 8224, 8229, 8234, 8257, 8260, 8272, 8274, 8277, 8292, 8320, 8330, 8340, 8362, 8449, 8452, 8464, 8466, 8469,
        8481, 8512, 8514, 8517, 8529, 8532, 8544, 8577, 8580, 8592, 8704, 8714, 8738, 8744, 8746, 8772, 8784, 8840, 8842, 8872,
        9217, 9220, 9222, 9225, 9232, 9237, 9240, 9249, 9252, 9280, 9282, 9285, 9288, 9297, 9300, 9312, 9345, 9348, 9360, 9472,
        9477, 9480, 9489, 9492, 9504, 9537, 9540, 9552, 9574, 9600, 9729, 9732, 9744, 9792, 9817, 10240, 10245, 10257, 10260,
        10305, 10308, 10320, 10378, 10410, 10497, 10500, 10512, 10645, 10762, 10786, 10852, 10888, 10890, 16385, 16388, 16390,
        16393, 16400, 16402, 16405, 16408, 16410, 16417, 16420, 16422, 16448, 16450, 16453, 16456, 16458, 16465, 16468, 16470,
        16473, 16480, 16482, 16485, 16513, 16516, 16528, 16533, 16536, 16545, 16548, 16640, 16642, 16645, 16648, 16657, 16660,
        16662, 16665, 16672, 16674, 16677, 16705, 16708, 16710, 16713, 16720, 16722, 16725, 16728, 16737, 16740, 16768, 16770,
        16773, 16776, 16785, 16788, 16800, 16897, 16900, 16912, 16914, 16917, 16920, 16932, 16960, 16965, 16968, 16977, 16980,
        16992, 17025, 17028, 17408, 17410, 17413, 17416, 17418, 17425, 17428, 17430, 17433, 17440, 17442, 17445, 17448, 17473,
        17476, 17478, 17481, 17488, 17490, 17493, 17496, 17505, 17508, 17536, 17538, 17541, 17544, 17553, 17556, 17568, 17665,
        17668, 17670, 17673, 17680, 17682, 17685, 17688, 17697, 17700, 17728, 17730, 17733, 17736, 17745, 17748, 17760, 17770,
        17793, 17796, 17808, 17920, 17922, 17925, 17928, 17937, 17940, 17952, 17985, 17988, 18000, 18048, 18085, 18433, 18436,
        18441, 18448, 18450, 18453, 18456, 18465, 18468, 18496, 18498, 18501, 18504, 18513, 18516, 18528, 18564, 18576, 18688,
        18690, 18693, 18696, 18705, 18708, 18720, 18753, 18756, 18768, 18816, 18838, 18945, 18948, 18960, 19008, 20480, 20482,
        20485, 20488, 20497, 20500, 20502, 20505, 20512, 20514, 20517, 20520, 20545, 20548, 20550, 20553, 20560, 20562, 20565,
        20568, 20577, 20580, 20608, 20610, 20613, 20616, 20625, 20628, 20737, 20740, 20742, 20745, 20752, 20754, 20757, 20760,
        20769, 20772, 20800, 20802, 20805, 20808, 20817, 20820, 20832, 20865, 20868, 20880, 20992, 20997, 21000, 21009, 21012,
        21024, 21057, 21060, 21072, 21097, 21120, 21505, 21508, 21510, 21513, 21520, 21522, 21525, 21528, 21537, 21540, 21568,
        21570, 21573, 21576, 21585, 21588, 21600, 21633, 21636, 21648, 21760, 21762, 21765, 21768, 21777, 21780, 21792, 21825,
        21828, 21840, 21888, 22017, 22020, 22032, 22054, 22080, 22528, 22530, 22533, 22536, 22545, 22548, 22560, 22593, 22596,
        22608, 22618, 22656, 22785, 22788, 22800, 22848, 23040, 23065, 23173, 23208, 24577, 24580, 24582, 24592, 24594, 24597,
        24600, 24609, 24612, 24640, 24645, 24648, 24657, 24660, 24672, 24708, 24720, 24832, 24834, 24837, 24840, 24849, 24852,
        24864, 24897, 24900, 24912, 24960, 24985, 25092, 25104, 25152, 25174, 25249, 25600, 25605, 25608, 25617, 25620, 25632,
        25665, 25668, 25680, 25728, 25857, 25860, 25872, 25920, 25930, 25960, 26002, 26112, 26260, 26625, 26628, 26640, 26725,
        26776, 26880, 26922, 27202, 27297, 32768, 32770, 32773, 32776, 32785, 32788, 32793, 32800, 32805, 32833, 32836, 32848,
        32850, 32853, 32856, 32865, 32896, 32901, 32913, 32916, 33025, 33028, 33033, 33040, 33042, 33045, 33048, 33057, 33060,
        33088, 33090, 33093, 33096, 33105, 33108, 33153, 33156, 33168, 33193, 33280, 33285, 33290, 33297, 33300, 33345, 33348,
        33360, 33793, 33796, 33798, 33801, 33808, 33810, 33813, 33816, 33825, 33856, 33858, 33861, 33864, 33873, 33876, 33888,
        33921, 33924, 33936, 34048, 34050, 34053, 34056, 34065, 34068, 34080, 34113, 34116, 34128, 34176, 34186, 34305, 34308,
        34320, 34345, 34368, 34816, 34821, 34833, 34836, 34881, 34884, 34896, 34978, 35073, 35076, 35136, 35173, 35362, 35416,
        35418, 35458, 35490, 36865, 36868, 36873, 36880, 36882, 36885, 36888, 36900, 36928, 36930, 36933, 36936, 36945, 36948,
        36960, 36993, 36996, 37008, 37120, 37125, 37137, 37140, 37185, 37188, 37200, 37210, 37377, 37380, 37392, 37440, 37542,
        37888, 37890, 37893, 37896, 37905, 37908, 37920, 37953, 37956, 37968, 38016, 38038, 38145, 38148, 38160, 38208, 38296,
        38305, 38400, 38470, 38500, 38913, 38916, 38928, 38950, 38976, 39081, 39168, 39241, 39250, 39568, 40960, 40965, 40970,
        40980, 40994, 41002, 41025, 41028, 41040, 41122, 41130, 41280, 41317, 41474, 41482, 41506, 41512, 41514, 41602, 41608,
        41610, 41640, 41985, 41988, 42000, 42048, 42121, 42148, 42240, 42265, 42577, 43018, 43048, 43170, 43348, 43398, 43528,
        43530, 43552, 43554, 43560, 43656, 43690)


LEVEL = (8, 25, 43)


GRID = Table("i8", *(LEVEL[CODES[i] // 4 ** j % 4] for i in range(1024) for j in range(8)), columns=8)


LEVELS = Table("f32", -43, -25, -8, 8, 25, 43, 43, 43)


ROW_CODES = RowCodes((5, 3, 1, 0, 2, 4,), g=GRID, s=(2, 1))


ROW_FUNCTIONS = """
/* w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * (1 - 2 * s)) */
#define BITS 3
#define FIELDS 2
#define BRAIN_NUMBERS
static const float numbers[16] = {-43.0f, -25.0f, -8.0f, 8.0f, 25.0f, 43.0f, 43.0f, 43.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-43)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {0, 18, 35, 51, 68, 86, 86, 86};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    *scale = 0.25f * d * sc + 0.125f * d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 82*K/256]."""
    r = blocks.unflatten(-1, (-1, 82))
    g_low = (r[..., 2:34]).flatten(1)
    g_high = spread(r[..., 66:74], 2).to(torch.int32).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "sc": spread(r[..., 74:82], 4).flatten(1),
            "g": g_low.to(torch.int32) | g_high.to(torch.int32) << 8, "s": spread(r[..., 34:66], 1).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 82), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:34] = (g.unflatten(-1, (-1, 32)) & 255).to(torch.uint8)
    g_split = g.unflatten(-1, (-1, 8, 4))
    r[..., 66:74] = sum((g_split[..., i] >> 8) << 2 * i for i in range(4)).to(torch.uint8)
    s_split = s.unflatten(-1, (-1, 32, 8))
    r[..., 34:66] = joined(s_split, 1).squeeze(-1)
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 74:82] = joined(sc_split, 4).squeeze(-1)
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
    return {"d": d, "sc": sc & 15, **ROW_CODES.fields(q_low | q_high << 2)}


def pack_planar(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, sc of the fields; the inverse of unpack_planar."""
    q = ROW_CODES.codes(g=g, s=s)
    q_split = q.unflatten(-1, (-1, 2, 8, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, 0, :, 0] & 3) | (q_split[:, :, 0, :, 1] & 3) << 4 | (q_split[:, :, 1, :, 0] & 3) << 2
        | (q_split[:, :, 1, :, 1] & 3) << 6).permute(0, 1, 3, 2, 4).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 2, 2, 8, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, 0, :, 0] >> 2) | (q_split2[:, :, 0, 0, :, 1] >> 2) << 4 | (q_split2[:, :, 0, 1, :, 0] >> 2)
        << 2 | (q_split2[:, :, 0, 1, :, 1] >> 2) << 6 | (q_split2[:, :, 1, 0, :, 0] >> 2) << 1
        | (q_split2[:, :, 1, 0, :, 1] >> 2) << 5 | (q_split2[:, :, 1, 1, :, 0] >> 2) << 3 | (q_split2[:, :, 1, 1, :, 1] >> 2)
        << 7).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d,
            "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, g: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * (1 - 2 * s)).  d [N,
    K/256], sc [N, K/16], g [N, K/8], s [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 2, 8))
    d = d.float()[..., None, None, None]
    sc = sc.unflatten(1, (-1, 16))[..., None, None]
    s = s.view(torch.int8).unflatten(1, (-1, 16, 2, 8))
    grid = GRID[g.unflatten(-1, (-1, 16, 2))]
    return torch.mul(d * (sc + 0.5) * 0.25, as_float(grid * (1 - 2 * s), out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: rows, signs and scales by search for the least error; super-scale by a fit to them.
    importance: float32 [K].
    """
    g, s, sc, d = grid_signs(weight, code="u10", sign="u1", scale="u4", super_scale="f16", columns=16, super_columns=256,
            steps=(0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875, 2.125, 2.375, 2.625, 2.875, 3.125, 3.375, 3.625,
                3.875),
            grid=GRID, importance=importance)
    return {"g": g, "s": s, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    blocks, grid = tensors
    blocks += 82 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 32
    i = u % 32
    d = tl.load(blocks_f16 + 41 * t, live, 0).to(tl.float32)
    sc = tl.load(blocks + 82 * t + i // 2 // 2 + 74, live, 0) >> 4 * (i // 2 % 2) & 15
    g_low = (tl.load(blocks + 82 * t + i + 2, live, 0)).to(tl.int32)
    g_high = (tl.load(blocks + 82 * t + i // 4 + 66, live, 0) >> 2 * (i % 4) & 3).to(tl.int32)
    g = (g_low | g_high << 8).to(tl.int32)
    s_word = tl.load(blocks + 82 * t + i + 34, live, 0)
    for h in tl.static_range(8):
        s = (s_word >> h & 1).to(tl.int32)
        column = h
        state = use(state, 256 * t + 8 * i + h, d * (sc + 0.5) * 0.25 * (tl.load(grid + 8 * g + column) * (1 - 2 * s)), live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 16)
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = tl.load(sc + k // 16, live, 0) & 15
    q_low = tl.load(q_0 + 16 * (k // 256) + 4 * (k % 256 // 2 % 4)
        + k % 256 // 32 % 4, live,
        0) >> 16 * (k % 256 // 16 % 2) + 8 * (k % 256 % 2) + 4 * (k % 256 // 8 % 2) + 2 * (k % 256 // 128) & 3
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live,
        0) >> 16 * (k % 512 // 16 % 2) + 8 * (k % 512 % 2) + 4 * (k % 512 // 8 % 2) + 2 * (k % 512 // 128 % 2) + k % 512 // 256 & 1
    q = (q_low | q_high << 2).to(tl.int32)
    return use(state, k, d1 * (sc1 + 0.5) * 0.25 * tl.load(levels + q), live)


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, 0x0, (0x33231200, 0x56565644))
    else:
        return codebook.table(g, N, 0x43434343, (0x33231200, 0x56565644))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (0.25 * d * sc + 0.125 * d) * levels[q]."""
    d, sc = fields
    if BASE != 0:
        sum -= BASE * ones
    return lanes.plus(total, sum * (0.25 * d * sc + 0.125 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/8", last="k", digits=(32,), lanes=(8,),
                order=(0, 1, 2, 3), tables=(GRID,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k", tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.entries_of_8, words=bitplanes.words_3, width=8, bits=0,
                    base=(43, 171), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 4)),
                    blocks=("256", "16")), {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-43, -171), "spans": (2, 2)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "", 3, ("d", "sc"), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "iq2_s", "title": "GGML IQ2_S, rows of 8 magnitudes from a grid of 1024, with a sign each and 4-bit scales",
    "source": "ggml-common.h block_iq2_s", "formula": "d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * (1 - 2 * s))",
    "bits": "2.5625 to 3.5625", "digest": "a92753afafce54b1",
    "detect": {"gguf": "IQ2_S"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/16"), "g": ("u10", "N", "K/8"), "s": ("u1", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "82*K/256",
                {"slices": (("d", 0, [0, [(0, 82, 1)]]), ("g", 16, [0, [(32, 1, 1), (0, 82, 1)]], 0, 8),
                ("g", 528, [0, [(4, 2), (8, 1, 1), (0, 82, 1)]], 8, 2), ("s", 272, [0, [(8, 1), (32, 1, 1), (0, 82, 1)]]),
                ("sc", 592, [0, [(2, 4), (8, 1, 1), (0, 82, 1)]]))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/256)",
                    {"row_codes": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]], 0, 2),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"row_codes": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (2, 1), (0, 16, 1)]], 2,
                    1),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/16", {"padding": 240, "field": "sc"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
