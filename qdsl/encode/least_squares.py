"""Codes of any finite table of values, with scales by search for the least squared error; for formats without another scheme.

Arrays are [elements, blocks] in float64, and sums add one element after the other, so no result depends on the machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode.blocks import cast_scale, join_blocks, per_field
from qdsl.encode.rows import ELEMENTS, split_blocks
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.tables import Table

Doubles = npt.NDArray[np.float64]
Places = npt.NDArray[np.int64]
RATIOS = tuple(i / 32 for i in range(36, 15, -1))                # trial scales, relative to the one that maps the extremes
ROUNDS = 2                                                       # rounds of least-squares scales, for the best codes so far


@scheme
@np.errstate(all="ignore")
def least_squares(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, values: Sequence[float],
                  sign: str | None = None, choice: str | None = None, importance: Tensor | None = None) -> tuple[Tensor, ...]:
    """(codes, signs, choices, scales) of w = scale * values[code], without fields that the format lacks.

    values: for each choice of a block, for each sign, for each code.  A weight gets the nearest value, ties to the lower one.
    Tries scales that map the extreme weight to an extreme value or near it, then least-squares scales for the best codes.
    importance [K]: the weight of a column's squared errors.
    """
    columns = min(columns, weight.shape[1])
    blocks = _Blocks(weight, rows, columns, columns, importance)
    tables = _tables(values, code, sign, choice)
    parts = [_find_best(x, by, tables, lambda exact: _round_scales(exact, scale), scale != "e8m0") for x, by in blocks.batches(1)]
    scales, choices, codes = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
    stored = per_field(cast_scale(blocks.shared(scales).float(), scale), axes).contiguous()
    return *_split_signs(blocks.whole(codes), code, sign), *_choices(blocks, choices, choice, axes), stored.to(weight.device)


@scheme
@np.errstate(all="ignore")
def least_squares_nested(weight: Tensor, *, code: str, scale: str, super_scale: str, columns: int, super_columns: int,
                         super_axes: int, steps: Sequence[float], values: Sequence[float], sign: str | None = None,
                         choice: str | None = None, importance: Tensor | None = None) -> tuple[Tensor, ...]:
    """(codes, signs, choices, scales, super-scales) of w = super_scale * steps[scale] * values[code]; see `least_squares`.

    The super-scale maps the largest scale of separately fitted blocks to an end of the steps.  A block then gets the step above
    or below its own scale, whichever has the smaller error, and the super-scale is refitted by least squares.
    """
    kind = number(scale)
    per = -(-min(super_columns, weight.shape[1]) // columns)
    blocks = _Blocks(weight, 1, columns, per * columns, importance)
    tables = _tables(values, code, sign, choice)
    parts = [_search_nested(x, by, tables, np.array(steps), per, lambda exact: _round_scales(exact, super_scale)) for x, by in
             blocks.batches(per)]
    above, scales, choices, codes = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
    supers = cast_scale(torch.from_numpy(above).float().view(weight.shape[0], 1, -1, 1), super_scale)
    stored = per_field(blocks.shared(scales + kind.low).to(torch_dtype(scale)), 2).contiguous()
    return (*_split_signs(blocks.whole(codes), code, sign), *_choices(blocks, choices, choice, 2), stored.to(weight.device),
            per_field(supers, super_axes).contiguous().to(weight.device))


@scheme
@np.errstate(all="ignore")
def least_squares_even(weight: Tensor, *, code: str, choice: str, scale: str, super_scale: str, columns: int, super_columns: int,
                       super_axes: int, steps: Sequence[float], windows: Table, group: Sequence[int], place: Sequence[int],
                       importance: Tensor | None = None) -> tuple[Tensor, ...]:
    """(codes, choices, scales, super-scales) of w = super_scale * steps[scale] * windows[32 * choice + five bits of a code].

    The five bits begin at bit place[k % columns] of 2 * code of the group[k % columns].  Bit b of a level's number is the
    exclusive or of bits b and b + 1, so the numbers of a group's four levels have an even count of ones.  Weights get the nearest
    levels; where the count is odd, the weight whose error grows least gets the nearest level of the other parity.
    """
    per = -(-min(super_columns, weight.shape[1]) // columns)
    blocks = _Blocks(weight, 1, columns, per * columns, importance)
    order = np.lexsort((place, group))                           # the four weights of each code, those of its low bits first
    blocks.sort(order)
    numbers = np.arange(16)
    tables = [_EvenValues([windows.numbers[start + (i ^ i >> 1 ^ i >> 2 ^ i >> 3)] for i in numbers])
              for start in range(0, len(windows.numbers), 32)]
    parts = [_search_nested(x, by, tables, np.array(steps), per, lambda exact: _round_scales(exact, super_scale)) for x, by in
             blocks.batches(per)]
    above, scales, choices, chosen = (np.concatenate(part, -1) for part in zip(*parts, strict=True))
    four = (chosen.reshape(-1, 4, chosen.shape[1]) << 4 * numbers[None, :4, None]).sum(1)
    for shift in (1, 2, 4, 8):                                   # bit b becomes the exclusive or of all bits from b on
        four ^= four >> shift
    stored = torch.from_numpy(four.T >> 1).reshape(weight.shape[0], -1, len(four)).to(torch_dtype(code))
    supers = cast_scale(torch.from_numpy(above).float().view(weight.shape[0], 1, -1, 1), super_scale)
    steps_of = per_field(blocks.shared(scales + number(scale).low).to(torch_dtype(scale)), 2).contiguous()
    return (stored.to(weight.device), *_choices(blocks, choices, choice, 2), steps_of.to(weight.device),
            per_field(supers, super_axes).contiguous().to(weight.device))


class _Blocks:
    """A weight split into blocks, in whole super-blocks of `spread` columns, and the weights of squared errors."""

    def __init__(self, weight: Tensor, rows: int, columns: int, spread: int, importance: Tensor | None) -> None:
        self.rows, self.columns, self.weight = min(rows, weight.shape[0]), columns, weight
        self.x = split_blocks(weight, spread, self.rows).reshape(-1, self.rows * columns)
        counts = None if importance is None else importance.float().expand(weight.shape)
        self.counts = None if counts is None else split_blocks(counts, spread, self.rows).reshape(self.x.shape)

    def sort(self, order: Places) -> None:
        """Put the elements of every block into an order."""
        self.x, self.counts = self.x[:, order], None if self.counts is None else self.counts[:, order]

    def batches(self, multiple: int) -> Iterator[tuple[Doubles, Doubles | None]]:
        """Weights and error weights [elements, blocks], in batches of a multiple of `multiple` blocks."""
        step = max(1, ELEMENTS // (self.x.shape[1] * multiple)) * multiple
        for start in range(0, len(self.x), step):
            at = slice(start, start + step)
            yield _transposed(self.x[at]), None if self.counts is None else _transposed(self.counts[at])

    def shared(self, values: npt.NDArray[np.generic]) -> Tensor:
        """Values of blocks as [R, 1, C, 1]."""
        n, k = self.weight.shape
        return torch.from_numpy(values).view(-(-n // self.rows), 1, -1, 1)[:, :, :-(-k // self.columns)]

    def whole(self, codes: Places) -> Tensor:
        """Values of weights [elements, blocks] as [N, K]."""
        n, k = self.weight.shape
        blocks = torch.from_numpy(np.ascontiguousarray(codes.T)).view(-(-n // self.rows), -1, self.rows, self.columns)
        return join_blocks(blocks.transpose(1, 2), n, k).to(self.weight.device)


def _transposed(blocks: npt.NDArray[np.float32]) -> Doubles:
    return np.ascontiguousarray(blocks.T, np.float64)


def _split_signs(codes: Tensor, code: str, sign: str | None) -> list[Tensor]:
    """Indices into a choice's values as codes, and as signs if there are any."""
    kind = number(code)
    low = codes & (1 << kind.bits) - 1
    stored = low.to(torch.uint8) if kind.is_float else (low + kind.low).to(torch_dtype(code))
    stored = stored.view(torch_dtype(code)) if kind.is_float else stored
    return [stored, *([] if sign is None else [(codes >> kind.bits).to(torch.uint8)])]


def _choices(blocks: _Blocks, choices: Places, choice: str | None, axes: int) -> list[Tensor]:
    chosen = per_field(blocks.shared(choices), axes).to(torch.uint8).contiguous()
    return [] if choice is None else [chosen.to(blocks.weight.device)]


def _round_scales(exact: Doubles, kind: str) -> Doubles:
    """Scales in their stored type; powers of two are rounded down."""
    if kind == "e8m0":
        fraction, exponent = np.frexp(exact)
        return np.where(exact > 0, np.ldexp(1.0, np.clip(exponent - (fraction == 0.5), -127, 127)), 2.0 ** -127)
    return torch.from_numpy(exact).float().to(FLOATS[kind]).double().numpy()


class _SortedValues:
    """Rising values, the code of each, and the midpoints between adjacent ones."""

    def __init__(self, values: Sequence[float]) -> None:
        order = sorted(range(len(values)), key=lambda code: (values[code], code))
        first = [place for i, place in enumerate(order) if not i or values[place] != values[order[i - 1]]]
        self.codes = np.array(first)
        self.values = np.array([values[code] for code in first], np.float64)
        self.middles = (self.values[1:] + self.values[:-1]) / 2
        self.is_symmetric = bool((self.values == -self.values[::-1]).all())

    def nearest(self, x: Doubles, by: Doubles | None, scales: Doubles) -> Places:
        """Indices of the values nearest to weights / the block's scale, or to 0 for a scale of 0; ties to the lower one.

        by: the weights of squared errors, for values that are not chosen one by one.
        """
        return np.searchsorted(self.middles, _units(x, scales))

    def error(self, x: Doubles, by: Doubles | None, scales: Doubles) -> Doubles:
        """The squared error of every block."""
        return _errors(x, by, scales * self.values[self.nearest(x, by, scales)])

    def extremes(self, x: Doubles, is_signed: bool) -> Iterator[Doubles]:
        """The scales for which all weights of a block lie between the extreme values; with both signs if they differ."""
        for sign in (1.0, -1.0) if is_signed and not self.is_symmetric else (1.0,):
            scale = np.zeros(x.shape[1])
            for end, largest in ((self.values[-1], (sign * x).max(0)), (self.values[0], (sign * x).min(0))):
                if end and (end > 0) == (end == self.values[-1]):
                    scale = np.maximum(scale, largest / end)
            yield sign * (scale + 0.0)                           # without -0.0


class _EvenValues(_SortedValues):
    """Values of which four adjacent elements of a block have codes with an even count of ones in all."""

    def __init__(self, values: Sequence[float]) -> None:
        super().__init__(values)
        odd = np.array([int(code).bit_count() % 2 for code in self.codes])
        self.of_parity = [np.flatnonzero(odd == parity) for parity in (0, 1)]

    def nearest(self, x: Doubles, by: Doubles | None, scales: Doubles) -> Places:
        """Indices of the values with the least error; of elements that are as cheap to change, the first is changed."""
        units = _units(x, scales)
        chosen, errors = [], []
        for own in self.of_parity:
            middles = (self.values[own[1:]] + self.values[own[:-1]]) / 2
            chosen.append(own[np.searchsorted(middles, units)])
            square = (units - self.values[chosen[-1]]) ** 2
            errors.append(square if by is None else by * square)
        is_odd = errors[1] < errors[0]
        costs = np.abs(errors[1] - errors[0]).reshape(-1 if x.size else 0, 4, x.shape[1])
        change = np.arange(4)[None, :, None] == costs.argmin(1)[:, None]
        wrong = is_odd.reshape(costs.shape).sum(1, keepdims=True) % 2 == 1
        return np.where(is_odd ^ (change & wrong).reshape(x.shape), chosen[1], chosen[0])


def _units(x: Doubles, scales: Doubles) -> Doubles:
    """Weights / the block's scale; 0 for a scale of 0."""
    return np.divide(x, scales, out=np.zeros_like(x), where=scales != 0)


def _errors(x: Doubles, by: Doubles | None, decoded: Doubles) -> Doubles:
    """The squared error of every block for these decoded values."""
    square = (x - decoded) ** 2
    return _block_sums(square if by is None else by * square)


def _tables(values: Sequence[float], code: str, sign: str | None, choice: str | None) -> list[_SortedValues]:
    size = 1 << sum(number(name).bits for name in (code, sign) if name is not None)
    return [_SortedValues(values[start:start + size]) for start in range(0, len(values), size)]


def _block_sums(values: Doubles) -> Doubles:
    """The sum of every block, one element after the other."""
    if values.shape[1] == 1:                                     # numpy would sum a single column in pairs
        return np.asarray(np.add.accumulate(values, axis=0)[-1])
    return np.asarray(np.add.reduce(np.ascontiguousarray(values), axis=0))


def _find_best(x: Doubles, by: Doubles | None, tables: Sequence[_SortedValues], rounded: Callable[[Doubles], Doubles],
               is_signed: bool) -> tuple[Doubles, Places, Places]:
    """(scales, choices, codes) of least error per block, the first among equals; an overflowing scale if all overflow."""
    trials = [_search_scales(x, by, table, rounded, is_signed) for table in tables]
    choices = np.stack([error for _, error in trials]).argmin(0)
    scales = np.take_along_axis(np.stack([scale for scale, _ in trials]), choices[None], 0)[0]
    return scales, choices, _nearest_codes(x, by, tables, choices, scales)[0]


def _search_scales(x: Doubles, by: Doubles | None, table: _SortedValues, rounded: Callable[[Doubles], Doubles], is_signed: bool,
                   ) -> tuple[Doubles, Doubles]:
    """The scales of least error of blocks with one table, and the errors."""
    scales = rounded(next(table.extremes(x, is_signed)))
    error = np.where(np.isfinite(scales), np.inf, -np.inf)       # overflows are refused when the scale is stored

    def keep_better(exact: Doubles) -> None:
        candidate = rounded(exact)
        errors = table.error(x, by, candidate)
        better = errors < error
        error[better], scales[better] = errors[better], candidate[better]

    for extreme in table.extremes(x, is_signed):
        for ratio in RATIOS:
            keep_better(extreme * ratio)
    for _ in range(ROUNDS):
        keep_better(_fit_scales(x, by, table.values[table.nearest(x, by, scales)]))
    return scales, error


def _fit_scales(x: Doubles, by: Doubles | None, values: Doubles) -> Doubles:
    """The least-squares scales for values; 0 if all of them are 0."""
    weighted = values if by is None else by * values
    square = _block_sums(weighted * values)
    return np.divide(_block_sums(weighted * x), square, out=np.zeros_like(square), where=square > 0)


def _search_nested(x: Doubles, by: Doubles | None, tables: Sequence[_SortedValues], steps: Doubles, per: int,
                   rounded: Callable[[Doubles], Doubles]) -> tuple[Doubles, Places, Places, Places]:
    """(super-scales, scales, choices, codes) of blocks, `per` of which share a super-scale."""
    is_signed = bool(steps.min() < 0 < steps.max())              # a block's step cannot have another sign than all steps
    alone = _find_best(x, by, tables, lambda exact: exact, is_signed)[0]
    supers = alone.reshape(-1, per)
    largest = np.take_along_axis(supers, np.abs(supers).argmax(1)[:, None], 1)[:, 0]
    above = rounded(largest / np.abs(steps).max())
    best = np.where(np.isfinite(above), np.inf, -np.inf)
    places, choices = np.zeros(x.shape[1], np.int64), np.zeros(x.shape[1], np.int64)
    for end in (steps.max(), steps.min()):
        trial = rounded(largest / end) if end else above
        new_places, new_choices, errors = _choose_steps(x, by, tables, steps, alone, trial.repeat(per))
        total = _block_sums(errors.reshape(-1, per).T)
        better = total < best
        best, above = np.where(better, total, best), np.where(better, trial, above)
        changed = better.repeat(per)
        places, choices = np.where(changed, new_places, places), np.where(changed, new_choices, choices)

    def joined(blocks: Doubles) -> Doubles:
        return blocks.T.reshape(len(best), -1).T

    for _ in range(ROUNDS):
        values = steps[places] * _nearest_codes(x, by, tables, choices, above.repeat(per) * steps[places])[1]
        trial = rounded(_fit_scales(joined(x), None if by is None else joined(by), joined(values)))
        scales = trial.repeat(per) * steps[places]
        total = _block_sums(_errors(x, by, scales * _nearest_codes(x, by, tables, choices, scales)[1]).reshape(-1, per).T)
        better = total < best
        best, above = np.where(better, total, best), np.where(better, trial, above)
    return above, places, choices, _nearest_codes(x, by, tables, choices, above.repeat(per) * steps[places])[0]


def _choose_steps(x: Doubles, by: Doubles | None, tables: Sequence[_SortedValues], steps: Doubles, alone: Doubles, above: Doubles,
                  ) -> tuple[Places, Places, Doubles]:
    """(scales, choices, errors) of blocks with these super-scales: the step below or above a block's separately fitted scale."""
    order = steps.argsort(kind="stable")
    near = np.searchsorted(steps[order], np.divide(alone, above, out=np.zeros_like(alone), where=above != 0))
    error = np.full(x.shape[1], np.inf)
    places, choices = np.zeros(x.shape[1], np.int64), np.zeros(x.shape[1], np.int64)
    for choice, table in enumerate(tables):
        for offset in (-1, 0):
            place = order[np.clip(near + offset, 0, len(steps) - 1)]
            errors = table.error(x, by, above * steps[place])
            better = errors < error
            error[better], places[better], choices[better] = errors[better], place[better], choice
    return places, choices, error


def _nearest_codes(x: Doubles, by: Doubles | None, tables: Sequence[_SortedValues], choices: Places, scales: Doubles,
                   ) -> tuple[Places, Doubles]:
    """(codes, values) nearest to weights, in the table that each block has chosen."""
    codes, values = np.zeros(x.shape, np.int64), np.zeros(x.shape)
    for choice, table in enumerate(tables):
        at = choices == choice
        place = table.nearest(x[:, at], None if by is None else by[:, at], scales[at])
        codes[:, at], values[:, at] = table.codes[place], table.values[place]
    return codes, values
