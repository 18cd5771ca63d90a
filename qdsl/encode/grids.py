"""Rows of a grid for groups of columns, with scales in two levels: what ggml's IQ1, IQ2 and IQ3 types store.

Errors count by importance * sqrt(mean square of the super-block + w^2), ggml's own measure.  For a group of weights x that count
by c, a row g of the grid at scale s lessens the error by s * (2 <c x, g> - s <c, g^2>).  Both products of all groups and all
rows are matrix products, made once; every scale that is tried then looks at every row.  The factors are rounded to integers
so small that the products are exact in float32, whatever order a machine adds in: the fields depend on nothing but the weights.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.encode.blocks import stored_scale
from qdsl.numbers import number

SUPER = 256                                                      # columns of a super-block
SIGNS = 8                                                        # columns that share 7 stored signs
RATIOS = tuple(0.6 * 3.5 ** (i / 9) for i in range(10))          # scales to try, from 0.6 to 2.1 of what the mean square says
MARKS = 1 << 18                                                  # groups times rows of a grid at a time: they stay in a cache


def grid(weight: Tensor, *, table: Tensor, scale: str, columns: int, unit: float, parity: bool = False,
         importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, signs, scales, super-scales) of |w| = super_scale * (2 * scale + 1) * unit * table[row].

    table: positive integers [rows, group].  scale: 'u4', of every `columns` columns.  rows: u8 or int32 [N, K / group].
    signs: u1 [N, K], 1 is negative; with `parity` u7 [N, K / 8], of which the eighth is the parity: where it would be wrong,
    the weight that matters least has the other sign.  super-scales: f16 [N, K / 256].  importance: f32 [K].
    Raises FormatError for a super-scale that does not fit.
    """
    n, k = weight.shape
    shape = _Shape((table.float(),), unit, columns, _top(scale))
    blocks, power = _scaled(weight)
    counts = _counts(blocks, importance, k)
    negative = blocks < 0
    if parity:
        eights, odd = negative.view(-1, SIGNS), negative.view(-1, SIGNS).sum(1) % 2 == 1
        least = (counts * blocks.abs()).view(-1, SIGNS).argmin(1, keepdim=True)
        eights.scatter_(1, least, eights.gather(1, least) ^ odd[:, None])
    found = _fit(torch.where(negative, -blocks, blocks), counts, power, shape)
    signs = negative.to(torch.uint8).view(n, k)
    if parity:
        signs = _packed(signs.view(n, -1, SIGNS)[..., :7])
    return found.rows.view(n, -1), signs, found.scales.view(n, -1), found.stored(n)


def shifted_grid(weight: Tensor, *, table: Tensor, scale: str, columns: int, shared: int, eighths: int = 1,
                 importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, shifts, scales, super-scales) of w = super_scale * (2 * scale + 1) * (table[row] + (1 - 2 * shift) * eighths / 8).

    table: integers of both signs [rows, group].  scale: 'u3', of every `columns` columns.  shifts: u1, of every `shared`
    columns.  The rest as for `grid`.
    """
    n, _ = weight.shape
    up, down = 8 * table.float() + eighths, 8 * table.float() - eighths
    shape = _Shape((up, down), 1 / 8, columns, _top(scale), shared)
    blocks, power = _scaled(weight)
    found = _fit(blocks, _counts(blocks, importance, weight.shape[1]), power, shape)
    return found.rows.view(n, -1), found.tables.view(n, -1), found.scales.view(n, -1), found.stored(n)


@dataclass(frozen=True)
class _Shape:
    """w = super_scale * steps * unit * a row of one of the tables; steps are odd, up to `top`, and shared by `columns` columns.

    One of several tables is chosen for `shared` columns.
    """

    tables: tuple[Tensor, ...]
    unit: float
    columns: int
    top: int
    shared: int = 0


@dataclass(frozen=True)
class _Found:
    """Per group a row, per shared columns a table, per sub-block a scale, per super-block its scale, exactly."""

    rows: Tensor
    tables: Tensor
    scales: Tensor
    exact: Tensor

    def stored(self, n: int) -> Tensor:
        return stored_scale(self.exact.view(n, 1, -1, 1), "f16")[:, 0, :, 0].contiguous()


def _top(scale: str) -> int:
    kind = number(scale)
    assert kind is not None
    return 2 * int(kind.high) + 1


def _scaled(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Super-blocks [B, 256] whose largest magnitude lies from 0.5 to 1, and what they were divided by, f64 [B, 1]."""
    blocks = weight.double().reshape(-1, SUPER)
    exponent = torch.frexp(blocks.abs().amax(1, keepdim=True)).exponent
    power = torch.ldexp(torch.ones_like(blocks[:, :1]), exponent)
    return (blocks / power).float(), power


def _counts(blocks: Tensor, importance: Tensor | None, k: int) -> Tensor:
    """importance * sqrt(mean square + square) of super-blocks [B, 256]; where no column is of importance, all count."""
    square = blocks * blocks
    # In float64, and then rounded: torch's square root of float32 is not always the nearest.
    found = (_sums(square, SUPER) / SUPER + square).double().sqrt_().float()
    if importance is None:
        return found
    given = importance.double().view(-1, SUPER)
    largest = given.amax(1, keepdim=True)
    scaled = torch.where(largest > 0, given / torch.ldexp(torch.ones_like(largest), torch.frexp(largest).exponent), 1)
    return (found.view(-1, k // SUPER, SUPER) * scaled.float()).view(-1, SUPER)


def _sums(values: Tensor, count: int) -> Tensor:
    """Sums of every `count` values, a power of two, of a contiguous tensor's last dim; half of them on the other, until one is left."""
    values = values.unflatten(-1, (-1, count))
    while values.shape[-1] > 1:
        half = values.shape[-1] // 2
        values = values[..., :half] + values[..., half:]
    return values[..., 0]


def _packed(bits: Tensor) -> Tensor:
    """Bits of the last dim as one number, the first lowest."""
    return (bits << torch.arange(bits.shape[-1], dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


# -- the search --------------------------------------------------------------------------------------------------------


def _fit(x: Tensor, counts: Tensor, power: Tensor, shape: _Shape) -> _Found:
    rows, group = shape.tables[0].shape
    step = max(1, MARKS * group // (rows * SUPER))
    parts = list(_parts(x, counts, power, shape, step))
    joined = [torch.cat(each) for each in zip(*parts, strict=True)]
    kind = torch.uint8 if rows <= 256 else torch.int32
    return _Found(joined[0].to(kind), joined[1].to(torch.uint8), (joined[2] / 2).to(torch.uint8), joined[3])


def _parts(x: Tensor, counts: Tensor, power: Tensor, shape: _Shape, step: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    for i in range(0, x.shape[0], step):
        yield _Search(x[i:i + step], counts[i:i + step], power[i:i + step], shape).found()


class _Search:
    """Scales and rows for some super-blocks x [B, 256], whose errors count by `counts`."""

    def __init__(self, x: Tensor, counts: Tensor, power: Tensor, shape: _Shape) -> None:
        self.x, self.counts, self.power, self.shape = x, counts, power, shape
        group = shape.tables[0].shape[1]
        self.shared = max(1, shape.shared // group)              # groups that share a table
        self.groups = shape.columns // group                     # groups of a sub-block
        largest = max(float(table.abs().max()) for table in shape.tables)
        linear, self.linear_unit = _whole((counts * x).view(-1, group), 24 - _bits(largest * group))
        square, square_unit = _whole(counts.view(-1, group), 24 - _bits(largest * largest * group))
        self.linear = [linear @ table.t() for table in shape.tables]
        self.square = [square @ (table * table).t() for table in shape.tables]
        self.ratio = square_unit / self.linear_unit * (shape.unit / 2)
        self.room = torch.empty_like(self.linear[0])

    def found(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Rows [groups], tables, steps [sub-blocks], super-scales [B]."""
        scales = self.free_scales()
        exact = scales.amax(1, keepdim=True) / self.shape.top
        d = self.stored(exact)
        steps = self.nearest_steps(scales, d)
        rows, tables = self.chosen(d * steps)
        exact = self.refit(rows, tables, steps)
        return rows, tables, steps.flatten(), exact.flatten()

    def free_scales(self) -> Tensor:
        """The best of RATIOS for every sub-block [B, sub-blocks]."""
        mean = float((self.shape.tables[0] ** 2).mean()) * self.shape.unit ** 2
        squares, counts = _sums(self.counts * self.x * self.x, self.shape.columns), _sums(self.counts, self.shape.columns)
        start = torch.where(counts > 0, squares / counts / mean, 0).double().sqrt_().float()
        gains = torch.stack([self.gains(start * ratio) for ratio in RATIOS])
        return start * start.new_tensor(RATIOS)[gains.argmax(0)]

    def nearest_steps(self, scales: Tensor, d: Tensor) -> Tensor:
        """The best of the steps nearest to scale / d and of those beside it."""
        middle = torch.where(d > 0, scales / d / 2 - 0.5, 0).round_() * 2 + 1
        tried = torch.stack([(middle + by).clamp_(1, self.shape.top) for by in (-2, 0, 2)])
        gains = torch.stack([self.gains(steps * d) for steps in tried])
        return tried.gather(0, gains.argmax(0, keepdim=True))[0]

    def gains(self, scale: Tensor) -> Tensor:
        """By how much the best rows lessen the error of each sub-block at a scale [B, sub-blocks]."""
        each = self.by_group(scale)
        best = torch.stack([self.marks(i, each).amax(1) * self.linear_unit[:, 0] for i in range(len(self.linear))])
        return _sums(_sums(best, self.shared).amax(0), self.groups // self.shared).view_as(scale) * scale

    def chosen(self, scale: Tensor) -> tuple[Tensor, Tensor]:
        """The best rows, and which tables they are of, at a scale [B, sub-blocks]."""
        each = self.by_group(scale)
        best, rows = zip(*(self.marks(i, each).max(1) for i in range(len(self.linear))), strict=True)
        tables = _sums(torch.stack(best) * self.linear_unit[:, 0], self.shared).argmax(0)
        return torch.stack(rows).gather(0, tables.repeat_interleave(self.shared)[None])[0], tables

    def marks(self, table: int, scale: Tensor) -> Tensor:
        """The gain of each row for each group at a scale [groups, 1], divided by the scale and by what is alike for a group."""
        torch.mul(self.square[table], scale * self.ratio, out=self.room)
        return torch.sub(self.linear[table], self.room, out=self.room)

    def by_group(self, values: Tensor) -> Tensor:
        """A value of each sub-block, for its groups [groups, 1]."""
        return values.flatten().repeat_interleave(self.groups)[:, None]

    def refit(self, rows: Tensor, tables: Tensor, steps: Tensor) -> Tensor:
        """The super-scale [B, 1] of least error for what is chosen."""
        values = torch.stack(self.shape.tables)[tables.repeat_interleave(self.shared), rows] * self.by_group(steps)
        values = values.view_as(self.x) * self.shape.unit
        weighted = self.counts * values
        linear, square = _sums(weighted * self.x, SUPER), _sums(weighted * values, SUPER)
        return torch.where(square > 0, linear / square, 0) * self.power

    def stored(self, exact: Tensor) -> Tensor:
        """A super-scale as it will be stored."""
        return ((exact * self.power).to(torch.float16) / self.power).float()


def _bits(largest: float) -> int:
    return math.ceil(math.log2(largest + 1))


def _whole(values: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Rows as integers of at most `bits` bits, and what one is worth in each row [rows, 1]: at least 2^(-60 - bits)."""
    exponent = torch.frexp(values.abs().amax(1, keepdim=True)).exponent.clamp_(min=-60)
    return torch.ldexp(values, bits - exponent).round_(), torch.ldexp(torch.ones_like(values[:, :1]), exponent - bits)
