"""Codes into a table of levels, with scales by a search whose bytes are ggml's.  Derived from ggml-quants.c: see NOTICE."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qdsl.encode import rows, search
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats
from qdsl.runtime.weight.tables import Table

TRIES = range(-7, 8)                                             # offsets to try between extreme weight and first level
SPREAD = 2                                                       # weight of the mean square with an importance


@scheme
@np.errstate(all="ignore")
def block_levels(weight: Tensor, *, code: str, scale: str, columns: int, levels: Table,
                 importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * levels[code], where levels are rising integers.

    columns: the weights of a row that share a scale.  Squared errors are weighted by the weight's square, or with importance [K]
    by importance * sqrt(2 * mean square of the block + w^2).  Runs on the CPU, wherever the weight is.  Raises FormatError for a
    scale that does not fit.
    """
    blocks, table = rows.SubBlocks(weight, columns, columns, importance, SPREAD), _LevelTable(levels)
    scales = _scales(blocks, table)
    return blocks.codes(code, partial(table.codes, search.reciprocal(scales))), blocks.stored(scales, scale)


@scheme
@np.errstate(all="ignore")
def kquant_levels(weight: Tensor, *, code: str, scale: str, super_scale: str, columns: int, super_columns: int, levels: Table,
                  scale_offset: int = 0, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, super-scales) of w = super_scale * (scale - scale_offset) * levels[code].

    columns, super_columns: the weights of a sub-block and of a super-block, whose mean square is used with an importance.  The
    scale of largest magnitude, the first among equals, becomes the least code.  Everything else is as in `block_levels`.
    """
    least, most = rows.integer_range(scale, scale_offset)
    blocks, table = rows.SubBlocks(weight, columns, super_columns, importance, SPREAD), _LevelTable(levels)
    unrounded = _scales(blocks, table)
    blocks.stored(unrounded, "f32")                              # a NaN would be skipped in the search for the largest
    scales = rows.transposed(unrounded.reshape(-1, super_columns // columns))
    exact = search.signed_extremes(scales) / np.float32(least)
    steps = search.clip(search.nearest(search.reciprocal(exact) * scales), least, most)
    codes = blocks.codes(code, partial(table.codes, search.reciprocal((exact * steps).T.ravel())))
    chosen = rows.field_of_blocks(steps.T + np.float32(scale_offset), scale, weight, columns)
    return codes, chosen, blocks.stored(exact, super_scale)


def _scales(blocks: rows.SubBlocks, table: _LevelTable) -> Floats:
    [scales] = blocks.fit(lambda x, by: (_fit_scale(x, x * x if by is None else by, table),))
    return scales


class _LevelTable:
    """A table of rising integers, and its nearest entry for a value, ties upward.

    A midpoint of two integers is a multiple of a half, so the floor of twice a value decides its side of every midpoint.
    """

    def __init__(self, table: Table) -> None:
        self.values: Floats = table.values.numpy()
        middles = self.values[:-1] + self.values[1:]
        self.low, self.high = middles[0] - 1, middles[-1]
        places = np.searchsorted(middles, np.arange(self.low, self.high + 1), side="right")
        self.of_halves: Floats = places.astype(np.float32)
        self.value_of_halves: Floats = self.values[places]

    def codes(self, inverse: Floats, x: Floats, at: slice) -> Floats:
        """Indices in the table of x * inverse[at]; NaN gets the last one, as in ggml; overwrites x."""
        return np.take(self.of_halves, self._halves(np.multiply(x, inverse[at], out=x)))

    def nearest(self, x: Floats, out: Floats) -> Floats:
        """The levels themselves; overwrites x."""
        return np.take(self.value_of_halves, self._halves(x), out=out, mode="clip")

    def _halves(self, x: Floats) -> NDArray[np.int64]:
        np.floor(np.multiply(x, np.float32(2), out=x), out=x)
        np.fmax(np.fmin(x, self.high, out=x), self.low, out=x)
        places: NDArray[np.int64] = np.subtract(x, self.low, out=x).astype(np.int64)
        return places


def _fit_scale(x: Floats, counts: Floats, levels: _LevelTable) -> Floats:
    """The scale of least weighted squares among 16 that map a block's extreme weight to about the first level.

    A tiny block has a scale of 0.
    """
    extreme = search.signed_extremes(x)
    tiny = np.abs(extreme) < search.TINY
    extreme[tiny] = 1
    value, work = np.empty_like(x), np.empty_like(x)

    def fitted(inverse: Floats) -> tuple[Floats, Floats]:
        levels.nearest(np.multiply(x, inverse, out=work), value)
        np.multiply(counts, value, out=work)
        square = search.sum_blocks(np.multiply(value, work, out=value))
        return search.sum_blocks(np.multiply(work, x, out=work)), square

    first = levels.values[0]
    across, square = fitted(search.divide(1, -extreme / first))
    scale = np.where(square > 0, across / square, search.ZERO)
    best = scale * across
    for by in TRIES:
        across, square = fitted(search.divide(first + by, extreme))
        fit = across / square
        better = (square > 0) & (across * across > best * square)
        np.copyto(scale, fit, where=better)
        np.copyto(best, fit * across, where=better)
    scale[tiny] = 0
    return scale
