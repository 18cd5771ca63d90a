"""mxfp4: GGML MXFP4, 4-bit floats with a power of two per 32.

    w = e * level[q]
    float32, rounded after each operation

    e      e8m0h [N, K/32]
    q      u4    [N, K]

    gguf: 4.25 bits per weight

Built from the spec mxfp4 (sha256 ae56585929ee6c8e) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Table, Variant, device, empty
from qdsl.runtime.numbers import e8m0h


# -- reference -------------------------------------------------------------------------------------------------------


LEVEL = Table("f32", 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_gguf(blocks: Tensor) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 17*K/32]."""
    r = blocks.unflatten(-1, (-1, 17))
    q_bytes = r[..., 1:17].contiguous()
    return {
        "e": r[..., 0:1].squeeze(-1),
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1),
    }


def pack_gguf(e: Tensor, q: Tensor) -> dict[str, Tensor]:
    """blocks of the fields; the inverse of unpack_gguf."""
    r = empty((e.shape[0], e.shape[1], 17), torch.uint8, e.device)
    r[..., 0:1] = e.unsqueeze(-1)
    q_split = q.unflatten(-1, (-1, 2, 16))
    r[..., 1:17] = q_split[:, :, 0] | q_split[:, :, 1] << 4
    return {
        "blocks": r.flatten(1),
    }


def decode(e: Tensor, q: Tensor, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * level[q].  e [N, K/32], q [N, K]."""
    out = out if out is None else out.unflatten(1, (-1, 32))
    e = e8m0h(e).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 32))
    return torch.mul(e, LEVEL[q], out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, level, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 17 * n.to(tl.int64) * (K // 32)
    out += n.to(tl.int64) * K
    t = u // 16
    i = u % 16
    live = (n < N) & (t < K // 32)
    e = device.e8m0h(tl.load(blocks + 17 * t, live, 0))
    q_word = tl.load(blocks + 17 * t + i + 1, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        w = e * tl.load(level + q)
        tl.store(out + 32 * t + 16 * h + i, w, live)


@triton.jit
def _linear_gguf(blocks, level, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 17 * n.to(tl.int64) * (K // 32)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 2, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 16
        i = u % 16
        live = (n < N) & (t < K // 32)
        e = device.e8m0h(tl.load(blocks + 17 * t, live, 0))
        q_word = tl.load(blocks + 17 * t + i + 1, live, 0)
        for h in tl.static_range(2):
            q = (q_word >> 4 * h & 15).to(tl.int32)
            x_k = tl.load(x + 32 * t + 16 * h + i, live, 0).to(tl.float32)
            acc += e * tl.load(level + q) * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "e": Field("e8m0h", "N", "K/32"),
        "q": Field("u4", "N", "K"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "17*K/32"),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/2", last="k", tables=(LEVEL,)),
        ),
    },
    decode=decode,
)

FORMAT = Format(
    name="mxfp4", title="GGML MXFP4, 4-bit floats with a power of two per 32",
    source="ggml-common.h block_mxfp4 and kvalues_mxfp4", formula="e * level[q]",
    variants={(): VARIANT},
    detect={"gguf": "MXFP4"},
    digest="ae56585929ee6c8e",
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
