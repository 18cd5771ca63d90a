"""bnb_int8: LLM.int8 of bitsandbytes, codes of 8 bits in 127ths of the largest weight of a row.

    w = q * s / 127
    float32, rounded after each operation

    s      f32 [N]
    q      i8  [N, K]

    bitsandbytes: 8.00195 bits per weight
    planar: 8.00195 bits per weight

Built from the spec bnb_int8 (sha256 d99377216098498a) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import unit_absmax
from qdsl.runtime import (Codes, EightBit, Format, GroupField, Kernels, MatrixUnitKernels, RowLoops, Storage, Sums, Variant,
        as_float, as_type, pad, workspace)
from qdsl.runtime.gpu.kernels import bitplanes, lanes
from qdsl.runtime.libraries.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


ROW_FUNCTIONS = """
/* w = q * s / 127 */
#define BITS 8
#define FIELDS 1
INLINE vf number(const Weight *w, vu codes) { return signed_number(codes); }
#define BASE (-128)
#define UNIT 1.0f
INLINE vb bytes_of_codes(vb codes) { return codes ^ 128; }
INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {
    const vf s = FIELD(0);
    *scale = 0.007874015718698502f * s;
}
"""


def unpack_bitsandbytes(weight: Tensor, SCB: Tensor) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K]; SCB float32 [N]."""
    return {"s": SCB, "q": weight}


def pack_bitsandbytes(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, SCB of the fields; the inverse of unpack_bitsandbytes."""
    return {"weight": q, "SCB": s}


def unpack_planar(q: Tensor, s: Tensor, *, K: int) -> dict[str, Tensor]:
    """Fields of q int32 [N, 32*ceil(K/128)]; s float32 [N]."""
    r = as_type(q, torch.uint8).unflatten(-1, (-1, 128))
    return {"s": s, "q": as_type(r, torch.int8).unflatten(-1, (8, 4, 2, 2)).permute(0, 1, 3, 5, 2, 4).flatten(1)[:, :K]}


def pack_planar(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """q, s of the fields; the inverse of unpack_planar."""
    r = pad(q, (0, -q.shape[1] % 128, 0, 0)).unflatten(-1, (-1, 4, 2, 8, 2)).permute(0, 1, 4, 2, 5,
        3).view(torch.uint8).flatten(2)
    return {"q": as_type(r, torch.int32).flatten(1), "s": s}


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s / 127.  s [N], q [N, K]."""
    s = s.unsqueeze(-1)
    space = workspace(out)
    w = torch.mul(as_float(q, out), s, out=space)
    return torch.div(w, 127.0, out=out)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block; codes are w * (divisor / scale)."""
    q, s = unit_absmax(weight, code="i8", scale="f32", rows=1, columns=weight.shape[1], axes=1, divisor=127)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _decode_bitsandbytes(tensors, n, k, live, N, K, sizes, use: tl.constexpr, state):
    """The weight in column k of row n, in float32."""
    weight, SCB = tensors
    SCB += n
    s = tl.load(SCB, n < N, 0)
    weight += n * K
    q = tl.load(weight + k, live, 0)
    return use(state, k, tl.div_rn(q * s, 127.0), live)


@triton.jit
def _finish_bitsandbytes(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a row adds up to, with w = 0.007874015718698502 * s * q."""
    s, = fields
    if BASE != 0:
        sum -= BASE * ones
    return lanes.plus(total, sum * (0.007874015718698502 * s))


@triton.jit
def _decode_planar(tensors, n, u, live, N, K, sizes, use: tl.constexpr, state):
    """The 4 weights of unit u of row n, in float32."""
    q, s = tensors
    s += n
    s1 = tl.load(s, n < N, 0)
    q += 32 * (n * tl.cdiv(K, 128))
    t = u // 32
    j = u // 8 % 4
    c = u % 8
    live = live & (128 * t + 32 * j + 2 * c < K)
    q_word = tl.load(q + 32 * t + 4 * c + j, live, 0)
    for h in tl.static_range(2):
        for i in tl.static_range(2):
            inside = live & (128 * t + 32 * j + 16 * h + 2 * c + i < K)
            q1 = ((q_word >> 16 * i + 8 * h & 255).to(tl.int32) ^ 128) - 128
            state = use(state, 128 * t + 32 * j + 16 * h + 2 * c + i, tl.div_rn(q1 * s1, 127.0), inside)
    return state


@triton.jit
def _finish_planar(fields, sum, ones, BASE: tl.constexpr, total=None):
    """What a row adds up to, with w = 0.007874015718698502 * s * q."""
    s, = fields
    if BASE != 0:
        sum -= BASE * ones
    return lanes.plus(total, sum * (0.007874015718698502 * s))


# -- format ----------------------------------------------------------------------------------------------------------
VARIANT = Variant(
    storages={
        "bitsandbytes": Storage(unpack_bitsandbytes, pack_bitsandbytes, Kernels(_decode_bitsandbytes, rows="N", units="K",
                last="k",
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304), in_order=True),
                    Sums(finish=_finish_bitsandbytes, row_fields=(GroupField("SCB", 1, 0),), ones=True), {"skinny": {}},
                    eight=EightBit("i8", "weight")))),
        "planar": Storage(unpack_planar, pack_planar, Kernels(_decode_planar, rows="N", units="32*ceil(K/128)", last="k",
                digits=(4, 8), lanes=(2, 2), order=(0, 1, 2, 4, 3, 5),
                matrix_unit=MatrixUnitKernels(Codes(bitplanes.i8, words=bitplanes.words_8, width=8, bits=8, signed=True,
                    base=(128, 2304)), Sums(finish=_finish_planar, row_fields=(GroupField("s", 1, 0),), ones=True),
                    {"skinny": {}, "tile_gemm": {"zero": (-128, 0)}}))),
    },
    decode=decode, encode=encode, row_loops=RowLoops(ROW_FUNCTIONS, "q", 8, ("s",)),
)

PROGRAM = {
    "name": "bnb_int8", "title": "LLM.int8 of bitsandbytes, codes of 8 bits in 127ths of the largest weight of a row",
    "source": "bitsandbytes functional.py int8_vectorwise_quant, nn Linear8bitLt", "formula": "q * s / 127", "bits": "8.002",
    "digest": "d99377216098498a",
    "detect": {"tensors": {"weight_format": 0}},
    "variants": {(): {
        "fields": {"s": ("f32", "N"), "q": ("i8", "N", "K")},
        "storages": {
            "bitsandbytes": {"tensors": {"weight": ("i8", "N", "K", {"field": "q"}),
                "SCB": ("f32", "N", {"aliases": ("weight.SCB",), "field": "s"})}},
            "planar": {"tensors": {
                "q": ("i32", "N", "32*ceil(K/128)",
                    {"slices": (("q", 0, [0, [(2, 16), (8, 4, 1), (2, 8), (4, 1, 1), (0, 32, 1)]]),)}),
                "s": ("f32", "N", {"field": "s"}),
            }},
        },
    }},
}

FORMAT = Format(PROGRAM, {(): VARIANT})
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar, SPEC = FORMAT.convert, FORMAT.requantize, FORMAT.planar, FORMAT.spec
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
