"""aqlm_1x16: AQLM 1x16, for 8 columns a row of a codebook of 65536, and a scale per row.

    w = cb[q, k % 8] * s
    float32, rounded after each operation

    q      u16  [N, K/8]
    cb     real [65536, 8]
    s      real [N]

    aqlm: 2.00403 bits per weight

Built from the spec aqlm_1x16 (sha256 57253af2c45fb12e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, entries
from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.gpu.triton import tl, triton


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_aqlm(codes: Tensor, codebooks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Fields of codes int16 [N, K/8, 1]; codebooks real [1, 65536, 1, 8]; scales real [N, 1, 1, 1]."""
    return {
        "q": codes.squeeze(2).to(torch.int32) & 65535,
        "cb": codebooks.squeeze(2).squeeze(0),
        "s": scales.squeeze(3).squeeze(2).squeeze(1),
    }


def pack_aqlm(q: Tensor, cb: Tensor, s: Tensor) -> dict[str, Tensor]:
    """codes, codebooks, scales of the fields; the inverse of unpack_aqlm."""
    return {
        "codes": q.to(torch.int16).unsqueeze(-1),
        "codebooks": cb.unsqueeze(0).unsqueeze(2),
        "scales": s.unsqueeze(-1).unsqueeze(-1).unsqueeze(-1),
    }


def decode(q: Tensor, cb: Tensor, s: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = cb[q, k % 8] * s.  q [N, K/8], cb [65536, 8], s [N]."""
    out = out if out is None else out.unflatten(1, (-1, 8))
    s = s.float()[..., None, None]
    cb = entries(cb.float(), q)
    return torch.mul(cb, s, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_aqlm(codes, codebooks, scales, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    k = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    codes += n.to(tl.int64) * (K // 8)
    scales += n
    s = tl.load(scales, n < N, 0).to(tl.float32)
    out += n.to(tl.int64) * K
    live = (n < N) & (k < K)
    q = tl.load(codes + k // 8, live, 0).to(tl.uint16, bitcast=True).to(tl.int32)
    column = k % 8
    cb = tl.load(codebooks + 8 * q + column, live, 0).to(tl.float32)
    w = cb * s
    tl.store(out + k, w, live)


@triton.jit
def _linear_aqlm(codes, codebooks, scales, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    codes += n.to(tl.int64) * (K // 8)
    scales += n
    s = tl.load(scales, n < N, 0).to(tl.float32)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        k = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        live = (n < N) & (k < K)
        q = tl.load(codes + k // 8, live, 0).to(tl.uint16, bitcast=True).to(tl.int32)
        column = k % 8
        cb = tl.load(codebooks + 8 * q + column, live, 0).to(tl.float32)
        x_k = tl.load(x + k, live, 0).to(tl.float32)
        acc += cb * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "q": Field("u16", "N", "K/8"),
        "cb": Field("real", "65536", "8"),
        "s": Field("real", "N"),
    },
    storages={
        "aqlm": Storage(
            tensors={
                "codes": Stored("i16", "N", "K/8", "1"),
                "codebooks": Stored("real", "1", "65536", "1", "8"),
                "scales": Stored("real", "N", "1", "1", "1"),
            },
            unpack=unpack_aqlm, pack=pack_aqlm,
            kernels=Kernels(_dequantize_aqlm, _linear_aqlm, rows="N", units="K", last="k"),
        ),
    },
    decode=decode,
)

FORMAT = Format(
    name="aqlm_1x16", title="AQLM 1x16, for 8 columns a row of a codebook of 65536, and a scale per row",
    source="aqlm checkpoints (QuantizedLinear, _dequantize_weight)", formula="cb[q, k % 8] * s",
    variants={(): VARIANT},
    params={"real": ("f16", "bf16")},
    digest="57253af2c45fb12e",
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
