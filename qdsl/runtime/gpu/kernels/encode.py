"""Encode schemes on a GPU: codes and numbers of a tile of rows, bit-exact with the functions of the same names in qdsl/encode.

A scheme takes x, float32 [rows, groups, units, E]; the E codes of a unit share a byte.  With ACROSS the rows of the tile share
numbers, column by column; else the units and codes of a group do.  k: the column of every element.  A scheme returns codes in
int32 and the numbers of its roles in the order of core/schemes.py, as stored, with extent 1 on their shared axes.  static: a
scale that the caller fixes, else None.

FLOAT: codes are E4M3; else integers from LOW to HIGH.  DIVISOR, OFFSET, BY, TIES, FACTOR, LEAST: settings of the spec.  LEVELS:
the rising borders between adjacent levels of a table, (border, whether it belongs to the lower level, code above), and the first
code.  TYPE: of the numbers, 'f32', 'f16', 'bf16' or 'ue4m3'.
"""

from qdsl.runtime.gpu.kernels import device
from qdsl.runtime.gpu.kernels.eight_bit import e4m3_code
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def most(x, ACROSS: tl.constexpr):
    """The largest value in each set of elements that share numbers."""
    if ACROSS:
        return tl.max(x, 0, keep_dims=True)
    else:
        return tl.max(tl.max(x, 3, keep_dims=True), 2, keep_dims=True)


@triton.jit
def stored(value, TYPE: tl.constexpr):
    """float32 numbers in their stored type, and the stored values as float32."""
    if TYPE == "f16":
        return value.to(tl.float16), value.to(tl.float16).to(tl.float32)
    elif TYPE == "bf16":
        rounded = device.rounded(value, tl.bfloat16)
        return rounded.to(tl.bfloat16), rounded
    elif TYPE == "ue4m3":
        bits = value.to(tl.int32, bitcast=True)
        small = tl.minimum((value * 512 + 0.5).to(tl.int32), 7)
        normal = ((bits + (1 << 19)) >> 20) - (120 << 3)         # the exponent, biased by 7, and three mantissa bits
        code = tl.where((bits >> 23) <= 120, small, tl.where(normal >= 15 << 3, 126, normal)).to(tl.uint8)
        return code, device.ue4m3(code)
    else:
        return value, value


@triton.jit
def nearest(value, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, TIES: tl.constexpr):
    """Codes nearest to value + OFFSET, clamped to the legal ones.  TIES: 'even', 'away' from zero or 'up'."""
    if FLOAT:
        return e4m3_code(value)
    else:
        value = tl.minimum(tl.maximum(value, LOW - OFFSET + 0.0), HIGH - OFFSET + 0.0)
        if TIES == "even":
            return (value + 12582912.0).to(tl.int32, bitcast=True) - 0x4B400000 + OFFSET           # 1.5 * 2^23
        elif TIES == "away":
            below: tl.constexpr = 0.5 - 2.0 ** -25
            return (value + tl.minimum(tl.maximum(value, -below), below)).to(tl.int32) + OFFSET
        else:
            return tl.floor(value + (OFFSET + 0.5)).to(tl.int32)


@triton.jit
def inverse(exact):
    """1 / exact, 0 for 0."""
    return tl.where(exact == 0, 0.0, tl.math.div_rn(1.0, tl.where(exact == 0, 1.0, exact)))


@triton.jit
def absmax(
    x, k, static, ACROSS: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """w = scale * (code - OFFSET), scale = largest magnitude / DIVISOR, at least LEAST; BY 'stored' or 'exact'."""
    if static is not None:
        return nearest(tl.math.div_rn(x, static), FLOAT, LOW, HIGH, OFFSET, TIES), ()
    else:
        exact = tl.maximum(tl.math.div_rn(most(tl.abs(x), ACROSS), DIVISOR), LEAST)
        return by_scale(x, exact, FLOAT, LOW, HIGH, OFFSET, BY, TIES, TYPE)


@triton.jit
def by_scale(
    x, exact, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, OFFSET: tl.constexpr, BY: tl.constexpr,
    TIES: tl.constexpr, TYPE: tl.constexpr,
):
    """Codes by an exact scale, and the scale in its stored type."""
    if BY == "exact":                                            # if its reciprocal overflows, codes are the least
        number, used = stored(exact, TYPE)
        factor = inverse(exact)
        value = tl.where(tl.abs(factor) == float("inf"), -OFFSET + 0.0, x * factor)
    else:
        number, used = stored(tl.where(exact == 0, 1.1920928955078125e-07, exact), TYPE)
        value = tl.where(used == 0, 0.0, tl.math.div_rn(x, tl.where(used == 0, 1.0, used)))
    return nearest(value, FLOAT, LOW, HIGH, OFFSET, TIES), (number,)


@triton.jit
def signmax(
    x, k, static, ACROSS: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """As absmax, with the signed value of largest magnitude; the first one among equals."""
    largest = most(tl.abs(x), ACROSS)
    first = -most(tl.where(tl.abs(x) == largest, -k, -(1 << 30)), ACROSS)
    value = most(tl.where((tl.abs(x) == largest) & (k == first), x, float("-inf")), ACROSS) + 0.0
    return by_scale(x, tl.math.div_rn(value, DIVISOR), FLOAT, LOW, HIGH, OFFSET, BY, TIES, TYPE)


@triton.jit
def absmax_level(
    x, k, static, ACROSS: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """w = scale * FACTOR * level[code], with the nearest level for each code; DIVISOR: the largest level times FACTOR."""
    number, used = stored(tl.math.div_rn(most(tl.abs(x), ACROSS), DIVISOR), TYPE)
    unit = used * FACTOR
    code = tl.full(x.shape, LEVELS[0], tl.int32)
    for i in tl.static_range(1, len(LEVELS)):
        border = unit * LEVELS[i][0]
        if LEVELS[i][1]:
            code = tl.where(x > border, LEVELS[i][2], code)
        else:
            code = tl.where(x >= border, LEVELS[i][2], code)
    return code, (number,)


@triton.jit
def edge_affine(
    x, k, static, ACROSS: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """w = scale * code + min: the end of larger magnitude is exact, and a code stands for 0."""
    low, high = -most(-x, ACROSS), most(x, ACROSS)
    is_low = tl.abs(low) > tl.abs(high)
    step = tl.maximum(tl.math.div_rn(high - low, HIGH), 1e-7)
    step = tl.where(is_low, step, -step)
    edge = tl.where(is_low, low, high)
    quotient = tl.math.div_rn(-edge, step)                       # at least 0; millions in a block of one number
    steps = tl.where(quotient < 8388608.0, (quotient + 8388608.0) - 8388608.0, quotient)             # 2^23: rounds
    exact = tl.where(steps != 0, tl.math.div_rn(-edge, tl.where(steps != 0, steps, 1.0)), step)
    least = tl.where(steps != 0, edge, 0.0)
    scale, _ = stored(exact, TYPE)
    number, _ = stored(least, TYPE)
    return nearest(tl.math.div_rn(x - least, exact), FLOAT, LOW, HIGH, 0, "even"), (scale, number)


@triton.jit
def float_middle(
    x, k, static, ACROSS: tl.constexpr, FLOAT: tl.constexpr, LOW: tl.constexpr, HIGH: tl.constexpr, DIVISOR: tl.constexpr,
    OFFSET: tl.constexpr, BY: tl.constexpr, TIES: tl.constexpr, FACTOR: tl.constexpr, LEAST: tl.constexpr, LEVELS: tl.constexpr,
    TYPE: tl.constexpr,
):
    """w = (code - OFFSET) * scale + zero: the least weight has code 0; codes are chosen by both numbers as stored."""
    least: tl.constexpr = 6.103515625e-05 if TYPE == "f16" else 1.1754943508222875e-38           # the smallest normal number
    low, high = -most(-x, ACROSS), most(x, ACROSS)
    scale, used = stored(tl.maximum(tl.math.div_rn(high - low, HIGH), least), TYPE)
    exact = tl.maximum(tl.math.div_rn(high - low, HIGH), least)
    zero, begin = stored(low + exact * OFFSET, TYPE)
    return nearest(tl.math.div_rn(x - (begin - used * OFFSET), used), FLOAT, LOW, HIGH, 0, "even"), (zero, scale)
