"""fbgemm_8bit: FBGEMM fused rows of 8 bits, the codes of a row and behind them its scale and bias in float32.

    w = s * q + b
    float32, rounded after each operation

    s      f32 [N]
    b      f32 [N]
    q      u8  [N, K]

    fbgemm: 8.00391 bits per weight
    planar: 8.00391 bits per weight

Built from the spec fbgemm_8bit (sha256 fb75fb53a722bf24) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import affine
from qdsl.runtime import (Codes, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant, as_float,
        as_type, empty, pad, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, device, group_sums
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = s * q + b */
#define BITS 8
#define FIELDS 2
#define HAS_OFFSET
INLINE vf number(const Weight *w, vu codes) { return unsigned_number(codes); }
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
    """Fields of rows uint8 [N, K + 8]."""
    codes = rows[..., :K]
    tail = rows[..., K:]
    return {"s": as_type(tail, torch.float32)[:, 0], "b": as_type(tail, torch.float32)[:, 1], "q": codes}


def pack_fbgemm(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """rows of the fields; the inverse of unpack_fbgemm."""
    r = empty((s.shape[0], 8), torch.uint8, s.device)
    r[..., 0:4] = as_type(s.unsqueeze(-1), torch.uint8)
    r[..., 4:8] = as_type(b.unsqueeze(-1), torch.uint8)
    return {"rows": torch.cat([q, r], -1)}


def unpack_planar(q: Tensor, s: Tensor, b: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s float32 [N]; b float32 [N]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"s": s, "b": b, "q": r.unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K]}


def pack_planar(s: Tensor, b: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s, b of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5, 3).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s, "b": b}


def decode(s: Tensor, b: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = s * q + b.  s [N], b [N], q [N, K]."""
    s = s.unsqueeze(-1)
    b = b.unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(s, as_float(q, out), out=space)
    return torch.add(w, b, out=out)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: min = the least weight of the block; scale = its range / (2^bits - 1)."""
    q, s, b = affine(weight, code="u8", scale="f32", min="f32", rows=1, columns=weight.shape[1], axes=1)
    return {"q": q, "s": s, "b": b}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_fbgemm(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    rows, = tensors
    rows += n * (K + 8)
    s = (device.stream(rows + K, 1, 0, 32, 8, n < N)).to(tl.uint32).to(tl.float32, bitcast=True)
    b = (device.stream(rows + K, 1, 32, 32, 8, n < N)).to(tl.uint32).to(tl.float32, bitcast=True)
    q = tl.load(rows + k, live, 0)
    return use(state, k, s * q + b, live)


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s, b = tensors
    s += n
    s1 = tl.load(s, n < N, 0)
    b += n
    b1 = tl.load(b, n < N, 0)
    q += 32 * (n * tl.cdiv(K, 128))
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = q_word >> 16 * i + 8 * h & 255
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, s1 * q1 + b1, inside)
    return state


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "fbgemm": Storage(unpack_fbgemm, pack_fbgemm, Kernels(_decode_fbgemm, rows="N", units="K", last="k")),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.u8, words=bitplanes.words_8, width=8, bits=8, base=(0, 2176)),
                    Sums(finish=group_sums.with_offset, row_fields=(GroupField("s", 1, 0), GroupField("b", 1, 0)), ones=True),
                    {"skinny": {}, "tile_gemm": {"zero": (0, 128), "sums": True}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s", "b")),
)

PROGRAM = {
    "name": "fbgemm_8bit",
    "title": "FBGEMM fused rows of 8 bits, the codes of a row and behind them its scale and bias in float32",
    "source": "torch.ops.quantized.embedding_bag_byte_prepack, fbgemm QuantUtils.h Fused8BitRowwiseQuantizedSBFloat",
    "formula": "s * q + b", "bits": "8.0039", "digest": "fb75fb53a722bf24",
    "variants": {(): {
        "fields": {"s": ("f32", "N"), "b": ("f32", "N"), "q": ("u8", "N", "K")},
        "storages": {
            "fbgemm": {"tensors": {"rows": ("u8", "N", "K + 8",
                {"slices": (("q", 0, [0, 1], {"section": 0}), ("s", 0, [0], {"section": 1}), ("b", 32, [0], {"section": 1}))})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("f32", "N", {"field": "s"}),
                "b": ("f32", "N", {"field": "b"}),
            }},
        },
        "codes": {"b": 0},
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
