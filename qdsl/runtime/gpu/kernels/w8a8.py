"""w8a8: 8-bit x times 8-bit codes as files store them, row by row.

A program multiplies BN rows of w with BM rows of x.

           w: BN rows x 128 bytes             x: BM rows x 128 bytes           sums

          +-----------------------+            +-----------+                +-----------+
    BN    |   shared memory,      |       128  |  shared   |           BN   | registers |
    rows  |   STAGES of them      |       bytes|  memory   |      =    rows |           |
          +-----------------------+            +-----------+                +-----------+
            cp.async                            BM columns                   BM columns

Both operands go to the matrix units without unpacking: wgmma on Hopper, mma.sync elsewhere, for int8 or E4M3.  So operands in
shared memory cost no additional instructions.

- int8 is summed in int32, which is exact, over all of K if no scale varies along it.
- Hopper's E4M3 sums keep 14 bits.  So they are added to a float32 sum after every 128 columns.
- If matrix units lack E4M3 (sm_80), codes become float16 by a shift, exactly, and x is float16.
- With TOKENS, from 33 rows of x on, the tile is transposed: a thread then has the sums of 2 rows of x, and loads 2 of their
  scales instead of 32.  A number of a block of w is then one load for all rows.
- If scales vary along K, x also has one per 128 columns: their product scales each sum.  Else both are applied at the end.
- With at most 16 rows of x, of 16 bits, and a scale per 128 columns, programs may quantize x themselves (LARGEST).  An iteration
  then takes 955 cycles instead of 470, but a launch is saved; costs.shared_k chooses.
- SPLIT programs may share K, as in tile_gemm, if a few rows of x give fewer tiles than the GPU has multiprocessors.  Partial sums
  of int8 are integers, so that their total is exact.
- An iteration takes UNROLL chunks, two if Hopper's or Blackwell's shared memory has room.  Their addresses differ by a constant
  in the load, and an iteration has one fence and two barriers.  STAGES iterations are in flight, so that copies wait for nothing.

A thread holds the sums that its MMA gives it: two rows, and two columns of every eight.

Cost, counted on sm_90, in instructions of a thread per weight: with scales of 128 columns 2.1 for 32 rows of x and 2.3 for 128
in tiles of 128 x 128; int8 with scales of rows 1.2 and 1.3.  Issue slots of a warp for a chunk of such a tile:

    sums                    66    64 multiply-adds, which every order of the work needs, and 2 products of scales
    matrix instructions      4
    copies                  14    8 of codes, 2 of scales, 4 that end a group of copies
    their addresses         14    64 bits of 8 places, once in two chunks; those of scales
    reads                    7    of scales, and what ptxas puts before a fence
    uniform                 35    descriptors of operands, the ring of stages, the loop's counter
    barriers and waits       6

For 4096 rows of x and 4096 x 4096 weights an H100's schedulers issue for 39.6 us, 17.5 of them the first two lines, and its
matrix units work for 64 us.

Variants that were counted and rejected:
- 256 rows of w per program would read a quarter less from the L2 cache, but 192 registers of sums spill.
- Two programs on a multiprocessor have 128 registers a thread, all of them sums.  In tiles of 64 rows of x three fit, and read
  half as much again from the L2 cache.
- Triton 3.7 does not divide the warps of a loop that cp.async feeds into producers and consumers: it leaves the kernel as it
  is, or fails.
- Tensor descriptors would save most copies and their addresses.  The host would have to encode them for every launch.
"""

from qdsl.runtime.gpu.kernels import eight_bit, group_numbers, lanes, tile
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A field's values in rows of w at a column, or one number.

    at: (rows of w, rows of x or None, column, stored columns, BN).
    """
    if columns == 0:
        if rows == 0:
            return group_numbers.loaded(plane, 0, kind)
        else:
            return tile.of_rows(plane, tile.block(at[0], rows, 1), 1, 0, 1, kind)
    else:
        count = group_numbers.count(at[3], columns)
        return tile.of_rows(plane, eight_bit.block(at[0], at[1], rows, at[4]), count, at[2], columns, kind)


@triton.jit(do_not_specialize=["M"])
def w8a8(
    tensors, w, x, x_scale, x_sum, bias, out, parts, arrivals, M, N, K, pitch,
    scale: tl.constexpr, finish: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr,
    BN: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr, TOKENS: tl.constexpr, SPLIT: tl.constexpr,
    UNROLL: tl.constexpr, LARGEST: tl.constexpr,
):
    """out[m, n] = sum over k of x_scale * x[m, k] * w[n, k], plus bias[n], in float32.

    w: [N, K] int8, E4M3, or uint8 E4M3 codes for float16 x.  x: [M, K] codes.  x_scale: [K / 128, M], or [1, M] if nothing varies
    along K.  x_sum: [1, M], the sums of codes, or None.  TOKENS: rows of x are the rows of the sums.  UNROLL: chunks of 128
    columns per iteration; K is a multiple of them.  pitch: as in skinny.  LARGEST: the largest code if x is numbers, [M, K], to
    quantize here; x_scale is then None.  Else 0.

    SPLIT: programs that share K; more than one need parts, float32 [tiles, SPLIT, BN * BM], and arrivals, int32 [tiles], zeros
    before and after the launch.
    """
    n, m = tl.program_id(0) * BN + tl.arange(0, BN), tl.program_id(1) * BM + tl.arange(0, BM)
    exact: tl.constexpr = scale is None and w.dtype.element_ty == tl.int8
    columns = tl.arange(0, 128)
    stored = lanes.stored_columns(K, pitch)
    if TOKENS:                                                   # first @ second: the rows and columns of the sums
        n, m = lanes.within(n, N).to(tl.int64)[None, :], lanes.within(m, M).to(tl.int64)[:, None]
        first, second, acc = x + m * K + columns[None, :], w + n * stored + columns[:, None], eight_bit.zeros(BM, BN, exact)
    else:
        n, m = lanes.within(n, N).to(tl.int64)[:, None], lanes.within(m, M).to(tl.int64)[None, :]
        first, second, acc = w + n * stored + columns[None, :], x + m * K + columns[:, None], eight_bit.zeros(BN, BM, exact)
    begin, end = tile.part_of_k(tl.program_id(2), K // (128 * UNROLL), SPLIT)
    for trip in tl.range(begin * UNROLL, end * UNROLL, UNROLL, num_stages=STAGES):
        for u in tl.static_range(UNROLL):                        # two additions: the second is a constant in the load
            if scale is None:
                acc = eight_bit.added(acc, tl.load(first + trip * 128 + u * 128), tl.load(second + trip * 128 + u * 128))
            else:
                values = group_numbers.values(tensors, FIELDS, (n, None if TOKENS else m, (trip + u) * 128, stored, BN), field)
                codes = tl.load(second + trip * 128 + u * 128)
                if LARGEST > 0:
                    codes, scales = eight_bit.quantized(codes, LARGEST, w.dtype.element_ty)
                else:
                    scales = tl.load(x_scale + ((trip + u) * M + m))
                acc += eight_bit.product(tl.load(first + trip * 128 + u * 128), codes) * scale(values, scales, None, 0)
    if SPLIT == 1:
        store(tensors, acc, x_scale, x_sum, bias, out, n, m, M, N, K, scale, finish, ROW_FIELDS, BN, BM, TOKENS)
    else:
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts = (parts + place.to(tl.int64) * (SPLIT * BN * BM)).to(tl.pointer_type(acc.dtype), bitcast=True)
        tile.store_part(acc, parts, tl.program_id(2))
        if tile.is_last(arrivals + place, SPLIT):
            acc = tile.sum_of_parts(parts, 1, SPLIT, acc.shape[0], acc.shape[1])
            store(tensors, acc, x_scale, x_sum, bias, out, n, m, M, N, K, scale, finish, ROW_FIELDS, BN, BM, TOKENS)


@triton.jit
def store(tensors, acc, x_scale, x_sum, bias, out, n, m, M, N, K, scale: tl.constexpr, finish: tl.constexpr,
          ROW_FIELDS: tl.constexpr, BN: tl.constexpr, BM: tl.constexpr, TOKENS: tl.constexpr):
    """Apply the numbers that are constant along K to a tile's sums, and store them."""
    sum = acc.to(tl.float32)
    if finish is not None:
        ones = None
        if x_sum is not None:
            ones = tl.load(x_sum + m)
        sum = finish(group_numbers.values(tensors, ROW_FIELDS, (n, m, 0, K, BN), field), sum, ones, 0)
    if scale is None:
        sum *= tl.load(x_scale + m)
    if TOKENS:
        m = tl.program_id(1) * BM + tl.arange(0, BM)[:, None]
        tile.store_rows(sum, bias, out, m, tl.program_id(0) * BN + tl.arange(0, BN)[None, :], M, N)
    else:
        tile.store_tile(sum, bias, out, tl.program_id(0) * BN, tl.program_id(1) * BM, M, N)
