"""Where the sections of stored tensors lie: one after the other in every row, or in the whole tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdsl.compiler.ir.index import Index, product_of
from qdsl.compiler.ir.program import Section, Tensor
from qdsl.compiler.spec import model
from qdsl.compiler.spec.source import Problems


def placed_sections(tensors: Sequence[Tensor], written: Sequence[model.Tensor], problems: Problems) -> tuple[Tensor, ...]:
    """The tensors of a storage, those that others hold with their places in them.  written: as the spec has them."""
    inside = {item.name.value: item.inside for item in written if item.inside is not None}
    placed: list[Tensor] = []
    for tensor in tensors:
        holder = inside.get(tensor.name)
        sections = [other for other in tensors if inside.get(other.name) is holder is not None]
        if holder is None or not _fits(holder, sections, problems if tensor is sections[0] else Problems()):
            placed.append(tensor)
            continue
        lengths = [_length(other, holder.by_rows) for other in sections]
        before = sections.index(tensor)
        section = Section(holder.name.value, holder.by_rows, _sum(lengths[:before]), _sum(lengths))
        placed.append(replace(tensor, section=section))
    return tuple(placed)


def _fits(holder: model.Sectioned, sections: Sequence[Tensor], problems: Problems) -> bool:
    """Whether sections have elements of one type, and the same rows; adds a problem where they have not."""
    first = sections[0]
    for tensor in sections:
        if tensor.kind != first.kind:
            problems.add(tensor.span, f"the sections of '{holder.name}' are {first.kind}, and '{tensor.name}' is {tensor.kind}",
                         "records make numbers of several bytes out of u8")
            return False
        if holder.by_rows and _rows(tensor) is None:
            problems.add(tensor.span, f"the first axis of '{tensor.name}' is not that of rows of '{holder.name}'",
                         "sections of a row begin with an axis such as n<N; 'regions' follow one another in the whole tensor")
            return False
        if holder.by_rows and _rows(tensor) != _rows(first):
            problems.add(tensor.span, f"'{first.name}' has {_rows(first)} rows, and '{tensor.name}' has {_rows(tensor)}")
            return False
    return True


def _rows(tensor: Tensor) -> Index | None:
    """The extent of the first axis, which has one variable; None where it is another."""
    digits = tensor.axes[0].digits if tensor.axes else ()
    return tensor.var(digits[0]).extent if len(digits) == 1 and digits[0] else None


def _length(tensor: Tensor, by_rows: bool) -> Index:
    """Elements of a section in a row, or in all."""
    return product_of(tensor.axis_extent(axis) for axis in (tensor.axes[1:] if by_rows else tensor.axes))


def _sum(lengths: Sequence[Index]) -> Index:
    return sum(lengths, start=Index(0))
