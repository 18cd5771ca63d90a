"""A group's or row's share of the result, for decode formulas that many formats share.

sum: of codes times x.  ones: of x.  BASE: the difference of numbers and codes.  fields: the numbers of a group or row.  total: is
added by the last multiply-add; None for nothing.  Terms besides scale * code, such as a minimum, take another multiply-add.  A
format with another formula prints its own function (compiler/emit/triton/matrix_unit.py compares the texts).
"""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def scaled(fields, sum, ones, BASE: tl.constexpr, total=None):
    """w = s * q, if numbers are equal to codes."""
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
