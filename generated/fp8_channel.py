"""fp8_channel: FP8 E4M3 codes with one scale per output row.

    w = q * s
    float32, rounded after each operation

    q      e4m3       [N, K]
    s      scale_type [N]

    safetensors: 8.00098 bits per weight

Built from the spec fp8_channel (sha256 318224f39800d127) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, device
from qdsl.runtime.numbers import e4m3


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_safetensors(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight float8_e4m3fn [N, K]; weight_scale scale_type [N, 1]."""
    return {
        "q": weight,
        "s": weight_scale.squeeze(1),
    }


def pack_safetensors(q: Tensor, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_safetensors."""
    return {
        "weight": q,
        "weight_scale": s.unsqueeze(-1),
    }


def decode(q: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = q * s.  q [N, K], s [N]."""
    q = e4m3(q)
    s = s.float().unsqueeze(-1)
    return torch.mul(q, s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: by."""
    q, s = absmax(weight, code="e4m3", scale=scale_type, rows=1, columns=weight.shape[1], axes=1, divisor=448,
            **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_safetensors(weight, weight_scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    weight += n.to(tl.int64) * K
    weight_scale += n
    s = tl.load(weight_scale, n < N, 0).to(tl.float32)
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    q = device.e4m3(tl.load(weight + k, live, 0))
    w = q * s
    tl.store(out + k, w, live)


@triton.jit
def _linear_safetensors(weight, weight_scale, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    weight += n.to(tl.int64) * K
    weight_scale += n
    s = tl.load(weight_scale, n < N, 0).to(tl.float32)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        q = device.e4m3(tl.load(weight + k, live, 0))
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += q * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "q": Field("e4m3", "N", "K"),
        "s": Field("scale_type", "N"),
    },
    storages={
        "safetensors": Storage(
            tensors={
                "weight": Stored("e4m3", "N", "K"),
                "weight_scale": Stored("scale_type", "N", "1"),
            },
            unpack=unpack_safetensors, pack=pack_safetensors,
            kernels=Kernels(_dequantize_safetensors, _linear_safetensors, rows="N", units="K", last="k"),
        ),
    },
    decode=decode, encode=encode, options={"by": ("stored", "exact", "inverse")},
)

FORMAT = Format(
    name="fp8_channel", title="FP8 E4M3 codes with one scale per output row",
    source="compressed-tensors float-quantized (channel)", formula="q * s",
    variants={(): VARIANT},
    params={"scale_type": ("bf16", "f32", "f16")},
    detect={"config": {"quant_method": "compressed-tensors", "type": "float", "num_bits": 8, "strategy": "channel"}},
    digest="318224f39800d127",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
linear = FORMAT.linear
Linear = FORMAT.Linear
