"""bitnet: BitNet b1.58 of transformers, codes of three values and a scale that divides.

    w = (q - 1) / s
    float32, rounded after each operation

    s      scale_type []
    q      u2         [N, K]

    transformers: 2 bits per weight

Built from the spec bitnet (sha256 ca5c46dabe1dd8c2) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_float, device, spread


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_transformers(weight: Tensor, weight_scale: Tensor) -> dict[str, Tensor]:
    """Fields of weight uint8 [N/4, K]; weight_scale scale_type [1]."""
    return {
        "s": weight_scale.squeeze(0),
        "q": spread(weight, 2).permute(2, 0, 1).flatten(0, 1),
    }


def pack_transformers(s: Tensor, q: Tensor) -> dict[str, Tensor]:
    """weight, weight_scale of the fields; the inverse of unpack_transformers."""
    q_split = q.unflatten(0, (4, -1))
    r = sum(q_split[i] << 2 * i for i in range(4))
    return {
        "weight": r,
        "weight_scale": s.unsqueeze(-1),
    }


def decode(s: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - 1) / s.  s [], q [N, K]."""
    s = s.float()
    q = q.view(torch.int8)
    return torch.div(as_float(q - 1, out), s, out=out)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_transformers(weight, weight_scale, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    s = tl.load(weight_scale).to(tl.float32)
    weight += (n % (N // 4)).to(tl.int64) * K
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    q = (tl.load(weight + k, live, 0) >> 2 * (n // (N // 4)) & 3).to(tl.int32)
    w = tl.div_rn((q - 1).to(tl.float32), s)
    tl.store(out + k, w, live)


@triton.jit
def _linear_transformers(weight, weight_scale, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    s = tl.load(weight_scale).to(tl.float32)
    weight += (n % (N // 4)).to(tl.int64) * K
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        q = (tl.load(weight + k, live, 0) >> 2 * (n // (N // 4)) & 3).to(tl.int32)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += tl.where(live, tl.div_rn((q - 1).to(tl.float32), s), 0) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "s": Field("scale_type"),
        "q": Field("u2", "N", "K"),
    },
    storages={
        "transformers": Storage(
            tensors={
                "weight": Stored("u8", "N/4", "K"),
                "weight_scale": Stored("scale_type", "1"),
            },
            unpack=unpack_transformers, pack=pack_transformers, whole=True,
            kernels=Kernels(_dequantize_transformers, _linear_transformers, rows="N", units="K", last="k"),
        ),
    },
    decode=decode,
)

FORMAT = Format(
    name="bitnet", title="BitNet b1.58 of transformers, codes of three values and a scale that divides",
    source="transformers integrations/bitnet.py pack_weights, BitLinear", formula="(q - 1) / s",
    variants={(): VARIANT},
    params={"scale_type": ("bf16", "f16", "f32")},
    digest="ca5c46dabe1dd8c2",
)
SPEC = FORMAT.spec
wrap = FORMAT.wrap
quantize = FORMAT.quantize
dequantize = FORMAT.dequantize
pack = FORMAT.pack
unpack = FORMAT.unpack
convert = FORMAT.convert
planar = FORMAT.planar
linear = FORMAT.linear
grouped_linear = FORMAT.grouped_linear
Linear = FORMAT.Linear
