"""Two levels of scales: those of sub-blocks are integers, in steps that their super-block stores.  ggml's K types."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qdsl.encode import rows, search
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats

Places = NDArray[np.int64]


@scheme
@np.errstate(all="ignore")
def kquant_minmax(weight: Tensor, *, code: str, scale: str, min: str, super_scale: str, super_min: str, columns: int,
                  super_columns: int, first: float, step: float, steps: int, errors: str = "squares", spread: float = 1,
                  importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, mins, super-scales, super-mins) of w = super_scale * scale * code - super_min * min.

    columns, super_columns: the weights of a sub-block and of a super-block.  The range of a sub-block is tried in
    high + first + step * i steps, for i from 0 to `steps`, where high is the largest code.  errors: 'squares', which count
    by a weight's magnitude plus the root of the mean square, or 'magnitudes', which count by it alone.
    importance [K]: squares count by importance * sqrt(spread * mean square of the super-block + w^2), and the steps of scales
    and mins are searched, too.  The bytes are ggml's.  Works on the CPU, wherever the weight is.
    """
    _, high = rows.integer_range(code)
    blocks = _SubBlocks(weight, columns, super_columns, importance, spread)

    def fit(x: Floats, by: Floats | None) -> tuple[Floats, ...]:
        if by is not None:
            return search.fit_counts(x, by, high, *search.IMPORTANT)
        plain = errors == "magnitudes"
        return search.fit_counts(x, search.magnitudes(x, plain), high, first, step, steps, plain)

    scales, mins, low, inverse = blocks.fit(fit)
    d, sc = blocks.positive_steps(scales, super_scale, rows.integer_range(scale)[1])
    dm, mn = blocks.positive_steps(-mins, super_min, rows.integer_range(min)[1])
    less = blocks.code_units(dm, mn)
    codes = blocks.unit_codes(code, blocks.code_units(d, sc),
                              lambda x, unit, at: search.clip(search.nearest((x + less[at]) / unit), 0, high),
                              lambda x, at: search.counts(x, low[at], inverse[at], high))
    return (codes, rows.field_of_blocks(sc, scale, weight, columns), rows.field_of_blocks(mn, min, weight, columns), d, dm)


@scheme
@np.errstate(all="ignore")
def kquant_signmax(weight: Tensor, *, code: str, scale: str, super_scale: str, columns: int, super_columns: int,
                   offset: int = 0, scale_offset: int = 0, by: str = "trials", spread: float = 0,
                   importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, super-scales) of w = super_scale * (scale - scale_offset) * (code - offset).

    columns, super_columns: the weights of a sub-block and of a super-block.  by 'trials': where the extreme weight of a
    sub-block lies is tried; 'exchange': codes are changed one by one.  Squares of errors count by the weight's square.
    importance [K]: squares count by it, and the search is by trials.  With `spread` they count by
    importance * sqrt(spread * mean square of the super-block + w^2), and the steps of scales are searched, too.
    The bytes are ggml's.  Works on the CPU, wherever the weight is.
    """
    low, high = rows.integer_range(code, offset)
    least, most = rows.integer_range(scale, scale_offset)
    blocks = _SubBlocks(weight, columns, super_columns, importance, spread)
    exchanged = by == "exchange" and importance is None
    if exchanged:
        [scales] = blocks.fit(lambda x, _: search.fit_exchange(x, low, high)[:1])
    else:
        scales, inverse = blocks.fit(lambda x, by: search.fit_signed(x, x * x if by is None else by, low, high))
    if importance is not None and spread:
        d, sc = blocks.searched_steps(scales, super_scale, least, most)
    else:
        d, sc, unusable = blocks.signed_steps(scales, super_scale, least, most, tiny=not exchanged)
        sc[unusable] = -scale_offset
        if not exchanged:
            inverse[unusable] = 0

    def kept(x: Floats, at: Places) -> Floats:
        return search.fit_exchange(x, low, high)[1] if exchanged else search.signed_or_least(x, inverse[at], low, high)

    codes = blocks.unit_codes(code, blocks.code_units(d, sc), lambda x, unit, _: search.clip(search.nearest(x / unit), low, high),
                              kept, offset)
    return codes, rows.field_of_blocks(sc + np.float32(scale_offset), scale, weight, columns), d


class _SubBlocks(rows.SubBlocks):
    """Sub-blocks, whose scales are steps of a super-block's."""

    def positive_steps(self, scales: Floats, kind: str, most: int) -> tuple[Tensor, Floats]:
        """(super-scales, steps 0 to most) of scales: in steps of the largest, or searched for.

        A negative scale, which an importance of few weights may come to, counts as 0; ggml's steps run over there.
        """
        values = np.maximum(self.by_super_block(scales), search.ZERO)
        if self.counts is not None:
            exact, steps = search.fit_positive(values, self.by_super_block(search.sum_blocks(rows.transposed(self.counts))), most)
        else:
            largest = values.max(axis=0)
            inverse = np.where(largest > 0, search.divide(most, largest), search.ZERO)
            exact, steps = largest / np.float32(most), search.clip(search.nearest(inverse * values), 0, most)
        return self.stored(exact, kind), steps.T.ravel()

    def searched_steps(self, scales: Floats, kind: str, least: int, most: int) -> tuple[Tensor, Floats]:
        """(super-scales, steps least to most) of least error, by the importance of sub-blocks."""
        assert self.counts is not None
        values = self.by_super_block(scales)
        counts = self.by_super_block(search.sum_blocks(rows.transposed(self.counts)))
        exact, inverse = search.fit_signed(values, counts, least, most)
        return self.stored(exact, kind), search.signed_or_least(values, inverse, least, most).T.ravel()

    def signed_steps(self, scales: Floats, kind: str, least: int, most: int, tiny: bool) -> tuple[Tensor, Floats, Places]:
        """(super-scales, steps least to most, sub-blocks that are lost), the scale of largest magnitude being the least step.

        Super-blocks of scales of 0 are lost, and with `tiny` those whose scales are tiny.
        """
        values = self.by_super_block(scales)
        extreme = search.signed_extremes(values)
        unusable = np.abs(extreme) < search.TINY if tiny else extreme == 0
        inverse = search.divide(least, np.where(unusable, search.ONE, extreme))
        steps = search.signed(values, inverse, least, most)
        exact = np.where(unusable, search.ZERO, search.divide(1, inverse))
        return self.stored(exact, kind), steps.T.ravel(), np.flatnonzero(np.repeat(unusable, len(values)))

    def by_super_block(self, values: Floats) -> Floats:
        return rows.transposed(values.reshape(self.supers, -1))

    def code_units(self, supers: Tensor, steps: Floats) -> Floats:
        """What a step of a code is worth."""
        return np.repeat(supers.float().cpu().numpy().ravel(), len(steps) // self.supers) * steps

    def unit_codes(self, kind: str, unit: Floats, find: Callable[[Floats, Floats, slice], Floats],
                   kept: Callable[[Floats, Places], Floats], offset: int = 0) -> Tensor:
        """Codes that `find` says of weights and units; `kept` says those of sub-blocks whose unit is 0."""
        def chosen(x: Floats, at: slice) -> Floats:
            without_unit = np.flatnonzero(unit[at] == 0)
            codes = find(x, np.where(unit[at] == 0, np.float32(1), unit[at]), at)
            if without_unit.size:
                codes[:, without_unit] = kept(x[:, without_unit], without_unit + at.start)
            return codes + np.float32(offset)

        return self.codes(kind, chosen)
