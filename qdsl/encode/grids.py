"""Rows of a grid for groups of columns, with scales in two levels: what ggml's IQ1, IQ2 and IQ3 types store.

Errors count by importance * sqrt(mean square of the super-block + w^2), ggml's own measure.  For a group of weights x that count
by c, a row g of the grid at scale s lessens the error by s * (2 <c x, g> - s <c, g^2>).  Both products, of all groups and all
rows, are matrix products that are made once; every scale that is tried then looks at every row.  Their factors are rounded to
integers so small that the products are exact in float32, whatever order a machine adds in, and other sums have an order of their
own: the fields depend on nothing but the weights of their super-block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.encode.blocks import cut_blocks, stored_scale
from qdsl.runtime.layout import FLOATS
from qdsl.runtime.match import torch_dtype
from qdsl.runtime.tables import Table

RATIOS = tuple(0.6 * 3.5 ** (i / 9) for i in range(10))          # scales to try, from 0.6 to 2.1 of what the mean square says
GAINS = 1 << 18                                                  # groups times rows of a grid at a time: they stay in a cache


def grid_signs(weight: Tensor, *, code: str, sign: str, scale: str, super_scale: str, columns: int, super_columns: int,
               steps: tuple[float, ...], grid: Table, signs: Table | None = None, importance: Tensor | None = None,
               ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, signs, scales, super-scales) of w = super_scale * steps[scale] * grid[code, k] * signs[sign, k].

    columns, super_columns: the weights of a sub-block and of a super-block; steps: rising from above 0; grid: rows of positive
    integers; signs: rows of 1 and -1, of which each run of weights has the one that suits what counts most; None: bits, 1 for
    negative weights.  importance [K]: what the square of an error counts.
    Raises FormatError for a super-scale that does not fit.
    """
    kind = _Kind((grid.on(weight.device).float(),), columns, super_columns, steps, super_scale)
    blocks = _Blocks(weight, kind, importance)
    if signs is None:
        chosen, turned = blocks.x < 0, blocks.x.abs()
    else:
        chosen, turned = _signed(blocks.x, blocks.counts, signs.on(weight.device).float())
    codes, _, scales, supers = blocks.fitted(turned)
    return blocks.field(codes, code), blocks.field(chosen, sign), blocks.field(scales, scale), supers


def grid_shifts(weight: Tensor, *, code: str, shift: str, scale: str, super_scale: str, columns: int, super_columns: int,
                shift_columns: int, steps: tuple[float, ...], shifts: tuple[float, ...], grid: Table,
                importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, shifts, scales, super-scales) of w = super_scale * steps[scale] * (grid[code, k] + shifts[shift]).

    grid: rows of integers of both signs; shift_columns: the weights of a sub-block that share a shift.  The rest is as for
    `grid_signs`.
    """
    table = grid.on(weight.device).float()
    kind = _Kind(tuple(table + by for by in shifts), columns, super_columns, steps, super_scale, shift_columns // table.shape[1])
    blocks = _Blocks(weight, kind, importance)
    codes, chosen, scales, supers = blocks.fitted(blocks.x)
    return blocks.field(codes, code), blocks.field(chosen, shift), blocks.field(scales, scale), supers


def _signed(x: Tensor, counts: Tensor, signs: Tensor) -> tuple[Tensor, Tensor]:
    """For every run of columns the row of signs under which most of what counts is positive, and x by those signs."""
    runs = x.view(-1, signs.shape[1])
    whole, _ = _whole((counts * x).view_as(runs), 24 - _bits(signs.shape[1]))
    chosen = (whole @ signs.t()).argmax(1)
    return chosen, (runs * signs[chosen]).view_as(x)


@dataclass(frozen=True)
class _Kind:
    """w = super_scale * steps[scale] * a row of one of the tables, the same table for `shared` rows in a run."""

    tables: tuple[Tensor, ...]
    columns: int
    super_columns: int
    steps: tuple[float, ...]
    stored: str
    shared: int = 1


class _Blocks:
    """The super-blocks of a weight: x [B, super_columns], divided by powers of two so that the largest is from 0.5 to 1.

    counts [B, super_columns]: importance * sqrt(mean square + x^2); where no column is of importance, all are.
    """

    def __init__(self, weight: Tensor, kind: _Kind, importance: Tensor | None) -> None:
        self.kind, self.shape = kind, weight.shape
        blocks = self.cut(weight.double())
        self.power = _power(blocks)
        self.x = (blocks / self.power).float()
        square = self.x * self.x
        # In float64, and then rounded: torch's square root of float32 is not always the nearest.
        self.counts = (_sums(square) / kind.super_columns + square).double().sqrt_().float()
        if importance is not None:
            given = self.cut(importance.double()[None])
            given = torch.where(given.amax(1, keepdim=True) > 0, given / _power(given), 1).float()
            self.counts = (self.counts.view(-1, *given.shape) * given).view_as(self.x)

    def cut(self, values: Tensor) -> Tensor:
        return cut_blocks(values, 1, self.kind.super_columns).reshape(-1, self.kind.super_columns)

    def field(self, values: Tensor, kind: str) -> Tensor:
        """Values of all super-blocks, in order, as a field of an integer type: what lies past the last column is cut."""
        n, k = self.shape
        columns = self.x.numel() // values.numel()
        return values.to(torch_dtype(kind)).view(n, -1)[:, :-(-k // columns)].contiguous()

    def fitted(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows, tables, scales, super-scales [N, super-blocks]) for x, which has signs of its own."""
        parts = [search.found() for search in self.searches(x)]
        rows, tables, scales, exact = (torch.cat(each) for each in zip(*parts, strict=True))
        supers = stored_scale(exact.view(self.shape[0], 1, -1, 1), self.kind.stored)[:, 0, :, 0].contiguous()
        return rows, tables, scales, supers

    def searches(self, x: Tensor) -> Iterator[_Search]:
        entries, columns = self.kind.tables[0].shape
        step = max(1, GAINS * columns // (entries * self.kind.super_columns))
        for i in range(0, len(x), step):
            yield _Search(x[i:i + step], self.counts[i:i + step], self.power[i:i + step], self.kind)


class _Search:
    """Scales and rows for some super-blocks x [B, super_columns], whose errors count by `counts`."""

    def __init__(self, x: Tensor, counts: Tensor, power: Tensor, kind: _Kind) -> None:
        self.x, self.counts, self.power, self.kind = x, counts, power, kind
        columns = kind.tables[0].shape[1]
        self.groups = kind.columns // columns                    # of a sub-block
        unit = _unit(kind.tables)
        tables = [table / unit for table in kind.tables]
        largest = max(float(table.abs().max()) for table in tables)
        linear, self.worth = _whole((counts * x).view(-1, columns), 24 - _bits(largest * columns))
        square, worth = _whole(counts.view(-1, columns), 24 - _bits(largest * largest * columns))
        self.linear = [linear @ table.t() for table in tables]
        self.square = [square @ (table * table).t() for table in tables]
        self.ratio = worth / self.worth * (unit / 2)
        self.room = torch.empty_like(self.linear[0])
        self.steps = x.new_tensor(kind.steps)

    def found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """(rows, tables, scales, super-scales [B, 1]); what is of groups and sub-blocks is flat."""
        wanted = self.free_scales()
        exact = wanted.amax(1, keepdim=True) / self.kind.steps[-1] * self.power
        d = (exact.to(FLOATS[self.kind.stored]) / self.power).float()
        scales = self.nearest_scales(wanted, d)
        values = self.steps[scales]
        rows, tables = self.chosen(d * values)
        return rows, tables, scales.flatten(), torch.where(torch.isfinite(d), self.refitted(rows, tables, values), exact)

    def free_scales(self) -> Tensor:
        """The best of RATIOS for every sub-block [B, sub-blocks]."""
        mean = float((self.kind.tables[0] ** 2).mean())
        squares, counts = _sums(self.counts * self.x * self.x, self.kind.columns), _sums(self.counts, self.kind.columns)
        start = torch.where(counts > 0, squares / counts / mean, 0).double().sqrt_().float()
        gains = torch.stack([self.gains(start * ratio) for ratio in RATIOS])
        return start * start.new_tensor(RATIOS)[gains.argmax(0)]

    def nearest_scales(self, wanted: Tensor, d: Tensor) -> Tensor:
        """The best of the scale whose step is nearest to what is wanted, and of those beside it."""
        middles = (self.steps[:-1] + self.steps[1:]) / 2
        middle = torch.bucketize(torch.where(d > 0, wanted / d, 0), middles)
        tried = torch.stack([(middle + by).clamp_(0, len(middles)) for by in (-1, 0, 1)])
        gains = torch.stack([self.gains(self.steps[scales] * d) for scales in tried])
        return tried.gather(0, gains.argmax(0, keepdim=True))[0]

    def gains(self, scale: Tensor) -> Tensor:
        """By how much the best rows lessen the error of each sub-block at a scale [B, sub-blocks]."""
        each = self.by_group(scale)
        best = torch.stack([self.marks(i, each).amax(1) * self.worth[:, 0] for i in range(len(self.linear))])
        return _sums(_sums(best, self.kind.shared).amax(0), self.groups // self.kind.shared).view_as(scale) * scale

    def chosen(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The best rows, and which tables they are of, at a scale [B, sub-blocks]."""
        each = self.by_group(scale)
        best, rows = zip(*(self.marks(i, each).max(1) for i in range(len(self.linear))), strict=True)
        tables = _sums(torch.stack(best) * self.worth[:, 0], self.kind.shared).argmax(0)
        return torch.stack(rows).gather(0, tables.repeat_interleave(self.kind.shared)[None])[0], tables

    def marks(self, table: int, scale: Tensor) -> Tensor:
        """The gain of each row for each group at a scale [groups, 1], but for factors that a group's rows share."""
        torch.mul(self.square[table], scale * self.ratio, out=self.room)
        return torch.sub(self.linear[table], self.room, out=self.room)

    def by_group(self, values: Tensor) -> Tensor:
        """A value of each sub-block, for its groups [groups, 1]."""
        return values.flatten().repeat_interleave(self.groups)[:, None]

    def refitted(self, rows: Tensor, tables: Tensor, values: Tensor) -> Tensor:
        """The super-scale [B, 1] of least error for what is chosen."""
        taken = torch.stack(self.kind.tables)[tables.repeat_interleave(self.kind.shared), rows] * self.by_group(values)
        taken = taken.view_as(self.x)
        weighted = self.counts * taken
        linear, square = _sums(weighted * self.x), _sums(weighted * taken)
        return torch.where(square > 0, linear / square, 0) * self.power


# -- arithmetic in which order does not count ------------------------------------------------------------------------------


def _power(rows: Tensor) -> Tensor:
    """The least power of two above all of a row, float64 [rows, 1]; 1 for zeros."""
    return torch.ldexp(torch.ones_like(rows[:, :1]), torch.frexp(rows.abs().amax(1, keepdim=True)).exponent)


def _whole(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rows as integers of at most `bits` bits, and what one is worth in each row [rows, 1]: at least 2^(-60 - bits)."""
    exponent = torch.frexp(values.abs().amax(1, keepdim=True)).exponent.clamp_(min=-60)
    return torch.ldexp(values, bits - exponent).round_(), torch.ldexp(torch.ones_like(values[:, :1]), exponent - bits)


def _bits(largest: float) -> int:
    return math.ceil(math.log2(largest + 1))


def _unit(tables: tuple[Tensor, ...]) -> float:
    """The power of two of which all numbers of the tables are whole multiples."""
    unit = 1.0
    while any(bool((table % unit).any()) for table in tables):
        unit /= 2
    return unit


def _sums(values: Tensor, count: int = 0) -> Tensor:
    """Sums of every `count` values of the last dim, or of all [..., 1]: a power of two, halved until one is left."""
    values = values.reshape(*values.shape[:-1], -1, count or values.shape[-1])
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]
