"""Device functions of the kernels that decode a weight unit by unit: `dequantize` and `matvec`."""

from qdsl.runtime.libraries.triton import tl, triton


@triton.jit
def extents(N, K, LARGE: tl.constexpr):
    """N and K, in 64 bits if LARGE, so that offsets computed with them do not overflow."""
    if LARGE:
        return tl.cast(N, tl.int64), tl.cast(K, tl.int64)
    else:
        return N, K


@triton.jit
def axis(first, size: tl.constexpr, others: tl.constexpr, along: tl.constexpr, LARGE: tl.constexpr):
    """first, first + 1, ... along an axis of a tile, `size` long, repeated `others` times along its other axis."""
    places = tl.arange(0, size)
    if LARGE:
        places = places.to(tl.int64)
    if along == 1:
        return tl.broadcast_to(first + places[None, :], (others, size))
    else:
        return tl.broadcast_to(first + places[:, None], (size, others))


@triton.jit
def row_offset(row: tl.constexpr, K):
    """The offset of a row of a tile from row 0."""
    if row == 0:
        return 0
    else:
        return row * tl.cast(K, tl.int64)


@triton.jit
def rows(first, BN: tl.constexpr, BK: tl.constexpr, tiles, AXIS: tl.constexpr, EVEN: tl.constexpr, LARGE: tl.constexpr):
    """The rows of tiles of a program; if EVEN, rows past the end are clamped to the last one, whose sums are not stored."""
    n = axis(first, BN, BK, 1 - AXIS, LARGE)
    if EVEN and AXIS == 1:                                       # clamping would break rows that are contiguous in memory
        n = tl.minimum(n, tiles - 1)
    return n


@triton.jit
def with_gaps(plane, n):
    """Pointers to rows n of tiles in a tensor with gaps: `gap` elements of another weight between its rows.

    plane: (tensor, gap, together), where `together` rows of tiles share a row of the tensor; (tensor,) without gaps.
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
    """Tiles of one shape joined to one tile with axes of 2 behind: the bits of a tile's number, highest first; 64 at most."""
    for _ in tl.static_range(6):
        if len(tiles) > 1:
            pairs = ()
            for i in tl.static_range(len(tiles) // 2):
                pairs = pairs + (tl.join(tiles[i], tiles[i + len(tiles) // 2]),)
            tiles = pairs
    return tiles[0]
