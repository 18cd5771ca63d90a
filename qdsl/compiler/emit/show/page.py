"""The page of a format: title, formula and layouts, as text and as data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdsl.compiler.emit.axes import field_axes, field_kinds, tensor_axes
from qdsl.compiler.emit.branch_description import branch_shapes, branch_texts
from qdsl.compiler.emit.show import picture
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.check_claims import bits_text, typical_bits
from qdsl.compiler.passes.derive_planar import order_name
from qdsl.compiler.spec.model import Table
from qdsl.core.layout import vector_width


def distinct_layouts(programs: Sequence[Program]) -> list[Program]:
    """Programs with different bits: types of scales, for example, do not change the layout."""
    by_layout: dict[tuple[object, ...], Program] = {}
    for program in programs:
        key = (program.storage, tuple((k, v) for k, v in program.params.items() if isinstance(v, int)))
        by_layout.setdefault(key, program)
    return list(by_layout.values())


def bits_per_weight(programs: Sequence[Program]) -> str:
    """The fewest and the most bits per weight of a format's storages: '4.5 to 4.625'."""
    plain = [program for program in programs if not any(tensor.stream for tensor in program.tensors)] or programs
    bits = [typical_bits(program) for program in distinct_layouts(plain)]
    low, high = f"{min(bits):.5g}", f"{max(bits):.5g}"
    return low if low == high else f"{low} to {high}"


def title(program: Program) -> str:
    """`gptq_v2 at bits = 4`"""
    params = ", ".join(f"{key} = {value}" for key, value in program.params.items() if isinstance(value, int))
    return program.storage + (f" at {params}" if params else "")


def terminal_lines(programs: Sequence[Program]) -> list[str]:
    """The page as plain text."""
    spec = programs[0].spec
    lines = [f"{spec.name}: {spec.title}", *([f"from {spec.origin}"] if spec.origin else []), "", f"  w = {spec.decode_text}", ""]
    kinds = field_kinds(programs)
    for field in programs[0].fields:
        kind = kinds[field.name] if field.number else "index"
        lines.append(f"  {field.name:<6} {kind:<10} [{', '.join(field_axes(programs, field))}]")
    for table in spec.tables:
        lines.append(f"  {table.name}: {_table_text(table)}")
    for param in spec.params:
        lines.append(f"  {param.name}: one of {', '.join(map(str, param.written))}")
    for program in distinct_layouts(programs):
        lines += ["", f"{title(program)}: {bits_text(program)}"]
        for tensor in program.tensors:
            inside = f", a section of {tensor.stored_name}" if tensor.section is not None else ""
            lines.append(f"  {tensor.name} {tensor.kind} [{', '.join(tensor_axes(tensor))}]{inside}")
            for placement in tensor.placements:
                for part in placement.slices:
                    cut = "" if part.width == program.field(placement.field).bits else \
                        f" bits {part.lo}..{part.lo + part.width - 1}"
                    width = vector_width(part, tensor.record_bits)
                    loads = f"loads up to {width} bits" if width else "elements cross words"
                    lines.append(f"    {placement.field}{cut}: {part}, {loads}")
        lines += branch_texts(program)
        order = order_name(program)
        lines += [f"  {order} i32 [K], where columns are stored by groups: the column at each place"] if order else []
        lines += ["", *(f"  {line}" for line in picture.terminal_picture(program))]
    return lines


def _table_text(table: Table) -> str:
    """All numbers of a short table, how many a long one has."""
    if len(table.values) <= 32:
        return ", ".join(map(str, table.values))
    return f"{' x '.join(map(str, table.shape))} numbers from {min(table.values)} to {max(table.values)}"


def spec_json(programs: Sequence[Program]) -> dict[str, Any]:
    """The page as data."""
    spec = programs[0].spec
    kinds = field_kinds(programs)
    return {
        "name": spec.name.value, "title": spec.title, "formula": spec.decode_text, "bits": bits_per_weight(programs),
        "storages": list(dict.fromkeys(program.storage for program in programs)), "source": spec.origin,
        "params": {param.name.value: list(param.written) for param in spec.params},
        "tables": {table.name.value: {"shape": table.shape, "numbers": table.values} for table in spec.tables},
        "fields": {field.name: {"type": kinds[field.name], "axes": field_axes(programs, field)} for field in programs[0].fields},
        "layouts": [{
            "storage": program.storage, "params": dict(program.params), "bits_per_weight": typical_bits(program),
            "tensors": {tensor.name: {
                "type": tensor.kind, "axes": tensor_axes(tensor), "record_bits": tensor.record_bits,
                "optional": tensor.optional, "aliases": list(tensor.aliases),
                **({"section_of": tensor.stored_name} if tensor.section is not None else {}),
                "fields": {placement.field: [
                    {"lo": part.lo, "width": part.width, "layout": str(part)} for part in placement.slices]
                    for placement in tensor.placements},
            } for tensor in program.tensors},
            **({"branches": dict(branch_shapes(program))} if program.plus else {}),
            **({"order": order_name(program)} if order_name(program) else {}),
        } for program in distinct_layouts(programs)],
    }
