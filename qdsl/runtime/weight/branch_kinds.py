"""The kinds of side branches: functions on their fields that validate, add to a weight, slice, gather and join.

`runtime/torch/branch_products.py` multiplies with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from qdsl.runtime.weight.arrays import common_tensor

Fields = dict[str, Tensor]
Shape = tuple[int, int]
Wrong = tuple[str, str] | None                                   # a field and the problem with it


@dataclass(frozen=True, slots=True)
class BranchOperations:
    """Functions of one kind of branch.

    wrong: the problem of fields for a weight [N, K].  add: to float32 weights, in place.  cut: rows or columns [start, stop).
    rows: int64 numbers [M].  nothing: fields that add nothing to a weight [N, K].  join: along N or K.
    """

    wrong: Callable[[Fields, Shape], Wrong]
    add: Callable[[Fields, Tensor], None]
    cut: Callable[[Fields, str, int, int], Fields]
    rows: Callable[[Fields, Tensor], Fields]
    nothing: Callable[[Fields, Shape], Fields]
    join: Callable[[Sequence[Fields], Sequence[Shape], str], Fields]


def _not_finite(fields: Fields, role: str) -> Wrong:
    values = fields[role]
    return None if values.is_meta or bool(values.isfinite().all()) else (role, "has numbers that are not finite")


def _shown(tensor: Tensor) -> str:
    return f"is {list(tensor.shape)}"


def _block_diagonal(blocks: Sequence[Tensor]) -> Tensor:
    whole: Tensor = torch.block_diag(*blocks)                    # type: ignore[no-untyped-call]
    return whole


# -- low rank ---------------------------------------------------------------------------------------------------------


def _factors_problem(fields: Fields, shape: Shape) -> Wrong:
    up, down = fields["up"], fields["down"]
    if up.dim() != 2 or up.shape[0] != shape[0]:
        return "up", f"{_shown(up)}, for {shape[0]} rows"
    if tuple(down.shape) != (up.shape[1], shape[1]):
        return "down", f"{_shown(down)}, for a rank of {up.shape[1]} and {shape[1]} columns"
    return _not_finite(fields, "up") or _not_finite(fields, "down")


def _add_factors(fields: Fields, weight: Tensor) -> None:
    up, down = fields["up"].float(), fields["down"].float()
    for r in range(down.shape[0]):
        weight += up[:, r, None] * down[r]


def _cut_factors(fields: Fields, dim: str, start: int, stop: int) -> Fields:
    return {**fields, "up": fields["up"][start:stop]} if dim == "N" else {**fields, "down": fields["down"][:, start:stop]}



def _join_factors(parts: Sequence[Fields], shapes: Sequence[Shape], dim: str) -> Fields:
    """Keep factors that all parts share; else each part gets its own r."""
    own, other = ("up", "down") if dim == "N" else ("down", "up")
    places = {"up": 0, "down": 1}
    shared = common_tensor([part[other] for part in parts])
    if shared is not None:
        return {own: torch.cat([part[own] for part in parts], places[own]), other: shared}
    return {own: _block_diagonal([part[own] for part in parts]),
            other: torch.cat([part[other] for part in parts], 1 - places[other])}


# -- sparse entries by rows -------------------------------------------------------------------------------------------


def _entries_problem(fields: Fields, shape: Shape) -> Wrong:
    start, column, value = fields["start"], fields["column"], fields["value"]
    count = column.numel()
    if tuple(start.shape) != (shape[0] + 1,):
        return "start", f"{_shown(start)}, for {shape[0]} rows and one more"
    if column.dim() != 1 or value.shape != column.shape:
        return "value", f"{_shown(value)}, beside {list(column.shape)} columns"
    if start.is_meta:
        return None
    if int(start[0]) != 0 or int(start[-1]) != count or bool((start[1:] < start[:-1]).any()):
        return "start", f"does not rise from 0 to {count} entries"
    if count and not 0 <= int(column.min()) <= int(column.max()) < shape[1]:
        return "column", f"has columns from {int(column.min())} to {int(column.max())} of {shape[1]}"
    begins = torch.zeros(count + 1, dtype=torch.bool, device=column.device)
    begins[start.long()] = True
    if bool(((column[1:] <= column[:-1]) & ~begins[1:count]).any() if count else False):
        return "column", "does not rise within rows"
    return _not_finite(fields, "value")


def row_numbers(start: Tensor, count: int) -> Tensor:
    """int64 [E], the row of every entry."""
    numbers = torch.arange(start.numel() - 1, device=start.device)
    return torch.repeat_interleave(numbers, start.diff().long(), output_size=count)


def permute_entries(fields: Fields, columns: Tensor, rising: bool = True) -> Fields:
    """The entries with column j renamed to columns[j].  rising: sort each row's entries by column."""
    start, column = fields["start"], columns[fields["column"].long()].to(torch.int32)
    if not rising:
        return {**fields, "column": column}
    places = torch.argsort(row_numbers(start, column.numel()) * columns.numel() + column)
    return {**fields, "column": column[places], "value": fields["value"][places]}


def _add_entries(fields: Fields, weight: Tensor) -> None:
    column = fields["column"].long()
    place = (row_numbers(fields["start"], column.numel()), column)
    weight[place] = weight[place] + fields["value"].float()       # no two entries share a place


def _starts(counts: Tensor) -> Tensor:
    """int32 [N + 1], the offset at which each row's entries begin."""
    return torch.cat([counts.new_zeros(1), counts.cumsum(0)]).to(torch.int32)


def _cut_entries(fields: Fields, dim: str, start: int, stop: int) -> Fields:
    first, column, value = fields["start"], fields["column"], fields["value"]
    if first.is_meta:                                            # their number is unknown on meta
        rows = stop - start if dim == "N" else first.numel() - 1
        return {"start": first.new_empty(rows + 1), "column": column.new_empty(0), "value": value.new_empty(0)}
    if dim == "N":
        begin, end = int(first[start]), int(first[stop])
        return {"start": first[start:stop + 1] - first[start], "column": column[begin:end], "value": value[begin:end]}
    kept = (column >= start) & (column < stop)
    counts = torch.zeros(first.numel() - 1, dtype=torch.int64, device=first.device)
    counts.index_add_(0, row_numbers(first, column.numel()), kept.long())
    return {"start": _starts(counts), "column": column[kept] - start, "value": value[kept]}


def _take_entry_rows(fields: Fields, index: Tensor) -> Fields:
    first, column, value = fields["start"].long(), fields["column"], fields["value"]
    index = index.to(first.device)
    if first.is_meta:
        return {"start": fields["start"].new_empty(index.numel() + 1), "column": column.new_empty(0), "value": value.new_empty(0)}
    start = _starts(first.diff()[index])
    count = int(start[-1])
    own = row_numbers(start, count)
    taken = first[index][own] + torch.arange(count, device=first.device) - start.long()[own]
    return {"start": start, "column": column[taken], "value": value[taken]}


def _no_entries(like: Fields, shape: Shape) -> Fields:
    return {"start": like["start"].new_zeros(shape[0] + 1), **{role: like[role].new_empty(0) for role in ("column", "value")}}


def _join_entries(parts: Sequence[Fields], shapes: Sequence[Shape], dim: str) -> Fields:
    counts = [part["start"].diff() for part in parts]
    if dim == "N":
        lists = {role: torch.cat([part[role] for part in parts]) for role in ("column", "value")}
        return {"start": _starts(torch.cat(counts)), **lists}
    first = [0, *accumulate(shape[1] for shape in shapes)]
    rows = torch.cat([row_numbers(part["start"], part["column"].numel()) for part in parts])
    order = torch.argsort(rows, stable=True)                     # within a row, parts stay in order
    columns = torch.cat([part["column"] + before for part, before in zip(parts, first, strict=False)])
    return {"start": _starts(torch.stack(counts).sum(0)), "column": columns[order],
            "value": torch.cat([part["value"] for part in parts])[order]}


# -- dense rows -------------------------------------------------------------------------------------------------------


def _dense_rows_problem(fields: Fields, shape: Shape) -> Wrong:
    row, value = fields["row"], fields["row_value"]
    if row.dim() != 1 or tuple(value.shape) != (row.numel(), shape[1]):
        return "row_value", f"{_shown(value)}, for {row.numel()} rows of {shape[1]} columns"
    if not row.is_meta and row.numel() and not 0 <= int(row.min()) <= int(row.max()) < shape[0]:
        return "row", f"has rows from {int(row.min())} to {int(row.max())} of {shape[0]}"
    return _not_finite(fields, "row_value")


def _add_rows(fields: Fields, weight: Tensor) -> None:
    for r, n in enumerate(fields["row"].tolist()):
        weight[n] += fields["row_value"][r].float()


def _cut_dense_rows(fields: Fields, dim: str, start: int, stop: int) -> Fields:
    row, value = fields["row"], fields["row_value"]
    if dim == "K":
        return {"row": row, "row_value": value[:, start:stop]}
    if row.is_meta:
        return {"row": row.new_empty(0), "row_value": value.new_empty(0, value.shape[1])}
    kept = (row >= start) & (row < stop)
    return {"row": row[kept] - start, "row_value": value[kept]}


def _take_dense_rows(fields: Fields, index: Tensor) -> Fields:
    row, value = fields["row"], fields["row_value"]
    if row.is_meta:
        return {"row": row.new_empty(0), "row_value": value.new_empty(0, value.shape[1])}
    taken, r = (index.to(row.device)[:, None] == row).nonzero(as_tuple=True)
    return {"row": taken.to(torch.int32), "row_value": value[r]}



def _join_dense_rows(parts: Sequence[Fields], shapes: Sequence[Shape], dim: str) -> Fields:
    if dim == "N":
        first = [0, *accumulate(shape[0] for shape in shapes)]
        return {"row": torch.cat([part["row"] + before for part, before in zip(parts, first, strict=False)]),
                "row_value": torch.cat([part["row_value"] for part in parts])}
    shared = common_tensor([part["row"] for part in parts])
    if shared is not None:
        return {"row": shared, "row_value": torch.cat([part["row_value"] for part in parts], 1)}
    return {"row": torch.cat([part["row"] for part in parts]),
            "row_value": _block_diagonal([part["row_value"] for part in parts])}


KINDS = {
    "low_rank": BranchOperations(_factors_problem, _add_factors, _cut_factors,
                                 lambda fields, index: {
        **fields, "up": fields["up"].index_select(0, index.to(fields["up"].device))}, lambda like, shape: {
        "up": like["up"].new_zeros(shape[0], 0), "down": like["down"].new_zeros(0, shape[1])}, _join_factors),
    "csr": BranchOperations(_entries_problem, _add_entries, _cut_entries, _take_entry_rows, _no_entries, _join_entries),
    "dense_rows": BranchOperations(_dense_rows_problem, _add_rows, _cut_dense_rows, _take_dense_rows, lambda like, shape: {
        "row": like["row"].new_empty(0), "row_value": like["row_value"].new_empty(0, shape[1])}, _join_dense_rows),
}
