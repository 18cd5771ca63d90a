"""iq4_nl: GGML IQ4_NL, 4-bit codes into a table of 16 levels, with one scale per 32.

    w = d * levels[q]
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      u4  [N, K]

    gguf: 4.5 bits per weight
    iq4_nl_r4: 4.5 bits per weight
    planar: 4.5 bits per weight

Built from the spec iq4_nl (sha256 51233cce86e2c6fd) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import block_levels
from qdsl.runtime import (Codes, Format, GroupField, Kernels, Levels, MatrixUnitKernels, RowLoops, Storage, Sums, Table, Variant,
        as_type, empty, pad)
from qdsl.runtime.gpu.kernels import bitplanes, codebook, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


LEVELS = Table("f32", -127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


ROW_FUNCTIONS = """
/* w = d * levels[q] */
#define BITS 4
#define FIELDS 1
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
    *scale = d;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 18*K/32]."""
    r = blocks.unflatten(-1, (-1, 18))
    q_bytes = r[..., 2:18].contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 18), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 2:18] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {"blocks": r.flatten(1)}


def unpack_iq4_nl_r4(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N/4, 72*K/32]."""
    r = blocks.unflatten(-1, (-1, 72))
    q_bytes = r[..., 8:72].unflatten(-1, (2, 2, 4, 4)).contiguous()
    return {"d": as_type(r, torch.float16)[..., 0:4].permute(0, 2, 1).flatten(0, 1),
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 5, 1, 4, 2, 3, 6).flatten(0, 1).flatten(1)}


def pack_iq4_nl_r4(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_iq4_nl_r4."""
    r = empty((d.shape[0] // 4, d.shape[1], 72), torch.uint8, d.device)
    r[..., 0:8] = as_type(d.unflatten(0, (-1, 4)).permute(0, 2, 1).unsqueeze(-1), torch.uint8).flatten(2)
    q_split = q.unflatten(-1, (-1, 2, 2, 2, 4)).unflatten(0, (-1, 4))
    r[..., 8:72] = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 2, 4, 3, 1, 5).flatten(2)
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 8, 2))
    return {"d": d, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -4).permute(0, 1, 4, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 8, 2, 4, 2))
    r = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).permute(0, 1, 3, 2, 4).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "d": d}


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * levels[q].  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d, LEVELS[q], out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale by search for the least error; codes of the nearest levels.  importance: float32
    [K].
    """
    q, d = block_levels(weight, code="u4", scale="f16", columns=32, levels=LEVELS, importance=importance)
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, levels = tensors
    blocks += 18 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 16
    i = u % 16
    d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        state = use(state, 32 * t + 16 * h + i, d * tl.load(levels + q), live)
    return state


@triton.jit
def _decode_iq4_nl_r4(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    blocks, levels = tensors
    blocks += 72 * (n // 4 * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    d = tl.load(blocks_f16 + 36 * (k // 32) + n % 4, live, 0).to(tl.float32)
    q = (tl.load(blocks + 72 * (k // 32) + 32 * (k % 32 // 4 % 2) + 16 * (k % 32 // 16) + 4 * (n % 4) + k % 32 % 4 + 8, live, 0)
        >> 4 * (k % 32 // 8 % 2) & 15).to(tl.int32)
    return use(state, k, d * tl.load(levels + q), live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, levels = tensors
    d += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    c = u // 4 % 4
    b = u % 4
    live = live & (128 * t + 32 * c + 2 * b < K)
    d1 = tl.load(d + 4 * t + c, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * b + c, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            for j in tl.static_range(2):
                inside = live & (128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j < K)
                q1 = (q_word >> 16 * h + 8 * j + 4 * i & 15).to(tl.int32)
                state = use(state, 128 * t + 32 * c + 16 * h + 8 * i + 2 * b + j, d1 * tl.load(levels + q1), inside)
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


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(16,), lanes=(2,),
                order=(0, 1, 3, 2), tables=(LEVELS,))),
        "iq4_nl_r4": Storage(unpack_iq4_nl_r4, pack_iq4_nl_r4, Kernels(_decode_iq4_nl_r4, rows="N", units="K", last="k",
                tables=(LEVELS,))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(2, 2, 2), order=(0, 1, 2, 4, 5, 3, 6), tables=(LEVELS,),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.split_entries_of_16, words=bitplanes.words_4, width=8, bits=-1,
                    base=(0, 0), levels=Levels(_table_planar)),
                    Sums(scale=group_sums.scaled, group_fields=(GroupField("d", 1, 32),), blocks=("32",)),
                    {"skinny": {}, "gemv": {}, "tile_gemm": {"zero": (0, 0)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d",)),
)

PROGRAM = {
    "name": "iq4_nl", "title": "GGML IQ4_NL, 4-bit codes into a table of 16 levels, with one scale per 32",
    "source": "ggml-common.h block_iq4_nl and kvalues_iq4nl", "formula": "d * levels[q]", "bits": "4.5",
    "digest": "51233cce86e2c6fd",
    "detect": {"gguf": "IQ4_NL", "repacked": {"IQ4_NL_R4": "iq4_nl_r4"}},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "18*K/32",
                {"slices": (("d", 0, [0, [(0, 18, 1)]]), ("q", 16, [0, [(16, 1, 1), (2, 4), (0, 18, 1)]]))})}},
            "iq4_nl_r4": {"tensors": {"blocks": ("u8", "N/4", "72*K/32",
                {"seen": ("N", "18*K/32"),
                "slices": (("d", 0, [[(4, 2, 1), (0, 1, 0)], [(0, 72, 1)]]),
                ("q", 64, [[(4, 4, 1), (0, 1, 0)], [(4, 1, 1), (2, 32, 1), (2, 4), (2, 16, 1), (0, 72, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 8), (4, 4, 1), (2, 4), (2, 16), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/32", {"field": "d"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
