"""q4_1: GGML Q4_1, 4-bit codes with a scale and a minimum per 32.

    w = d * q + m
    float32, rounded after each operation

    d      f16 [N, K/32]
    m      f16 [N, K/32]
    q      u4  [N, K]

    gguf: 5 bits per weight
    planar: 5 bits per weight

Built from the spec q4_1 (sha256 75cf1a82c0c64ca2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import affine
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, pad, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * q + m */
#define BITS 4
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[16] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_16(numbers, codes); }
#define BASE (0)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf d = FIELD(0);
    const vf m = FIELD(1);
    *scale = d;
    *offset = m;
}
"""


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 20*K/32]."""
    r = blocks.unflatten(-1, (-1, 20))
    q_bytes = r[..., 4:20].contiguous()
    return {"d": as_type(r, torch.float16)[..., 0], "m": as_type(r, torch.float16)[..., 1],
            "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)}


def pack_gguf(d: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 20), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:4] = as_type(m.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 4:20] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {"blocks": r.flatten(1)}


def unpack_planar(q: Tensor, d: Tensor, m: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; d float16 [N, K/32]; m float16 [N, K/32]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"d": d, "m": m, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(d: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, d, m of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "d": d, "m": m}


def decode(d: Tensor, m: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * q + m.  d [N, K/32], m [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    m = m.float().unsqueeze(-1)
    q = q.unflatten(1, (-1, 32))
    space = workspace(out)
    w = torch.mul(d, as_float(q, out), out=space)
    return torch.add(w, m, out=out).flatten(1)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the least weight of the block; scale = its range / (2^bits - 1).  importance:
    float32 [K].
    """
    q, d, m = affine(weight, code="u4", scale="f16", min="f16", rows=1, columns=32, axes=2, importance=importance)
    return {"q": q, "d": d, "m": m}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 20 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 16
    i = u % 16
    d = tl.load(blocks_f16 + 10 * t, live, 0).to(tl.float32)
    m = tl.load(blocks_f16 + 10 * t + 1, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 20 * t + i + 4, live, 0)
    for h in tl.static_range(2):
        q = q_word >> 4 * h & 15
        state = use(state, 32 * t + 16 * h + i, d * q + m, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, d, m = tensors
    d += n * (K // 32)
    m += n * (K // 32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    d1 = tl.load(d + 4 * t + j, live, 0).to(tl.float32)
    m1 = tl.load(m + 4 * t + j, live, 0).to(tl.float32)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, d1 * q1 + m1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/2", last="k", digits=(16,), lanes=(2,),
                order=(0, 1, 3, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("d", 1, 32), GroupField("m", 1, 32)),
                    blocks=("32",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("d", "m")),
)

PROGRAM = {
    "name": "q4_1", "title": "GGML Q4_1, 4-bit codes with a scale and a minimum per 32", "source": "ggml-common.h block_q4_1",
    "formula": "d * q + m", "bits": "5", "digest": "75cf1a82c0c64ca2",
    "detect": {"gguf": "Q4_1"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "m": ("f16", "N", "K/32"), "q": ("u4", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "20*K/32",
                {"slices": (("d", 0, [0, [(0, 20, 1)]]), ("m", 16, [0, [(0, 20, 1)]]),
                ("q", 32, [0, [(16, 1, 1), (2, 4), (0, 20, 1)]]))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "d": ("f16", "N", "K/32", {"field": "d"}),
                "m": ("f16", "N", "K/32", {"field": "m"}),
            }},
        },
        "codes": {"m": 0},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
