"""Kernels of routed experts: sorting by expert, the product with decoded weights, and the weighted sum of results per token.

A program of `matmul` multiplies BM rows of x with BN rows of one expert's decoded weight, BK columns in a step.

            x: rows that `rows` names        w[e]: as it was decoded              sums, float32

              K ->                             K ->                                BN rows of w
            +------+------+- -               +------+------+- -                   +--------------+
    row 7   | BK   |      |             n    | BK   |      |                 m    |              |
    row 2   | wide |      |    BM       n+1  | wide |      |    BN      ->   m+1  |  registers   |
    row 31  |      |      |             n+2  |      |      |                 m+2  |              |
            +------+------+- -               +------+------+- -                   +--------------+

Both tiles pass through shared memory, where warps that share rows of x or of w read them: tl.dot puts them there, for the
matrix instruction that the GPU has.  w is loaded along K and read transposed, so that 16 bytes of a row are one load.  The
host does not know how many rows an expert has, so the list has empty tiles, whose programs end at once.  float32 stays float32.

`route` has a program per expert, and one for pairs of no expert.  Each reads all pairs of token and expert twice.  First it
counts those of every expert, so that it knows where its own rows and tiles begin.  Then it stores its own in their order.
Nothing is added by several programs, so every run gives the same order: that of a stable sort.  `list_tiles` lists the tiles
alone, where offsets come without pairs, or tiles have another height.

`weighted_sum` has a program per token and BN columns.  It adds in the order of the list, so that every run gives the same bits.

Cost: that of the vendor's matmul for such a tile.  w was decoded before, and is read once per BM rows of its expert.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit(do_not_specialize=["begin", "experts"])
def matmul(x, w, bias, rows, tiles, out, N, K, begin, experts, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[m] = x[rows[m]] @ w[e].T + bias[e], in float32, for up to BM rows m of one expert e and BN rows of its weight.

                      K ->
        x  [BM, BK]  #### . . .      rows of x lie anywhere: `rows` names them, or they are the rows of out
         w  [BN, BK]  #### . . .      decoded, so that a tile of the transpose is loaded along K
        out[BM, BN]  summed by the matrix unit, stored once

    w: [experts, N, K], of experts from `begin` on.  tiles: [T, 3] of (expert, first row, end of the expert's rows); a program
    without rows or of another expert does nothing.
    """
    tile = tiles + tl.program_id(0) * 3
    expert, first, last = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if (first < last) & (expert >= begin) & (expert < begin + experts):
        m = first + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        row = m
        if rows is not None:
            row = tl.load(rows + m, m < last, 0)
        left = x + row.to(tl.int64)[:, None] * K + k[None, :]
        right = w + ((expert - begin) * N + n)[None, :] * K + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            a = tl.load(left + start, (m < last)[:, None] & (start + k < K)[None, :], 0)
            b = tl.load(right + start, (n < N)[None, :] & (start + k < K)[:, None], 0)
            total = tl.dot(a, b, total, input_precision="ieee")  # float32 stays float32
        if bias is not None:
            total += tl.load(bias + expert * N + n, n < N, 0).to(tl.float32)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total, (m < last)[:, None] & (n < N)[None, :])


@triton.jit
def expert_of(ids, expert_map, at, pairs, EXPERTS: tl.constexpr):
    """The experts of pairs `at`, EXPERTS for those of other ranks, EXPERTS + 1 behind the last pair."""
    e = tl.load(ids + at, at < pairs, 0).to(tl.int32)
    if expert_map is not None:
        e = tl.load(expert_map + e, (at < pairs) & (e >= 0), -1).to(tl.int32)
    return tl.where(at < pairs, tl.where((e < 0) | (e > EXPERTS), EXPERTS, e), EXPERTS + 1)


@triton.jit(do_not_specialize=["pairs", "count"])
def route(ids, expert_map, offsets, tokens, places, tiles, pairs, count, EXPERTS: tl.constexpr, TOP: tl.constexpr,
          HEIGHT: tl.constexpr, BINS: tl.constexpr, BLOCK: tl.constexpr):
    """Sort pairs of token and expert by expert, and list tiles of up to HEIGHT rows of one expert.

    ids: [T, TOP] integers, `pairs` of them; expert_map: their numbers on this rank, or None.  offsets: [EXPERTS + 1] rows at
    which experts begin.  tokens: [pairs], the token of each row.  places: [pairs], the row of each pair.  tiles: [count, 3] of
    (expert, first row, end of the expert's rows); those that no expert needs are zeros.  All are int32.  BINS: a power of two
    above EXPERTS + 1.
    """
    own, bins, counts = tl.program_id(0), tl.arange(0, BINS), tl.zeros((BINS,), tl.int32)
    for start in range(0, pairs, BLOCK):
        counts += tl.histogram(expert_of(ids, expert_map, start + tl.arange(0, BLOCK), pairs, EXPERTS), BINS)
    needed = (counts + (HEIGHT - 1)) // HEIGHT
    first, tile = tl.sum(tl.where(bins < own, counts, 0)), tl.sum(tl.where(bins < own, needed, 0))
    stop = first + tl.sum(tl.where(bins == own, counts, 0))
    tl.store(offsets + own, first)
    place = first
    for start in range(0, pairs, BLOCK):
        at = start + tl.arange(0, BLOCK)
        is_own = expert_of(ids, expert_map, at, pairs, EXPERTS) == own
        row = place + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(tokens + row, at // TOP, is_own)
        tl.store(places + at, row, is_own)
        place += tl.sum(is_own.to(tl.int32))
    store_tiles(tiles, tile, own, first, stop, count, EXPERTS, HEIGHT)


@triton.jit(do_not_specialize=["rows", "count"])
def list_tiles(offsets, tiles, rows, count, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr, BINS: tl.constexpr):
    """List tiles of up to HEIGHT rows of one expert, as `route` does, by a program per expert and one for unused tiles.

    offsets: [EXPERTS + 1] integers; those outside of [0, rows] count as the nearest inside.  BINS: a power of two above EXPERTS.
    """
    own, bins = tl.program_id(0), tl.arange(0, BINS)
    start, end = offsets + bins, offsets + bins + 1
    first = tl.minimum(tl.maximum(tl.load(start, bins < EXPERTS, 0), 0), rows).to(tl.int32)
    stop = tl.minimum(tl.maximum(tl.load(end, bins < EXPERTS, 0), 0), rows).to(tl.int32)
    needed = (tl.maximum(stop - first, 0) + (HEIGHT - 1)) // HEIGHT
    tile = tl.sum(tl.where(bins < own, needed, 0))
    store_tiles(tiles, tile, own, tl.sum(tl.where(bins == own, first, 0)), tl.sum(tl.where(bins == own, stop, 0)), count,
                EXPERTS, HEIGHT)


@triton.jit
def store_tiles(tiles, tile, own, first, stop, count, EXPERTS: tl.constexpr, HEIGHT: tl.constexpr):
    """Store the tiles of rows [first, stop) of expert `own` from number `tile` on; for EXPERTS, zeros up to number `count`."""
    last = tl.minimum(tl.where(own < EXPERTS, tile + (stop - first + HEIGHT - 1) // HEIGHT, count), count)
    for start in range(tile, last, 32):
        at = start + tl.arange(0, 32)
        row = tl.where(own < EXPERTS, first + (at - tile) * HEIGHT, 0)
        tl.store(tiles + at * 3, tl.where(own < EXPERTS, own, 0), at < last)
        tl.store(tiles + at * 3 + 1, row, at < last)
        tl.store(tiles + at * 3 + 2, tl.where(own < EXPERTS, stop, 0), at < last)


@triton.jit
def weighted_sum(rows, places, weights, out, offsets, E, N, TOP: tl.constexpr, BN: tl.constexpr):
    """out[t] = the sum over j of weights[t, j] * rows[places[t, j]], in float32 and in that order.

    places: integers [T, TOP].  Rows from offsets[E] on belong to no expert and count as 0.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    stop = tl.load(offsets + E)
    for j in range(TOP):
        place = tl.load(places + t * TOP + j).to(tl.int64)
        value = tl.load(rows + place * N + n, (n < N) & (place < stop), 0).to(tl.float32)
        total += value * tl.load(weights + t * TOP + j).to(tl.float32)
    tl.store(out + t * N + n, total, n < N)
