"""Branches of weights: their fields, and rows, pieces and joins of weights that have some."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce

import torch
from torch import Tensor

from qdsl.runtime.weight import order
from qdsl.runtime.weight.branch_kinds import KINDS, Fields, permute_entries
from qdsl.runtime.weight.branch_tensors import Branch
from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.packed import PackedWeight, WeightFormat


def branch_fields(branch: Branch, packed: PackedWeight, rising: bool = True) -> Fields | None:
    """The fields of a branch of a weight; None if the weight does not have this branch.  rising: sort the columns of a row."""
    fields = stored_fields(branch, packed)
    columns = packed.order if branch.ordered and fields is not None and packed.device.type != "meta" else None
    return fields if fields is None or columns is None else permute_entries(fields, columns, rising)


def stored_fields(branch: Branch, packed: PackedWeight) -> Fields | None:
    """The fields with places instead of columns, if its tensors store places."""
    if any(name not in packed.tensors for name in branch.names):
        return None
    return {role: tensor.unpack_field(packed.tensors[tensor.name], packed.shape) for role, tensor in branch.tensors.items()}


def check_branches(packed: PackedWeight) -> None:
    """Raises FormatError for branch tensors that do not fit each other, point outside of the weight, or are not finite."""
    for branch in packed.variant.plus if packed.has_branch else ():
        fields = stored_fields(branch, packed)
        wrong = None if fields is None else KINDS[branch.kind].wrong(fields, packed.shape)
        if wrong is not None:
            raise FormatError(f"{packed.format.name}: '{branch.tensors[wrong[0]].name}' {wrong[1]}")


def fields(packed: PackedWeight) -> dict[str, Tensor]:
    """The fields of all branches of a weight."""
    return {role: value for branch in packed.variant.plus for role, value in (branch_fields(branch, packed) or {}).items()}


def with_branches(base: PackedWeight, values: Fields, names: Mapping[str, str] | None = None) -> PackedWeight:
    """A weight with branches from these fields.  base: without branches.  names: the checkpoint's names of tensors.

    Raises FormatError for an incomplete branch, and for fields of another dtype or shape.
    """
    tensors = dict(base.tensors)
    for branch in base.variant.plus:
        parts: dict[str, list[Tensor]] = {}
        present = [role for role in branch.tensors if role in values]
        if present and len(present) < len(branch.tensors):
            missing = next(role for role in branch.tensors if role not in values)
            raise FormatError(f"{base.format.name}: field '{missing}' is missing; given is '{present[0]}'")
        columns = base.order if branch.ordered and present and base.device.type != "meta" else None
        own = values if columns is None else permute_entries(values, order.inverse_order(columns))
        for role, tensor in branch.tensors.items() if present else ():
            dtype = tensor.dtype(base.params)
            if own[role].dtype != dtype:
                raise FormatError(f"{base.format.name}: field '{role}' is {str(own[role].dtype)[6:]}; the format needs "
                                  f"{str(dtype)[6:]}")
            parts.setdefault(tensor.name, []).append(tensor.pack_field(own[role], base.shape))
        for name, halves in parts.items():
            if len({half.numel() for half in halves}) > 1:
                raise FormatError(f"'{name}' holds lists of one length, not {' and '.join(str(half.numel()) for half in halves)}")
            tensors[name] = reduce(torch.bitwise_or, halves)
    result = base.derive(tensors)
    result.names = {**base.names, **{name: word for name, word in (names or {}).items() if name in result.branch_names}}
    return result


# -- rows, pieces and joins -------------------------------------------------------------------------------------------


def cut_with_branches(packed: PackedWeight, base: PackedWeight, dim: str, start: int, stop: int) -> PackedWeight:
    """Rows or columns [start, stop) of a weight; `base` is that slice without branches.  Raises FormatError."""
    cut: Fields = {}
    for branch in packed.variant.plus:
        if (values := branch_fields(branch, packed)) is not None:
            cut |= KINDS[branch.kind].cut(values, dim, start, stop)
    return with_branches(base, cut, packed.names)


def rows_with_branches(packed: PackedWeight, base: PackedWeight, index: Tensor) -> PackedWeight:
    """Rows of a weight by their numbers; `base` has these rows without branches.  Raises FormatError."""
    taken: Fields = {}
    for branch in packed.variant.plus:
        if (values := branch_fields(branch, packed)) is not None:
            taken |= KINDS[branch.kind].rows(values, index.long())
    return with_branches(base, taken, packed.names)


def join_with_branches(parts: Sequence[PackedWeight], base: PackedWeight, dim: str) -> PackedWeight:
    """The parts joined; `base` is the joined weight without branches."""
    values: Fields = {}
    for branch in base.variant.plus:
        every = [branch_fields(branch, part) for part in parts]
        present = next((fields for fields in every if fields is not None), None)
        if present is not None:
            kind = KINDS[branch.kind]
            whole = [kind.nothing(present, part.shape) if fields is None else fields
                     for fields, part in zip(every, parts, strict=True)]
            values |= kind.join(whole, [part.shape for part in parts], dim)
    return with_branches(base, values, {name: word for part in parts for name, word in part.names.items()})


def check_branch_kinds(format: WeightFormat, packed: PackedWeight) -> None:
    """Raises FormatError if a format does not support a branch of a weight."""
    kinds = {branch.kind for branch in next(iter(format.variants.values())).plus}
    for branch in packed.variant.plus:
        if branch.kind not in kinds and branch_fields(branch, packed) is not None:
            raise FormatError(f"{format.name} has no place for '{branch.names[0]}', which is added to the weight")


def convert_with_branches(packed: PackedWeight, base: PackedWeight) -> PackedWeight:
    """The converted weight with the branches of `packed`; `base` is the converted weight without branches.

    Raises FormatError for numbers that the new types cannot hold.
    """
    values = fields(packed)
    for branch in base.variant.plus:
        for role, tensor in branch.tensors.items():
            if role in values:
                values[role] = _cast_exactly(values[role], tensor.dtype(base.params), tensor.name)
    return with_branches(base, values, packed.names)


def _cast_exactly(value: Tensor, dtype: torch.dtype, name: str) -> Tensor:
    """A field in another dtype.  Raises FormatError for a number that would change."""
    other = value.to(dtype)
    if value.dtype != dtype and not value.is_meta and not torch.equal(other.to(value.dtype), value):
        raise FormatError(f"'{name}' is {str(dtype)[6:]} there, which does not hold its numbers")
    return other
