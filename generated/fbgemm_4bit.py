"""fbgemm_4bit: FBGEMM fused rows of 4 bits, the codes of a row and behind them its scale and bias in float16.

    w = s * q + b
    float32, rounded after each operation

    s      f16 [N]
    b      f16 [N]
    q      u4  [N, K]

    fbgemm: 4.00098 bits per weight
    planar: 4.00195 bits per weight

Built from the spec fbgemm_4bit (sha256 513fa7f7ebf528e0) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import affine
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, joined, pad, spread, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = s * q + b */
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
    const vf s = FIELD(0);
    const vf b = FIELD(1);
    *scale = s;
    *offset = b;
}
"""


def unpack_fbgemm(rows: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of rows uint8 [N, K/2 + 4]."""
    codes = rows[..., :K // 2]
    tail = rows[..., K // 2:]
    return {"s": as_type(tail, torch.float16)[:, 0], "b": as_type(tail, torch.float16)[:, 1], "q": spread(codes, 4).flatten(1)}


def pack_fbgemm(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """rows of the fields; the inverse of unpack_fbgemm."""
    q_split = q.unflatten(-1, (-1, 2))
    codes_bytes = joined(q_split, 4).squeeze(-1)
    tail_bytes = empty((s.shape[0], 4), torch.uint8, s.device)
    tail_bytes[..., 0:2] = as_type(s.unsqueeze(-1), torch.uint8)
    tail_bytes[..., 2:4] = as_type(b.unsqueeze(-1), torch.uint8)
    return {"rows": torch.cat([codes_bytes, tail_bytes], -1)}


def unpack_planar(q: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 16*ceil(K/128)]; s float16 [N]; b float16 [N]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 64))
    q_bytes = r.unflatten(-1, (4, 4, 2, 2))
    return {"s": s, "b": b, "q": torch.stack([q_bytes & 15, q_bytes >> 4], -5).permute(0, 1, 4, 6, 2, 3, 5).flatten(1)[:, :K]}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, b of the fields; the inverse of unpack_planar."""
    q_split = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 2, 4, 2))
    r = (q_split[:, :, :, :, 0] | q_split[:, :, :, :, 1] << 4).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "b": b}


def decode(s: Tensor, b: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = s * q + b.  s [N], b [N], q [N, K]."""
    s = s.float().unsqueeze(-1)
    b = b.float().unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(s, as_float(q, out), out=space)
    return torch.add(w, b, out=out)


def encode(weight: Tensor, *, importance: Tensor | None = None) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the least weight of the block; scale = its range / (2^bits - 1).  importance:
    float32 [K].
    """
    q, s, b = affine(weight, code="u4", scale="f16", min="f16", rows=1, columns=weight.shape[1], axes=1, importance=importance)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_fbgemm(tensors, n, t, live, N, K, sizes, use: tl.constexpr, state):
    """The 2 weights of unit t of row n, in float32."""
    rows, = tensors
    rows += n * (K // 2 + 4)
    s = (device.stream(rows + K // 2, 1, 0, 16, 8, n < N)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    b = (device.stream(rows + K // 2, 1, 16, 16, 8, n < N)).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
    q_word = tl.load(rows + t, live, 0)
    for h in tl.static_range(2):
        q = q_word >> 4 * h & 15
        state = use(state, 2 * t + h, s * q + b, live)
    return state


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 8 weights of unit u of row n, in float32."""
    q, s, b = tensors
    s += n
    s1 = tl.load(s, n < N, 0).to(tl.float32)
    b += n
    b1 = tl.load(b, n < N, 0).to(tl.float32)
    q += 16 * (n * tl.cdiv(K, 128))
    t = u // 16
    j = u // 4 % 4
    c = u % 4
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 16 * t + 4 * c + j, live, 0)
    for h in tl.static_range(4):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 8 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 4 * h & 15
            state = use(state, 128 * t + 32 * j + 8 * h + 2 * c + i, s1 * q1 + b1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "fbgemm": Storage(unpack_fbgemm, pack_fbgemm, Kernels(_decode_fbgemm, rows="N", units="K/2", last="k", lanes=(2,),
                order=(0, 1, 2))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="16*ceil(K/128)", last="k",
                digits=(4, 4), lanes=(4, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u4, words=bitplanes.words_4),
                    Sums(finish=group_sums.with_offset, row_fields=(GroupField("s", 1, 0), GroupField("b", 1, 0)), ones=True),
                    {"skinny": {}, "tile_gemm": {"sums": True}}))),
    },
    decode=decode, encode=encode, importance=True, row_loops=RowLoops(ROW_FUNCTIONS, "q", 4, ("s", "b")),
)

PROGRAM = {
    "name": "fbgemm_4bit",
    "title": "FBGEMM fused rows of 4 bits, the codes of a row and behind them its scale and bias in float16",
    "source": "torch.ops.quantized.embedding_bag_4bit_prepack, fbgemm QuantUtils.h FusedNBitRowwiseQuantizedSBHalf",
    "formula": "s * q + b", "bits": "4.001 to 4.002", "digest": "513fa7f7ebf528e0",
    "variants": {(): {
        "fields": {"s": ("f16", "N"), "b": ("f16", "N"), "q": ("u4", "N", "K")},
        "storages": {
            "fbgemm": {"tensors": {"rows": ("u8", "N", "K/2 + 4",
                {"slices": (("q", 0, [0, [(2, 4), (0, 1, 1)]], {"section": 0}), ("s", 0, [0], {"section": 1}),
                ("b", 16, [0], {"section": 1}))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "16*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (4, 4, 1), (4, 4), (4, 1, 1), (0, 16, 1)]]),)}),
                "s": ("f16", "N", {"field": "s"}),
                "b": ("f16", "N", {"field": "b"}),
            }},
        },
        "codes": {"b": 0},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
