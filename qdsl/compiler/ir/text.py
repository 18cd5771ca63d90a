"""Prints a program as readable text, after any pass."""

from __future__ import annotations

from collections.abc import Iterator

from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Placement, Program, Tensor, TensorSection, Terms, Value


def text(program: Program) -> str:
    """One section per part that the passes so far have filled in."""
    return "\n".join(line.rstrip() for line in _program_lines(program)) + "\n"


def _program_lines(program: Program) -> Iterator[str]:
    params = ", ".join(f"{name} = {value}" for name, value in program.params.items())
    sizes = f"  sizes {', '.join(program.sizes)}" if program.sizes else ""
    yield f"program {program.spec.name}.{program.storage}{f'  at {params}' if params else ''}{sizes}"
    if program.dims:
        yield "dims"
        yield from (f"  {name} = {index}" for name, index in program.dims.items())
    if program.fields:
        yield "fields"
    for field in program.fields:
        kind = field.number.name if field.number else f"index({field.groups})"
        note = f"  = {program.where[field.name]}" if field.name in program.where else \
            f"  or {program.defaults[field.name]}" if field.name in program.defaults else ""
        yield f"  {field.name:<6} {kind:<8} {_list(field.index):<20} of {_list(field.extents)}{note}"
    if program.tensors:
        yield "tensors"
    for tensor in program.tensors:
        yield from _tensor_lines(tensor)
    for branch in program.plus:
        yield f"plus {branch.kind}"
        yield from (f"  {tensor.name} {tensor.stored_kind} {_list(tensor.axes)}: {tensor.role} of digits "
                    f"{_list(tensor.digits)}, by subscripts {tensor.order}" for tensor in branch.tensors)
    if program.values:
        yield "values"
        yield from (f"  %{number:<3} {_value_text(value)}" for number, value in enumerate(program.values))
    yield from _affine_lines(program)
    if program.encode is not None:
        encode = program.encode
        shown = [f"{key} = {value}" for key, value in {**encode.roles, **encode.options, **encode.constants}.items()]
        yield f"encode {encode.scheme}: {', '.join(shown)}"
    if program.units is not None:
        units = program.units
        digits = ", ".join(name if extent is None else f"{name} < {extent} (k + {weight} {name})"
                           for name, weight, extent in units.digits)
        lanes = ", ".join(f"{lane.name} < {lane.extent} ({lane.axis} + {lane.weight} {lane.name})" for lane in units.lanes)
        yield f"units of {units.tensor}{', whole records' if units.whole else ''}: {digits}; contiguous along {units.last}"
        yield f"lanes {lanes or 'none'}"


def _tensor_lines(tensor: Tensor) -> Iterator[str]:
    axes: list[str] = []
    for axis in tensor.axes:
        shown = [f"{digit} < {tensor.var(digit).extent}{'' if tensor.var(digit).exact else ' padded'}" if digit else
                 f"{tensor.words} words" for digit in axis.digits]
        axes.append((" x ".join(shown) or "1") + (f" cut to {axis.extent}" if axis.extent is not None else ""))
    notes = [f"{tensor.record_bits} bits"]
    notes += ["optional"] if tensor.optional else []
    notes += [_stored(tensor)] if tensor.stored else []
    notes += [_section(tensor.section)] if tensor.section else []
    yield f"  {tensor.name} {tensor.element.name} [{', '.join(axes)}]  {', '.join(notes)}"
    yield from (line for placement in tensor.placements for line in _placement_lines(placement))


def _section(section: TensorSection) -> str:
    return f"from {section.first} of {section.length} in {'rows of ' if section.by_rows else ''}{section.holder}"


def _stored(tensor: Tensor) -> str:
    assert tensor.stored is not None
    return f"stored = {tensor.stored.field or 'word'} {tensor.stored.op} {tensor.stored.amount}"


def _placement_lines(placement: Placement) -> Iterator[str]:
    tiles = ", ".join(_tile(digits, extent) for digits, extent in zip(placement.digits, placement.extents, strict=True))
    yield f"    {placement.field:<6} {'flat ' if placement.flat else ''}tiles [{tiles}]"
    for part in placement.slices:
        yield f"      bits {part.lo}..{part.lo + part.width - 1} at {part}"
    for part in placement.copies:
        yield f"      bits {part.lo}..{part.lo + part.width - 1} again at {part}"


def _tile(digits: tuple[str, ...], extent: int) -> str:
    """A coordinate's elements of a record, and its variables; all digits in order if some are faster than the record."""
    return f"{extent} {digits[0] or 'one'}" if digits[1:] in ((), ("",)) else " ".join(digit or str(extent) for digit in digits)


def _value_text(value: Value) -> str:
    args = ", ".join(f"%{arg}" for arg in value.args)
    what = f"{value.op} {value.name} {args}".rstrip() if value.name else f"const {value.const!r}" if value.op == "const" else \
        f"{value.op} {args}"
    kind = f"int {value.range[0]}..{value.range[1]}" if value.range else "f32"
    return f"{what:<16} {kind:<16} {_list(value.index)}"


def _list(items: tuple[Index, ...]) -> str:
    return f"[{', '.join(map(str, items))}]"


def _affine_lines(program: Program) -> Iterator[str]:
    if (affine := program.affine) is not None:
        parts = {"code": affine.code, "levels": affine.table, "scale": _terms(affine.scale), "zero": _terms(affine.zero),
                 "offset": _terms(affine.offset), "columns": affine.columns}
        yield f"affine {', '.join(f'{key} = {value}' for key, value in parts.items() if value)}"


def _terms(terms: Terms) -> str:
    """A sum of products of fields, '' for none."""
    return " + ".join(" * ".join([*([f"{factor:g}"] if factor != 1 or not names else []), *names]) for factor, names in terms)
