"""gemv_records: one row of x, for weights in records as files store them.

A record is 256 columns: 32 words of 4-bit codes, and the numbers of its groups in the words around them.  Low and high halves
of the bytes of 8 words are two runs of 32 columns.

             codes of a record: 8 words a lane                     x, a diagonal of runs             sums, float32

    lane     c = 0      c = 1      c = 2      c = 3               0   1        7                      runs 0 ... 7
            +----------+----------+----------+----------+       +---+---+- - +---+                  +------------+
    row g   | runs 0, 1| 2, 3     | 4, 5     | 6, 7     | run 0 | x |   |    |   |           row g  |  2c, 2c + 1|
    (0..7)  +----------+----------+----------+----------+   1   |   | x |    |   |     =     (0..7) +------------+
    row g+8 | runs 0, 1| 2, 3     | 4, 5     | 6, 7     |  ...  |   |   | ...|   |          row g+8 |  2c, 2c + 1|
            +----------+----------+----------+----------+   7   |   |   |    | x |                  +------------+
                                                                +---+---+- - +---+

Lane c holds runs 2c and 2c + 1 of both operands, and it gets the sums of exactly these.  The numbers of groups lie in HEAD
words, which every lane of a row loads: 16 bytes of a cached line, from which it cuts the numbers of its two runs.

Cost for Q4_K, counted on sm_90: 1.7 instructions of a thread per weight in float16, 2.0 in bfloat16.
"""

from qdsl.runtime.gpu.kernels import lanes, records
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def gemv_records(
    tensors, x, bias, out, N, K, pitch, early,
    numbers: tl.constexpr, fields: tl.constexpr, scale: tl.constexpr, start: tl.constexpr, RECORD: tl.constexpr,
    CODES: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, BITS: tl.constexpr, SIGNED: tl.constexpr, UNIT: tl.constexpr,
    BASE: tl.constexpr, R: tl.constexpr, WN: tl.constexpr, WK: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr,
):
    """out[n] = sum over k of x[k] * w[n, k], plus bias[n], in float32.

    tensors: the records, as int32.  x: [1, K] of type F, pairs of columns as int32.  start: the pair at which run g begins.
    pitch, early: as in skinny.  RECORD: words of a record.  CODES: the first of its codes.  HEAD: the first of every four words
    of its other numbers.
    """
    w, g, c = lanes.warps(WN * WK)
    first = (tl.program_id(0) * WN + w // WK) * (16 * R) + g
    lanes.prefetch_and_wait(tensors[0], early, first, w, c, N, R, WK)
    stored = lanes.stored_columns(K, pitch)
    flip = lanes.flips(N, WIDTH, BITS, SIGNED, F)
    acc = lanes.zeros(R, WN * WK)
    for step in range(0, tl.cdiv(K, 256 * WK)):
        record = step * WK + w % WK
        columns, sums = records.runs(x, start(g), record, K // 256, g, c, UNIT, EVEN, F)
        record = lanes.within(record, K // 256)
        new = ()
        for r in tl.static_range(R):
            row = lanes.rows(first + 16 * r, N)
            p = records.at(tensors[0], row, stored // 256, record, RECORD)
            sum = lanes.product(numbers, records.words(p, CODES), columns, flip, 0, 4, WIDTH, BITS, F)
            values = fields(records.words_of_fields(p, HEAD), c[:, :, None])
            new = new + (scale(values, sum, sums, BASE, acc[r]),)
        acc = new
    for r in tl.static_range(R):
        lanes.store_row(acc[r] * UNIT, bias, out, tl.program_id(0) * WN, r, R, N, WN, WK)
