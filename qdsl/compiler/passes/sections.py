"""Places the sections of stored tensors: consecutive in every row, or in the whole tensor; bit planes are sections too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from qdsl.compiler.ir.index import Index, product_of
from qdsl.compiler.ir.program import Program, Tensor, TensorSection
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.passes.type_fields import parameters
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import model
from qdsl.compiler.spec.source import Problems

MOST_PLANES = 32                                                 # of bits, one tensor each


def bit_planes(program: Program, item: model.Tensor, problems: Problems) -> list[tuple[model.Tensor, dict[str, Index]]]:
    """The tensor and value for each value of an axis whose variable selects the stored bit, as in `.at(3 - p):1`.

    The tensor itself if there is no such axis.
    """
    axes = item.shape.axes if item.shape is not None else ()
    digits = [digit for axis in axes for digit in axis.digits if digit is not None]
    chosen = {word for line in item.record for part in line.fields for word in g.names(part.lo)}
    loops = [digit for digit in digits if digit.name in chosen]
    if not loops or item.shape is None:
        return [(item, {})]
    place = next((place for place, axis in enumerate(axes[:2]) if axis.digits == (loops[0],)), None)
    constants = {**parameters(program), **{name: dim for name, dim in program.dims.items() if dim.is_const}}
    count = Scope(constants, f"the shape of '{item.name}'", Problems()).const(loops[0].extent, "an extent")
    if place is None or len(loops) > 1 or count is None or not 1 <= count <= MOST_PLANES:
        problems.add(loops[0].span, f"'{loops[0].name}' chooses bits: it is the first axis of '{item.name}', or the second, with "
                                    f"a constant extent of up to {MOST_PLANES}")
        return []
    if item.inside is not None or item.optional is not None or item.stream is not None:
        problems.add(item.name.span, f"'{item.name}' has an axis that chooses bits: it is no section, not optional and no stream")
        return []
    shape = replace(item.shape, axes=(*axes[:place], *axes[place + 1:]))
    inside = model.SectionHolder(item.name, place == 1, item.aliases, item.seen, is_planes=True)
    return [(replace(item, name=replace(item.name, value=f"{item.name}_{i}"), shape=shape, inside=inside),
             {loops[0].name: Index(i)}) for i in range(count)]


def place_sections(tensors: Sequence[Tensor], written: Sequence[model.Tensor], problems: Problems) -> tuple[Tensor, ...]:
    """The tensors of a storage; those inside of others get their places.  written: the tensors as the spec has them."""
    inside = {item.name.value: item.inside for item in written if item.inside is not None}
    placed: list[Tensor] = []
    for tensor in tensors:
        holder = inside.get(tensor.name)
        sections = [other for other in tensors if inside.get(other.name) is holder is not None]
        if holder is None or not _have_equal_rows(holder, sections, problems if tensor is sections[0] else Problems()):
            placed.append(tensor)
            continue
        lengths = [_length(other, holder.by_rows) for other in sections]
        before = sections.index(tensor)
        section = TensorSection(holder.name.value, holder.by_rows, _sum(lengths[:before]), _sum(lengths), holder.is_planes)
        placed.append(replace(tensor, section=section))
    return tuple(placed)


def _have_equal_rows(holder: model.SectionHolder, sections: Sequence[Tensor], problems: Problems) -> bool:
    """Whether sections have elements of one type, and the same rows; adds a problem if not."""
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
    """The extent of the first axis, which has one variable; None if it is different."""
    digits = tensor.axes[0].digits if tensor.axes else ()
    return tensor.var(digits[0]).extent if len(digits) == 1 and digits[0] else None


def _length(tensor: Tensor, by_rows: bool) -> Index:
    """Elements of a section per row, or in total."""
    return product_of(tensor.axis_extent(axis) for axis in (tensor.axes[1:] if by_rows else tensor.axes))


def _sum(lengths: Sequence[Index]) -> Index:
    return sum(lengths, start=Index(0))
