"""nvfp4: GGML NVFP4, 4-bit floats with an 8-bit float per 16, and a scale of the whole weight beside them.

    w = e * 0.5 * level[q] * s
    float32, rounded after each operation

    e      ue4m3 [N, K/16]
    q      u4    [N, K]
    s      f32   []

    gguf: 4.5 bits per weight

Built from the spec nvfp4 (sha256 4f344a723a817580) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.runtime import Field, Format, Kernels, Storage, Stored, Table, Variant, device, empty
from qdsl.runtime.numbers import ue4m3


# -- reference -------------------------------------------------------------------------------------------------------


LEVEL = Table("f32", 0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)


def unpack_gguf(blocks: Tensor, scale: Tensor | None) -> dict[str, Tensor]:
    """Fields of blocks uint8 [N, 36*K/64]; scale float32 []."""
    r = blocks.unflatten(-1, (-1, 36))
    q_bytes = r[..., 4:36].unflatten(-1, (4, 8)).contiguous()
    fields = {
        "e": r[..., 0:4].flatten(1),
        "q": torch.stack([q_bytes & 15, q_bytes >> 4], -2).flatten(1),
    }
    if scale is not None:
        fields["s"] = scale
    return fields


def pack_gguf(e: Tensor, q: Tensor, s: Tensor | None) -> dict[str, Tensor]:
    """blocks, scale of the fields; the inverse of unpack_gguf."""
    r = empty((e.shape[0], e.shape[1] // 4, 36), torch.uint8, e.device)
    r[..., 0:4] = e.unflatten(-1, (-1, 4))
    q_split = q.unflatten(-1, (-1, 4, 2, 8))
    r[..., 4:36] = (q_split[:, :, :, 0] | q_split[:, :, :, 1] << 4).flatten(2)
    tensors = {
        "blocks": r.flatten(1),
    }
    if s is not None:
        tensors["scale"] = s
    return tensors


def decode(e: Tensor, q: Tensor, s: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = e * 0.5 * level[q] * s.  e [N, K/16], q [N, K], s
    [].
    """
    out = out if out is None else out.unflatten(1, (-1, 16))
    e = ue4m3(e).unsqueeze(-1)
    q = q.view(torch.int8).unflatten(1, (-1, 16))
    s = 1 if s is None else s
    return torch.mul(e * 0.5 * LEVEL[q], s, out=out).flatten(1)


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gguf(blocks, scale, level, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    u = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[None, :], (BN, BK))
    blocks += 36 * n.to(tl.int64) * (K // 64)
    if scale is None:
        s = 1
    else:
        s = tl.load(scale)
    out += n.to(tl.int64) * K
    t = u // 32
    i = u // 8 % 4
    j = u % 8
    live = (n < N) & (t < K // 64)
    e = device.ue4m3(tl.load(blocks + 36 * t + i, live, 0))
    q_word = tl.load(blocks + 36 * t + 8 * i + j + 4, live, 0)
    for h in tl.static_range(2):
        q = (q_word >> 4 * h & 15).to(tl.int32)
        w = e * 0.5 * tl.load(level + q) * s
        tl.store(out + 64 * t + 16 * i + 8 * h + j, w, live)


@triton.jit
def _linear_gguf(blocks, scale, level, x, bias, out, N, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 2 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[:, None], (BN, BK))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    blocks += 36 * n.to(tl.int64) * (K // 64)
    if scale is None:
        s = 1
    else:
        s = tl.load(scale)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K // 2, BK):
        u = tl.broadcast_to(start + tl.arange(0, BK)[None, :], (BN, BK))
        t = u // 32
        i = u // 8 % 4
        j = u % 8
        live = (n < N) & (t < K // 64)
        e = device.ue4m3(tl.load(blocks + 36 * t + i, live, 0))
        q_word = tl.load(blocks + 36 * t + 8 * i + j + 4, live, 0)
        for h in tl.static_range(2):
            q = (q_word >> 4 * h & 15).to(tl.int32)
            x_k = tl.load(x + 64 * t + 16 * i + 8 * h + j, live, 0).to(tl.float32)
            acc += e * 0.5 * tl.load(level + q) * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 1))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "e": Field("ue4m3", "N", "K/16"),
        "q": Field("u4", "N", "K"),
        "s": Field("f32"),
    },
    storages={
        "gguf": Storage(
            tensors={
                "blocks": Stored("u8", "N", "36*K/64"),
                "scale": Stored("f32", optional=True),
            },
            unpack=unpack_gguf, pack=pack_gguf,
            kernels=Kernels(_dequantize_gguf, _linear_gguf, rows="N", units="K/2", last="k", tables=(LEVEL,)),
        ),
    },
    decode=decode, defaults={"s": 1},
)

FORMAT = Format(
    name="nvfp4", title="GGML NVFP4, 4-bit floats with an 8-bit float per 16, and a scale of the whole weight beside them",
    source="ggml-common.h block_nvfp4 and kvalues_mxfp4", formula="e * 0.5 * level[q] * s",
    variants={(): VARIANT},
    detect={"gguf": "NVFP4"},
    digest="4f344a723a817580",
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
