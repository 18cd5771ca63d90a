"""The numbers that each code of a format stands for, with all other fields fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd

import torch
from torch import Tensor

from qdsl.core.numbers import find_number, number
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_fields

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
    """The vectors that codes stand for, of a few rows of a column each: float32 [codes, rows].

    codes: those of the weights [K, N / rows], which `choose` fills in.
    """

    values: Tensor
    codes: Tensor

    def choose(self, columns: Tensor, old: Tensor, slopes: Tensor, inner: Tensor) -> Tensor:
        """Choose the codes of some columns in order, as `affine.Columns.choose` does."""
        changes, half = torch.empty_like(slopes), self.values.square().sum(1) / 2
        for place, column in enumerate(columns.tolist()):
            wanted = old[place] + slopes[place] / inner[place, place]
            chosen = torch.addmm(half, wanted.view(-1, self.values.shape[1]), self.values.T, alpha=-1).argmin(1)
            self.codes[column] = chosen
            changes[place] = self.values[chosen].flatten() - old[place]
            slopes[place + 1:].addr_(inner[place, place + 1:], changes[place], alpha=-1)
        return changes


def vectors(packed: PackedWeight, fields: Mapping[str, Tensor]) -> tuple[str, Vectors] | None:
    """The field whose codes are of vectors of rows in a table of the whole weight, and these; None for another format."""
    codes = [name for name in fields if any(axis.dim in ("N", "K", "N*K") for axis in packed.variant.fields[name].axes)]
    by = {axis.dim: axis.by(packed.sizes) for name in codes for axis in packed.variant.fields[name].axes}
    kind = find_number(packed.variant.fields[codes[0]].type) if len(codes) == 1 else None
    if kind is None or by.keys() != {"N", "K"} or by["K"] != 1 or by["N"] == 1:
        return None
    [code], rows = codes, by["N"]
    every = torch.arange(kind.high + 1, dtype=torch.int32, device=fields[code].device).to(fields[code].dtype)
    values = torch.empty(rows, len(every), dtype=torch.float32, device=every.device)
    decode_fields(packed.variant, {**fields, code: every[None]}, packed.sizes, values)
    return code, Vectors(values.T.contiguous(), torch.empty_like(fields[code].T))


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
