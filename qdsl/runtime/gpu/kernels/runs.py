"""One row of x as operands of MMAs whose eight columns are runs of 16, 32 or 64 columns of w.

Lane 4 * g + c loads run g of x.  With runs of 32 columns (`product`) a word belongs to one run r.  The MMA multiplies it by all
eight runs, and only column r of the result is wanted.  Lane 4 * g + c has columns 2 * c and 2 * c + 1 of it, so a selection by
lane keeps the column: 8 selections for eight runs, and x is used as loaded.  Otherwise x is a diagonal (`diagonals`): a lane has
its run in the column of the run and zeros elsewhere, by a mask per pair of columns.
"""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def operand(x, chunk, K, g, c, unit: tl.constexpr, lift: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operand of x for runs of 32 columns in two chunks, the sums of runs, and the factors of scaled()."""
    p = x + (lanes.within(chunk, K // 128) * 64 + g * 16 + c)
    live = chunk * 128 + g * 32 < K
    pairs = (lanes.pairs(p, live, even), lanes.pairs(p + 8, live, even),
             lanes.pairs(p + 4, live, even), lanes.pairs(p + 12, live, even))
    sums = lanes.sums(lanes.columns_of_word(pairs[0], pairs[1], pairs[2], pairs[3], F), unit, F)
    pairs, factors = scaled(pairs, lift, F)
    return lanes.columns_of_word(pairs[0], pairs[1], pairs[2], pairs[3], F), sums, factors


@triton.jit
def scaled(pairs, lift: tl.constexpr, F: tl.constexpr):
    """Pairs of bfloat16 of runs, multiplied by 2^(lift - e), e of their run; and 2^e of every run, [W, 16, 8].

    Operands of w are 2^lift times too small, so that sums times 2^e are right.  e is the exponent of the run's largest magnitude,
    but at least 0: then x does not overflow, and products do not underflow.  lift: 0 for unchanged pairs and 1.
    """
    if lift == 0:
        return pairs, 1.0
    else:
        most = largest(pairs[0])
        for i in tl.static_range(1, len(pairs)):
            most = tl.maximum(most, largest(pairs[i]))
        most = tl.maximum(tl.max(most, axis=1, keep_dims=True), 1.0)
        exponent = most.to(tl.int32, bitcast=True) & 0x7F800000
        factor = in_both(((254 + lift) << 23) - (1 << 32) - exponent) + tl.zeros_like(pairs[0])
        power = in_both(exponent) + tl.zeros_like(pairs[0])
        products = ()
        for i in tl.static_range(len(pairs)):
            products = products + (lanes.scaled(pairs[i], factor),)
        return products, lanes.sums(lanes.columns_of_word(power, power, power, power, F), 32.0, F)


@triton.jit
def largest(pair):
    """The larger magnitude of pairs of bfloat16, as float32; bits below bfloat16's may be set."""
    return tl.maximum(tl.abs(pair.to(tl.float32, bitcast=True)), tl.abs((pair << 16).to(tl.float32, bitcast=True)))


@triton.jit
def in_both(power):
    """The bits of a positive float32 power of two as a pair of bfloat16."""
    return power | (power >> 16)


@triton.jit
def product(codes: tl.constexpr, words, columns, flip, bits: tl.constexpr, F: tl.constexpr):
    """The sums of eight runs of 32 columns, [W, 16, 8], from words of two chunks and operand()."""
    column = tl.arange(0, 8)[None, None, :]
    total = run_product(codes, words, columns, flip, 0, bits, F)
    for r in tl.static_range(1, 8):
        sum = run_product(codes, words, columns, flip, r, bits, F)
        total = tl.where(column % 2 == 0 if r == 1 else column != r, total, sum)
    return total


@triton.jit
def run_product(codes: tl.constexpr, words, columns, flip, r: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """The product of word r, of four in each chunk, with all eight runs of x, [W, 16, 8]; only column r is wanted."""
    return lanes.word_product(codes, lanes.by_word(words[r // 4])[r % 4], columns, flip, r // 4 * 2, bits, F)


@triton.jit
def diagonals(x, chunk, K, g, c, size: tl.constexpr, unit: tl.constexpr, lift: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operands of x for 8 * size columns, half a chunk each, with a run of 16, 32 or 64 per column.

    And the sums of runs, and the factors of scaled().
    """
    at = lanes.within(chunk, K // 128) * 64 + g * (size // 2) + c
    live = chunk * 128 + g * size < K
    x00, x10 = lanes.pairs(x + at, live, even), lanes.pairs(x + (at + 4), live, even)
    if size == 16:
        zero = tl.zeros_like(x00)
        pairs, factors = scaled((x00, x10), lift, F)
        return ((diagonal(pairs[0], pairs[0], pairs[0], pairs[0], g, 0, 16, F),
                 diagonal(pairs[1], pairs[1], pairs[1], pairs[1], g, 0, 16, F)),
                lanes.sums(lanes.columns_of_word(x00, zero, x10, zero, F), unit, F), factors)
    x01, x11 = lanes.pairs(x + (at + 8), live, even), lanes.pairs(x + (at + 12), live, even)
    ones = lanes.sums(lanes.columns_of_word(x00, x01, x10, x11, F), unit, F)
    pairs = (x00, x10, x01, x11)
    if size == 64:
        y00, y10 = lanes.pairs(x + (at + 16), live, even), lanes.pairs(x + (at + 20), live, even)
        y01, y11 = lanes.pairs(x + (at + 24), live, even), lanes.pairs(x + (at + 28), live, even)
        ones += lanes.sums(lanes.columns_of_word(y00, y01, y10, y11, F), unit, F)
        pairs = pairs + (y00, y10, y01, y11)
    pairs, factors = scaled(pairs, lift, F)
    y: tl.constexpr = len(pairs) - 4
    operands = ()
    for t in tl.static_range(size // 16):
        operands = operands + (diagonal(pairs[0], pairs[2], pairs[y], pairs[y + 2], g, t * 128 // size, size, F),
                               diagonal(pairs[1], pairs[3], pairs[y + 1], pairs[y + 3], g, t * 128 // size, size, F))
    return operands, ones, factors


@triton.jit
def diagonal(x0, x1, x2, x3, g, first: tl.constexpr, step: tl.constexpr, F: tl.constexpr):
    """The operand [W, 64, 8] of x with each group of `step` columns in its own column, and zeros elsewhere.

    x0 (i = 0) and x1 (i = 1) are the pairs of u = 0 and 2, x2 and x3 those of u = 1 and 3; first: the first group's column.
    """
    r: tl.constexpr = 1 if step == 16 else 0
    return lanes.columns(only(x0, g, first), only(x1, g, first + r),
                   only(x2, g, first + 32 // step), only(x3, g, first + 32 // step + r),
                   only(x0, g, first + 64 // step), only(x1, g, first + 64 // step + r),
                   only(x2, g, first + 96 // step), only(x3, g, first + 96 // step + r), F)


@triton.jit
def only(pair, g, column: tl.constexpr):
    """The pair in the lanes of a column, elsewhere 0.  Masks are numbers, because there are fewer predicates than columns."""
    return pair & (((g ^ column) - 1) >> 31)
