"""gemm: x @ w.T for any format, BM rows of x at a time, on the matrix units of any GPU that Triton compiles for.

Per iteration a program decodes BN rows of tiles by BK units of w, and multiplies BM rows of x by them.

        units of w, packed              weights of a unit, one tile each           sums, float32
                                              w0        w1
        u   u+1      u+BK-1                 BN rows   BN rows                       BN rows of w
      +---+---+- -+---+                   +-------+ +-------+                     +-------------+
   n  | w0|w0 |   |   |              u    |       | |       |                     |             |
      | w1|w1 |   |   |     ->       u+1  |       | |       |   -> tl.dot     BM  |             |
      +---+---+- -+---+                   |       | |       |                rows |             |
   n+1|   |   |   |   |            u+BK-1 |       | |       |                of x |             |
      +---+---+- -+---+                   +-------+ +-------+                     +-------------+
                                          +-------+ +-------+
                                    x     | k of  | | k of  |  BM x BK each
                                          | w0    | | w1    |
                                          +-------+ +-------+

`decode`, the function of dequantize and matvec, gives the first weights of all units as one tile, then the second ones, and so
on.  The columns of a tile need not be adjacent: x is loaded at the same columns, which a second call of `decode` for one row of
w gives.  The compiler drops the decoding of that row.  So a format needs no other function here, and any storage works.

- Weights are rounded to the type of x, as `dequantize` rounds them for the vendor's matmul.  Sums are float32.
- The sums are [rows of x, rows of w].  Warps divide the rows of w, so that no two decode the same weights.
- Weights move to the MMA's lanes through shared memory; the compiler moves the packed words instead if they are smaller.
- If EVEN, all units exist and no load has a mask.  AMD's GPUs have no predicates: a mask is a branch around every load.
- SPLIT programs share K.  The last to finish adds their sums in order.

Cost of q4_0, counted, in vector instructions per weight: gfx942 11.0 in bfloat16 and 5.5 in float16, gfx950 6.5 in bfloat16,
which it has an instruction to round to.
"""

from qdsl.runtime.gpu.kernels import tile, units
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def load_columns(state, k, w, live, row: tl.constexpr = 0):
    """Load columns k of x; state: (pointers to rows of x, a tile of x per weight of a unit)."""
    x, loaded = state
    if row == 0:                                                 # other rows of w use the same columns
        loaded = loaded + (tl.load(x + k, tl.broadcast_to(live, (x.shape[0], k.shape[1])), 0),)
    return x, loaded


@triton.jit
def keep_weight(state, k, w, live, row: tl.constexpr = 0):
    """Append weights to the state, (the weights per row of the tiles, DIVIDES)."""
    weights, DIVIDES = state
    if DIVIDES:                                                  # masked loads give 0, and 0 / 0 would spoil the sum
        w = tl.where(live, w, 0)
    kept = ()
    for i in tl.static_range(len(weights)):
        if i == row:
            kept = kept + (weights[i] + (w,),)
        else:
            kept = kept + (weights[i],)
    return kept, DIVIDES


@triton.jit
def operand(weights, j: tl.constexpr, AXIS: tl.constexpr, BN: tl.constexpr, F: tl.constexpr):
    """The j-th weights of all units as an operand, [BK, ROWS * BN], rows in order."""
    tiles = ()
    for row in tl.static_range(len(weights)):
        w = weights[row][j].to(F)
        if AXIS == 1:
            w = tl.trans(w)
        tiles = tiles + (w,)
    w = units.joined(tiles)
    return w.reshape(w.shape[0], len(weights) * BN)


@triton.jit(do_not_specialize=["M"])
def gemm(
    tensors, x, bias, out, parts, arrivals, M, N, K, sizes, tiles, count,
    decode: tl.constexpr, DIVIDES: tl.constexpr, ROWS: tl.constexpr, AXIS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    BM: tl.constexpr, SPLIT: tl.constexpr, EVEN: tl.constexpr, F: tl.constexpr, LARGE: tl.constexpr, GAPS: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    x: [M, K] of type F.  DIVIDES: decode divides by stored numbers.  tiles, count: rows of tiles of ROWS rows, and units per row.
    AXIS: the axis of adjacent units, 0 for N, 1 for K.  parts, arrivals: float32 workspace and int32 zero counters for SPLIT > 1;
    else None.  LARGE: offsets need 64 bits.  GAPS: tensors are as units.with_gaps takes them.
    """
    m = tl.program_id(1) * BM + tl.arange(0, BM)[:, None]
    x += tl.minimum(m, M - 1).to(tl.int64) * K
    rows, K = units.extents(N, K, LARGE)
    n = units.rows(tl.program_id(0) * BN, BN, BK, tiles, AXIS, EVEN, LARGE)
    if GAPS:
        own = [plane if plane is None else units.with_gaps(plane, n) for plane in tensors]
        tensors = [plane if plane is None else plane[0] for plane in tensors]         # as the first row reads them
    else:
        own = tensors
    acc = tl.zeros((BM, ROWS * BN), tl.float32)
    none = ()
    for _ in tl.static_range(ROWS):
        none = none + ((),)
    first, last = tile.part_of_k(tl.program_id(2), tl.cdiv(count, BK), SPLIT)
    for step in range(first, last):
        u = units.axis(step * BK, BK, 1, 1, LARGE)
        columns = decode(tensors, u * 0, u, units.live(u * 0, 1, u, count, EVEN), rows, K, sizes, load_columns, (x, ()))[1]
        u = units.axis(step * BK, BK, BN, AXIS, LARGE)
        weights = decode(own, n, u, units.live(n, tiles, u, count, EVEN), rows, K, sizes, keep_weight, (none, DIVIDES))[0]
        for j in tl.static_range(len(columns)):
            acc = tl.dot(columns[j], operand(weights, j, AXIS, BN, F), acc)
    n = tl.program_id(0) * (ROWS * BN) + tl.arange(0, ROWS * BN)[None, :]
    if SPLIT == 1:
        tile.store_rows(acc, bias, out, m, n, M, N)
    else:
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts += place.to(tl.int64) * (SPLIT * BM * ROWS * BN)
        tile.store_part(acc, parts, tl.program_id(2))
        if tile.is_last(arrivals + place, SPLIT):
            tile.store_rows(tile.sum_of_parts(parts, 1, SPLIT, BM, ROWS * BN), bias, out, m, n, M, N)
