"""q4_0: GGML Q4_0, 4-bit codes around 8 with one scale per 32.

    w = d * (q - 8)
    float32, rounded after each operation

    d      f16 [N, K/32]
    q      u4  [N, K]

    gguf: 4.5 bits per weight

Built from the spec q4_0 (sha256 3977fa3ebec36f87) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.encode import signmax
from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Variant, as_type, device, empty


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 18*K/32]."""
    r = blocks.unflatten(-1, (-1, 18))
    q_bytes = r[..., 2:18].contiguous()
    return {
        "d": as_type(r, torch.float16)[..., 0],
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1),
    }


def pack_gguf(d: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((d.shape[0], d.shape[1], 18), torch.uint8, d.device)
    r[..., 0:2] = as_type(d.unsqueeze(-1), torch.uint8)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 2:18] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {
        "blocks": r.flatten(1),
    }


def decode(d: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = d * (q - 8).  d [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    d = d.float().unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(d, q - 8, out=out).flatten(1)


def encode(weight: Tensor, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = the value of largest magnitude, sign and all, / divisor.  options:
    by, ties.
    """
    q, d = signmax(weight, code="u4", scale="f16", rows=1, columns=32, axes=2, divisor=-8, offset=8,
            **{"by": "exact", "ties": "up", **options})
    return {"q": q, "d": d}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 18 * n.to(tl.int64) * (K // 32)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    out += n.to(tl.int64) * K
    t = u // 16
    i = u % 16
    live = (n < N) & (t < K // 32)
    d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
    q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        w = d * (q - 8)
        tl.store(out + 32 * t + 16 * h + i, w, live)


@triton.jit
def _linear_gguf(blocks, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 18 * n.to(tl.int64) * (K // 32)
    blocks_f16 = blocks.to(tl.pointer_type(tl.float16))
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 2, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        i = u % 16
        live = (n < N) & (t < K // 32)
        d = tl.load(blocks_f16 + 9 * t, live, 0).to(tl.float32)
        q_word = tl.load(blocks + 18 * t + i + 2, live, 0)
        for h in tl.static_range(2):
            q = (q_word >> 4 * h & 15).to(tl.int32)
            x_k = tl.load(x + 32 * t + 16 * h + i, live, 0).to(tl.float32)
            acc += d * (q - 8) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "d": Field("f16", "N", "K/32"),
        "q": Field("u4", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "18*K/32"),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/2", last="k"),
        ),
    },
    decode=decode, encode=encode, options={"by": ("stored", "exact", "inverse"), "ties": ("even", "away", "up")},
)

FORMAT = Format(
    name="q4_0", title="GGML Q4_0, 4-bit codes around 8 with one scale per 32",
    source="ggml-common.h block_q4_0", formula="d * (q - 8)",
    variants={(): VARIANT},
    detect={"gguf": "Q4_0"},
    digest="3977fa3ebec36f87",
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
