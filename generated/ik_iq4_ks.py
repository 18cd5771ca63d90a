"""ik_iq4_ks: ik_llama.cpp IQ4_KS, a scale ahead of each row, 7-bit scales of blocks, 4-bit codes into two tables of levels.

    w = d * (2 * sc - 127) * levels[16 * h + q]
    float32, rounded after each operation

    d      f32 [N]
    sc     u7  [N, K/32]
    h      u1  [N, K/32]
    q      u4  [N, K]

    ik_llama: 4.25 bits per weight
    planar: 4.25006 bits per weight

Built from the spec ik_iq4_ks (sha256 f484603c1febc591) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import least_squares_nested
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, pad)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, group_sums, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -123, -100, -79, -61, -45, -31,
        -18, -6, 5, 17, 29, 42, 57, 73, 93, 117)


ROW_FUNCTIONS = """
/* w = d * (2 * sc - 127) * levels[16 * h + q] */
#define BITS 4
#define FIELDS 3
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {-127.0f, -104.0f, -83.0f, -65.0f, -49.0f, -35.0f, -22.0f, -10.0f, 1.0f, 13.0f, 25.0f, 38.0f,
        53.0f, 69.0f, 89.0f, 113.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (-127)
#define UNIT 1.0f
static const uint8_t byte_numbers[16] = {0, 23, 44, 62, 78, 92, 105, 117, 128, 140, 152, 165, 180, 196, 216, 240};
INLINE vb bytes_of_codes(vb codes) { return lookup(vload_16(byte_numbers), codes); }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf sc = FIELD(1);
    const vf h = FIELD(2);
    *scale = 2.0f * d * sc - 127.0f * d;
    *offset = *scale * (4.0f * h);
}
"""


def unpack_ik_llama(rows: Tensor) -> dict[str, Tensor]:
    """Fields of rows uint8 [N, 4 + 136*K/256]."""
    head = rows[..., :4]
    blocks = rows[..., 4:]
    blocks_bytes = blocks.unflatten(-1, (-1, 136))
    q_bytes = blocks_bytes[..., 8:136].unflatten(-1, (8, 16)).contiguous()
    return {"d": as_type(head, torch.float32)[:, 0], "sc": (blocks_bytes[..., 0:8] >> 1).flatten(1),
            "h": (blocks_bytes[..., 0:8] & 1).flatten(1), "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_ik_llama(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """rows of the fields; the inverse of unpack_ik_llama."""
    head_bytes = as_type(d.unsqueeze(-1), torch.uint8)
    blocks_bytes = torch.zeros(h.shape[0], h.shape[1] // 8, 136, dtype=torch.uint8, device=h.device)
    blocks_bytes[..., 0:8] |= h.unflatten(-1, (-1, 8))
    blocks_bytes[..., 0:8] |= sc.unflatten(-1, (-1, 8)) << 1
    q_split = q.unflatten(-1, (-1, 8, 2, 16))
    blocks_bytes[..., 8:136] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).flatten(2)
    return {"rows": torch.cat([head_bytes, blocks_bytes.flatten(1)], -1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float32 [N]; sc uint8 [N, K/32]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 8, 2))
    return {"d": d, "sc": sc & 127, "h": sc >> 7,
            "q": torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(d: Tensor, sc: Tensor, h: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, sc of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    q_bytes = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] |= sc.unsqueeze(-1)
    sc_bytes[...] |= (h << 7).unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, h: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (2 * sc - 127) * levels[16 * h + q].  d [N], sc [N, K/32],
    h [N, K/32], q [N, K].
    """
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d[..., None, None]
    sc = sc.to(torch.int16).unsqueeze(-1)
    h = h.view(torch.int8).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d * (2 * sc - 127), LEVELS[16 * h + q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: as least_squares; scales are steps of a super-scale of columns or of the row.
    importance: float32 [K].
    """
    q, h, sc, d = least_squares_nested(weight, code="u4", choice="u1", scale="u7", super_scale="f32", columns=32, super_axes=1,
            super_columns=weight.shape[1],
            steps=(-127, -125, -123, -121, -119, -117, -115, -113, -111, -109, -107, -105, -103, -101, -99, -97, -95, -93, -91,
                -89, -87, -85, -83, -81, -79, -77, -75, -73, -71, -69, -67, -65, -63, -61, -59, -57, -55, -53, -51, -49, -47,
                -45, -43, -41, -39, -37, -35, -33, -31, -29, -27, -25, -23, -21, -19, -17, -15, -13, -11, -9, -7, -5, -3, -1, 1,
                3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31, 33, 35, 37, 39, 41, 43, 45, 47, 49, 51, 53, 55, 57, 59,
                61, 63, 65, 67, 69, 71, 73, 75, 77, 79, 81, 83, 85, 87, 89, 91, 93, 95, 97, 99, 101, 103, 105, 107, 109, 111,
                113, 115, 117, 119, 121, 123, 125, 127),
            values=(-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113, -123, -100, -79, -61, -45, -31,
                -18, -6, 5, 17, 29, 42, 57, 73, 93, 117),
            importance=importance)
    return {"q": q, "h": h, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_ik_llama(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    rows, levels = tensors
    rows += n * (136 * (K // 256) + 4)
    rows_f32 = rows.to(tl.pointer_type(tl.float32))
    d = tl.load(rows_f32, n < N, 0)
    t = u // 128
    j = u // 16 % 8
    c = u % 16
    sc = (tl.load(rows + 136 * t + j + 4, live, 0) >> 1 & 127).to(tl.int32)
    h = (tl.load(rows + 136 * t + j + 4, live, 0) & 1).to(tl.int32)
    q_word = tl.load(rows + 136 * t + 16 * j + c + 12, live, 0)
    for i in tl.static_range(2):
        q = (q_word >> 4 * i & 15).to(tl.int32)
        state = use(state, 256 * t + 32 * j + 16 * i + c, d * (2 * sc - 127) * tl.load(levels + 16 * h + q), live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, sc, levels = tensors
    d += n
    d1 = tl.load(d, n < N, 0)
    sc += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    b = u // 4 % 4
    a = u % 4
    live = live & (128 * t + 32 * b + 2 * a < K)
    sc1 = (tl.load(sc + 4 * t + b, live, 0) & 127).to(tl.int32)
    h = (tl.load(sc + 4 * t + b, live, 0) >> 7 & 1).to(tl.int32)
    q_word = tl.load(q + 16 * t + 4 * a + b, live, 0)
    for i in tl.static_range(2):
        for j in tl.static_range(2):
            for c in tl.static_range(2):
                inside = live & (128 * t + 32 * b + 16 * i + 8 * j + 2 * a + c < K)
                q1 = (q_word >> 16 * i + 8 * c + 4 * j & 15).to(tl.int32)
                state = use(state, 128 * t + 32 * b + 16 * i + 8 * j + 2 * a + c, d1 * (2 * sc1 - 127)
                    * tl.load(levels + 16 * h + q1), inside)
    return state


@triton.jit
def _table_planar(g, N, F: tl.constexpr):
    """The numbers of levels[q] as words of bytes, in every lane."""
    if F == tl.float16:
        return codebook.table(g, N, -0x7f7f7f80,
            (0x4153687f, 0xa162331, 0x26190d01, 0x71594535, 0x4153687f, 0xa162331, 0x26190d01, 0x71594535, -0x7f7f7f80,
            -0x7f7f7f80, 0x0, 0x0, 0x0))
    else:
        return codebook.table(g, N, -0x3c3c3c3d,
            (0x4153687f, 0xa162331, 0x26190d01, 0x71594535, -0x7d592f02, 0x20b00c44, 0x18c85080, -0x1d4d75ac, -0x3d3d3d3e,
            -0x3e3e3d3e, 0x4241413f, 0x42424242, 0x43434343))


@triton.jit
def _scale_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a group adds up to, with w = (2.0 * d * sc - 127.0 * d) * (levels[q] + 4.0 * h)."""
    sc, h = fields
    sum += (4.0 * h - BASE) * ones
    return lanes.plus(total, sum * (2.0 * sc - 127.0))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "ik_llama": Storage(unpack_ik_llama, pack_ik_llama, Kernels(_decode_ik_llama, rows="N", units="K/2", last="k",
                digits=(8, 16), lanes=(2,), order=(0, 1, 2, 4, 3), tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.split_entries_of_16, words=bitplanes.words_4, width=8, bits=-1,
                    base=(0, 0), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar, finish=group_sums.scaled,
                    group_fields=(GroupField("sc", 1, 32, 7, at=0), GroupField("sc", 1, 32, 1, at=7)),
                    row_fields=(GroupField("d", 1, 0),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0), "sums": True}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d", "sc", "h")),
)

PROGRAM = {
    "name": "ik_iq4_ks",
    "title": "ik_llama.cpp IQ4_KS, a scale ahead of each row, 7-bit scales of blocks, 4-bit codes into two tables of levels",
    "source": "ik_llama.cpp ggml-common.h block_iq4_ks, iqk_quantize.cpp dequantize_row_iq4_ks",
    "formula": "d * (2 * sc - 127) * levels[16 * h + q]", "bits": "4.25 to 4.2501", "digest": "f484603c1febc591",
    "detect": {"gguf": "IQ4_KS"},
    "variants": {(): {
        "fields": {"d": ("f32", "N"), "sc": ("u7", "N", "K/32"), "h": ("u1", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "ik_llama": {"tensors": {"rows": ("u8", "N", "4 + 136*K/256",
                {"slices": (("d", 0, [0], {"section": 0}), ("h", 0, [0, [(8, 1, 1), (0, 136, 1)]], {"section": 1}),
                ("sc", 1, [0, [(8, 1, 1), (0, 136, 1)]], {"section": 1}),
                ("q", 64, [0, [(16, 1, 1), (2, 4), (8, 16, 1), (0, 136, 1)]], {"section": 1}))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f32", "N", {"field": "d"}),
                "sc": ("u8", "N", "K/32", {"slices": (("sc", 0, [0, 1]), ("h", 7, [0, 1]))}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
