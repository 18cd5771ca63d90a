"""tile_gemm: many rows of x, on NVIDIA GPUs from Ampere on.  The drawing and the notes are Hopper's.

A program multiplies R tiles of 16 * W rows of w with BM rows of x.  A warp group is four warps, 64 rows of w.

                    a chunk of w: 128 columns                    x: BM rows x 128 columns            sums, float32

                  c = 0      1       2       3                       BM columns                       BM columns
                 +-------+-------+-------+-------+                +--------------+                 +--------------+
    warp 0  row g| 4 words each, two rows a lane |          128   |   shared     |   warp 0        |   16 rows    |
            (16) +-------+-------+-------+-------+        columns |   memory,    |                 +--------------+
    warp 1       |                               |                |   STAGES of  |   warp 1   =    |              |
            (16) +-------------------------------+                |   them       |                 +--------------+
    ...          |        registers              |                +--------------+   ...           |  registers   |
                 +-------------------------------+                 cp.async                        +--------------+

- wgmma with w from registers: the planar words are its A operand after a mask, so that weights never pass through shared memory.
  x, which all warps of a group share, is its B operand, in shared memory.
- x is copied STAGES - 1 chunks ahead by cp.async; Triton decides whether words of w are copied the same way.
- Every code becomes one number, in the column order of x: codes at bit 4 are scaled back, exactly.  Integer zero points are
  subtracted from the numbers (ZERO, POINT), exact in both types, so that no sums of x are needed.
- The minimums of Q4_K and similar formats need the sums of x: one more wgmma with a constant for w.  An iteration takes 476 issue
  cycles, of which matrix units are busy for 128; without the sums it takes 399.  Additions would take more than these 77: each
  thread would convert and add 16 numbers of x, and pass them on behind a barrier.
- Groups of 128 columns or more have one sum per chunk, which is multiplied by its scale; groups of 32 and 64 have their own sums.
- SPLIT programs may share K, so that few tiles fill the GPU.  Each stores its sums; the last to finish a tile adds the parts in
  their order along K, so that every run gives the same bits.
- There is no programmatic dependent launch as in skinny: all copies of the pipeline would wait for the previous launch, and the
  first words are a small part of a program's time.
- AHEAD: an iteration loads the scales of the next chunk.  On sm_100 one that loads its own waits for them after its product.
- WHOLE: with a constant K and no partial tiles, addresses differ by constants, which saves 0.2 instructions per weight.

Elsewhere the same lines compile for mma (sm_80, sm_89, sm_120) and for tcgen05 (sm_100): decoded weights pass through shared
memory, once for all rows of x.  64 rows, 4 bits, groups of 128: 11.4 instructions per weight on sm_80, 4.1 on sm_100.

Cost for 4 bits, groups of 128 and 16 rows of x, counted on sm_90: 2.3 instructions of a thread per weight in float16, 2.5 in
bfloat16; for 128 rows 3.1 and 3.3.
"""

from qdsl.runtime.gpu.kernels import codebook, group_numbers, lanes, scaled_tiles, tile
from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def field(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """A field's values in rows of w at a column, [16 * W, 1], or one number; at: (rows, column, N, stored columns)."""
    if columns == 0:
        if rows == 0:
            return group_numbers.loaded(plane, 0, kind)
        else:
            return tile.of_rows(plane, tile.block(at[0], rows, at[2]), 1, 0, 1, kind)
    else:
        return tile.of_rows(plane, tile.block(at[0], rows, at[2]), group_numbers.count(at[3], columns), at[1], columns, kind)


@triton.jit
def field_as_codes(plane, at, rows: tl.constexpr, columns: tl.constexpr, kind: tl.constexpr):
    """Zero points in the number form of codes; at: (two rows, column, stored columns, columns of a group, bits of codes, F)."""
    count = group_numbers.count(at[2], columns)
    return tile.points(plane, group_numbers.blocks(at[0], rows), count, at[1], columns, at[3], at[4], at[5])


@triton.jit
def numbers_of_groups(tensors, fields: tl.constexpr, first, chunk, N, stored, SIZE: tl.constexpr, R: tl.constexpr,
                      W: tl.constexpr, whole: tl.constexpr):
    """The numbers of a chunk's groups in R tiles of rows from `first` on, a tuple for each tile and group."""
    numbers = ()
    for r in tl.static_range(R):
        n = tile.tile_of_rows(first + 16 * W * r, W, N, whole)
        for u in tl.static_range(128 // SIZE):
            numbers = numbers + (group_numbers.values(tensors, fields, (n, chunk * 128 + u * SIZE, N, stored), field),)
    return numbers


@triton.jit(do_not_specialize=["M"])
def tile_gemm(
    tensors, x, bias, out, parts, arrivals, M, N, K, pitch,
    words: tl.constexpr, numbers: tl.constexpr, table: tl.constexpr, LEVELS: tl.constexpr, scale: tl.constexpr,
    finish: tl.constexpr, FIELDS: tl.constexpr, ROW_FIELDS: tl.constexpr, POINT: tl.constexpr, SIZE: tl.constexpr,
    WIDTH: tl.constexpr, BITS: tl.constexpr, SIGNED: tl.constexpr, SPANS: tl.constexpr, UNIT: tl.constexpr, BASE: tl.constexpr,
    ZERO: tl.constexpr, ONES: tl.constexpr, R: tl.constexpr, W: tl.constexpr, BM: tl.constexpr, STAGES: tl.constexpr,
    UNROLL: tl.constexpr, WHOLE: tl.constexpr, SPLIT: tl.constexpr, SCALED: tl.constexpr, AHEAD: tl.constexpr, F: tl.constexpr,
):
    """out[m, n] = sum over k of x[m, k] * w[n, k], plus bias[n], in float32.

    x: [M, K] of type F.  LEVELS: as in codebook.constants.  SIZE: columns that share a sum.  SPANS: by plane, how many bits
    higher the second chunk of 256 columns is.  ZERO: is added to a code; BASE: None if ZERO subtracts the zero point.  ONES:
    scale or finish take the sums of x.  UNROLL: chunks per iteration.  WHOLE: K if there are no partial tiles, else 0.  pitch: as
    in skinny.

    SPLIT: programs that share K; more than one need parts, float32 [tiles, SPLIT, R * 16 * W, BM], and arrivals, int32 [tiles],
    zeros before and after the launch.

    AHEAD: an iteration loads the numbers of the next chunk's groups, else those of its own.

    SCALED: weights are scaled and rounded to F, as `dequantize` does, and all of K adds to one sum.  Else they are exact.  ONES:
    something is added to scaled numbers.
    """
    if WHOLE:
        K = WHOLE
    stored = lanes.stored_columns(K, pitch)
    first = tl.program_id(0) * (16 * W * R)
    PART: tl.constexpr = 128 if SCALED else SIZE                 # columns of a product
    x, at = tile.tile_of_x(x, M, K, BM, PART, W, WHOLE)
    flips = ()
    for r in tl.static_range(R):
        flips = flips + (codebook.constants(table, LEVELS, tensors, tile.rows_of_tile(first + 16 * W * r, W, N, WHOLE),
                                            lanes.warps(W)[1], N, PART == 128, WIDTH, BITS, SIGNED, F),)
    acc = tile.tiles(R, 16 * W, BM)
    ones = tl.zeros((16 * W, BM), tl.float32)
    begin, end = tile.part_of_k(tl.program_id(2), K // 128, SPLIT)
    if SCALED:
        acc = scaled_tiles.sums(tensors, x, at, acc, first, begin, end, N, stored, flips, words, numbers, scale, finish, FIELDS,
                                ROW_FIELDS, WIDTH, BITS, SPANS, UNIT, BASE, ONES, R, W, STAGES, F)
    else:
        ready = ()
        if AHEAD:
            ready = numbers_of_groups(tensors, FIELDS, first, begin, N, stored, SIZE, R, W, WHOLE)
        for chunk in tl.range(begin, end, num_stages=STAGES, loop_unroll_factor=UNROLL):
            columns = tile.parts(x + chunk * 128, at, SIZE)
            new, following = (), ()
            if AHEAD:
                later = tl.minimum(chunk + 1, end - 1)
                following = numbers_of_groups(tensors, FIELDS, first, later, N, stored, SIZE, R, W, WHOLE)
            for r in tl.static_range(R):
                row = tile.rows_of_tile(first + 16 * W * r, W, N, WHOLE)
                n = tile.tile_of_rows(first + 16 * W * r, W, N, WHOLE)
                loaded = lanes.by_size(tile.first_span(words(tensors, row, stored, chunk), chunk, SPANS), SIZE)
                total = acc[r]
                for u in tl.static_range(128 // SIZE):
                    column = chunk * 128 + u * SIZE
                    less = None
                    if POINT is not None:
                        less = tile.zero_points(tensors, FIELDS, POINT, (row, column, stored, SIZE, BITS, F),
                                          field_as_codes, BITS, F)
                    sum = tile.rows_product(numbers, loaded, u, columns[u], flips[r], ZERO, less, WIDTH, BITS, SIZE, F)
                    sums = None
                    if ONES:
                        sums = tile.column_sums(columns[u], 16 * W, UNIT, F)
                        if scale is None and r == 0:
                            ones += sums
                    if scale is not None:
                        if AHEAD:
                            values = ready[r * (128 // SIZE) + u]
                        else:
                            values = group_numbers.values(tensors, FIELDS, (n, column, N, stored), field)
                        total = scale(values, sum, sums, BASE, total)
                    else:
                        total += sum
                new = new + (total,)
            acc, ready = new, following
    new = ()
    for r in tl.static_range(R):
        sum = acc[r]
        if finish is not None and not SCALED:
            n = tile.tile_of_rows(first + 16 * W * r, W, N, WHOLE)
            sum = finish(group_numbers.values(tensors, ROW_FIELDS, (n, 0, N, stored), field), sum, ones, BASE)
        new = new + (sum if SCALED else sum * UNIT,)
    if SPLIT == 1:
        for r in tl.static_range(R):
            tile.store_tile(new[r], bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)
    else:
        place = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        parts += place.to(tl.int64) * (SPLIT * R * 16 * W * BM)
        for r in tl.static_range(R):
            tile.store_part(new[r], parts, tl.program_id(2) * R + r)
        if tile.is_last(arrivals + place, SPLIT):
            for r in tl.static_range(R):
                sum = tile.sum_of_parts(parts + r * (16 * W * BM), R, SPLIT, 16 * W, BM)
                tile.store_tile(sum, bias, out, first + 16 * W * r, tl.program_id(1) * BM, M, N)
