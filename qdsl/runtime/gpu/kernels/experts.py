"""Kernels of routed experts: the product with decoded weights, and the weighted sum of experts' results per token.

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

`weighted_sum` has a program per token and BN columns.  It adds in the order of the list, so that every run gives the same bits.

Cost: that of the vendor's matmul for such a tile.  w was decoded before, and is read once per BM rows of its expert.
"""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def matmul(x, w, bias, rows, tiles, out, N, K, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    """out[m] = x[rows[m]] @ w[e].T + bias[e], in float32, for up to BM rows m of one expert e and BN rows of its weight.

                      K ->
        x  [BM, BK]  #### . . .      rows of x lie anywhere: `rows` names them, or they are the rows of out
         w  [BN, BK]  #### . . .      decoded, so that a tile of the transpose is loaded along K
        out[BM, BN]  summed by the matrix unit, stored once

    w: [E, N, K].  tiles: [T, 3] of (expert, first row, end of the expert's rows); a program without rows does nothing.
    """
    tile = tiles + tl.program_id(0) * 3
    expert, first, last = tl.load(tile).to(tl.int64), tl.load(tile + 1), tl.load(tile + 2)
    if first < last:
        m = first + tl.arange(0, BM)
        n = tl.program_id(1) * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        row = m
        if rows is not None:
            row = tl.load(rows + m, m < last, 0)
        left = x + row.to(tl.int64)[:, None] * K + k[None, :]
        right = w + (expert * N + n)[None, :] * K + k[:, None]
        total = tl.zeros((BM, BN), tl.float32)
        for start in range(0, K, BK):
            a = tl.load(left + start, (m < last)[:, None] & (start + k < K)[None, :], 0)
            b = tl.load(right + start, (n < N)[None, :] & (start + k < K)[:, None], 0)
            total = tl.dot(a, b, total, input_precision="ieee")  # float32 stays float32
        if bias is not None:
            total += tl.load(bias + expert * N + n, n < N, 0).to(tl.float32)[None, :]
        tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], total, (m < last)[:, None] & (n < N)[None, :])


@triton.jit
def weighted_sum(rows, places, weights, out, live, N, TOP: tl.constexpr, BN: tl.constexpr):
    """out[t] = the sum over j of weights[t, j] * rows[places[t, j]], in float32 and in that order.

    places: int64 [T, TOP].  live: the number of valid `rows`, on the device; others count as 0.
    """
    t = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BN + tl.arange(0, BN)
    total = tl.zeros((BN,), tl.float32)
    stop = tl.load(live)
    for j in range(TOP):
        place = tl.load(places + t * TOP + j)
        value = tl.load(rows + place * N + n, (n < N) & (place < stop), 0).to(tl.float32)
        total += value * tl.load(weights + t * TOP + j).to(tl.float32)
    tl.store(out + t * N + n, total, n < N)
