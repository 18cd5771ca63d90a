"""iq4_xs: GGML IQ4_XS, 4-bit codes into a table of 16 levels, with 6-bit scales in super-blocks of 256.

    w = d * (sc - 32) * levels[q]
    float32, rounded after each operation

    d      f16 [N, K/256]
    sc     u6  [N, K/32]
    q      u4  [N, K]

    gguf: 4.25 bits per weight
    planar: 4.3125 bits per weight

Built from the spec iq4_xs (sha256 f27dc5f25ec6a1cb) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import kquant_levels
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, empty, joined, spread)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


ROW_FUNCTIONS = """
/* w = d * (sc - 32) * levels[q] */
#define BITS 4
#define FIELDS 2
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
    *scale = d * sc - 32.0f * d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 136*K/256]."""
    r = blocks.unflatten(-1, (-1, 136))
    sc_low = spread(r[..., 4:8], 4).flatten(1)
    sc_high = spread(r[..., 2:4], 2).flatten(1)
    q_bytes = r[..., 8:136].unflatten(-1, (8, 16)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "sc": sc_low | sc_high << 4,
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_gguf(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 136), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    sc_split = sc.unflatten(-1, (-1, 4, 2))
    r[..., 4:8] = joined(sc_split & 15, 4).squeeze(-1)
    sc_split2 = sc.unflatten(-1, (-1, 2, 4))
    r[..., 2:4] = joined(sc_split2 >> 4, 2).squeeze(-1)
    q_split = q.unflatten(-1, (-1, 8, 2, 16))
    r[..., 8:136] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, sc: Tensor) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/256]; sc uint8 [N, K/32]."""
    q_bytes = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_bytes.unflatten(-1, (4, 8, 2))
    return {"d": d, "sc": sc & 63, "q": torch.stack([q_bytes2 & 15, q_bytes2 >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)}


def pack_planar(d: Tensor, sc: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, sc of the fields; the inverse of unpack_planar."""
    q_split = q.unflatten(-1, (-1, 8, 2, 4, 2))
    q_bytes = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    sc_bytes = torch.zeros(sc.shape[0], sc.shape[1], 1, dtype=torch.uint8, device=sc.device)
    sc_bytes[...] = sc.unsqueeze(-1)
    return {"q": as_type(q_bytes, torch.int32).flatten(1), "d": d, "sc": sc_bytes.squeeze(-1)}


def decode(d: Tensor, sc: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (sc - 32) * levels[q].  d [N, K/256], sc [N, K/32], q [N,
    K].
    """
    out = out if out is None else out.unflatten(1, (-1, 8, 32))
    d = d.float()[..., None, None]
    sc = sc.view(torch.int8).unflatten(1, (-1, 8)).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 8, 32))
    return torch.mul(d * (sc - 32), LEVELS[q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale by search for the least error, in steps of the super-block's largest, sign and
    all; codes of the nearest levels.  importance: float32 [K].
    """
    q, sc, d = kquant_levels(weight, code="u4", scale="u6", super_scale="f16", columns=32, super_columns=256, scale_offset=32,
            levels=LEVELS, importance=importance)
    return {"q": q, "sc": sc, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 136 * (n * (K // 256))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 128
    i = u // 16 % 8
    j = u % 16
    d = tl.load(blocks_f16 + 68 * t, live, 0).to(tl.float32)
    sc_low = tl.load(blocks + 136 * t + i // 2 + 4, live, 0) >> 4 * (i % 2) & 15
    sc_high = tl.load(blocks + 136 * t + i // 4 + 2, live, 0) >> 2 * (i % 4) & 3
    sc = (sc_low | sc_high << 4).to(tl.int32)
    q_word = tl.load(blocks + 136 * t + 16 * i + j + 8, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 256 * t + 32 * i + 16 * h + j, d * (sc - 32) * tl.load(levels + q), live)
    return state


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
    sc1 = (tl.load(sc + 4 * t + c, live, 0) & 63).to(tl.int32)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, d1 * (sc1 - 32) * tl.load(levels + q1), live)
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
    """What a group adds up to, with w = (d * sc - 32.0 * d) * levels[q]."""
    d, sc = fields
    return lanes.plus(total, sum * (d * sc - 32.0 * d))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(8, 16), lanes=(2,),
                order=(0, 1, 2, 4, 3), tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.split_entries_of_16, words=bitplanes.words_4, width=8, bits=-1,
                    base=(0, 0), levels=Levels(_table_planar)),
                    Sums(scale=_scale_planar, group_fields=(GroupField("d", 1, 256), GroupField("sc", 1, 32, 6)),
                    blocks=("256", "32")), {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d", "sc")),
)

PROGRAM = {
    "name": "iq4_xs", "title": "GGML IQ4_XS, 4-bit codes into a table of 16 levels, with 6-bit scales in super-blocks of 256",
    "source": "ggml-common.h block_iq4_xs and kvalues_iq4nl", "formula": "d * (sc - 32) * levels[q]", "bits": "4.25 to 4.3125",
    "digest": "f27dc5f25ec6a1cb",
    "detect": {"gguf": "IQ4_XS"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/256"), "sc": ("u6", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "136*K/256",
                {"slices": (("d", 0, [0, [(0, 136, 1)]]), ("sc", 32, [0, [(2, 4), (4, 1, 1), (0, 136, 1)]], 0, 4),
                ("sc", 16, [0, [(4, 2), (2, 1, 1), (0, 136, 1)]], 4, 2),
                ("q", 64, [0, [(16, 1, 1), (2, 4), (8, 16, 1), (0, 136, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/256", {"field": "d"}),
                "sc": ("u8", "N", "K/32", {"padding": 192, "field": "sc"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
