"""Codes per weight, computed from fields that a few columns share: table rows, signs, shifts.

The planar storage of such a format has the codes; all other storages have the fields (compiler/passes/expand_codes.py).
"""

from __future__ import annotations

from functools import cached_property

import torch
from torch import Tensor

from qdsl.runtime.weight.errors import FormatError
from qdsl.runtime.weight.tables import Table


class RowCodes:
    """Converts between codes and fields.  order: the joint number of each code.  The first field's digit is the highest.

    A digit is the index of a field's value.  fields: for each field the table whose rows it selects; for a field that is itself
    the number, its number of values and the columns that share one.
    """

    def __init__(self, order: tuple[int, ...], **fields: Table | tuple[int, int]) -> None:
        self.order = order
        self.rows = {name: _NumberRows(source) for name, source in fields.items()}

    @cached_property
    def _codes(self) -> Table:
        """The code of a joint number."""
        return Table("i32", *(self.order.index(joint) for joint in range(len(self.order))))

    @cached_property
    def _joints(self) -> Table:
        """The joint number of a code; -1 for unused bytes."""
        return Table("i32", *self.order, *[-1] * (256 - len(self.order)))

    @cached_property
    def _single_field_tables(self) -> tuple[str, Table, Table] | None:
        """The field, its value for each code and the code of each value, if codes are another order of one field's 2^b values."""
        (name, rows), *others = self.rows.items()
        if others or rows.source != (len(self.order), 1) or len(self.order) & len(self.order) - 1 or len(self.order) > 128:
            return None
        return name, Table("i8", *self.order), Table("i8", *map(self.order.index, range(len(self.order))))

    def codes(self, **fields: Tensor) -> Tensor:
        """Codes uint8 [N, K] of fields [N, K / columns]."""
        if self._single_field_tables is not None:
            name, _, codes = self._single_field_tables
            return codes[fields[name]].view(torch.uint8)
        joint: Tensor | None = None
        for name, rows in self.rows.items():
            places = rows.places_of(fields[name])
            joint = places if joint is None else joint.mul_(rows.count).add_(places)
        assert joint is not None
        return self._codes[joint].to(torch.uint8)

    def fields(self, codes: Tensor) -> dict[str, Tensor]:
        """The fields of codes uint8 [N, K].  Raises FormatError for a code, or a row of codes, that no field value gives."""
        if self._single_field_tables is not None:
            name, values, _ = self._single_field_tables
            return {name: values[codes].view(torch.uint8)}
        joint = self._joints[codes]
        _check_codes_exist(joint, 1, "code")
        fields: dict[str, Tensor] = {}
        for name, rows in reversed(self.rows.items()):
            fields[name] = rows.field_values(joint % rows.count, name)
            joint = joint // rows.count
        return fields


class _NumberRows:
    """The rows of numbers that a field's values select; numbers are indexed in rising order."""

    def __init__(self, source: Table | tuple[int, int]) -> None:
        self.source = source

    @cached_property
    @torch.inference_mode(False)
    def _places(self) -> Tensor:
        """Indices [values of the field, columns] of the numbers of every row."""
        if isinstance(self.source, tuple):
            count, columns = self.source
            return torch.arange(count, device="cpu")[:, None].expand(count, columns)
        values = self.source.values
        return torch.searchsorted(torch.unique(values), values)

    @cached_property
    def count(self) -> int:
        """How many different numbers there are."""
        return int(self._places.max()) + 1

    @cached_property
    def _table(self) -> Table:
        """The rows of indices, as a lookup table."""
        return Table("i8", *self._places.flatten().tolist(), columns=self._places.shape[1])

    @cached_property
    def _values(self) -> Table:
        """The field's value for a row of indices, read as digits of a number; -1 for rows that no value has."""
        columns = self._places.shape[1]
        digits = self.count ** torch.arange(columns, device="cpu")
        values = torch.full((self.count ** columns,), -1, dtype=torch.int32, device="cpu")
        values[(self._places * digits).sum(1)] = torch.arange(len(self._places), dtype=torch.int32, device="cpu")
        return Table("i32", *values.tolist())

    def places_of(self, field: Tensor) -> Tensor:
        """Indices int32 [N, K] of the numbers of single weights, for a field [N, K / columns]."""
        return field.to(torch.int32) if self._places.shape[1] == 1 else self._table[field].flatten(1).to(torch.int32)

    def field_values(self, places: Tensor, name: str) -> Tensor:
        """The field [N, K / columns] for indices int32 [N, K].  Raises FormatError for a row that no value has."""
        columns = self._places.shape[1]
        dtype = torch.uint8 if len(self._places) <= 256 else torch.int32
        if columns == 1:
            return places.to(dtype)
        rows = places.view(len(places), places.shape[1] // columns, columns)
        number = rows[..., columns - 1].clone()
        for column in reversed(range(columns - 1)):
            number.mul_(self.count).add_(rows[..., column])
        values = self._values[number]
        _check_codes_exist(values, columns, f"row of '{name}'")
        return values.to(dtype)


def _check_codes_exist(values: Tensor, columns: int, what: str) -> None:
    """Raises FormatError for the first negative value.  columns: how many columns share one."""
    if values.is_meta or not (values < 0).any():
        return
    n, at = (int(place) for place in (values < 0).nonzero()[0])
    where = f"k = {at * columns}" if columns == 1 else f"k = {at * columns} to {(at + 1) * columns - 1}"
    raise FormatError(f"codes of n = {n}, {where} are no {what} that the format has")
