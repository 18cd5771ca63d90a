"""The lines that many formats share: what a group, or a row, adds up to of the sum of its codes times x.

sum: of codes times x.  ones: of x.  BASE: what numbers have more than their codes.  fields: the numbers of a group, or a row.
A format whose line is another prints a function of its own (compiler/emit/triton/matrix_unit.py chooses by the text).
"""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.gpu.triton import tl, triton


@triton.jit
def scaled(fields, sum, ones, BASE: tl.constexpr):
    """w = s * q, of codes that numbers are equal to."""
    s, = fields
    sum *= s
    return sum


@triton.jit
def scaled_codes(fields, sum, ones, BASE: tl.constexpr):
    """w = s * q."""
    s, = fields
    if BASE != 0:
        sum -= BASE * ones
    sum *= s
    return sum


@triton.jit
def with_zero(fields, sum, ones, BASE: tl.constexpr):
    """w = s * (q - z)."""
    s, z = fields
    sum += lanes.shifted(-z, BASE) * ones
    sum *= s
    return sum


@triton.jit
def with_offset(fields, sum, ones, BASE: tl.constexpr):
    """w = s * q + b."""
    s, b = fields
    if BASE != 0:
        sum -= BASE * ones
    sum *= s
    sum += ones * b
    return sum


@triton.jit
def nested_with_minimum(fields, sum, ones, BASE: tl.constexpr):
    """w = d * sc * q - dmin * mn."""
    d, sc, dmin, mn = fields
    if BASE != 0:
        sum -= BASE * ones
    sum *= d * sc
    sum += ones * (-dmin * mn)
    return sum
