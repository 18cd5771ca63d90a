"""dequantize: every weight in float32, rounded once to the dtype of out.

A program decodes BN rows of tiles by BK units.  A unit is a word with several codes, or one weight.

              units of w, packed                                   out [N, K]

              u    u+1        u+BK-1                    the columns of unit u, ROWS rows of them
            +----+----+- - -+----+                    +--+- - -+--+- - - - - - - - - - -+--+- -
      n     | w0 | w1 |     |    |    thread t        |w0|     |w0|                     |w0|
            | of | of |     |    |    decodes w0, w1  |  |     |  |                     |  |
            | u  | u+1|     |    |    of its units    +--+- - -+--+- - - - - - - - - - -+--+- -
            +----+----+- - -+----+    one by one        k of weight 0: the same in all rows
      n+1   |    |    |     |    |
            +----+----+- - -+----+

Neighbouring threads take neighbouring units along the axis that is contiguous in memory (AXIS 1: along K, 0: along N), so
that a warp loads whole sectors of 32 bytes.  A thread loads a word once and cuts all of its weights from it: `decode` calls
`use` for one weight after the other, and values never change threads.  A scale of the unit's weights
is loaded once per unit; the threads that share it read one address, from the L1 cache.

Columns of a unit are seldom neighbours, and neighbouring units may be rows.  With DIGITS and ORDER the program joins
its weights, reorders them to rows and columns through shared memory, and stores 16 bytes per thread.  Without them a thread
stores single elements, which the L2 cache merges at a third of the memory's rate.

Cost: the packed weight is loaded once and out is stored once.  Fused multiply-adds are off, because they skip a rounding of
the decode formula.
"""

from qdsl.runtime.gpu.kernels import units
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def store_weight(state, k, w, live, row: tl.constexpr = 0):
    """Store weights w in columns k of a row of their tiles; state: (pointers to row 0 of the tiles in out, K)."""
    out, K = state
    tl.store(out + units.row_offset(row, K) + k, w, live)
    return state


@triton.jit
def keep_weight(state, k, w, live, row: tl.constexpr = 0):
    """Append weights w to the state, a tuple of the units' weights."""
    return state + (w,)


@triton.jit
def dequantize(
    tensors, out, N, K, sizes, tiles, count,
    decode: tl.constexpr, ROWS: tl.constexpr, AXIS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    EVEN: tl.constexpr, LARGE: tl.constexpr, GAPS: tl.constexpr, DIGITS: tl.constexpr, ORDER: tl.constexpr,
):
    """out[n, k] = w[n, k], computed in float32 and rounded once to the dtype of out [N, K].

    tiles, count: rows of tiles of ROWS rows, and units per row.  AXIS: the axis of adjacent units, 0 for N, 1 for K.  EVEN: the
    grid covers the units of w exactly, so no load has a mask.  LARGE: offsets need 64 bits.  GAPS: tensors are as units.with_gaps
    takes them.  DIGITS, ORDER: the shape of a tile with its units' weights last, and the order of its axes that gives rows and
    then columns of w, 8 of both; None for storing single elements.
    """
    N, K = units.extents(N, K, LARGE)
    n = units.axis(tl.program_id(0) * BN, BN, BK, 1 - AXIS, LARGE)
    u = units.axis(tl.program_id(1) * BK, BK, BN, AXIS, LARGE)
    if GAPS:
        tensors = [plane if plane is None else units.with_gaps(plane, n) for plane in tensors]
    live = units.live(n, tiles, u, count, EVEN)
    if ORDER is None:
        decode(tensors, n, u, live, N, K, sizes, store_weight, (out + n * (ROWS * K), K))
    else:
        weights = decode(tensors, n, u, live, N, K, sizes, keep_weight, ())
        rounded = ()
        for i in tl.static_range(len(weights)):
            rounded = rounded + (weights[i].to(out.dtype.element_ty),)
        columns: tl.constexpr = BK * len(weights) // ROWS
        w = units.joined(rounded).reshape(
            (DIGITS[0], DIGITS[1], DIGITS[2], DIGITS[3], DIGITS[4], DIGITS[5], DIGITS[6], DIGITS[7]))
        w = w.permute((ORDER[0], ORDER[1], ORDER[2], ORDER[3], ORDER[4], ORDER[5], ORDER[6], ORDER[7]))
        w = w.reshape(BN * ROWS, columns)
        n = tl.program_id(0) * (BN * ROWS) + tl.arange(0, BN * ROWS)[:, None]
        k = tl.program_id(1) * columns + tl.arange(0, columns)[None, :]
        tl.store(out + n * K + k, w, (n < N) & (k < K))
