"""matvec: x @ w.T for any format, shape and dtype, one row of x at a time, without matrix units.

A program multiplies BN rows of tiles of w with one row of x, BK units along K in a step.

             units of w, packed                x [K], of one row       acc, float32

              step 0      step 1                step 0   step 1
            +-----------+-----------+- -       +--------+--------+-    +-----------+
      n     |u|u+1| ... |           |          |k| ...  |        |     | | |  ...  |  BK partial sums
            +-----------+-----------+- -       +--------+--------+-    +-----------+  for each of BN rows,
      n+1   | |   |     |           |           every row of w         | | |  ...  |  in ROWS registers of
            +-----------+-----------+- -        meets the same x       +-----------+  a thread

A thread has the same place in the tile in every iteration.  It loads a word and decodes its weights one by one.  For each it
loads the element of x and adds the product to its own accumulator: the loop has no barrier and no shared memory.  After the
loop the BK partial sums of a row are added up across threads.

Adjacent threads take adjacent units along the axis that is contiguous in memory (AXIS 1: along K, 0: along N).  For AXIS 0 a
tile covers one memory sector along N and is long along K, so that enough programs run.  A unit that spans ROWS rows has as many
accumulators.  The compiler hoists addresses that do not depend on K out of the loop.

Cost per weight: decoding, a conversion, a multiply-add and a load of x.  x comes from the L1 cache, but its load takes an issue
slot per weight; the MMAs of gemv do not need it, so gemv is faster if it applies.  With M rows of x the weight is read M times.
"""

from qdsl.runtime.gpu.kernels import device, units
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def add_product(state, k, w, live, row: tl.constexpr = 0):
    """Add w * x[k] to the sum of a row of the tiles; state: (x, a sum per row of the tiles, DIVIDES)."""
    x, acc, DIVIDES = state
    if DIVIDES:                                                  # masked loads give 0, and 0 / 0 would spoil the sum
        w = tl.where(live, w, 0)
    sums = ()
    for i in tl.static_range(len(acc)):
        if i == row:
            sums = sums + (acc[i] + w.to(tl.float32) * tl.load(x + k, live, 0).to(tl.float32),)
        else:
            sums = sums + (acc[i],)
    return x, sums, DIVIDES


@triton.jit
def matvec(
    tensors, x, bias, out, N, K, sizes, tiles, count,
    decode: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr, AXIS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, LARGE: tl.constexpr, GAPS: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    DIVIDES: decode divides by stored numbers.  tiles, count: rows of tiles of ROWS rows, and units per row.  AXIS: the axis of
    adjacent units, 0 for N, 1 for K.  EVEN: the grid covers the units exactly, so no load has a mask.  LARGE: offsets need 64
    bits.  GAPS: as in units.with_gaps.
    """
    x += tl.program_id(1).to(tl.int64) * K
    out += tl.program_id(1).to(tl.int64) * N
    N, K = units.extents(N, K, LARGE)
    n = units.rows(tl.program_id(0) * BN, BN, BK, tiles, AXIS, EVEN, LARGE)
    if GAPS:
        tensors = [plane if plane is None else units.with_gaps(plane, n) for plane in tensors]
    acc = ()
    for _ in tl.static_range(ROWS):
        acc = acc + (tl.zeros(n.shape, tl.float32),)
    if not LARGE:
        tl.assume(count <= 0x7FFFFFFF - BK)                      # start does not overflow: u // 2 ** i becomes a plain shift
    for start in range(0, count, BK):
        u = units.axis(start, BK, BN, AXIS, LARGE)
        acc = decode(tensors, n, u, units.live(n, tiles, u, count, EVEN), N, K, sizes, add_product, (x, acc, DIVIDES))[1]
    n = (tl.program_id(0) * BN + tl.arange(0, BN)) * ROWS
    for row in tl.static_range(ROWS):
        device.store_sums(out, bias, n + row, N, tl.sum(acc[row], AXIS))
