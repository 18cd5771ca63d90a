"""Gathers the fields of chosen rows and columns of a weight, in the same blocks or in smaller ones.

A block has one value, so all weights of a block of the result must come from one block of the source.  A smaller block repeats
the value of the larger one.  Nothing is decoded, so numbers keep their bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import gcd, prod

import torch
from torch import Tensor

from qdsl.core.shapes import Axis
from qdsl.runtime.weight import order
from qdsl.runtime.weight.defaults import default_field
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class GatherSource:
    """The rows, by number (int64 on the CPU), and columns [start, stop) of a weight to make a new weight from."""

    packed: PackedWeight
    rows: Tensor
    start: int
    stop: int

    @classmethod
    def whole(cls, packed: PackedWeight) -> GatherSource:
        """All rows and columns of a weight."""
        return cls(packed, torch.arange(packed.shape[0], device="cpu"), 0, packed.shape[1])

    @property
    def shape(self) -> tuple[int, int]:
        """(rows, columns) of the new weight."""
        return self.rows.numel(), self.stop - self.start


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """For every field the axes and element numbers to gather; and the group of each column, if columns are not in order."""

    elements: Mapping[str, list[tuple[int, Tensor]]]
    index: Tensor | None


def plan_gather(source: GatherSource, sizes: Mapping[str, int]) -> GatherPlan:
    """How to gather fields for the rows and columns of `source`, in blocks of `sizes`.

    Raises FormatError if a block of the result would have weights from several blocks of the source.
    """
    variant = source.packed.variant
    groups, index = variant.index_groups, group_index(source.packed)
    taken, index = (None, None) if index is None or groups is None else _groups_taken(source, sizes, groups, index)
    elements: dict[str, list[tuple[int, Tensor]]] = {}
    for name, field in variant.fields.items():
        elements[name] = []
        for place, axis in enumerate(field.axes):
            if groups is not None and taken is not None and axis.text == groups.text != "K":
                elements[name].append((place, taken))
            elif groups is not None and index is not None and axis.dim == "K" and groups.text == "K" and axis.by(sizes) > 1 \
                    and source.shape[1] < source.packed.shape[1]:
                raise FormatError(f"one value of '{name}' is for columns that are stored side by side, and these lie all over K")
            elif axis.dim in ("N", "K", "N*K"):
                elements[name].append((place, _source_elements(source, sizes, name, axis)))
    return GatherPlan(elements, index)


def gather_fields(source: GatherSource, sizes: Mapping[str, int], gather: GatherPlan, fields: Mapping[str, Tensor],
                  ) -> dict[str, Tensor]:
    """The fields of the rows and columns of `source`; `fields` are those of its weight."""
    packed, result = source.packed, dict(fields)
    for name, value in fields.items():
        if packed.variant.fields[name].groups is None:
            for place, elements in gather.elements[name]:
                result[name] = _take_elements(result[name], place, elements)
        elif gather.index is not None:
            result[name] = gather.index.to(value.device)
        else:
            result[name] = default_field(packed.format.description, packed.variant, name, source.shape,
                                         {**packed.params, **sizes}, value.device)
    return result


def group_index(packed: PackedWeight) -> Tensor | None:
    """int32 [K], the group of each column, if columns are not in order (act-order); None if they are, and on meta."""
    if packed.device.type == "meta":
        return None
    if packed.order is not None:
        return order.index_of(packed.order.cpu(), group_size(packed))
    return packed.tensors[packed.moved_indices[0]].cpu() if packed.moved_indices else None


def group_size(packed: PackedWeight) -> int:
    """Columns per group, for a format with an index of groups."""
    groups = packed.variant.index_groups
    assert groups is not None
    return groups.by(packed.sizes)


def is_scattered(variant: Variant) -> bool:
    """Whether a block has weights all over the matrix."""
    return variant.cuts[1] == "1"


def _groups_taken(source: GatherSource, sizes: Mapping[str, int], groups: Axis, index: Tensor,
                  ) -> tuple[Tensor | None, Tensor | None]:
    """The groups of the columns of `source`, padded to the number that the result has, and its index.

    None for all groups in order; no index if only one group is left, which all groups of the result then repeat.
    """
    part, count = index[source.start:source.stop], groups.extent(*source.shape, sizes) or 0
    if part.numel() == index.numel() and count == groups.extent(*source.packed.shape, source.packed.sizes):
        return None, index
    used = torch.bincount(part).nonzero().flatten()
    if used.numel() > count:
        raise FormatError(f"columns {source.start} to {source.stop} belong to {used.numel()} groups (act-order), and so many "
                          f"columns have {count}")
    taken = torch.cat([used, used[-1:].expand(count - used.numel())])
    return taken, None if used.numel() == 1 else torch.searchsorted(used, part).to(torch.int32)


def _source_elements(source: GatherSource, sizes: Mapping[str, int], name: str, axis: Axis) -> Tensor:
    """For each element of a field's axis in the result, its element in the source."""
    old, new = axis.by(source.packed.sizes), axis.by(sizes)
    if axis.dim == "N*K":
        if is_scattered(source.packed.variant):
            raise FormatError(f"one value of '{name}' is for weights all over the matrix")
        elements = _flat_source_elements(source, old, new)
        unit = "weights of consecutive rows"
    else:
        units = source.rows if axis.dim == "N" else torch.arange(source.start, source.stop, device="cpu")
        blocks = units // old
        first = blocks[::new]
        elements = first if new == 1 or torch.equal(first.repeat_interleave(new)[:blocks.numel()], blocks) else None
        unit = "rows" if axis.dim == "N" else "columns"
    if elements is None:
        raise FormatError(f"one value of '{name}' is for {old} {unit}")
    return elements


def _flat_source_elements(source: GatherSource, old: int, new: int) -> Tensor | None:
    """The same for blocks of consecutive weights across row ends; None if a block would mix several source blocks.

    A run of rows ends at the end of a block; its rows, and the columns of each, must be consecutive.
    """
    (m, width), k = source.shape, source.packed.shape[1]
    if not prod(source.shape):
        return source.rows[:0]
    run = new // gcd(new, width)
    starts = source.rows[::run]
    expected = starts.repeat_interleave(run)[:m] + torch.arange(m, device="cpu") % run
    if (run > 1 and m > 1 and width != k) or not torch.equal(expected, source.rows):
        return None
    count = -(-m * width // new)
    first = (starts[:, None] * k + source.start + torch.arange(0, run * width, new, device="cpu")).flatten()[:count]
    last = first + new - 1
    last[-1] = int(source.rows[-1]) * k + source.stop - 1        # the last block may be partial
    return first // old if torch.equal(first // old, last // old) else None


def _take_elements(value: Tensor, place: int, elements: Tensor) -> Tensor:
    """Elements along an axis; a view if they are consecutive."""
    first, count = int(elements[0]) if elements.numel() else 0, elements.numel()
    if torch.equal(elements, torch.arange(first, first + count, device="cpu")):
        return value.narrow(place, first, count)
    return value.index_select(place, elements.to(value.device))
