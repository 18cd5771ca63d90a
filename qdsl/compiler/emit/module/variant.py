"""Prints a variant's description in its module: types and axes of its fields, and its storages."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

from qdsl.compiler.emit.axes import axis_text
from qdsl.compiler.emit.c.rows import row_loops
from qdsl.compiler.emit.formula import constant, table_types
from qdsl.compiler.emit.lines import indent, wrap_items
from qdsl.compiler.emit.literals import literal, quoted, tupled
from qdsl.compiler.emit.triton.arrangement import order_of_stores
from qdsl.compiler.emit.triton.kernel import tile_of
from qdsl.compiler.emit.triton.matrix_unit import kernels_record
from qdsl.compiler.emit.triton.matrix_unit_layout import matrix_unit_plan
from qdsl.compiler.emit.triton.pairs import paired_decode
from qdsl.compiler.ir.program import Encode, Program
from qdsl.core.schemes import SCHEMES


def variant_lines(programs: Sequence[Program]) -> list[str]:
    """Lines of `VARIANT = Variant(...)`: the functions of storages, and the calls of decode and encode."""
    first = programs[0]
    lines = ["VARIANT = Variant(", "    storages={"]
    for program in programs:
        name = program.storage
        head = f'"{name}": Storage(unpack_{name}, pack_{name}, Kernels('
        lines += indent(wrap_items(head, _kernels(program), ")),", level=2), 2)
    arguments = ["decode=decode", *(_encode_lines(first) if first.encode is not None else []), *row_loops(programs)]
    return [*lines, "    },", *indent(wrap_items("", arguments, ",", level=1)), ")"]


def _encode_lines(program: Program) -> list[str]:
    """The encoder, and what it depends on."""
    encode = program.encode
    assert encode is not None
    arguments = ["encode=encode", "importance=True" if encode.importance else "",
                 *(_scheme_lines(encode) if SCHEMES[encode.scheme].kernel else [])]
    return [argument for argument in arguments if argument]


def _scheme_lines(encode: Encode) -> list[str]:
    """The scheme as data, for kernels that encode."""
    settings = {key: literal(value) for key, value in encode.options.items()}
    settings |= {key: constant(value) if isinstance(value, str) else str(value)
                 for key, value in encode.constants.items() if value}
    shown = [", ".join(f"{quoted(key)}: {value}" for key, value in pairs.items())
             for pairs in ({role: quoted(field) for role, field in encode.roles.items()}, settings)]
    return [f'scheme="{encode.scheme}"', f"roles={{{shown[0]}}}", f"settings={{{shown[1]}}}" if shown[1] else ""]


def _kernels(program: Program) -> list[str]:
    """The kernels of a storage, and their tiles of a weight."""
    at = tile_of(program)
    sums = prod(lane.extent for lane in at.lanes if lane.axis == "n")
    arguments = [f"_decode_{program.storage}", f'rows="{axis_text(at.row_count)}"',
             f'units="{axis_text(at.unit_count)}"', f'last="{at.last}"', *([f"sums={sums}"] if sums > 1 else [])]
    if (arranged := order_of_stores(program)) is not None:
        arguments += [f"{key}={tupled(part)}" for key, part in zip(("digits", "lanes", "order"), arranged, strict=True) if part]
    arguments += ["divides=True"] if _divides_by_stored(program) else []
    arguments += [f"tables=({', '.join(map(constant, table_types(program)))},)"] if table_types(program) else []
    if (plan := matrix_unit_plan(program)) is not None:
        arguments.append(f"matrix_unit={kernels_record(plan)}")
    if (two := paired_decode(program)) is not None:
        arguments.append(f'pairs=Pairs(_pairs_{program.storage}, "{two.type}", "{two.stream}", {two.at}, "{two.uncoded}")')
    return arguments


def _divides_by_stored(program: Program) -> bool:
    """Whether decode divides by stored numbers."""
    def is_stored(number: int) -> bool:
        value = program.values[number]
        return value.op != "const" if not value.args else any(map(is_stored, value.args))

    return any(value.op == "/" and is_stored(value.args[1]) for value in program.values)
