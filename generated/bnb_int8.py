"""bnb_int8: LLM.int8 of bitsandbytes, codes of 8 bits in 127ths of the largest weight of a row.

    w = q * s / 127
    float32, rounded after each operation

    s      f32 [N]
    q      i8  [N, K]

    bitsandbytes: 8.00195 bits per weight

Built from the spec bnb_int8 (sha256 d99377216098498a) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.encode import unit_absmax
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_float, workspace
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_bitsandbytes(weight: Tensor, SCB: Tensor) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K]; SCB float32 [N]."""
    return {
        "s": SCB,
        "q": weight,
    }


def pack_bitsandbytes(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, SCB of the fields; the inverse of unpack_bitsandbytes."""
    return {
        "weight": q,
        "SCB": s,
    }


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
    state = use(state, k, tl.div_rn(q * s, 127.0), live)
    return state


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "s": Field("f32", "N"),
        "q": Field("i8", "N", "K"),
    },
    storages={
        "bitsandbytes": Storage(unpack=unpack_bitsandbytes, pack=pack_bitsandbytes, tensors={
            "weight": Stored("i8", "N", "K"),
            "SCB": Stored("f32", "N", aliases=("weight.SCB",)),
        }, kernels=Kernels(_decode_bitsandbytes, rows="N", units="K", last="k")),
    },
    decode=decode, encode=encode,
)

FORMAT = Format(
    name="bnb_int8", title="LLM.int8 of bitsandbytes, codes of 8 bits in 127ths of the largest weight of a row",
    source="bitsandbytes functional.py int8_vectorwise_quant, nn Linear8bitLt", formula="q * s / 127",
    variants={(): VARIANT},
    detect={"tensors": {"weight_format": 0}},
    digest="d99377216098498a",
)
SPEC = FORMAT.spec
wrap, pack, unpack, quantize, dequantize = FORMAT.wrap, FORMAT.pack, FORMAT.unpack, FORMAT.quantize, FORMAT.dequantize
convert, requantize, planar = FORMAT.convert, FORMAT.requantize, FORMAT.planar
linear, grouped_linear, Linear, Embedding = FORMAT.linear, FORMAT.grouped_linear, FORMAT.Linear, FORMAT.Embedding
