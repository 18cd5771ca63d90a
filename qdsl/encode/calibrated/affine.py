"""How the weights of a format depend on one of its fields, found by decoding: most are affine in each field."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from math import lcm

import torch
from torch import Tensor

from qdsl.core.numbers import find_number
from qdsl.encode import native
from qdsl.encode.calibrated.levels import code_choices
from qdsl.runtime.weight.defaults import is_default
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.tiles import decode_fields

TOLERANCE = 1e-3                                                 # of the largest change: what differs more is not affine
MOST_BITS = 11                                                   # of integers whose values are all compared
FLOAT_BITS = 8                                                   # of floats whose values are all compared
SAMPLE = 256                                                     # columns that are decoded with each value, about


@dataclass(frozen=True, slots=True)
class Affine:
    """A weight is first + factor * values[choice, its column of the block], whichever choice the field of its block is.

    choices: codes of the field [C]; values: [C, columns of a block], or [C, 1] where all columns have the same.  A value is 0 for
    the first choice, and 1 for the choice `unit` [columns or 1], by whose weights the factor is known.
    """

    choices: Tensor
    values: Tensor
    unit: Tensor

    def parts(self, packed: PackedWeight, fields: Mapping[str, Tensor], name: str) -> tuple[Tensor, Tensor]:
        """The weights of the first choice, and the factor of values, [K, N]."""
        first = decoded(packed, {**fields, name: filled(fields[name], self.choices[0])}).T.contiguous()
        factor = torch.empty_like(first).view(-1, len(self.values[0]), first.shape[1])
        for unit in sorted(set(self.unit.tolist())):
            change = decoded(packed, {**fields, name: filled(fields[name], self.choices[unit])}).T.sub(first)
            columns = (self.unit == unit).expand(factor.shape[1])
            factor[:, columns] = change.reshape(factor.shape)[:, columns]
        return first, factor.view(first.shape)


@dataclass(slots=True)
class Columns:
    """The codes of weights that are chosen column by column; matrices are [K, N].

    Weights are first + factor * values[place], with values rising.  choices: the code of each place.
    """

    first: Tensor
    factor: Tensor
    values: Tensor
    choices: Tensor
    places: Tensor

    @classmethod
    def of(cls, packed: PackedWeight, fields: Mapping[str, Tensor], name: str, kind: Affine) -> Columns:
        """The columns of a field with a value for each weight, before any is chosen."""
        first, factor = kind.parts(packed, fields, name)
        values, order = kind.values[:, 0].sort(stable=True)
        choices = kind.choices.to(first.device)[order]
        return cls(first, factor, values, choices, torch.empty(first.shape, dtype=torch.int32, device=first.device))

    @property
    def codes(self) -> Tensor:
        """The codes that were chosen, [K, N]."""
        return self.choices[self.places]

    def choose(self, columns: Tensor | slice, old: Tensor, slopes: Tensor, inner: Tensor) -> Tensor:
        """Choose the places of some columns in order; returns how their weights, `old` [columns, N], change.

        slopes [columns, N]: by how much the loss falls with each.  A change of a column lessens those of later ones, by the rows
        of inner [columns, columns].
        """
        first, factor = (matrix[columns].clone(memory_format=torch.contiguous_format) for matrix in (self.first, self.factor))
        borders, changes = (self.values[1:] + self.values[:-1]) / 2, torch.empty_like(slopes)
        places = torch.empty(slopes.shape, dtype=torch.int32, device=slopes.device)
        if not native.choose_columns(old, slopes, inner.contiguous(), first, factor, borders, self.values, places, changes):
            for column, own in enumerate(inner.diagonal().tolist()):
                target = old[column] + slopes[column] / own if own > 0 else old[column]
                wanted = torch.where(factor[column] != 0, (target - first[column]) / factor[column], 0)
                places[column] = torch.searchsorted(borders, wanted)
                changes[column] = first[column] + factor[column] * self.values[places[column]] - old[column]
                slopes[column + 1:].addr_(inner[column, column + 1:], changes[column], alpha=-1)
        self.places[columns] = places
        return changes


def decoded(packed: PackedWeight, fields: Mapping[str, Tensor]) -> Tensor:
    """The float32 weights [N, K] of the fields of a weight."""
    out = torch.empty(packed.shape, dtype=torch.float32, device=next(iter(fields.values())).device)
    variant = packed.variant
    in_order = {name for name in fields.keys() & variant.defaults.keys() if variant.fields[name].groups is not None
                and is_default(variant, name, fields[name], packed.sizes)}     # decode would gather by it, which takes longest
    decode_fields(variant, {name: field for name, field in fields.items() if name not in in_order}, packed.sizes, out)
    return out


def field_number(packed: PackedWeight, name: str) -> tuple[int, bool]:
    """The bits of a field's type, and whether it is a float; (0, False) for an index."""
    kind = find_number(str(packed.params.get(packed.variant.fields[name].type, packed.variant.fields[name].type)))
    return (0, False) if kind is None else (kind.bits, kind.is_float)


def field_columns(packed: PackedWeight, name: str) -> int:
    """The columns of a row that share a value of a field; 0 where rows share values, and where a block is not whole."""
    field, k = packed.variant.fields[name], packed.shape[1]
    by = {axis.dim: axis.by(packed.sizes) for axis in field.axes}
    if by.keys() == {"N*K"}:
        step, is_own = by["N*K"], packed.variant.cuts[1] != "1"  # else blocks are not of adjacent columns
    else:
        step, is_own = min(by.get("K", k), k), by.keys() <= {"N", "K"} and by.get("N") == 1 and len(by) == len(field.axes)
    return step if is_own and field.groups is None and not k % step else 0


def is_linear(packed: PackedWeight, name: str) -> bool:
    """Whether weights are affine in a field of floats."""
    part, some = _sample(packed, 1)
    once, twice, fourfold = (decoded(part, {**some, name: (some[name].float() * by).to(some[name].dtype)}) for by in (1, 2, 4))
    error = float((fourfold - twice - 2 * (twice - once)).abs().max())
    return error <= TOLERANCE * float((twice - once).abs().max())        # not so if one is not finite


def affine(packed: PackedWeight, name: str, step: int) -> Affine | None:
    """How weights depend on a field of few bits with a value for `step` columns; None where they are not affine in it.

    Neither are they where rows have tables of their own.
    """
    dims = [{axis.dim for axis in field.axes} for field in packed.variant.fields.values()]
    if any("N" in every and every - {"N", "K"} for every in dims):
        return None
    part, some = _sample(packed, step)
    choices = _choices(packed, name, step)
    every = torch.stack([decoded(part, {**some, name: filled(some[name], choice)}) for choice in choices])
    finite = torch.isfinite(every).flatten(1).all(1)
    choices = choices[finite.to(choices.device)]
    changes = (every - every[:1])[finite].view(len(choices), -1, step)            # [choices, blocks, columns]
    if len(choices) < 2 or not float(changes.abs().max()) > 0:
        return None
    for unit in (changes.abs().amax((1, 2)).argmax().expand(step), changes.abs().amax(1).argmax(0)):
        factor = changes.gather(0, unit.expand(1, *changes.shape[1:]))
        largest = factor.abs().argmax(1, keepdim=True)           # the block from which the values of a column are taken
        values = changes.gather(1, largest.expand(len(changes), 1, step)) / factor.gather(1, largest)
        if bool((values * factor - changes).abs().max() <= TOLERANCE * changes.abs().max()):
            same = bool((values - values[..., :1]).abs().max() <= TOLERANCE)
            return Affine(choices, values[:, 0, :1] if same else values[:, 0], unit[:1] if same else unit)
    return None


def filled(values: Tensor, choice: Tensor) -> Tensor:
    """A tensor like the values of a field that has one choice everywhere."""
    return torch.full_like(values.view(choice.dtype), int(choice)).view(values.dtype)


def places_of(choices: Tensor, codes: Tensor) -> Tensor:
    """The places of codes among the choices of a field, int32."""
    place = torch.zeros(1 << MOST_BITS, dtype=torch.int32, device=choices.device)
    place[choices.long() % len(place)] = torch.arange(len(choices), dtype=torch.int32, device=choices.device)
    return place[codes.contiguous().view(choices.dtype).long() % len(place)]


def _choices(packed: PackedWeight, name: str, step: int) -> Tensor:
    """The codes that a field may have: of scales in few bits those between the least and the greatest that it has."""
    values = packed.format.unpack(packed)[name]
    choices = code_choices(packed, values, name)
    if step == 1 or not field_number(packed, name)[1]:
        return choices
    low, high = (int(code) for code in values.view(torch.uint8).aminmax())
    return choices[low:high + 1]


def _sample(packed: PackedWeight, step: int) -> tuple[PackedWeight, dict[str, Tensor]]:
    """The first rows and columns of a weight, as few as its storage can be cut to, and their fields."""
    part = packed.cut("N", 0, min(packed.step("N"), packed.shape[0]))
    least = lcm(packed.step("K"), step)
    with suppress(FormatError):                                  # all columns, if a storage allows no cut
        part = part.cut("K", 0, min(packed.shape[1], -(-SAMPLE // least) * least))
    return part, packed.format.unpack(part)
