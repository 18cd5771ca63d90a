"""q5_1: GGML Q5_1, 5-bit codes with a scale and a minimum per 32.

    w = d * q + m
    float32, rounded after each operation

    d      f16 [N, K/32]
    m      f16 [N, K/32]
    q      u5  [N, K]

    gguf: 6 bits per weight
    planar: 6 bits per weight

Built from the spec q5_1 (sha256 9acd3992981022f5) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import affine
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = d * q + m */
#define BITS 5
#define FIELDS 2
#define HAS_OFFSET
#define BRAIN_NUMBERS
static const float numbers[32] = {0.0f, 1.0f, 2.0f, 3.0f, 4.0f, 5.0f, 6.0f, 7.0f, 8.0f, 9.0f, 10.0f, 11.0f, 12.0f, 13.0f, 14.0f,
        15.0f, 16.0f, 17.0f, 18.0f, 19.0f, 20.0f, 21.0f, 22.0f, 23.0f, 24.0f, 25.0f, 26.0f, 27.0f, 28.0f, 29.0f, 30.0f, 31.0f};
INLINE vf number(const Weight *w, vu codes) { return lookup_32(numbers, codes); }
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
    """Fields of blocks uint8 [N, 24*K/32]."""
    r = blocks.unflatten(-1, (-1, 24))
    q_bytes = r[..., 8:24].contiguous()
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1)
    q_high = spread(r[..., 4:8], 1).flatten(1)
    return {"d": as_type(r, torch.float16)[..., 0], "m": as_type(r, torch.float16)[..., 1], "q": q_low | q_high << 4}


def pack_gguf(d: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 24), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    r[..., 2:4] = as_type(m.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 8:24] = (q_split[:, :, 0] & 15) | (q_split[:, :, 1] & 15) << 4
    q_split2 = q.unflatten(-1, (-1, 4, 8))
    r[..., 4:8] = joined(q_split2 >> 4, 1).squeeze(-1)
    return {"blocks": r.flatten(1)}


def unpack_planar(q_0: Tensor, q_1: Tensor, d: Tensor, m: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q_0 int32 [N, 16*ceil(K/128)]; q_1 int32 [N, 16*ceil(K/512)]; d float16 [N, K/32]; m float16 [N, K/32]."""
    q_0_bytes = as_type(q_0, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = q_0_bytes.unflatten(-1, (4, 4, 2, 2))
    q_low = torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]
    q_1_bytes = as_type(q_1, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes2 = q_1_bytes.unflatten(-1, (4, 4, 2, 2))
    q_high = torch.stack([q_bytes2 & 1, q_bytes2 >> 4 & 1, q_bytes2 >> 1 & 1, q_bytes2 >> 5 & 1, q_bytes2 >> 2 & 1, q_bytes2 >> 6
        & 1, q_bytes2 >> 3 & 1, q_bytes2 >> 7], -5).unflatten(2, (4, 2)).permute(0, 1, 2, 5, 7, 3, 4, 6).flatten(1)[:, :K]
    return {"d": d, "m": m, "q": q_low | q_high << 4}


def pack_planar(d: Tensor, m: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q_0, q_1, d, m of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    q_0_bytes = ((q_split[:, :, :, :, 0] & 15) | (q_split[:, :, :, :, 1] & 15) << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    q_split2 = pad(q, (0, -q.shape[1] % 512, 0, 0)).unflatten(-1, (-1, 4, 4, 2, 2, 4, 2))
    q_1_bytes = ((q_split2[:, :, 0, :, :, 0] >> 4) | (q_split2[:, :, 0, :, :, 1] >> 4) << 4 | (q_split2[:, :, 1, :, :, 0] >> 4)
        << 1 | (q_split2[:, :, 1, :, :, 1] >> 4) << 5 | (q_split2[:, :, 2, :, :, 0] >> 4) << 2
        | (q_split2[:, :, 2, :, :, 1] >> 4) << 6 | (q_split2[:, :, 3, :, :, 0] >> 4) << 3 | (q_split2[:, :, 3, :, :, 1] >> 4)
        << 7).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q_0": as_type(q_0_bytes, torch.int32).flatten(1), "q_1": as_type(q_1_bytes, torch.int32).flatten(1), "d": d, "m": m}


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
    q, d, m = affine(weight, code="u5", scale="f16", min="f16", rows=1, columns=32, axes=2, importance=importance)
    return {"q": q, "d": d, "m": m}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_gguf(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 16 weights of unit u of row n, in float32."""
    blocks, = tensors
    blocks += 24 * (n * (K // 32))
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    t = u // 2
    j = u % 2
    d = tl.load(blocks_f16 + 12 * t, live, 0).to(tl.float32)
    m = tl.load(blocks_f16 + 12 * t + 1, live, 0).to(tl.float32)
    for h in tl.static_range(2):
        q_word = tl.load(blocks + 24 * t + 2 * h + j + 4, live, 0)
        for i in tl.static_range(8):
            q_low = tl.load(blocks + 24 * t + 8 * j + i + 8, live, 0) >> 4 * h & 15
            q_high = q_word >> i & 1
            q = q_low | q_high << 4
            state = use(state, 32 * t + 16 * h + 8 * j + i, d * q + m, live)
    return state


@triton.jit
def _decode_planar(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    q_0, q_1, d, m = tensors
    d += n * (K // 32)
    m += n * (K // 32)
    q_0 += 16 * (n * tl.cdiv(K, 128))
    q_1 += 16 * (n * tl.cdiv(K, 512))
    d1 = tl.load(d + k // 32, live, 0).to(tl.float32)
    m1 = tl.load(m + k // 32, live, 0).to(tl.float32)
    q_low = tl.load(q_0 + 16 * (k // 128) + 4 * (k % 128 // 2 % 4)
        + k % 128 // 32, live, 0) >> 16 * (k % 128 % 2) + 4 * (k % 128 // 8 % 4) & 15
    q_high = tl.load(q_1 + 16 * (k // 512) + 4 * (k % 512 // 2 % 4)
        + k % 512 // 32 % 4, live, 0) >> 16 * (k % 512 % 2) + 4 * (k % 512 // 8 % 4) + k % 512 // 128 & 1
    q = q_low | q_high << 4
    return use(state, k, d1 * q + m1, live)


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "gguf": Storage(unpack_gguf, pack_gguf, Kernels(_decode_gguf, rows="N", units="K/16", last="k", digits=(2,), lanes=(2, 8),
                order=(0, 1, 3, 2, 4))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="K", last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u5, words=bitplanes.words_5, width=4, bits=5),
                    Sums(scale=group_sums.with_offset, group_fields=(GroupField("d", 1, 32), GroupField("m", 1, 32)),
                    blocks=("32",)), {"skinny": {}, "gemv": {}, "tile_gemm": {"sums": True, "spans": (0, 1)}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 5, ("d", "m")),
)

PROGRAM = {
    "name": "q5_1", "title": "GGML Q5_1, 5-bit codes with a scale and a minimum per 32", "source": "ggml-common.h block_q5_1",
    "formula": "d * q + m", "bits": "6", "digest": "9acd3992981022f5",
    "detect": {"gguf": "Q5_1"},
    "variants": {(): {
        "fields": {"d": ("f16", "N", "K/32"), "m": ("f16", "N", "K/32"), "q": ("u5", "N", "K")},
        "storages": {
            "gguf": {"tensors": {"blocks": ("u8", "N", "24*K/32",
                {"slices": (("d", 0, [0, [(0, 24, 1)]]), ("m", 16, [0, [(0, 24, 1)]]),
                ("q", 64, [0, [(16, 1, 1), (2, 4), (0, 24, 1)]], 0, 4),
                ("q", 32, [0, [(8, 1), (4, 1, 1), (0, 24, 1)]], 4, 1))})}},
            "planar": {"tensors": {
                "q_0": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]], 0, 4),)}),
                "q_1": ("i32", "N", "16*ceil(K/512)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (4, 1), (0, 16, 1)]], 4, 1),)}),
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
