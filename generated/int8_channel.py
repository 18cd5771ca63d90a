"""int8_channel: INT8 codes with one scale per output row and an optional zero point.

    w = (q - z) * s
    float32, rounded after each operation

    q      i8         [N, K]
    z      i8         [N]
    s      scale_type [N]

    safetensors: 8.00098 bits per weight

Built from the spec int8_channel (sha256 ca1ab8c1ed580a57) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.encode import absmax
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, device


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_safetensors(weight: Tensor, weight_scale: Tensor, weight_zero_point: Tensor | None) -> dict[str, Tensor]:
    """Fields of weight int8 [N, K]; weight_scale scale_type [N, 1]; weight_zero_point int8 [N, 1]."""
    fields = {
        "q": weight,
        "s": weight_scale.squeeze(1),
    }
    if weight_zero_point is not None:
        fields["z"] = weight_zero_point.squeeze(1)
    return fields


def pack_safetensors(q: Tensor, z: Tensor | None, s: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale, weight_zero_point of the fields; the inverse of unpack_safetensors."""
    tensors = {
        "weight": q,
        "weight_scale": s.unsqueeze(-1),
    }
    if z is not None:
        tensors["weight_zero_point"] = z.unsqueeze(-1)
    return tensors


def decode(q: Tensor, s: Tensor, z: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], s [N], z [N]."""
    q = q.to(torch.int16)
    z = 0 if z is None else z.to(torch.int16).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(q - z, s, out=out)


def encode(weight: Tensor, *, scale_type: str, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = largest magnitude of the block / divisor.  options: by, ties."""
    q, s = absmax(weight, code="i8", scale=scale_type, rows=1, columns=weight.shape[1], axes=1, divisor=127.5,
            **options)
    return {"q": q, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_safetensors(weight, weight_scale, weight_zero_point, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    weight += n.to(tl.int64) * K
    if weight_zero_point is None:
        z = 0
    else:
        weight_zero_point += n
        z = tl.load(weight_zero_point, n < N, 0).to(tl.int32)
    weight_scale += n
    s = tl.load(weight_scale, n < N, 0).to(tl.float32)
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    q = tl.load(weight + k, live, 0).to(tl.int32)
    w = (q - z) * s
    tl.store(out + k, w, live)


@triton.jit
def _linear_safetensors(weight, weight_scale, weight_zero_point, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    weight += n.to(tl.int64) * K
    if weight_zero_point is None:
        z = 0
    else:
        weight_zero_point += n
        z = tl.load(weight_zero_point, n < N, 0).to(tl.int32)
    weight_scale += n
    s = tl.load(weight_scale, n < N, 0).to(tl.float32)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        q = tl.load(weight + k, live, 0).to(tl.int32)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += (q - z) * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "q": Field("i8", "N", "K"),
        "z": Field("i8", "N"),
        "s": Field("scale_type", "N"),
    },
    storages={
        "safetensors": Storage(
            tensors={
                "weight": Stored("i8", "N", "K"),
                "weight_scale": Stored("scale_type", "N", "1"),
                "weight_zero_point": Stored("i8", "N", "1", optional=True),
            },
            unpack=unpack_safetensors, pack=pack_safetensors,
            kernels=Kernels(_dequantize_safetensors, _linear_safetensors, rows="N", units="K", last="k"),
        ),
    },
    decode=decode, encode=encode, options={"by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up")},
    defaults={"z": 0},
)

FORMAT = Format(
    name="int8_channel", title="INT8 codes with one scale per output row and an optional zero point",
    source="compressed-tensors int-quantized (channel)", formula="(q - z) * s",
    variants={(): VARIANT},
    params={"scale_type": ("bf16", "f32", "f16")},
    detect={"config": {"quant_method": "compressed-tensors", "type": "int", "num_bits": 8, "strategy": "channel"}},
    digest="ca1ab8c1ed580a57",
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
