"""Chooses the fields of a quantized weight again, block by block with all others fixed, as long as the loss falls.

What a block of columns b adds to the loss when its weights change by d is d H_bb d^T - 2 d g_b^T, with g = (weight - decoded) H.
In a field that weights are affine in, the best scale of a block is a quotient, which is rounded to the field's type; and the best
of the rows of a grid is that of least cost among all.  See affine.py.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qdsl.encode.calibrated.affine import (
    FLOAT_BITS,
    MOST_BITS,
    Affine,
    Columns,
    affine,
    decoded,
    field_columns,
    field_number,
    is_linear,
    places_of,
)
from qdsl.encode.calibrated.hessian import Hessian
from qdsl.host import progress
from qdsl.runtime.weight.packed import PackedWeight

STEP = 128                                                       # columns whose changes reach the others by one product
SWEEPS = 3                                                       # over all fields, at most
LEAST_GAIN = 0.01                                                # of the loss, for another sweep

Choose = Callable[[slice, Tensor, Tensor], Tensor]               # columns, their H and g: how their weights change


def descend(packed: PackedWeight, weight: Tensor, hessian: Hessian) -> PackedWeight:
    """The weight with the fields that lessen its loss.  Progress: its numbers."""
    state = Descent(packed, weight, hessian)
    # codes last: they are the best ones for the scales that are stored
    names = sorted(state.fields, key=lambda name: field_columns(packed, name), reverse=True)
    sweep = weight.numel() * len(names) / (2 + SWEEPS * len(names))      # progress counts products with H: a field is one
    progress.passed((weight.numel() - SWEEPS * sweep) / 2)
    loss = state.loss
    for _ in range(SWEEPS):
        before = state.loss
        with progress.part(sweep, len(names) * weight.numel()):
            names = [name for name in names if state.choose(name)]
        if not names or state.loss > (1 - LEAST_GAIN) * before:
            break
    chosen = packed.format.pack(state.fields, packed.storage, **packed.params)
    # some formats round what they decode once more
    return chosen if hessian.loss(packed.format.dequantize(chosen, torch.float32).sub_(weight)) < loss else packed


class Descent:
    """A weight while its fields are chosen.  Its matrices are [K, N], as those of `solve`.

    values: the decoded weights; gradient: H (weight - values); loss: of the whole weight.
    """

    def __init__(self, packed: PackedWeight, weight: Tensor, hessian: Hessian) -> None:
        self.packed, self.hessian, self.weight = packed, hessian.matrix, weight.T
        self.fields = packed.format.unpack(packed)
        self.kinds: dict[str, Affine | None] = {}
        self.values = self.decoded()
        self.gradient = self.hessian @ (self.weight - self.values)
        self.loss = self.measured()

    def measured(self) -> float:
        """The loss, from the values and the gradient."""
        return float(((self.weight - self.values) * self.gradient).sum(dtype=torch.float64))

    def decoded(self, **changed: Tensor) -> Tensor:
        """The weights, some of their fields changed."""
        return decoded(self.packed, {**self.fields, **changed}).T.contiguous()

    def choose(self, name: str) -> bool:
        """Choose a field again; returns whether its kind allows it."""
        chosen = self.chosen(name)
        if chosen is not None:
            self.fields = {**self.fields, name: chosen.contiguous()}
            self.loss = self.measured()
        return chosen is not None

    def chosen(self, name: str) -> Tensor | None:
        """The values of a field that lessen the loss; None where its blocks or its kind allow no choice."""
        step, (bits, is_float) = field_columns(self.packed, name), field_number(self.packed, name)
        if not step or not bits or (bits > MOST_BITS and not is_float):
            return None
        blocks = self.fields[name].reshape(self.packed.shape[0], -1).T       # [blocks, N]
        if is_float and bits > FLOAT_BITS:
            new = self._floats(name, blocks, step) if is_linear(self.packed, name) else None
        else:
            if name not in self.kinds:
                self.kinds[name] = affine(self.packed, name, step)
            kind = self.kinds[name]
            new = None if kind is None else self._codes(name, kind, blocks, step)
        return None if new is None else new.T.reshape(self.fields[name].shape).contiguous().view(self.fields[name].dtype)

    def _floats(self, name: str, blocks: Tensor, step: int) -> Tensor:
        """The best floats [blocks, N] of a field."""
        old = self.fields[name]
        chosen = blocks.float()
        doubled = self.decoded(**{name: (old.float() * 2).to(old.dtype)})
        factor = (doubled - self.values) / chosen.repeat_interleave(step, 0)
        factor = torch.where(torch.isfinite(factor), factor, 0)

        def choose(columns: slice, inner: Tensor, slope: Tensor) -> Tensor:
            block, own = columns.start // step, factor[columns]
            new = (chosen[block] + _quotient(own, inner, slope)).to(old.dtype).float()
            new = torch.where(torch.isfinite(new) & (new.sign() == chosen[block].sign()), new, chosen[block])
            change = own * (new - chosen[block])
            chosen[block] = new
            return change

        self._by_blocks(step, choose)
        return chosen.to(old.dtype)

    def _codes(self, name: str, kind: Affine, blocks: Tensor, step: int) -> Tensor:
        """The best codes [blocks, N] of a field of few bits."""
        if step == 1:
            return self._columns(Columns.of(self.packed, self.fields, name, kind))
        first, factor = kind.parts(self.packed, self.fields, name)
        if kind.values.shape[1] > 1:
            return kind.choices.to(first.device)[self._rows(kind.values, first, factor)]
        values, order = kind.values[:, 0].sort(stable=True)
        rising = kind.choices.to(first.device)[order]
        return rising[self._scalars(factor, values, places_of(rising, blocks), step)]

    def _columns(self, columns: Columns) -> Tensor:
        """The best codes [K, N] of a field with a value for each weight."""
        for start in range(0, len(self.values), STEP):
            places = slice(start, min(start + STEP, len(self.values)))
            inner, slope = self.hessian[places, places], self.gradient[places].clone()
            self._change(places, columns.choose(places, slope, inner, descends=True))
        return columns.codes

    def _scalars(self, factor: Tensor, values: Tensor, places: Tensor, step: int) -> Tensor:
        """The best places [blocks, N] in rising values that are the same for all columns of a block."""
        borders, current = (values[1:] + values[:-1]) / 2, values[places]

        def choose(columns: slice, inner: Tensor, slope: Tensor) -> Tensor:
            block, own = columns.start // step, factor[columns]
            places[block] = torch.searchsorted(borders, current[block] + _quotient(own, inner, slope))
            return own * (values[places[block]] - current[block])

        self._by_blocks(step, choose)
        return places

    def _rows(self, values: Tensor, first: Tensor, factor: Tensor) -> Tensor:
        """The best rows [blocks, N] of a grid of values, [rows, columns of a block]."""
        step = values.shape[1]
        i, j = torch.triu_indices(step, step, dtype=torch.int64, device=values.device)
        costs = torch.cat([values[:, i] * values[:, j] * torch.where(i == j, 1, 2), -2 * values], 1)
        places = torch.empty(len(factor) // step, factor.shape[1], dtype=torch.int64, device=values.device)

        def choose(columns: slice, inner: Tensor, slope: Tensor) -> Tensor:
            own, fixed = factor[columns], self.values[columns] - first[columns]
            linear = own * torch.addmm(slope, inner, fixed)
            place = (costs @ torch.cat([own[i] * own[j] * inner[i, j, None], linear])).argmin(0)
            places[columns.start // step] = place
            return own * values[place].T - fixed

        self._by_blocks(step, choose)
        return places

    def _by_blocks(self, step: int, choose: Choose) -> None:
        """Change blocks of columns in order; each sees what those before it changed."""
        k, size = len(self.values), step * max(1, STEP // step)
        for start in range(0, k, size):
            places = slice(start, min(k, start + size))
            inner, slope, changes = self.hessian[places, places], self.gradient[places].clone(), []
            for column in range(0, len(slope), step):
                own = slice(column, column + step)
                changes.append(choose(slice(start + column, start + column + step), inner[own, own], slope[own]))
                slope[column + step:].addmm_(inner[column + step:, own], changes[-1], alpha=-1)
            self._change(places, torch.cat(changes))

    def _change(self, columns: slice, changes: Tensor) -> None:
        """Add changes to the values of some columns."""
        self.values[columns] += changes
        self.gradient.addmm_(self.hessian[:, columns], changes, alpha=-1)
        progress.passed(changes.numel())


def _quotient(factor: Tensor, inner: Tensor, slope: Tensor) -> Tensor:
    """The change [N] of a scale with the least loss; 0 where the scale does not matter."""
    square = (factor * (inner @ factor)).sum(0)
    return torch.where(square > 0, (factor * slope).sum(0) / square, 0)

