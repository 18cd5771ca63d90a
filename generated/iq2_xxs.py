"""iq2_xxs: GGML IQ2_XXS, rows of 8 magnitudes from a grid of 256, with signs and 4-bit scales.

    w = d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8])
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u4  [N, K/32]
    g      u8  [N, K/8]
    s      u7  [N, K/8]

    gguf: 2.0625 bits per weight
    planar: 3.3125 bits per weight

Built from the spec iq2_xxs (sha256 658536321cdf34c2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import grid_signs
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowCodes, RowLoops, Storage, Sums, Table,
        Variant, as_float, as_type, integer, pad)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, device, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


CODES = (0, 2, 5, 8, 10, 17, 20, 32, 34, 40, 42, 65, 68, 80, 88, 97, 100, 128, 130, 138, 162, 257, 260, 272, 277, 320, 388, 408,
        512, 514, 546, 642, 1025, 1028, 1040, 1057, 1060, 1088, 1090, 1096, 1120, 1153, 1156, 1168, 1188, 1280, 1282, 1288, 1312,
        1350, 1385, 1408, 1425, 1545, 1552, 1600, 1668, 1700, 2048, 2053, 2056, 2068, 2088, 2113, 2116, 2128, 2130, 2184, 2308,
        2368, 2562, 2580, 4097, 4100, 4112, 4129, 4160, 4192, 4228, 4240, 4245, 4352, 4360, 4384, 4432, 4442, 4480, 4644, 4677,
        5120, 5128, 5152, 5157, 5193, 5248, 5400, 5474, 5632, 5654, 6145, 6148, 6160, 6208, 6273, 6400, 6405, 6560, 6737, 8192,
        8194, 8202, 8260, 8289, 8320, 8322, 8489, 8520, 8704, 8706, 9217, 9220, 9232, 9280, 9302, 9472, 9537, 9572, 9872, 10248,
        10272, 10388, 10820, 16385, 16388, 16400, 16408, 16417, 16420, 16448, 16456, 16470, 16480, 16513, 16516, 16528, 16640,
        16672, 16737, 16768, 16773, 16897, 16912, 16968, 16982, 17000, 17408, 17416, 17440, 17536, 17561, 17682, 17700, 17920,
        18433, 18436, 18448, 18496, 18501, 18688, 18776, 18785, 18818, 19013, 19088, 20480, 20488, 20497, 20505, 20512, 20608,
        20616, 20740, 20802, 20900, 21137, 21648, 21650, 21770, 22017, 22100, 22528, 22545, 22553, 22628, 22848, 23048, 24580,
        24592, 24640, 24680, 24832, 24917, 25112, 25184, 25600, 25605, 25872, 25874, 25988, 26690, 32768, 32770, 32778, 32833,
        32898, 33028, 33048, 33088, 33297, 33793, 33796, 33808, 33813, 33856, 33888, 34048, 34118, 34196, 34313, 34368, 34400,
        34818, 35076, 35345, 36868, 36880, 36900, 36928, 37025, 37142, 37248, 37445, 37888, 37922, 37956, 38225, 39041, 39200,
        40962, 41040, 41093, 41225, 41472, 42008, 43088, 43268)


LEVEL = (8, 25, 43)


GRID = Table("i8", *(LEVEL[CODES[i] // 4 ** j % 4] for i in range(256) for j in range(8)), columns=8)


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
    """Fields of blocks uint8 [N, 66*K/256]."""
    r = blocks.unflatten(-1, (-1, 66))
    s_words = integer(r[..., 2:66].unflatten(-1, (8, 8))[..., 4:8])
    return {"d": as_type(r, torch.float16)[..., 0], "sc": (r[..., 9:66:8] >> 4).flatten(1),
            "g": r[..., 2:66].unflatten(-1, (8, 8))[..., :4].flatten(1),
            "s": torch.stack([s_words >> 7 * i & 127 for i in range(4)], -1).to(torch.uint8).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, g: Tensor, s: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = torch.zeros(d.shape[0], d.shape[1], 66, dtype=torch.uint8, device=d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:66].unflatten(-1, (8, 8))[..., :4] |= g.unflatten(-1, (-1, 8, 4))
    s_split = s.unflatten(-1, (-1, 8, 4))
    s_packed = sum(s_split[..., i].to(torch.int64) << 7 * i for i in range(4))
    r[..., 2:66].unflatten(-1, (8, 8))[..., 4:8] |= s_packed.unsqueeze(-1).view(torch.uint8)[..., :4]
    r[..., 9:66:8] |= sc.unflatten(-1, (-1, 8)) << 4
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, sc: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/256)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/256]; sc uint8 [N, K/32]."""
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
    [N, K/256], sc [N, K/32], g [N, K/8], s [N, K/8].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 4, 8))
    d = d.float()[..., None, None, None]
    sc = sc.unflatten(1, (-1, 8))[..., None, None]
    grid = GRID[g.unflatten(-1, (-1, 8, 4))]
    sign = SIGN[s.unflatten(-1, (-1, 8, 4))]
    return torch.mul(d * (sc + 0.5) * 0.25, as_float(grid * sign, out), out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: rows, signs and scales by search for the least error; super-scale by a fit to them.
    importance: float32 [K].
    """
    g, s, sc, d = grid_signs(weight, code="u8", sign="u7", scale="u4", super_scale="f16", columns=32, super_columns=256,
            steps=(0.125, 0.375, 0.625, 0.875, 1.125, 1.375, 1.625, 1.875, 2.125, 2.375, 2.625, 2.875, 3.125, 3.375, 3.625,
                3.875),
            grid=GRID, signs=SIGN, importance=importance)
    return {"g": g, "s": s, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, grid, sign = tensors
    blocks += 66 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 33 * (k // 256), live, 0).to(tl.float32)
    sc = tl.load(blocks + 66 * (k // 32 // 8) + 8 * (k // 32 % 8) + 9, live, 0) >> 4 & 15
    g = tl.load(blocks + 66 * (k // 8 // 32) + 8 * (k // 8 % 32 // 4) + k // 8 % 32 % 4 + 2, live, 0).to(tl.int32)
    s = device.stream(blocks + 66 * (k // 8 // 32), 1, 64 * (k // 8 % 32 // 4) + 7 * (k // 8 % 32 % 4)
        + 48, 7, 8, live).to(tl.int32)
    column = k % 8
    return use(state, k, d * (sc + 0.5) * 0.25 * (tl.load(grid + 8 * g + column) * tl.load(sign + 8 * s + column)), live)


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, sc, levels = tensors
    d += n * (K // 256)
    sc += n * (K // 32)
    q_0 += 16 * (n * tl.cdiv(K, 256))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 256, live, 0).to(tl.float32)
    sc1 = tl.load(sc + k // 32, live, 0) & 15
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
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 32, 4)),
                    blocks=("256", "32")), {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (-43, -171), "spans": (2, 2)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "", 3, ("d", "sc"), row_codes=ROW_CODES),
)

PROGRAM = {
    "name": "iq2_xxs", "title": "GGML IQ2_XXS, rows of 8 magnitudes from a grid of 256, with signs and 4-bit scales",
    "source": "ggml-common.h block_iq2_xxs", "formula": "d * (sc + 0.5) * 0.25 * (grid[g, k % 8] * sign[s, k % 8])",
    "bits": "2.0625 to 3.3125", "digest": "658536321cdf34c2",
    "detect": {"gguf": "IQ2_XXS"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u4", "N", "K/32"), "g": ("u8", "N", "K/8"), "s": ("u7", "N", "K/8")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "66*K/256",
                {"slices": (("d", 0, [0, [(0, 66, 1)]]), ("g", 16, [0, [(4, 1, 1), (8, 8, 1), (0, 66, 1)]]),
                ("s", 48, [0, [(4, 7), (8, 8, 1), (0, 66, 1)]]), ("sc", 76, [0, [(8, 8, 1), (0, 66, 1)]]))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/256)",
                    {"row_codes": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (0, 16, 1)]], 0, 2),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"row_codes": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (2, 2), (2, 1), (0, 16, 1)]], 2,
                    1),)}),
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
