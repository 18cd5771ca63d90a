"""Device functions of the kernels that decode a weight unit by unit: `dequantize` and `matvec`."""

from qdsl.runtime.gpu.triton import tl, triton


@triton.jit
def extents(N, K, LARGE: tl.constexpr):
    """N and K, in 64 bits if LARGE, so that products with them are positions that do not overflow."""
    if LARGE:
        return tl.cast(N, tl.int64), tl.cast(K, tl.int64)
    else:
        return N, K


@triton.jit
def axis(first, size: tl.constexpr, others: tl.constexpr, along: tl.constexpr, LARGE: tl.constexpr):
    """first, first + 1, ... along an axis of a tile, `size` long, the same in the `others` of its other axis."""
    places = tl.arange(0, size)
    if LARGE:
        places = places.to(tl.int64)
    if along == 1:
        return tl.broadcast_to(first + places[None, :], (others, size))
    else:
        return tl.broadcast_to(first + places[:, None], (size, others))


@triton.jit
def row_offset(row: tl.constexpr, K):
    """Where a row of a tile begins, after row 0."""
    if row == 0:
        return 0
    else:
        return row * tl.cast(K, tl.int64)


@triton.jit
def rows(first, BN: tl.constexpr, BK: tl.constexpr, tiles, AXIS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr):
    """The rows of tiles of a program; if EVEN those past the end are the last one, whose sums are not stored."""
    n = axis(first, BN, BK, 1 - AXIS, LARGE)
    if EVEN and AXIS == 1:                                       # rows that neighbour in memory would not any more
        n = tl.minimum(n, tiles - 1)
    return n


@triton.jit
def with_gaps(plane, n):
    """Pointers by which rows n of tiles read a tensor, `gap` elements between whose rows are another weight's.

    plane: (tensor, gap, together), where `together` rows of tiles share a row of the tensor; (tensor,) of one without gaps.
    """
    if len(plane) == 1:
        return plane[0]
    else:
        return plane[0] + n // plane[2] * plane[1]


@triton.jit
def live(n, tiles, u, count, EVEN: tl.constexpr):
    """Which places of a tile are units of w; if EVEN all are, and masks fold away."""
    if EVEN:
        return tl.full(n.shape, True, tl.int1)
    else:
        return (n < tiles) & (u < count)


@triton.jit
def joined(tiles):
    """Tiles of one shape as one whose last axes, each of 2, are the bits of a tile's number, the highest first; 64 at most."""
    for _ in tl.static_range(6):
        if len(tiles) > 1:
            pairs = ()
            for i in tl.static_range(len(tiles) // 2):
                pairs = pairs + (tl.join(tiles[i], tiles[i + len(tiles) // 2]),)
            tiles = pairs
    return tiles[0]
