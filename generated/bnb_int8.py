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
from qdsl.runtime.gpu.kernels import device
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
def _dequantize_bitsandbytes(weight, SCB, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    SCB += n
    s = tl.load(SCB, n < N, 0)
    weight += n.to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    q = tl.load(weight + k, live, 0)
    w = tl.div_rn(q * s, 127.0)
    tl.store(out + k, w, live)


@triton.jit
def _linear_bitsandbytes(weight, SCB, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    SCB += n
    s = tl.load(SCB, n < N, 0)
    weight += n.to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        q = tl.load(weight + k, live, 0)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += tl.where(live, tl.div_rn(q * s, 127.0), 0) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "s": Field("f32", "N"),
        "q": Field("i8", "N", "K"),
    },
    storages={
        "bitsandbytes": Storage(
            tensors={
                "weight": Stored("i8", "N", "K"),
                "SCB": Stored("f32", "N", aliases=("weight.SCB",)),
            },
            unpack=unpack_bitsandbytes, pack=pack_bitsandbytes,
            kernels=Kernels(_dequantize_bitsandbytes, _linear_bitsandbytes, rows="N", units="K", last="k"),
        ),
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
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
requantize = FORMAT.requantize
planar = FORMAT.planar
linear = FORMAT.linear
grouped_linear = FORMAT.grouped_linear
Linear = FORMAT.Linear
Embedding = FORMAT.Embedding
