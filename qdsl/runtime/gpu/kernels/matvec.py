"""matvec: x @ w.T for any format, shape and dtype, one row of x at a time, without matrix units.

A program multiplies BN rows of tiles of w with one row of x, BK units along K in a step.

             units of w, packed                x [K], of one row       acc, float32

              step 0      step 1                step 0   step 1
            +-----------+-----------+- -       +--------+--------+-    +-----------+
      n     |u|u+1| ... |           |          |k| ...  |        |     | | |  ...  |  BK partial sums
            +-----------+-----------+- -       +--------+--------+-    +-----------+  for each of BN rows,
      n+1   | |   |     |           |           every row of w         | | |  ...  |  in ROWS registers of
            +-----------+-----------+- -        meets the same x       +-----------+  a thread

A thread has the same place in the tile in every step.  It loads a word, cuts its weights one after the other, loads the element
of x that meets each, and adds the product to an accumulator of its own: the loop has no barrier and no shared memory.  After
the last step the BK partial sums of a row are added up, across threads.

Neighbouring threads take neighbouring units along the axis that is contiguous in memory (AXIS 1: along K, 0: along N).  Along
N a tile is as short as a sector of memory allows, and long along K, so that there are programs enough.  A unit that spans ROWS
rows has as many accumulators.  Addresses that do not move along K are computed ahead of the loop: the compiler
hoists them out of `decode`.

Cost: a conversion, a multiply-add and a load of x per weight, and what decoding takes.  x comes from the L1 cache, but its load
takes an issue slot for every weight: gemv, whose matrix instructions do without, is faster wherever it fits.  With M rows of x
the weight is read M times.
"""

from qdsl.runtime.gpu.kernels import device, units
from qdsl.runtime.gpu.triton import tl, triton


@triton.jit
def add_product(state, k, w, live, row: tl.constexpr = 0):
    """Add w * x[k] to the sum of a row of the tiles; state: (x, a sum per row of the tiles, DIVIDES)."""
    x, acc, DIVIDES = state
    if DIVIDES:                                                  # what is not loaded is 0, and 0 / 0 would spoil the sum
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

    DIVIDES: decode divides by what is stored.
    tiles, count: rows of tiles of ROWS rows, and units in each.  AXIS: along which units neighbour, 0 for N, 1 for K.
    EVEN: all units exist, and no load has a mask.  LARGE: positions take 64 bits.  GAPS: tensors are what units.with_gaps takes.
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
