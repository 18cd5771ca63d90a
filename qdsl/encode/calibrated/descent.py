"""Chooses the fields of a quantized weight again, block by block with all others fixed, as long as the loss falls.

What a block of columns b adds to the loss when its weights change by d is d H_bb d^T - 2 d g_b^T, with g = (weight - decoded) H.
In a field that weights are affine in, the best scale of a block is a quotient, which is rounded to the field's type; and the best
of the rows of a grid is that of least cost among all.  See affine.py.  All fields of a run of columns are chosen before those of
the next, so that one product with H serves them all.  Rows do not depend on each other, so the first ones say what a sweep gains.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from math import lcm

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
from qdsl.runtime.weight.tiles import row_tiles

STEP = 128                                                       # columns whose changes reach the others by one product
SWEEPS = 3                                                       # over all fields, at most
TRIED = 1 / 8                                                    # of the rows, by whose loss the first sweep is judged
LEAST_GAIN = 0.1                                                 # of the loss, for a sweep over all rows
DRIFT = 1e-5                                                     # of the largest value, by sums of changes

Kinds = Mapping[str, "Affine | bool"]
Choose = Callable[[slice, Tensor, Tensor], Tensor]               # columns, their H and g: how their weights change


def descend(state: Descent) -> PackedWeight:
    """The weight with the fields that lessen its loss.  Progress: its numbers, as many for each product with H."""
    products = 1 + max(0, len(state.names) - 1) / len(state.runs)        # of a sweep: fields of a run have one each, within it
    losses, numbers = [state.loss], state.weight.numel() / (1 + (TRIED + SWEEPS) * products)
    progress.advance_units(numbers)                                     # of the gradient
    with progress.step_share(TRIED * products * numbers, TRIED * len(state.names) * state.weight.numel()):
        if not state.promises():
            return state.packed
    for _ in range(SWEEPS):
        with progress.step_share(products * numbers, len(state.names) * state.weight.numel()):
            state.sweep(state.names)
        losses.append(state.loss)
        if losses[-1] > (1 - LEAST_GAIN) * losses[-2]:
            break
    chosen = state.chosen()
    return chosen if state.measured(chosen) < losses[0] else state.packed


class Descent:
    """A weight while its fields are chosen.  Its matrices are [K, N], as those of `solve`.

    values: the decoded weights; gradient: H (weight - values).  kinds: how weights depend on the fields that may be chosen, those
    of long blocks first: codes are then the best ones for the scales that are stored.  names: those fields.  runs: of columns.
    """

    def __init__(self, packed: PackedWeight, weight: Tensor, hessian: Hessian, kinds: Kinds | None = None) -> None:
        self.packed, self.hessian, self.weight = packed, hessian, weight.T.contiguous()
        fields = packed.format.unpack(packed)
        self.values = decoded(packed, fields).T.contiguous()
        self.gradient = hessian.matrix @ (self.weight - self.values)
        steps = {name: field_columns(packed, name) for name in fields}
        self.kinds = _kinds(packed, steps) if kinds is None else kinds
        self.names = tuple(self.kinds)
        k, size = packed.shape[1], lcm(STEP, packed.step("K"), *(steps[name] for name in self.names))
        self.runs = [Run(self, slice(start, min(k, start + size)), steps) for start in range(0, k, size)]

    @property
    def loss(self) -> float:
        """The loss of the whole weight, from the values and the gradient."""
        return float(((self.weight - self.values) * self.gradient).sum(dtype=torch.float64))

    def promises(self) -> bool:
        """Whether a sweep over the first rows lessens their loss by LEAST_GAIN; True where they cannot be cut off."""
        _, stop = next(row_tiles(self.packed, int(TRIED * self.weight.numel())), (0, 0))
        if not self.names or stop == self.packed.shape[0]:
            return bool(self.names)
        first = Descent(self.packed.cut("N", 0, stop), self.weight.T[:stop], self.hessian, self.kinds)
        loss = first.loss
        first.sweep(first.names)
        return first.loss < (1 - LEAST_GAIN) * loss

    def sweep(self, names: Sequence[str]) -> None:
        """Choose fields again, run by run."""
        for run in self.runs:
            before = run.values.clone()
            for name in names:
                run.choose(name)
            changes = run.values - before
            for others in (slice(0, run.columns.start), slice(run.columns.stop, None)):
                self.gradient[others].addmm_(self.hessian.matrix[others, run.columns], changes, alpha=-1)

    def chosen(self) -> PackedWeight:
        """The weight with the fields of all runs."""
        fields = self.packed.format.unpack(self.packed)
        for name in self.names:
            parts = [run.fields[name].reshape(self.packed.shape[0], -1) for run in self.runs]
            fields[name] = torch.cat([_bytes(part) for part in parts], 1).view(parts[0].dtype).view(fields[name].shape)
        return self.packed.format.pack(fields, self.packed.storage, **self.packed.params)

    def measured(self, packed: PackedWeight) -> float:
        """The loss of a weight as it decodes; some formats round that once more."""
        values = packed.format.dequantize(packed, torch.float32).T
        if bool((values - self.values).abs().max() <= DRIFT * values.abs().max()):
            return self.loss
        return self.hessian.loss((values - self.weight).T)


def _bytes(values: Tensor) -> Tensor:
    """Values of one byte as integers, which torch joins whatever they are."""
    return values.view(torch.uint8) if values.element_size() == 1 else values


def _kinds(packed: PackedWeight, steps: Mapping[str, int]) -> Kinds:
    """How weights depend on the fields that may be chosen, those of long blocks first."""
    kinds = {name: _kind(packed, name, step) for name, step in sorted(steps.items(), key=lambda item: -item[1])}
    return {name: kind for name, kind in kinds.items() if kind is not None}


def _kind(packed: PackedWeight, name: str, step: int) -> Affine | bool | None:
    """How weights depend on a field; True for one of long floats that they are linear in, None for one that is not chosen."""
    bits, is_float = field_number(packed, name)
    if not step or not bits or (bits > MOST_BITS and not is_float):
        return None
    return affine(packed, name, step) if not is_float or bits <= FLOAT_BITS else is_linear(packed, name) or None


class Run:
    """A run of columns of a weight, of whole blocks; values and gradient are views of the weight's."""

    def __init__(self, whole: Descent, columns: slice, steps: Mapping[str, int]) -> None:
        self.packed = whole.packed.cut("K", columns.start, columns.stop)
        self.columns, self.hessian = columns, whole.hessian.matrix[columns, columns]
        self.values, self.gradient = whole.values[columns], whole.gradient[columns]
        self.kinds, self.steps = whole.kinds, steps
        self.fields = self.packed.format.unpack(self.packed)

    def decoded(self, **changed: Tensor) -> Tensor:
        """The weights, some of their fields changed."""
        return decoded(self.packed, {**self.fields, **changed}).T.contiguous()

    def choose(self, name: str) -> None:
        """Choose a field again, for less loss."""
        step, kind = self.steps[name], self.kinds[name]
        old = self.fields[name]
        blocks = old.reshape(self.packed.shape[0], -1).T         # [blocks, N]
        new = self._codes(name, kind, blocks, step) if isinstance(kind, Affine) else self._floats(name, blocks, step)
        self.fields = {**self.fields, name: new.T.reshape(old.shape).contiguous().view(old.dtype)}

    def _floats(self, name: str, blocks: Tensor, step: int) -> Tensor:
        """The best floats [blocks, N] of a field."""
        old = self.fields[name]
        chosen = blocks.to(torch.float32, copy=True)             # fields may be views of the weight's tensors
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
            self._change(places, columns.choose(places, self.values[places], slope, inner))
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
        progress.advance_units(changes.numel())


def _quotient(factor: Tensor, inner: Tensor, slope: Tensor) -> Tensor:
    """The change [N] of a scale with the least loss; 0 where the scale does not matter."""
    square = (factor * (inner @ factor)).sum(0)
    return torch.where(square > 0, (factor * slope).sum(0) / square, 0)

