"""The numbers that each code of a format stands for, with all other fields fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from qdsl.core.numbers import find_number, number
from qdsl.encode.blocks import quotients
from qdsl.encode.vectors import nearest_vectors
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_fields

TURNS = 6                                                        # in which codes of two tables are chosen, each for the other's
LEAST_BLOCK = 8                                                  # columns per value of a field; shorter runs are vectors


def code_field(variant: Variant) -> str:
    """The field with the code of each weight; '' if weights have several fields of their own, or share codes with others."""
    if variant.cuts[1] == "1":                                  # blocks are not of adjacent columns
        return ""
    own = [name for name, field in variant.fields.items() if [axis.text for axis in field.axes] == ["N", "K"]]
    steps = [axis.by({}) for name, field in variant.fields.items() for axis in field.axes
             if axis.dim == "K" and axis.step and not any(isinstance(part, str) for part in axis.step)]
    kind = find_number(variant.fields[own[0]].type) if len(own) == 1 else None
    is_code = len(own) == 1 and (kind is None or kind.bits <= 8) and all(step > LEAST_BLOCK for step in steps)
    return own[0] if is_code else ""


def block_columns(packed: PackedWeight, code: str) -> int:
    """The number of adjacent columns in which the same code is the same number."""
    k = packed.shape[1]
    steps = [(axis.dim, axis.by(packed.sizes)) for name, field in packed.variant.fields.items()
             if name != code and field.groups is None for axis in field.axes]
    return gcd(*(step for dim, step in steps if dim == "K"), *(gcd(step, k) for dim, step in steps if dim == "N*K")) or k


@dataclass(frozen=True, slots=True)
class Levels:
    """The values of codes in blocks of `step` columns, rising.

    values: float32 [blocks, rows, choices].  choices: the code of each, the same shape.  borders: halfway between two values.
    codes: those of the weights [K, rows], which `choose` fills in.
    """

    values: Tensor
    choices: Tensor
    borders: Tensor
    step: int
    codes: Tensor

    def nearest(self, weights: Tensor, column: int) -> tuple[Tensor, Tensor]:
        """The values nearest to weights [rows] of a column, and their codes."""
        block = column // self.step
        places = torch.searchsorted(self.borders[block], weights[:, None])
        return self.values[block].gather(1, places)[:, 0], self.choices[block].gather(1, places)[:, 0]

    def choose(self, columns: Tensor, old: Tensor, slopes: Tensor, inner: Tensor) -> Tensor:
        """Choose the codes of some columns in order, as `affine.Columns.choose` does."""
        changes = torch.empty_like(slopes)
        for place, column in enumerate(columns.tolist()):
            value, self.codes[column] = self.nearest(old[place] + slopes[place] / inner[place, place], column)
            changes[place] = value - old[place]
            slopes[place + 1:].addr_(inner[place, place + 1:], changes[place], alpha=-1)
        return changes


@dataclass(frozen=True, slots=True)
class Vectors:
    """Codes of vectors of `rows` rows or `step` columns: a weight is its row's scale [N, 1] times the sum of the tables' entries.

    tables: of each code, float32 [codes, numbers of a vector].  fields: the codes by name, which `choose` fills in.
    """

    tables: list[Tensor]
    fields: dict[str, Tensor]
    scale: Tensor
    rows: int
    step: int

    def choose(self, columns: Tensor, old: Tensor, slopes: Tensor, inner: Tensor, pivots: Tensor) -> Tensor:
        """Choose the codes of some columns in order, as `affine.Columns.choose` does; of two tables by turns.

        pivots [columns]: by how much each adds to the loss; those of a vector's columns weigh its distances.
        """
        changes = torch.empty_like(slopes)
        for place in range(0, len(columns), self.step):
            run = slice(place, place + self.step)
            own, block = inner[run, run], int(columns[place]) // self.step
            wanted = old[run] + torch.linalg.solve_triangular(own.T, slopes[run], upper=False)
            target, tables = quotients(wanted.T, self.scale).reshape(-1, self.tables[0].shape[1]), self.tables
            if self.step > 1:                                    # so that plain distances are those of the loss
                metric = own * pivots[run].sqrt()
                target, tables = target @ metric, [table @ metric for table in tables]
            target, tables = target.double(), [table.double() for table in tables]
            parts, counts = [torch.zeros_like(target)] * len(tables), torch.ones_like(target)
            for turn in range(1 if len(tables) == 1 else TURNS):
                at = turn % len(tables)
                codes = nearest_vectors(target - sum(parts[:at] + parts[at + 1:]), counts, tables[at])
                parts[at] = tables[at][codes]
                list(self.fields.values())[at][:, block] = codes
            chosen = [table[codes[:, block].long()] for table, codes in zip(self.tables, self.fields.values(), strict=True)]
            changes[run] = (torch.stack(chosen).sum(0).view(-1, self.step) * self.scale).T - old[run]
            slopes[run.stop:].addmm_(inner[run, run.stop:].T, changes[run], alpha=-1)
        return changes


def vectors(packed: PackedWeight, fields: Mapping[str, Tensor]) -> Vectors | None:
    """The codes of vectors in tables of the whole weight; None for another format."""
    kinds = packed.variant.fields
    by = {name: {axis.dim: axis.by(packed.sizes) for axis in kinds[name].axes} for name in fields if kinds[name].type != "index"}
    own, tables, scales = ([name for name, steps in by.items() if steps.keys() & {"N", "K", "N*K"} == dims]
                           for dims in ({"N", "K"}, set(), {"N"}))
    if not own or not tables or any(by[name] != by[own[0]] for name in own) or len(own) + len(tables) + len(scales) < len(by):
        return None
    rows, step = by[own[0]]["N"], by[own[0]]["K"]
    if (rows == 1) == (step == 1) or len(scales) > 1:
        return None
    device, none = fields[own[0]].device, {name: torch.zeros_like(fields[name][:1, :1]) for name in own}
    unit = {name: torch.ones_like(fields[name][:1]) for name in scales}
    matrices = []
    for name in own:
        kind = find_number(kinds[name].type)
        assert kind is not None
        every = torch.arange(kind.high + 1, dtype=torch.int32, device=device).to(fields[name].dtype)[None]
        values = torch.empty(rows, step * every.shape[1], dtype=torch.float32, device=device)
        decode_fields(packed.variant, {**fields, **{key: one.expand_as(every) for key, one in none.items()}, **unit, name: every},
                      packed.sizes, values)
        matrices.append(values.view(rows, -1, step).transpose(0, 1).flatten(1))
    matrices[1:] = [table - matrices[0][0] for table in matrices[1:]]
    scale = fields[scales[0]].float()[:, None] if scales else torch.ones(packed.shape[0], 1, dtype=torch.float32, device=device)
    return Vectors(matrices, {name: torch.empty_like(fields[name]) for name in own}, scale, rows, step)


def levels(packed: PackedWeight, fields: Mapping[str, Tensor], code: str, choices: Tensor) -> Levels:
    """The values of codes, `choices`, of a weight whose other fields are `fields`."""
    step = block_columns(packed, code)
    n, k = packed.shape
    width = min(step, (k - 1) % step + 1)                        # of the narrowest block, whose columns take a code each
    integers = torch.empty_like(fields[code])
    decoded = torch.empty(n, k, dtype=torch.float32, device=integers.device)
    values = torch.empty(-(-k // step), n, len(choices), dtype=torch.float32, device=integers.device)
    for start in range(0, len(choices), width):
        part = choices[start:start + width]
        column = torch.arange(k, device="cpu") % step
        integers.view(choices.dtype).view(n, k)[:] = part[column.clamp(max=len(part) - 1)].to(integers.device)
        decode_fields(packed.variant, {**fields, code: integers}, packed.sizes, decoded)
        for place in range(len(part)):
            values[..., start + place] = decoded[:, place::step].T
    rising, order = values.nan_to_num_(nan=torch.inf, neginf=torch.inf).sort(dim=-1, stable=True)
    # between two infinities there is no half; nothing is nearer to them than to a finite value
    borders = ((rising[..., 1:] + rising[..., :-1]) / 2).contiguous()
    chosen = torch.empty(k, n, dtype=choices.dtype, device=integers.device)
    return Levels(rising, choices.to(integers.device)[order], borders, step, chosen)


def code_choices(packed: PackedWeight, chosen: Tensor, code: str) -> Tensor:
    """The codes that weights may have, as integers.  chosen: those of round to nearest.

    Of an integer type those between its least and its greatest: a scheme leaves out codes that have no number.
    """
    variant = packed.variant
    kind = number(str(packed.params.get(variant.fields[code].type, variant.fields[code].type)))
    if kind.is_float:
        return torch.arange(1 << kind.bits, dtype=torch.uint8, device="cpu")
    low, high = (int(value) for value in chosen.aminmax())
    return torch.arange(low, high + 1, dtype=torch_dtype(kind.name), device="cpu")
