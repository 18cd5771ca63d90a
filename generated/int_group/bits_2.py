"""int_group at bits = 2: integer codes with a zero point and a scale per group of columns.

    w = (q - z) * s
    float32, rounded after each operation

    g      index into ceil(K/group) groups [K]
    q      u2    [N, K]
    z      u2    [N, ceil(K/group)]
    s      f16   [N, ceil(K/group)]

    gptq_v2: 2.14062 bits per weight with group = 128
    gptq_v1: 2.14062 bits per weight with group = 128

Built from the spec int_group (sha256 f3ff62b90cb44e5c) by qdsl 0.1.0.
Do not edit: change the spec and run `qdsl build`.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from qdsl.encode import minmax
from qdsl.runtime import Field, Kernels, Storage, Stored, Variant, as_type, device, integer


# -- reference -------------------------------------------------------------------------------------------------------


def unpack_gptq_v2(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor]:
    """Fields of qweight int32 [K/16, N]; qzeros int32 [ceil(K/group), N/16]; scales float16 [ceil(K/group), N];
    g_idx int32 [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type(qzeros.t(), torch.uint8).unflatten(-1, (-1, 4))
    fields = {
        "q": torch.stack([qweight_bytes >> 2 * i & 3 for i in range(4)], -1).flatten(1),
        "z": torch.stack([qzeros_bytes >> 2 * i & 3 for i in range(4)], -1).permute(0, 2, 3, 1).flatten(0, 2),
        "s": scales.t(),
    }
    if g_idx is not None:
        fields["g"] = g_idx
    return fields


def pack_gptq_v2(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v2."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    qweight_bytes = sum(q_split[..., i] << 2 * i for i in range(4))
    z_split = z.unflatten(0, (-1, 4, 4))
    qzeros_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
    tensors = {
        "qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
        "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous(),
        "scales": s.t().contiguous(),
    }
    if g is not None:
        tensors["g_idx"] = g
    return tensors


def unpack_gptq_v1(qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None) -> dict[str, Tensor]:
    """Fields of qweight int32 [K/16, N]; qzeros int32 [ceil(K/group), N/16]; scales float16 [ceil(K/group), N];
    g_idx int32 [K].
    """
    qweight_bytes = as_type(qweight.t(), torch.uint8).unflatten(-1, (-1, 4))
    qzeros_bytes = as_type((qzeros + 0x55555555).t(), torch.uint8).unflatten(-1, (-1, 4))
    fields = {
        "q": torch.stack([qweight_bytes >> 2 * i & 3 for i in range(4)], -1).flatten(1),
        "z": torch.stack([qzeros_bytes >> 2 * i & 3 for i in range(4)], -1).permute(0, 2, 3, 1).flatten(0, 2),
        "s": scales.t(),
    }
    if g_idx is not None:
        fields["g"] = g_idx
    return fields


def pack_gptq_v1(g: Tensor | None, q: Tensor, z: Tensor, s: Tensor) -> dict[str, Tensor]:
    """qweight, qzeros, scales, g_idx of the fields; the inverse of unpack_gptq_v1."""
    q_split = q.unflatten(-1, (-1, 4, 4))
    qweight_bytes = sum(q_split[..., i] << 2 * i for i in range(4))
    z_split = z.unflatten(0, (-1, 4, 4))
    qzeros_bytes = sum(z_split[:, :, i] << 2 * i for i in range(4))
    tensors = {
        "qweight": as_type(qweight_bytes, torch.int32).squeeze(-1).t().contiguous(),
        "qzeros": integer(qzeros_bytes.transpose(-1, -2), torch.int32).t().contiguous() - 0x55555555,
        "scales": s.t().contiguous(),
    }
    if g is not None:
        tensors["g_idx"] = g
    return tensors


def decode(q: Tensor, z: Tensor, s: Tensor, g: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """Weights [N, K], float32 rounded after each operation: w = (q - z) * s.  q [N, K], z [N, ceil(K/group)], s [N,
    ceil(K/group)], g [K].
    """
    if g is not None:
        z, s = z[:, g], s[:, g]
    out = out if out is None else out.unflatten(1, (z.shape[1], -1))
    q = q.view(torch.int8).unflatten(1, (z.shape[1], -1))
    z = z.view(torch.int8).unsqueeze(-1)
    s = s.float().unsqueeze(-1)
    return torch.mul(q - z, s, out=out).flatten(1)


def encode(weight: Tensor, *, group: int, **options: Any) -> dict[str, Tensor]:
    """Fields for a float weight [N, K]: scale = range of the block, zero included, / (2^bits - 1); zero = the code
    of 0.  options: by, symmetric.
    """
    q, z, s = minmax(weight, code="u2", zero="u2", scale="f16", rows=1, columns=group, axes=2, **options)
    return {"q": q, "z": z, "s": s}


# -- kernels ---------------------------------------------------------------------------------------------------------


@triton.jit
def _dequantize_gptq_v2(qweight, qzeros, scales, g_idx, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[None, :], (BK, BN))
    t = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[:, None], (BK, BN))
    qweight += n
    qzeros += n // 16
    scales += n
    out += n.to(tl.int64) * K
    live = (n < N) & (t < K // 16)
    q_word = tl.load(qweight + t.to(tl.int64) * N, live, 0)
    if g_idx is None:
        g = t // (group // 16)
        z = (tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
        s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
    for h in tl.static_range(16):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 16 * t + h, live, 0)
            z = (tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
        w = (q - z) * s
        tl.store(out + 16 * t + h, w, live)


@triton.jit
def _linear_gptq_v2(qweight, qzeros, scales, g_idx, x, bias, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[None, :], (BK, BN))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    qweight += n
    qzeros += n // 16
    scales += n
    acc = tl.zeros((BK, BN), tl.float32)
    for start in range(0, K // 16, BK):
        t = tl.broadcast_to(start + tl.arange(0, BK)[:, None], (BK, BN))
        live = (n < N) & (t < K // 16)
        q_word = tl.load(qweight + t.to(tl.int64) * N, live, 0)
        if g_idx is None:
            g = t // (group // 16)
            z = (tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
        for h in tl.static_range(16):
            q = (q_word >> 2 * h & 3).to(tl.int32)
            if g_idx is not None:
                g = tl.load(g_idx + 16 * t + h, live, 0)
                z = (tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) >> 2 * (n % 16) & 3).to(tl.int32)
                s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
            x_k = tl.load(x + 16 * t + h, live, 0).to(tl.float32)
            acc += (q - z) * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 0))


@triton.jit
def _dequantize_gptq_v1(qweight, qzeros, scales, g_idx, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out.

    A program makes BN rows by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[None, :], (BK, BN))
    t = tl.broadcast_to(tl.program_id(1) * BK + tl.arange(0, BK)[:, None], (BK, BN))
    qweight += n
    qzeros += n // 16
    scales += n
    out += n.to(tl.int64) * K
    live = (n < N) & (t < K // 16)
    q_word = tl.load(qweight + t.to(tl.int64) * N, live, 0)
    if g_idx is None:
        g = t // (group // 16)
        z_word = tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) + 0x55555555
        z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
        s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
    for h in tl.static_range(16):
        q = (q_word >> 2 * h & 3).to(tl.int32)
        if g_idx is not None:
            g = tl.load(g_idx + 16 * t + h, live, 0)
            z_word = tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) + 0x55555555
            z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
        w = (q - z) * s
        tl.store(out + 16 * t + h, w, live)


@triton.jit
def _linear_gptq_v1(qweight, qzeros, scales, g_idx, x, bias, out, N, K, group, BN: tl.constexpr, BK: tl.constexpr):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    A program takes one row of x and BN rows of w, and steps along K by BK units of 16 weights.
    """
    n = tl.broadcast_to(tl.program_id(0) * BN + tl.arange(0, BN)[None, :], (BK, BN))
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    qweight += n
    qzeros += n // 16
    scales += n
    acc = tl.zeros((BK, BN), tl.float32)
    for start in range(0, K // 16, BK):
        t = tl.broadcast_to(start + tl.arange(0, BK)[:, None], (BK, BN))
        live = (n < N) & (t < K // 16)
        q_word = tl.load(qweight + t.to(tl.int64) * N, live, 0)
        if g_idx is None:
            g = t // (group // 16)
            z_word = tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) + 0x55555555
            z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
            s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
        for h in tl.static_range(16):
            q = (q_word >> 2 * h & 3).to(tl.int32)
            if g_idx is not None:
                g = tl.load(g_idx + 16 * t + h, live, 0)
                z_word = tl.load(qzeros + g.to(tl.int64) * (N // 16), live, 0) + 0x55555555
                z = (z_word >> 2 * (n % 16) & 3).to(tl.int32)
                s = tl.load(scales + g.to(tl.int64) * N, live, 0).to(tl.float32)
            x_k = tl.load(x + 16 * t + h, live, 0).to(tl.float32)
            acc += (q - z) * s * x_k
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    device.store_sums(out, bias, n, N, tl.sum(acc, 0))


# -- format ----------------------------------------------------------------------------------------------------------

VARIANT = Variant(
    fields={
        "g": Field("index", "K", groups="ceil(K/group)"),
        "q": Field("u2", "N", "K"),
        "z": Field("u2", "N", "ceil(K/group)"),
        "s": Field("f16", "N", "ceil(K/group)"),
    },
    storages={
        "gptq_v2": Storage(
            tensors={
                "qweight": Stored("i32", "K/16", "N"),
                "qzeros": Stored("i32", "ceil(K/group)", "N/16"),
                "scales": Stored("f16", "ceil(K/group)", "N"),
                "g_idx": Stored("index", "K", optional=True),
            },
            unpack=unpack_gptq_v2, pack=pack_gptq_v2,
            kernels=Kernels(_dequantize_gptq_v2, _linear_gptq_v2, rows="N", units="K/16", last="n"),
        ),
        "gptq_v1": Storage(
            tensors={
                "qweight": Stored("i32", "K/16", "N"),
                "qzeros": Stored("i32", "ceil(K/group)", "N/16"),
                "scales": Stored("f16", "ceil(K/group)", "N"),
                "g_idx": Stored("index", "K", optional=True),
            },
            unpack=unpack_gptq_v1, pack=pack_gptq_v1,
            kernels=Kernels(_dequantize_gptq_v1, _linear_gptq_v1, rows="N", units="K/16", last="n"),
        ),
    },
    decode=decode, encode=encode, options={"by": ("stored", "exact"), "symmetric": (True, False)}, defaults={"g": None},
    cuts=("N", "ceil(K/group)"),
)
