"""iq2_xs: GGML IQ2_XS, rows of 8 magnitudes from a grid of 512, with signs and 4-bit scales.

    w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8])
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/16]
    g      u9  [N, K/8]
    s      u7  [N, K/8]

    gguf: 2.3125 bits per weight
    planar: 3.5625 bits per weight

Built from the spec iq2_xs (sha256 5323d83ce19a8966) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import grid_signs
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_float, as_type, integer, joined, pad, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


CODES = (0, 2, 5, 8, 10, 17, 20, 22, 25, 32, 34, 37, 40, 65, 68, 70, 73, 80, 82, 85, 88, 97, 100, 128, 130, 133, 136, 145, 148,
        153, 160, 257, 260, 262, 265, 272, 274, 277, 280, 282, 289, 292, 320, 322, 325, 328, 337, 340, 352, 360, 385, 388, 400,
        512, 514, 517, 520, 529, 532, 544, 577, 580, 592, 597, 640, 650, 1025, 1028, 1030, 1033, 1040, 1042, 1045, 1048, 1057,
        1060, 1088, 1090, 1093, 1096, 1105, 1108, 1110, 1120, 1153, 1156, 1168, 1280, 1282, 1285, 1288, 1297, 1300, 1312, 1345,
        1348, 1360, 1377, 1408, 1537, 1540, 1552, 1574, 1600, 1602, 1668, 2048, 2050, 2053, 2056, 2058, 2065, 2068, 2080, 2085,
        2113, 2116, 2128, 2136, 2176, 2208, 2218, 2305, 2308, 2320, 2368, 2433, 2441, 2560, 2592, 2600, 2710, 2720, 4097, 4100,
        4102, 4105, 4112, 4114, 4117, 4120, 4129, 4132, 4160, 4162, 4165, 4168, 4177, 4180, 4192, 4202, 4225, 4228, 4240, 4352,
        4354, 4357, 4360, 4369, 4372, 4384, 4417, 4420, 4432, 4480, 4500, 4502, 4609, 4612, 4614, 4624, 4672, 4704, 5120, 5122,
        5125, 5128, 5137, 5140, 5152, 5185, 5188, 5193, 5200, 5220, 5248, 5377, 5380, 5392, 5440, 5632, 5652, 5705, 6145, 6148,
        6160, 6162, 6208, 6228, 6278, 6400, 6405, 6502, 6737, 6825, 8192, 8194, 8197, 8200, 8202, 8209, 8212, 8224, 8257, 8260,
        8272, 8320, 8352, 8449, 8452, 8464, 8512, 8520, 8549, 8704, 8738, 8832, 8872, 9217, 9220, 9232, 9257, 9280, 9472, 9537,
        9554, 9625, 9729, 9754, 9894, 10240, 10248, 10250, 10272, 10325, 10376, 10402, 10600, 10640, 10760, 10784, 10882, 10888,
        10890, 16385, 16388, 16390, 16393, 16400, 16402, 16405, 16408, 16417, 16420, 16448, 16450, 16453, 16456, 16458, 16465,
        16468, 16480, 16485, 16513, 16516, 16528, 16640, 16642, 16645, 16648, 16657, 16660, 16672, 16705, 16708, 16720, 16768,
        16773, 16802, 16897, 16900, 16912, 16914, 16937, 16960, 17408, 17410, 17413, 17416, 17425, 17428, 17433, 17440, 17473,
        17476, 17488, 17536, 17556, 17665, 17668, 17680, 17700, 17728, 17818, 17920, 17930, 17988, 18000, 18433, 18436, 18448,
        18496, 18501, 18516, 18530, 18688, 18705, 18756, 18768, 18793, 18948, 20480, 20482, 20485, 20488, 20497, 20500, 20512,
        20520, 20545, 20548, 20560, 20608, 20737, 20740, 20752, 20757, 20800, 20802, 20992, 21060, 21162, 21505, 21508, 21520,
        21537, 21568, 21600, 21633, 21665, 21760, 21768, 21888, 21896, 22049, 22120, 22177, 22528, 22548, 22593, 22608, 22681,
        22810, 22848, 22850, 23173, 24577, 24580, 24592, 24640, 24660, 24674, 24710, 24745, 24832, 25124, 25162, 25234, 25600,
        25622, 25872, 25920, 25925, 26020, 26625, 26730, 26917, 27142, 27220, 27234, 32768, 32770, 32773, 32776, 32785, 32788,
        32800, 32810, 32833, 32836, 32848, 32896, 32898, 32936, 32938, 33025, 33028, 33030, 33040, 33088, 33105, 33113, 33280,
        33312, 33408, 33410, 33440, 33448, 33793, 33796, 33808, 33810, 33813, 33856, 33888, 33929, 34048, 34116, 34213, 34328,
        34410, 34816, 34824, 34853, 34906, 34944, 34946, 34984, 35078, 35362, 35456, 35464, 35478, 35496, 36865, 36868, 36880,
        36928, 36950, 36996, 37120, 37154, 37220, 37462, 37513, 37888, 37893, 37956, 37968, 37976, 38185, 38288, 38290, 38465,
        38993, 39078, 39241, 39445, 39520, 40960, 40962, 40968, 40970, 40992, 41002, 41120, 41297, 41305, 41382, 41472, 41474,
        41480, 41514, 41600, 41632, 42048, 42133, 42597, 42648, 43018, 43040, 43042, 43048, 43168, 43176, 43268, 43396, 43398,
        43560, 43562, 43665, 43690)


LEVEL = (8, 25, 43)


GRID = Table("i8", *(LEVEL[CODES[i] // 4 ** j % 4] for i in range(512) for j in range(8)), columns=8)


SIGN = Table("i8", *(1 - 2 * ((i + 128 * (i.bit_count() % 2)) // 2 ** j % 2) for i in range(128) for j in range(8)), columns=8)


LEVELS = Table("f32", -43, -25, -8, 8, 25, 43, 43, 43)


ROW_CODES = RowCodes((4, 2, 0, 1, 3, 5,), g=GRID, s=SIGN)


ROW_FUNCTIONS = """
/* w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8]) */
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
    """Fields of blocks uint8 [N, 74*K/256]."""
    r = blocks.unflatten(-1, (-1, 74))
    return {"d": as_type(r, torch.float16)[..., 0], "sc": spread(r[..., 66:74], 4).flatten(1),
            "g": (integer(r[..., 2:66].unflatten(-1, (32, 2))) & 511).flatten(1), "s": (r[..., 3:66:2] >> 1).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = torch.zeros(d.shape[0], d.shape[1], 74, dtype=torch.uint8, device=d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    g_packed = g.unflatten(-1, (-1, 32)).to(torch.int32)
    r[..., 2:66] |= g_packed.unsqueeze(-1).view(torch.uint8)[..., :2].flatten(2)
    r[..., 3:66:2] |= s.unflatten(-1, (-1, 32)) << 1
    sc_split = sc.unflatten(-1, (-1, 8, 2))
    r[..., 66:74] = joined(sc_split, 4).squeeze(-1)
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
    """Weights [N, K], float32 rounded after each operation: w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8]).  d
    [N, K/256], sc [N, K/16], g [N, K/8], s [N, K/8].
    """
    out = out if out is None else out.unflatten(1, (-1, 16, 2, 8))
    d = d.float()[..., None, None, None]
    sc = sc.unflatten(1, (-1, 16))[..., None, None]
    grid = GRID[g.unflatten(-1, (-1, 16, 2))]
    sign = SIGN[s.unflatten(-1, (-1, 16, 2))]
    return torch.mul(d * (sc + 0.5) * 0.25, as_float(grid * sign, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: rows, signs and scales by search for the least error; super-scale by a fit to them.
    importance: float32 [K].
    """
    g, s, sc, d = grid_signs(weight, code="u9", sign="u7", scale="u4", super_scale="f16", columns=16, super_columns=256,
            steps=(0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875, 2.125, 2.375, 2.625, 2.875, 3.125, 3.375, 3.625,
                3.875),
            grid=GRID, signs=SIGN, importance=importance)
    return {"g": g, "s": s, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, grid, sign = tensors
    blocks += 74 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 37 * (k // 256), live, 0).to(tl.float32)
    sc = tl.load(blocks + 74 * (k // 16 // 16) + k // 16 % 16 // 2 + 66, live, 0) >> 4 * (k // 16 % 16 % 2) & 15
    g = device.stream(blocks + 74 * (k // 8 // 32), 1, 16 * (k // 8 % 32) + 16, 9, 8, live).to(tl.int32)
    s = (tl.load(blocks + 74 * (k // 8 // 32) + 2 * (k // 8 % 32) + 3, live, 0) >> 1 & 127).to(tl.int32)
    column = k % 8
    return use(state, k, d * (sc + 0.5) * 0.25 * (tl.load(grid + 8 * g + column) * tl.load(sign + 8 * s + column)), live)


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
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K", last="k", tables=(GRID, SIGN,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k", tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.entries_of_8, words=bitplanes.words_3, width=8, bits=0,
                    base=(43, 171), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 16, 4)),
                    blocks=("256", "16")), {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-43, -171), "spans": (2, 2)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "", 3, ("d", "sc"), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "iq2_xs", "title": "GGML IQ2_XS, rows of 8 magnitudes from a grid of 512, with signs and 4-bit scales",
    "source": "ggml-common.h block_iq2_xs", "formula": "d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8])",
    "bits": "2.3125 to 3.5625", "digest": "5323d83ce19a8966",
    "detect": {"gguf": "IQ2_XS"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/16"), "g": ("u9", "N", "K/8"), "s": ("u7", "N", "K/8")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "74*K/256",
                {"slices": (("d", 0, [0, [(0, 74, 1)]]), ("g", 16, [0, [(32, 2, 1), (0, 74, 1)]]),
                ("s", 25, [0, [(32, 2, 1), (0, 74, 1)]]), ("sc", 528, [0, [(2, 4), (8, 1, 1), (0, 74, 1)]]))})}},
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
