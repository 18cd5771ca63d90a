"""Rows of a grid for groups of columns, with scales in two levels: what ggml's IQ1, IQ2 and IQ3 types store.

Errors are weighted by importance * sqrt(mean square of the super-block + w^2), ggml's own measure.  For a group of weights x with
error weights c, a row g of the grid at scale s reduces the error by s * (2 <c x, g> - s <c, g^2>).  Both products, of all groups
and all rows, are matrix products that are computed once; every trial scale then compares all rows.  Their factors are rounded to
small integers, so that the products are exact in float32 in any order of addition.  Other sums have a fixed order.  So the fields
depend only on the weights of their super-block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.encode import native, rows
from qdsl.encode.blocks import cast_scale
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.tables import Table

Integers = NDArray[np.int64]

RATIOS = tuple(0.65 * 2.9 ** (i / 6) for i in range(7))         # scales to try, relative to that of the mean square
FACTORS = (1.06, 1.0, 0.93)                                      # super-scales to try, relative to the one for the largest scale
GAINS = 1 << 20                                                  # groups times rows of a grid at a time, to fit caches
PRODUCTS = 1 << 18                                               # per matrix product, to keep it on one thread


@scheme
@np.errstate(all="ignore")
def grid_signs(weight: Tensor, *, code: str, sign: str, scale: str, super_scale: str, columns: int, super_columns: int,
               steps: tuple[float, ...], grid: Table, signs: Table | None = None, importance: Tensor | None = None,
               ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, signs, scales, super-scales) of w = super_scale * steps[scale] * grid[code, k] * signs[sign, k].

    columns, super_columns: the weights of a sub-block and of a super-block; steps: rising from above 0; grid: rows of positive
    integers; signs: rows of 1 and -1, of which each run of weights gets the best by error weight; None: bits, 1 for negative
    weights.  importance [K]: the weight of squared errors.  Runs on the CPU, wherever the weight is.  Raises FormatError for a
    super-scale that does not fit.
    """
    kind = _GridFormula((grid.values.float().numpy(),), columns, super_columns, steps, super_scale)
    blocks = _SuperBlocks(weight, kind, importance)
    chosen, positive = (blocks.x < 0, np.abs(blocks.x)) if signs is None else blocks.signed(signs.values.float().numpy())
    codes, _, scales, supers = blocks.fitted(positive)
    return blocks.field(codes, code), blocks.field(chosen, sign), blocks.field(scales, scale), supers


@scheme
@np.errstate(all="ignore")
def grid_shifts(weight: Tensor, *, code: str, shift: str, scale: str, super_scale: str, columns: int, super_columns: int,
                shift_columns: int, steps: tuple[float, ...], shifts: tuple[float, ...], grid: Table,
                importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, shifts, scales, super-scales) of w = super_scale * steps[scale] * (grid[code, k] + shifts[shift]).

    grid: rows of integers of both signs; shift_columns: the weights of a sub-block that share a shift.  Everything else is as in
    `grid_signs`.
    """
    table = grid.values.float().numpy()
    tables = tuple(table + np.float32(by) for by in shifts)
    kind = _GridFormula(tables, columns, super_columns, steps, super_scale, shift_columns // table.shape[1])
    blocks = _SuperBlocks(weight, kind, importance)
    codes, chosen, scales, supers = blocks.fitted(blocks.x)
    return blocks.field(codes, code), blocks.field(chosen, shift), blocks.field(scales, scale), supers


@dataclass(frozen=True)
class _GridFormula:
    """w = super_scale * steps[scale] * a row of one of the tables; runs of `shared` rows use the same table."""

    tables: tuple[Floats, ...]
    columns: int
    super_columns: int
    steps: tuple[float, ...]
    stored: str
    shared: int = 1

    @cached_property
    def unit(self) -> float:
        """The power of two that divides all numbers of the tables."""
        unit = 1.0
        while any((table % unit).any() for table in self.tables):
            unit /= 2
        return unit

    @cached_property
    def whole(self) -> tuple[tuple[Floats, float], ...]:
        """The tables in that unit and their squares, with the largest number of each."""
        rows = np.stack(self.tables) / np.float32(self.unit)
        return tuple((values, float(np.abs(values).max())) for values in (rows, rows * rows))

    @cached_property
    def mean(self) -> np.float32:
        """The mean square of the tables' numbers."""
        return np.mean(np.stack(self.tables) ** 2, dtype=np.float32)


class _SuperBlocks:
    """The super-blocks of a weight: x [B, super_columns], divided by powers of two so that the largest is from 0.5 to 1.

    counts [B, super_columns]: error weights, importance * sqrt(mean square + x^2); equal if no column has importance.
    """

    def __init__(self, weight: Tensor, kind: _GridFormula, importance: Tensor | None) -> None:
        self.kind, self.weight = kind, weight
        blocks = rows.split_blocks(weight, kind.super_columns)
        self.power = _exponents(blocks)
        self.x: Floats = np.ldexp(blocks, -self.power)
        weights = np.ones_like(self.x)
        if importance is not None:
            weights = rows.split_blocks(importance[None], kind.super_columns)
            weights = np.where(weights.max(axis=1, keepdims=True) > 0, np.ldexp(weights, -_exponents(weights)), np.float32(1))
            weights = np.tile(weights, (weight.shape[0], 1))
        self.counts = rows.error_weights(self.x, weights, 1)

    def field(self, values: NDArray[Any], kind: str) -> Tensor:
        return rows.field_of_blocks(values, kind, self.weight, self.x.size // values.size)

    def signed(self, signs: Floats) -> tuple[Integers, Floats]:
        """For every run of columns the best row of signs by error weight, and x with these signs."""
        runs = self.x.reshape(-1, signs.shape[1])
        chosen: Integers = _inner_products(_as_integers(self.counts.reshape(runs.shape) * runs, 1)[0], signs).argmax(axis=1)
        return chosen, (runs * signs[chosen]).reshape(self.x.shape)

    def fitted(self, x: Floats) -> tuple[Integers, Integers, Integers, Tensor]:
        """(rows, tables, scales, super-scales [N, super-blocks]) for signed x."""
        fits = [search.search_scales() for search in self.searches(x)]
        codes, tables, scales, exact = (np.concatenate(parts) for parts in zip(*fits, strict=True))
        supers = cast_scale(torch.from_numpy(exact).view(self.weight.shape[0], 1, -1, 1), self.kind.stored)
        return codes, tables, scales, supers[:, 0, :, 0].contiguous().to(self.weight.device)

    def searches(self, x: Floats) -> Iterator[_GridSearch]:
        entries, columns = self.kind.tables[0].shape
        step = max(1, GAINS * columns // (entries * self.kind.super_columns))
        for i in range(0, len(x), step):
            yield _GridSearch(x[i:i + step], self.counts[i:i + step], self.power[i:i + step], self.kind)


class _GridSearch:
    """Scales and rows for some super-blocks x [B, super_columns] with error weights `counts`."""

    def __init__(self, x: Floats, counts: Floats, power: Integers, kind: _GridFormula) -> None:
        self.x, self.counts, self.power, self.kind = x, counts, power, kind
        self.steps = np.array(kind.steps, np.float32)
        columns = kind.tables[0].shape[1]
        self.groups = kind.columns // columns                    # per sub-block
        (tables, largest), (squares, most) = kind.whole
        linear, self.worth = _as_integers((counts * x).reshape(-1, columns), largest)
        square, worth = _as_integers(counts.reshape(-1, columns), most)
        self.linear = [_inner_products(linear, table) for table in tables]
        self.square = [_inner_products(square, table) for table in squares]
        self.ratio = worth / self.worth * np.float32(kind.unit / 2)
        self.room = np.empty_like(self.linear[0])

    def search_scales(self) -> tuple[Integers, Integers, Integers, Floats]:
        """(rows, tables, scales, super-scales) of least error among the trial scales; all flat."""
        wanted = self.unrounded_scales()
        exact = np.ldexp(wanted.max(axis=1, keepdims=True) / self.steps[-1], self.power)
        d, scales, best = exact, np.zeros(wanted.shape, np.int64), np.full_like(exact, -np.inf)
        for factor in FACTORS:
            tried = self.stored(exact * np.float32(factor))
            nearest, gains = self.nearest_scales(wanted, tried)
            gain = _sum_runs(gains, gains.shape[1])
            d, scales = np.where(gain > best, tried, d), np.where(gain > best, nearest, scales)
            best = np.fmax(gain, best)
        chosen, tables, _ = self.best_table_rows(d * self.steps[scales])
        fitted = np.where(np.isfinite(best), self.refitted(chosen, tables, self.steps[scales]), exact)
        return chosen, tables, scales.ravel(), fitted.ravel()

    def stored(self, exact: Floats) -> Floats:
        """Super-scales for x in their stored type."""
        supers: Floats = np.ldexp(torch.from_numpy(exact).to(FLOATS[self.kind.stored]).float().numpy(), -self.power)
        return supers

    def unrounded_scales(self) -> Floats:
        """The best of RATIOS for every sub-block [B, sub-blocks]."""
        squares, counts = _sum_runs(self.counts * self.x * self.x, self.kind.columns), _sum_runs(self.counts, self.kind.columns)
        start = np.sqrt(np.where(counts > 0, squares / counts / self.kind.mean, 0))
        gains = np.stack([self.best_table_rows(start * np.float32(ratio))[2] for ratio in RATIOS])
        scales: Floats = start * np.array(RATIOS, np.float32)[gains.argmax(axis=0)]
        return scales

    def nearest_scales(self, wanted: Floats, d: Floats) -> tuple[Integers, Floats]:
        """(scale of each sub-block, error reduction): the best of the step nearest to the wanted scale and its two neighbours."""
        middle = np.searchsorted((self.steps[:-1] + self.steps[1:]) / 2, np.where(d > 0, wanted / d, 0))
        tried = np.stack([np.clip(middle + by, 0, len(self.steps) - 1) for by in (-1, 0, 1)])
        gains = np.stack([self.best_table_rows(self.steps[scales] * d)[2] for scales in tried])
        return np.take_along_axis(tried, gains.argmax(axis=0)[None], axis=0)[0], gains.max(axis=0)

    def best_table_rows(self, scale: Floats) -> tuple[Integers, Integers, Floats]:
        """The best rows at a scale [B, sub-blocks], their tables, and the error reduction of each sub-block."""
        factor = scale.ravel().repeat(self.groups)[:, None] * self.ratio
        chosen, gains = [], []
        for linear, square in zip(self.linear, self.square, strict=True):
            columns, gain = native.best_rows(linear, square, factor) or self.best_rows(linear, square, factor)
            chosen.append(columns)
            gains.append(_sum_runs(gain[:, None] * self.worth, self.kind.shared, 0))
        tables = np.stack(gains)[..., 0].argmax(axis=0)
        total = _sum_runs(np.stack(gains).max(axis=0), self.groups // self.kind.shared, 0).reshape(scale.shape) * scale
        return np.stack(chosen)[tables.repeat(self.kind.shared), np.arange(len(chosen[0]))], tables, total

    def best_rows(self, linear: Floats, square: Floats, factor: Floats) -> tuple[Integers, Floats]:
        """As `native.best_rows`."""
        np.subtract(linear, np.multiply(square, factor, out=self.room), out=self.room)
        columns = self.room.argmax(axis=1)
        return columns, np.take_along_axis(self.room, columns[:, None], axis=1)[:, 0]

    def refitted(self, chosen: Integers, tables: Integers, steps: Floats) -> Floats:
        """The super-scale [B, 1] of least error for the chosen rows and steps."""
        values = np.stack(self.kind.tables)[tables.repeat(self.kind.shared), chosen] * steps.ravel().repeat(self.groups)[:, None]
        weighted = self.counts * values.reshape(self.x.shape)
        linear, square = (_sum_runs(weighted * by, self.kind.super_columns) for by in (self.x, values.reshape(self.x.shape)))
        return np.ldexp(np.where(square > 0, linear / square, np.float32(0)), self.power)


# -- arithmetic that does not depend on order ----------------------------------------------------------------------------


def _exponents(values: Floats) -> Integers:
    """For each row [rows, 1] the least exponent of a power of two above all values; 0 for zeros."""
    exponents: Integers = np.frexp(np.abs(values).max(axis=1, keepdims=True))[1]
    return exponents


def _as_integers(values: Floats, largest: float) -> tuple[Floats, Floats]:
    """Rows as integers whose products with integers up to `largest` sum exactly, and the unit of each row [rows, 1]."""
    bits = 24 - math.ceil(math.log2(largest * values.shape[1] + 1))
    exponent = np.maximum(_exponents(values), -60)
    return np.rint(np.ldexp(values, bits - exponent)), np.ldexp(np.float32(1), exponent - bits)


def _inner_products(groups: Floats, table: Floats) -> Floats:
    """Inner products [groups, rows of the table] of integers."""
    products = np.empty((len(groups), len(table)), np.float32)
    step = max(1, PRODUCTS // table.size)
    for i in range(0, len(groups), step):
        np.matmul(groups[i:i + step], table.T, out=products[i:i + step])
    return products


def _sum_runs(values: Floats, count: int, axis: int = 1) -> Floats:
    """Sums of every `count` values, a power of two, along one of two axes, by repeated halving."""
    values = values if axis else values.T
    values = values.reshape(len(values), -1, count)
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0] if axis else values[..., 0].T
