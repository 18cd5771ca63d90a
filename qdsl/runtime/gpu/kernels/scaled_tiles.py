"""The loop of tile_gemm that multiplies scaled weights: one chain of products along K, whatever the groups are.

    words of w, registers         factor, summand of their groups         operand, rounded        sums, float32

      c = 0      1 ...              row g, word u                           columns in order        BM columns
    +-------+-------+- -          +-------+-------+- -                    +---------- - -         +--------------+
    | codes as      |      *      |  s    |  s    |      + summand   =    |  w as F        x  x = |  16 rows     |
    | numbers       |             |       |       |                       |                       |  for all of K|
    +-------+-------+- -          +-------+-------+- -                    +---------- - -         +--------------+

- A format's scale and finish are affine in `sum`.  So a group's factor is what they make of a sum of one and no sums of x, its
  summand what they make of no sum and sums of x of one.  A weight is one multiply-add, as `dequantize` computes it, rounded to F.
- The exact loop keeps a sum per group, waits for each product and scales every sum: for 64 rows and groups of 32 columns that is
  two multiply-adds for a weight, and four waits per chunk.
- Words and group numbers of the next chunk are loaded before this one is multiplied, so that no load is waited for.
"""

from qdsl.runtime.gpu.kernels import group_numbers, tile
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field_of_words(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A field's values for pairs i = 0 of a chunk's words, [8 * W, 16, 2, 1], or one number; at: (two rows, chunk, K stored)."""
    if rows == 0 and columns == 0:
        return group_numbers.loaded(plane, 0, kind)
    else:
        return tile.block_values_at_pairs(plane, group_numbers.blocks(at[0], rows), at[1], at[2], 0, columns, kind)


@triton.jit
def field_of_later_pairs(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """The same for the pairs i = 1, which have other values where 16 columns share one."""
    if columns == 16:
        return tile.block_values_at_pairs(plane, group_numbers.blocks(at[0], rows), at[1], at[2], 1, columns, kind)
    else:
        return field_of_words(plane, at, rows, columns, kind)


@triton.jit
def affine(tensors, at, scale: tl.constexpr, finish: tl.constexpr, fields: tl.constexpr, row_fields: tl.constexpr,
           base: tl.constexpr, adds: tl.constexpr, unit: tl.constexpr, field: tl.constexpr):
    """Factor and summand that make a weight of a number; without a summand unless `adds`."""
    numbers = group_numbers.values(tensors, fields, at, field)
    shared = scale(numbers, unit, 0.0, base),
    if adds:
        shared = shared + (scale(numbers, 0.0, 1.0, base),)
    if finish is None:
        return shared
    else:
        of_rows, scaled = group_numbers.values(tensors, row_fields, at, field), ()
        for i in tl.static_range(len(shared)):
            scaled = scaled + (finish(of_rows, shared[i], 0.0, base),)
        return scaled


@triton.jit
def operand(words, groups, numbers: tl.constexpr, flip, width: tl.constexpr, bits: tl.constexpr, F: tl.constexpr):
    """The rows of w in a chunk, [16 * W, 128], in type F.  groups: results of affine() for the pairs i = 0 and 1."""
    weights = ()
    for place in tl.static_range(4):
        value = tile.numbers(numbers, words, place // 2, place % 2, flip, 0, None, width, bits, F)
        value = tile.as_float32(value, F) * groups[place % 2][0]
        if len(groups[0]) == 2:
            value += groups[place % 2][1]
        weights = weights + (value.to(F),)
    return tile.chunk_operand(weights[0], weights[1], weights[2], weights[3])


@triton.jit
def loaded(tensors, row, chunk, stored, words: tl.constexpr, scale: tl.constexpr, finish: tl.constexpr, fields: tl.constexpr,
           row_fields: tl.constexpr, spans: tl.constexpr, base: tl.constexpr, adds: tl.constexpr, unit: tl.constexpr):
    """The words of rows in a chunk, and affine() of their groups for the pairs i = 0 and 1."""
    at = (row, chunk, stored)
    return tile.first_span(words(tensors, row, stored, chunk), chunk, spans), (
        affine(tensors, at, scale, finish, fields, row_fields, base, adds, unit, field_of_words),
        affine(tensors, at, scale, finish, fields, row_fields, base, adds, unit, field_of_later_pairs))


@triton.jit
def sums(tensors, x, at, acc, first, begin, end, N, stored, flips, words: tl.constexpr, numbers: tl.constexpr,
         scale: tl.constexpr, finish: tl.constexpr, fields: tl.constexpr, row_fields: tl.constexpr, width: tl.constexpr,
         bits: tl.constexpr, spans: tl.constexpr, unit: tl.constexpr, base: tl.constexpr, adds: tl.constexpr, R: tl.constexpr,
         W: tl.constexpr, STAGES: tl.constexpr, F: tl.constexpr):
    """acc plus the products of chunks begin to end of x with R tiles of rows from `first` on.  adds: numbers have a summand."""
    ready = ()
    for r in tl.static_range(R):
        row = tile.rows_of_tile(first + 16 * W * r, W, N, 0)
        ready = ready + (loaded(tensors, row, begin, stored, words, scale, finish, fields, row_fields, spans, base, adds, unit),)
    for chunk in tl.range(begin, end, num_stages=STAGES):
        columns = tl.load(x + chunk * 128 + at)
        later, following = tl.minimum(chunk + 1, end - 1), ()
        for r in tl.static_range(R):
            row = tile.rows_of_tile(first + 16 * W * r, W, N, 0)
            following = following + (loaded(tensors, row, later, stored, words, scale, finish, fields, row_fields, spans, base,
                                            adds, unit),)
        new = ()
        for r in tl.static_range(R):
            w = operand(ready[r][0], ready[r][1], numbers, flips[r], width, bits, F)
            new = new + (tl.dot(w, columns, acc[r]),)
        acc, ready = new, following
    return acc
