"""The lines that many formats share: what a group, or a row, adds up to of the sum of its codes times x.

sum: of codes times x.  ones: of x.  BASE: what numbers have more than their codes.  fields: the numbers of a group, or a row.
total: what is added; None for nothing.  What groups have on top of codes, minimums say, enters it by a multiply-add of its own.
A format whose line is another prints a function of its own (compiler/emit/triton/matrix_unit.py chooses by the text).
"""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.gpu.triton import tl, triton


@triton.jit
def scaled(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = s * q, of codes that numbers are equal to."""
    s, = fields
    return lanes.plus(total, sum * s)


@triton.jit
def scaled_codes(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = s * q."""
    s, = fields
    if BASE != 0:
        sum -= BASE * ones
    return lanes.plus(total, sum * s)


@triton.jit
def with_zero(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = s * (q - z)."""
    s, z = fields
    sum += (-z - BASE) * ones
    return lanes.plus(total, sum * s)


@triton.jit
def with_offset(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = s * q + b."""
    s, b = fields
    total = lanes.plus(total, sum * s)
    return total + ones * lanes.offset(b, s, BASE)


@triton.jit
def nested_with_minimum(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = d * sc * q - dmin * mn."""
    d, sc, dmin, mn = fields
    factor = d * sc
    total = lanes.plus(total, sum * factor)
    return total + ones * lanes.offset(-dmin * mn, factor, BASE)
