"""Fits the meaning of stored codes: a number type or a table, and the blocks of weights that share a scale and an offset."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import FLOATS, number
from qdsl.infer.labels import GROUPS, TOLERANCE, Values, group_sizes
from qdsl.infer.tiles import Codes

_T = TypeVar("_T", bound=np.generic)
Numbers = npt.NDArray[np.float64]
FEW, SAMPLE = 1 << 13, 1 << 18                                   # values to reject most blocks and types, and to find a table
MOST_TABLE_BITS, MOST_CHOICE_BITS = 4, 5                         # bits of codes of one table, and of two tables
MOST_LEVEL = 128                                                 # largest level of a table of integers


@dataclass(frozen=True)
class Blocks:
    """Blocks of weights that share a number.

    apart: a block has the weights whose flat positions differ by multiples of N * K / columns, not neighbours.
    """

    rows: int
    columns: int
    apart: bool = False

    def count(self, shape: tuple[int, int]) -> tuple[int, int]:
        """The number of blocks along rows and columns: the shape of the numbers."""
        n, k = shape
        return (1, n * k // self.columns) if self.apart else (-(-n // self.rows), -(-k // self.columns))

    def view(self, array: npt.NDArray[_T]) -> npt.NDArray[_T]:
        """An array [N, K] viewed as [blocks, weights of a block]; blocks have one row."""
        return array.reshape(self.columns, -1).T if self.apart else array.reshape(-1, self.columns)

    def at(self, numbers: Numbers, weights: npt.NDArray[np.int64], shape: tuple[int, int]) -> Numbers:
        """The number of each weight's block; weights are flat positions in [N, K]."""
        if self.apart:
            return np.asarray(numbers.reshape(-1)[weights % numbers.size])
        row, column = np.divmod(weights, shape[1])
        return np.asarray(numbers[row // self.rows, column // self.columns])


@dataclass(frozen=True)
class CodeMeaning:
    """The meaning of codes: values = scale * levels[code] + offset.

    kind: the number type of codes.  levels: the number of each code.  is_table: the levels are no number type's own.  scale,
    offset: per block, NaN if the block's values do not determine them; offset is None if it is 0 everywhere.  choice: for two
    tables, concatenated in `levels`, the index of each block's table; None for one table.
    """

    kind: str
    levels: Numbers
    blocks: Blocks
    scale: Numbers
    offset: Numbers | None
    is_table: bool = False
    choice: Numbers | None = None


def fit_codes(codes: Codes, values: Values, bits: int) -> CodeMeaning | None:
    """The meaning of codes [N, K] with the fewest numbers; None if the values are no such function of the codes."""
    n, k = values.shape
    for blocks in candidate_blocks((n, k)):
        in_blocks = blocks.view(codes), blocks.view(values)
        if not is_function(*_sample(*in_blocks, FEW)):
            continue
        for affine in (False, True):
            for kind, levels in number_types(bits):
                numbers = _fit_all_lines(levels, *in_blocks, affine)
                if numbers is not None:
                    return _merge_equal_rows(kind, levels, blocks, (n, k), *numbers)
        if bits <= MOST_TABLE_BITS:
            entries = table(*_sample(*in_blocks, SAMPLE), bits)
            numbers = None if entries is None else _fit_all_lines(entries, *in_blocks, False)
            if entries is not None and numbers is not None:
                if np.nanmax(numbers[0]) <= 0:
                    entries, numbers = -entries, (-numbers[0], None)
                return replace(_merge_equal_rows(f"u{bits}", entries, blocks, (n, k), *numbers), is_table=True)
        if 1 < bits <= MOST_CHOICE_BITS and not blocks.apart and (chosen := _fit_two_tables(*in_blocks, bits)) is not None:
            pair, scale, choice = chosen
            count = blocks.count((n, k))
            return CodeMeaning(f"u{bits}", pair.reshape(-1), blocks, scale.reshape(count), None, True, choice.reshape(count))
    return None


def _sample(codes: Codes, values: Values, most: int) -> tuple[Codes, Numbers]:
    """About `most` of the codes and values [blocks, weights], from blocks spread over the whole weight."""
    chosen = slice(None, None, max(1, codes.size // most))
    return codes[chosen], values[chosen].astype(np.float64)


def is_function(codes: Codes, values: Numbers) -> bool:
    """Whether equal codes have equal values within every block [blocks, weights]."""
    order = codes.argsort(1)
    codes, ordered = np.take_along_axis(codes, order, 1), np.take_along_axis(values, order, 1)
    apart = np.abs(np.diff(ordered)) > 2 * TOLERANCE * np.abs(values).max(1, keepdims=True)
    return not (apart & (np.diff(codes) == 0)).any()


def _fit_all_lines(levels: Numbers, codes: Codes, values: Values, affine: bool) -> tuple[Numbers, Numbers | None] | None:
    """Applies `fit_lines` to all blocks, a part at a time; None as soon as a block fits no line."""
    few_codes, few_values = _sample(codes, values, FEW)
    if fit_lines(levels[few_codes], few_values, affine) is None:
        return None
    step = max(1, SAMPLE // codes.shape[1])
    scales, offsets = [], []
    for start in range(0, len(codes), step):
        part = slice(start, start + step)
        numbers = fit_lines(levels[codes[part]], values[part].astype(np.float64), affine)
        if numbers is None:
            return None
        scales.append(numbers[0])
        if numbers[1] is not None:
            offsets.append(numbers[1])
    return np.concatenate(scales), np.concatenate(offsets) if offsets else None


def candidate_blocks(shape: tuple[int, int]) -> list[Blocks]:
    """The sizes of blocks that may share a number, largest first."""
    n, k = shape
    return [*(Blocks(1, size) for size in group_sizes(k)),
            *(Blocks(1, size, apart=True) for size in GROUPS if n % size == 0 and size < n)]


def number_types(bits: int) -> Iterator[tuple[str, Numbers]]:
    """Yields the number types of this width, and the levels of their codes."""
    names = [f"i{bits}"] if bits > 1 else []
    for name in [*names, f"u{bits}", *(name for name, form in FLOATS.items() if form.bits == bits and form.signed)]:
        form = number(name)
        yield name, np.array([form.decode(code) for code in range(1 << bits)], np.float64)


def fit_lines(levels: Numbers, values: Numbers, affine: bool) -> tuple[Numbers, Numbers | None] | None:
    """The scales and offsets of blocks by least squares, from levels and values [blocks, weights]; None if a block fits no line.

    A scale is NaN if all levels of its block are zero or, for affine blocks, equal.
    """
    if not np.isfinite(levels).all():
        return None
    around = levels.mean(1, keepdims=True) if affine else 0.0
    middle = values.mean(1, keepdims=True) if affine else 0.0
    squares = ((levels - around) ** 2).sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = ((levels - around) * (values - middle)).sum(1, keepdims=True) / squares
    used = np.nan_to_num(scale)
    offset = middle - used * around
    largest = np.abs(values).max(1, keepdims=True) + (np.abs(used * levels).max(1, keepdims=True) if affine else 0)
    if (np.abs(levels * used + offset - values) > TOLERANCE * largest).any():
        return None
    return scale, np.where(np.isnan(scale), np.nan, offset) if affine else None


def table(codes: Codes, values: Numbers, bits: int) -> Numbers | None:
    """The levels of codes up to a factor: a code's value over that of the code that occurs in most blocks."""
    return _agreed_levels(_ratios_to_reference(codes, values, bits)[0])


def _ratios_to_reference(codes: Codes, values: Numbers, bits: int) -> tuple[Numbers, int]:
    """Each code's value over the value of the reference code, per block, NaN if absent; and that code, the one in most blocks."""
    of_code = np.full((len(codes), 1 << bits), np.nan)
    for code in range(1 << bits):
        at = codes == code
        of_code[:, code] = np.where(at.any(1), np.where(at, values, -np.inf).max(1), np.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        common = int((np.nan_to_num(of_code) != 0).sum(0).argmax())
        ratios = of_code / of_code[:, [common]]
    ratios[~np.isfinite(ratios)] = np.nan
    return ratios, common


def _agreed_levels(ratios: Numbers) -> Numbers | None:
    """The levels that the blocks' ratios agree on."""
    seen = ~np.isnan(ratios).all(0)
    levels = np.zeros(ratios.shape[1])
    if seen.sum() < 2:
        return None
    levels[seen] = np.nanmedian(ratios[:, seen], 0)
    levels *= np.sign(levels[seen][-1] - levels[seen][0]) or 1   # make levels rise when the signs of scales leave it open
    return smallest_integers(levels)


def _fit_two_tables(codes: Codes, values: Values, bits: int) -> tuple[Numbers, Numbers, Numbers] | None:
    """Two tables of integers [2, codes], and per block its scale and the index of its table, NaN if both fit.

    Blocks with the same two codes show two different ratios of values, which tells the tables apart.
    """
    ratios, common = _ratios_to_reference(*_sample(codes, values, SAMPLE), bits)
    has_ratio = ~np.isnan(ratios)
    has_ratio[:, common] = False
    anchor = int(has_ratio.sum(0).argmax())
    ratio = ratios[:, anchor]
    with np.errstate(invalid="ignore"):
        is_high = ratio > (np.nanmin(ratio) + np.nanmax(ratio)) / 2 if has_ratio.any() else has_ratio[:, 0]
    tables = [_agreed_levels(ratios[has_ratio[:, anchor] & (is_high == high)]) for high in (False, True)]
    pair = np.array([levels for levels in tables if levels is not None and (levels == np.rint(levels)).all()])
    if len(pair) < 2 or (pair[0] == pair[1]).all():
        return None
    scale, choice = np.empty(len(codes)), np.empty(len(codes))
    for start in range(0, len(codes), step := max(1, SAMPLE // codes.shape[1])):
        part = slice(start, start + step)
        fitted = [_fit_scales(levels[codes[part]], values[part].astype(np.float64)) for levels in pair]
        fits = ~np.isnan(fitted)
        if not fits.any(0).all():
            return None
        choice[part] = np.where(fits.all(0), np.nan, fits[1])
        scale[part] = np.where(fits.all(0), np.nan, np.where(fits[1], fitted[1], fitted[0]))
    return pair, scale, choice


def _fit_scales(levels: Numbers, values: Numbers) -> Numbers:
    """The scales of blocks by least squares, from levels and values [blocks, weights]; NaN if no line through 0 fits."""
    with np.errstate(invalid="ignore", divide="ignore"):
        scale = np.nan_to_num((levels * values).sum(1) / (levels ** 2).sum(1))
    apart = np.abs(levels * scale[:, None] - values) > TOLERANCE * np.abs(values).max(1, keepdims=True)
    return np.where(apart.any(1), np.nan, scale)


def smallest_integers(levels: Numbers) -> Numbers:
    """The smallest integers proportional to the levels; if there are none, the levels scaled to a largest magnitude of 1."""
    for factor in range(1, MOST_LEVEL):
        multiples = np.rint(levels * factor)
        if np.abs(multiples).max() < MOST_LEVEL and np.abs(levels * factor - multiples).max() < TOLERANCE * factor:
            return np.asarray(multiples)
    return np.asarray(levels / np.abs(levels).max())


def _merge_equal_rows(kind: str, levels: Numbers, blocks: Blocks, shape: tuple[int, int], scale: Numbers,
                      offset: Numbers | None) -> CodeMeaning:
    """The meaning after merging rows that have the same numbers."""
    n = shape[0]
    count = blocks.count(shape)
    scale = scale.reshape(count)
    offset = None if offset is None else offset.reshape(count)
    rows = [size for size in (n, 256, 128, 64, 32, 16, 8, 4, 2) if size <= n] if not blocks.apart else []
    for size in rows:
        scales = _merge_rows(scale, size, np.abs(scale))
        offsets = None if offset is None else _merge_rows(offset, size, np.abs(offset) + np.abs(np.nan_to_num(scale)))
        if scales is not None and (offset is None) == (offsets is None):
            return CodeMeaning(kind, levels, replace(blocks, rows=size), scales, offsets)
    return CodeMeaning(kind, levels, blocks, scale, offset)


def _merge_rows(numbers: Numbers, size: int, sizes: Numbers) -> Numbers | None:
    """One number for each `size` rows; None if they differ by more than rounding.  sizes: the magnitudes that were rounded."""
    n, k = numbers.shape
    padded = np.full((2, -(-n // size) * size, k), np.nan)
    padded[:, :n] = numbers, sizes
    groups, largest = padded.reshape(2, -1, size, k)
    low, high = (reduce(groups, axis=1, initial=start, where=~np.isnan(groups))
                 for reduce, start in ((np.min, np.inf), (np.max, -np.inf)))
    return None if (high - low > 2 * TOLERANCE * np.nan_to_num(largest).max(1)).any() else np.where(np.isfinite(low), low, np.nan)
