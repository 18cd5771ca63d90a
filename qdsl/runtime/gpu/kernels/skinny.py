"""skinny: up to 8 rows of x, in all or per expert; more rows in blocks of 8 or 16.

A program multiplies 16 * R * WN rows of w with BM rows of x.  WK warps share K: a warp takes spans of 256 columns in turn.

             a chunk of w: 128 columns, 16 words a row (4 bits)               x, transposed            sums, float32

    lane     c = 0        c = 1        c = 2        c = 3                    8 rows of x               8 rows of x
            +------------+------------+------------+------------+          +------------+            +------------+
    row g   | words 0-3  | 4-7        | 8-11       | 12-15      |    128   |            |     row g  |  2c, 2c + 1|
    (0..7)  +------------+------------+------------+------------+  columns | lane 4g + c|  =  (0..7) +------------+
    row g+8 | words 0-3  | 4-7        | 8-11       | 12-15      |          | has row g  |    row g+8 |  2c, 2c + 1|
            +------------+------------+------------+------------+          +------------+            +------------+
              lane 4g + c: two loads of 16 bytes                         pairs of its columns         lane 4g + c

A lane loads exactly its part of the MMA's operands, of w and of x, because the planar storage orders columns so (lanes.py).  In
the loop nothing passes through shared memory or between lanes; at the end warps add up their sums.

- mma.sync m16n8k16 rather than wgmma: its 8 columns are the 8 rows of x; wgmma needs 64 rows of w, and x in shared memory.
- A mask and a shift turn two codes of a word into two numbers: subnormal float16, or bfloat16 from 128 on (BASE).  A conversion
  would run at a quarter of the rate.  Codes are exact, and so are products with them.
- Scales multiply float32 sums, one per SIZE columns, so that no weight is rounded.  Zero points need the sums of x: one more MMA
  with a constant for w, which is cheaper than additions and moves between lanes.
- With BM = 16 a chunk of w is multiplied by two blocks of 8 rows of x.  Words, codes and scales are loaded and converted once
  for both.  Only the MMAs and the scaling of sums are done twice.
- num_stages = 1: weights are loaded to registers, and other warps hide the latency.  Copies through shared memory would cost a
  quarter more instructions.
- An iteration loads its words and scales before its x, and a fence keeps that order.  ptxas would move loads down to their use:
  Q4_K with R = 2 then waits for memory 7 times per iteration, with the fence once.
- With `early` a program may begin before the previous launch ends (programmatic dependent launch, Hopper and later).  It
  prefetches its first words into the L2 cache, and waits before it reads or writes anything else.

Cost for 4 bits and groups of 32, counted on sm_90: 2.2 instructions of a thread per weight in float16, 2.0 in bfloat16.
With 16 rows of x and R = 2 it is 2.7 in bfloat16, where two blocks of 8 would be 3.9.
"""

from qdsl.runtime.gpu.kernels import codebook, group_numbers, lanes
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A field's values in group u of a chunk, [W, 16, 8], or one number.

    at: (two rows, chunk, stored columns, u, columns of a group).
    """
    if columns == 0:
        return group_numbers.of_rows(plane, at[0], rows, kind)
    else:
        row = group_numbers.blocks(at[0], rows)
        return group_numbers.by_group(plane, row, group_numbers.count(at[2], columns), at[1], at[4], columns, kind)[at[3]]


@triton.jit(do_not_specialize=["M"])
def skinny(
    tensors, x, bias, out, M, N, K, pitch, tiles, gather, early,
    words: tl.constexpr, numbers: tl.constexpr, table: tl.constexpr, LEVELS: tl.constexpr, scale: tl.constexpr,
    finish: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr, SIZE: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, SIGNED: tl.constexpr, UNIT: tl.constexpr, BASE: tl.constexpr, ONES: tl.constexpr, IN_ORDER: tl.constexpr,
    R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, BM: tl.constexpr, EVEN: tl.constexpr, FENCE: tl.constexpr,
    F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    x: [M, K] of type F, pairs of columns as int32.  tiles: int32 [T, 3] of (expert, first row of x, end), or None.  With tiles, w
    and bias have N rows per expert, and a row of x meets those of its expert.  gather: int [M], the row of x for each row of out;
    None if they are the same.  pitch: columns from a row of w to the next, if w
    is a slice along K of a longer weight; else None.  early: words per row of the first tensor, if the launch may begin before
    the previous one ends; else None, as with tiles.

    LEVELS: as in codebook.constants.  SIZE: columns that share a sum.  IN_ORDER: codes are bytes in row order.  ONES: `finish`
    takes the sums of x.  BM: rows of x per program, 8 or, without tiles, 16.  EVEN: all WK warps have equally many spans of
    columns.  FENCE: keep loads in order; only on NVIDIA GPUs, and not with IN_ORDER, which would spill.
    """
    BLOCKS: tl.constexpr = BM // 8
    w, g, c = lanes.warps(WN * WK)
    m, M, start = lanes.tile(tiles, M, N, BM)
    if tiles is not None:
        if m >= M:
            return
    tokens, acc, ones = (), (), ()
    for b in tl.static_range(BLOCKS):
        tokens = tokens + (lanes.token_rows(x, gather, m + 8 * b + g, M, K),)
        acc = acc + lanes.zeros(R, WN * WK)                      # tile r of block b is at b * R + r
        ones = ones + lanes.zeros(1, WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    lanes.prefetch_and_wait(tensors[0], early, first, w, c, N, R, WK)
    flips = ()
    for r in tl.static_range(R):
        flips = flips + (codebook.constants(table, LEVELS, tensors, lanes.rows(first + 16 * r, N, start), g, N, SIZE == 128,
                                            WIDTH, BITS, SIGNED, F),)
    stored = lanes.stored_columns(K, pitch)
    for step in range(0, tl.cdiv(K, 256 * WK)):
        span, loaded, operands = (step * WK + w % WK) * 2, (), ()
        for j in tl.static_range(2):
            chunk = lanes.within(span + j, K // 128)
            for r in tl.static_range(R):
                row = lanes.rows(first + 16 * r, N, start)
                codes, values = lanes.by_size(words(tensors, row, stored, chunk), SIZE), ()
                if scale is not None:
                    for u in tl.static_range(128 // SIZE):
                        values = values + (group_numbers.values(tensors, FIELDS, (row, chunk, stored, u, SIZE), field),)
                loaded = loaded + ((codes, values),)
        lanes.fence(FENCE)
        for j in tl.static_range(2):                             # R tiles share the operands of x
            for b in tl.static_range(BLOCKS):
                if IN_ORDER:
                    operands = operands + (lanes.tokens_in_order(tokens[b], span + j, K // 128, c, UNIT, EVEN, F),)
                else:
                    operands = operands + (lanes.tokens(tokens[b], span + j, K // 128, c, SIZE, UNIT, EVEN, F),)
        for j in tl.static_range(2):
            new, new_ones = (), ()
            for b in tl.static_range(BLOCKS):
                columns, sums = operands[j * BLOCKS + b]
                if ONES:
                    new_ones = new_ones + (ones[b] + sums[0],)
                for r in tl.static_range(R):
                    codes, values = loaded[j * R + r]
                    total = acc[b * R + r]
                    for u in tl.static_range(128 // SIZE):
                        sum = lanes.part(numbers, codes, columns, u, j, flips[r], WIDTH, BITS, SIZE, F)
                        if scale is not None:
                            total = scale(values[u], sum, sums[u], BASE, total)
                        else:
                            total += sum
                    new = new + (total,)
            acc = new
            if ONES:
                ones = new_ones
    for b in tl.static_range(BLOCKS):
        for r in tl.static_range(R):
            sum = acc[b * R + r]
            if finish is not None:
                row = lanes.rows(first + 16 * r, N, start)
                sum = finish(group_numbers.values(tensors, ROW_FIELDS, (row, 0, stored, 0, SIZE), field), sum, ones[b], BASE)
            lanes.store_columns(sum * UNIT, bias, out, m + 8 * b, M, start, tl.program_id(0) * WN, r, R, N, WN, WK)
