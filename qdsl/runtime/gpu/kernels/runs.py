"""One row of x as operands of MMAs whose eight columns are runs of 16, 32 or 64 columns of w.

Lane 4 * g + c loads run g of x.  With runs of 32 columns (`product`) a word belongs to one run r.  The MMA multiplies it by all
eight runs, and only column r of the result is wanted.  Lane 4 * g + c has columns 2 * c and 2 * c + 1 of it, so a selection by
lane keeps the column: 8 selections for eight runs, and x is used as loaded.  Otherwise x is a diagonal (`diagonals`): a lane has
its run in the column of the run and zeros elsewhere, by a mask per pair of columns.
"""

from qdsl.runtime.gpu.kernels import lanes
from qdsl.runtime.gpu.triton import tl, triton


@triton.jit
def operand(x, chunk, K, g, c, unit: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operand of x for runs of 32 columns in two chunks, and the sums of runs."""
    p = x + (lanes.within(chunk, K // 128) * 64 + g * 16 + c)
    live = chunk * 128 + g * 32 < K
    columns = lanes.columns_of_word(lanes.pairs(p, live, even), lanes.pairs(p + 8, live, even),
                                    lanes.pairs(p + 4, live, even), lanes.pairs(p + 12, live, even), F)
    return columns, lanes.sums(columns, unit, F)


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
def diagonals(x, chunk, K, g, c, size: tl.constexpr, unit: tl.constexpr, even: tl.constexpr, F: tl.constexpr):
    """The operands of x for 8 * size columns, half a chunk each, with a run of 16, 32 or 64 per column; and their sums."""
    at = lanes.within(chunk, K // 128) * 64 + g * (size // 2) + c
    live = chunk * 128 + g * size < K
    x00, x10 = lanes.pairs(x + at, live, even), lanes.pairs(x + (at + 4), live, even)
    if size == 16:
        zero = tl.zeros_like(x00)
        return ((diagonal(x00, x00, x00, x00, g, 0, 16, F), diagonal(x10, x10, x10, x10, g, 0, 16, F)),
                lanes.sums(lanes.columns_of_word(x00, zero, x10, zero, F), unit, F))
    x01, x11 = lanes.pairs(x + (at + 8), live, even), lanes.pairs(x + (at + 12), live, even)
    ones = lanes.sums(lanes.columns_of_word(x00, x01, x10, x11, F), unit, F)
    y00, y10, y01, y11 = x00, x10, x01, x11
    if size == 64:
        y00, y10 = lanes.pairs(x + (at + 16), live, even), lanes.pairs(x + (at + 20), live, even)
        y01, y11 = lanes.pairs(x + (at + 24), live, even), lanes.pairs(x + (at + 28), live, even)
        ones += lanes.sums(lanes.columns_of_word(y00, y01, y10, y11, F), unit, F)
    operands = ()
    for t in tl.static_range(size // 16):
        operands = operands + (diagonal(x00, x01, y00, y01, g, t * 128 // size, size, F),
                               diagonal(x10, x11, y10, y11, g, t * 128 // size, size, F))
    return operands, ones


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
