"""gemv: one row of x, for formats whose scales vary along K.

A program multiplies 16 * R * WN rows of w with x.  WK warps share K, as in skinny.

             w: the same words as in skinny                    x, a diagonal of groups                 sums, float32

             runs of STEP columns: 0   1  ...  7                columns of the instruction            runs 0 ... 7
            +-----+-----+- - - -+-----+                        0   1        7                        +------------+
    row g   |     |     |       |     |                      +---+---+- - +---+               row g  |  2c, 2c + 1|
    (0..7)  +-----+-----+- - - -+-----+       run 0 of x     | x |   |    |   |               (0..7) +------------+
    row g+8 |     |     |       |     |       run 1          |   | x |    |   |       =      row g+8 |  2c, 2c + 1|
            +-----+-----+- - - -+-----+       ...            |   |   | ...|   |                      +------------+
              lane 4g + c: loads of 16 bytes  run 7          |   |   |    | x |                lane 4g + c: two runs
                                                             +---+---+- - +---+

With one row of x, seven of the matrix instruction's eight columns would be idle.  So a column stands for a run of STEP columns
of w.  One MMA then gives the sums of eight runs, one per scale, and a lane loads only the scales of its two runs.

- WHOLE, for table codes in runs of 32: x is used as lanes load it.  A word belongs to one run, and one of its eight sums is
  kept.  This takes fewer instructions than the diagonal, but for some codes more registers than a thread has.
- Otherwise x is the diagonal above: column r has run r of x, and zeros elsewhere.  It is built once per iteration, with a mask
  per lane, and serves all R tiles: R = 2 halves its cost (runs.py has both).
- LIFT, for E2M1 codes in bfloat16: a run of x is scaled, not the codes (runs.scaled).
- With R = 2, codes that are looked up are shifted by products (codebook.shifted).  With R = 1 ptxas would spill the factors.
- Plain multiply-adds would take a conversion and an addition per weight; the MMA takes 1/8 of an instruction.
- After the loop the eight columns and the WK warps of a row are added up.

Cost for 4 bits and groups of 32, counted on sm_90: 1.2 instructions of a thread per weight in float16, 1.4 in bfloat16.
"""

from qdsl.runtime.gpu.kernels import codebook, group_numbers, lanes, runs
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A field's values in eight runs of STEP columns, [W, 16, 8], or one number.

    at: (two rows, chunk, K, stored columns, STEP).
    """
    if columns == 0:
        return group_numbers.of_rows(plane, at[0], rows, kind)
    else:
        row = group_numbers.blocks(at[0], rows)
        count, stored = group_numbers.count(at[2], columns), group_numbers.count(at[3], columns)
        return group_numbers.by_column(plane, row, count, stored, at[1], at[2], at[4], columns, kind)


@triton.jit
def gemv(
    tensors, x, bias, out, N, K, pitch, early,
    words: tl.constexpr, numbers: tl.constexpr, table: tl.constexpr, LEVELS: tl.constexpr, scale: tl.constexpr,
    finish: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr, STEP: tl.constexpr, WIDTH: tl.constexpr,
    BITS: tl.constexpr, SIGNED: tl.constexpr, UNIT: tl.constexpr, BASE: tl.constexpr, LIFT: tl.constexpr, R: tl.constexpr,
    WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32.

    x: [1, K] of type F, pairs of columns as int32.  STEP: columns of a run, 16, 32 or 64.  pitch, early, EVEN: as in skinny.
    LEVELS: as codebook.constants takes it.  LIFT: numbers() returns w * 2^-LIFT; 0 for w.
    """
    TRIP: tl.constexpr = max(2, STEP // 16)                      # chunks of 128 columns per warp and iteration
    # Two operands of one tile, and longer runs, would spill.
    WHOLE: tl.constexpr = STEP == 32 and BITS <= 0 and (R > 1 or (BITS == 0 and table is not None))
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    lanes.prefetch_and_wait(tensors[0], early, first, w, c, N, R, WK)
    flips = ()
    for r in tl.static_range(R):
        flips = flips + (codebook.constants(table, LEVELS, tensors, lanes.rows(first + 16 * r, N), g, N, True, WIDTH, BITS,
                                            SIGNED, F, R > 1),)
    stored = lanes.stored_columns(K, pitch)
    acc = lanes.zeros(R, WN * WK)
    for step in range(0, tl.cdiv(K, 128 * TRIP * WK)):
        for j in tl.static_range(32 // min(32, STEP)):
            chunk = (step * WK + w % WK) * TRIP + j
            if WHOLE:
                columns, sums, factors = runs.operand(x, chunk, K, g, c, UNIT, LIFT, EVEN, F)
            else:
                columns, sums, factors = runs.diagonals(x, chunk, K, g, c, STEP, UNIT, LIFT, EVEN, F)
            chunk = lanes.within(chunk, K // 128)
            new = ()
            for r in tl.static_range(R):
                row = lanes.rows(first + 16 * r, N)
                loaded = ()
                for t in tl.static_range(STEP // 16):
                    loaded = loaded + (words(tensors, row, stored, lanes.after(chunk, t, K // 128, EVEN), t if EVEN else 0),)
                if WHOLE:
                    sum = runs.product(numbers, loaded, columns, flips[r], BITS, F)
                else:
                    sum = lanes.product(numbers, loaded, columns, flips[r], 2 * j, STEP // 8, WIDTH, BITS, F)
                sum *= factors
                values = group_numbers.values(tensors, FIELDS, (row, chunk, K, stored, STEP), field)
                new = new + (scale(values, sum, sums, BASE, acc[r]),)
            acc = new
    for r in tl.static_range(R):
        sum = acc[r]
        if finish is not None:
            row = lanes.rows(first + 16 * r, N)
            sum = finish(group_numbers.values(tensors, ROW_FIELDS, (row, 0, K, stored, STEP), field), sum, None, BASE)
        lanes.store_row(sum * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)
