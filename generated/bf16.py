"""bf16: plain bfloat16, the upper half of float32.

    w = v
    float32, rounded after each operation

    v      bf16 [N, K]

    plain: 16 bits per weight

Built from the spec bf16 (sha256 7dc8a2bcc65c4b51) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from torch import Tensor

from qdsl.encode import nearest
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_plain(weight: Tensor) -> dict[str, Tensor]:
    """Fields of weight bfloat16 [N, K]."""
    return {
        "v": weight,
    }


def pack_plain(v: Tensor) -> dict[str, Tensor]:
    """weight of the fields; the inverse of unpack_plain."""
    return {
        "weight": v,
    }


def decode(v: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = v.  v [N, K]."""
    return v.float() if out is None else out.copy_(v)


def encode(weight: Tensor) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: each weight is rounded to nearest, ties to even."""
    v = nearest(weight, code="bf16")
    return {"v": v}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_plain(weight, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    weight += n.to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    v = tl.load(weight + k, live, 0)
    w = v
    tl.store(out + k, w, live)


@triton.jit
def _linear_plain(weight, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    weight += n.to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        v = tl.load(weight + k, live, 0).to(tl.float32)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += v * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "v": Field("bf16", "N", "K"),
    },
    storages={
        "plain": Storage(
            tensors={
                "weight": Stored("bf16", "N", "K"),
            },
            unpack=unpack_plain, pack=pack_plain,
            kernels=Kernels(_dequantize_plain, _linear_plain, rows="N", units="K", last="k"),
        ),
    },
    decode=decode, encode=encode, copies="v",
)

FORMAT = Format(
    name="bf16", title="plain bfloat16, the upper half of float32",
    source="safetensors BF16, GGUF BF16", formula="v",
    variants={(): VARIANT},
    detect={"safetensors": "BF16", "gguf": "BF16"},
    digest="7dc8a2bcc65c4b51",
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
