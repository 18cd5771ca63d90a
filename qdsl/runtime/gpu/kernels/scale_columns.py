"""scale_columns: x times, or divided by, a factor per column, rounded to x's dtype, before kernels for matrix units.

A program takes BK columns of a row.  It loads x and the factor once and stores the products.  All formats share it.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def scale_columns(x, factor, out, K, DIVIDES: tl.constexpr, BK: tl.constexpr):
    """out [M, K] = x [M, K] * factor [K] or x / factor, in float32 and rounded once."""
    k = tl.program_id(1) * BK + tl.arange(0, BK)
    at = tl.program_id(0).to(tl.int64) * K + k
    value = tl.load(x + at, k < K, 0).to(tl.float32)
    by = tl.load(factor + k, k < K, 1).to(tl.float32)
    value = tl.math.div_rn(value, by) if DIVIDES else value * by
    tl.store(out + at, value.to(out.dtype.element_ty), k < K)
