"""Small kernels whose instructions per weight are plain to see, compiled for GPUs that need not be there."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sums(w, out, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n] = the sum of row n of w."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BK), tl.float32)
    for start in range(0, K, BK):
        acc += tl.load(w + n[:, None] * K + start + tl.arange(0, BK)[None, :]).to(tl.float32)
    tl.store(out + n, tl.sum(acc, 1))


@triton.jit
def copy(w, out, BK: tl.constexpr):
    """out[k] = w[k]; a program takes BK of them."""
    k = tl.program_id(0) * BK + tl.arange(0, BK)
    tl.store(out + k, tl.load(w + k))


@triton.jit
def product(w, x, out, K, BN: tl.constexpr, BK: tl.constexpr):
    """out[n, m] = w[n] times x[m], 16 rows of x."""
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.arange(0, 16)
    acc = tl.zeros((BN, 16), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        acc = tl.dot(tl.load(w + n[:, None] * K + k[None, :]), tl.load(x + m[None, :] * K + k[:, None]), acc)
    tl.store(out + n[:, None] * 16 + m[None, :], acc)


@triton.jit
def refused(w, out, BK: tl.constexpr):
    tl.static_assert(BK == 0, "this kernel never compiles")
