"""Prints `decode` of the torch reference: from fields to float32 weights.

Every field is brought to common axes, digits of whole blocks of n and k; broadcasting then computes the formula, printed once.
Constant blocks that always divide an axis are split by their size.  Other blocks (of a size parameter, or with a short last
block) are split by their number, so that one text serves whole and short blocks, which the caller separates.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import lcm

from qdsl.compiler.emit.formula import constant, integer_fields, plane_text, step_lines, step_name
from qdsl.compiler.emit.tensors import Unsupported, is_read_by_dtype
from qdsl.compiler.emit.torch.joint import JoinedTable, joint
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Field, Program, Value
from qdsl.compiler.passes.samples import axis_divisor
from qdsl.core.ops import OPS

FLOATS = ("f32", "f16", "bf16")                                  # types that torch copies into float32


@dataclass(frozen=True, slots=True)
class AxisLevels:
    """Block sizes along one axis, largest first, 1 last.  fixed: all are constants that always divide the axis.

    If constant blocks neither nest nor divide, values are repeated per weight: then 1 is the only level.
    """

    blocks: tuple[Index, ...]
    fixed: bool


@dataclass(frozen=True, slots=True)
class DecodeBody:
    """The text of decode, and the steps at which its caller must split rows and columns so that blocks are whole or alone.

    fields: its arguments, including unused ones.  scattered: blocks have weights all over the matrix, so that no split is
    possible.
    """

    lines: tuple[str, ...]
    fields: tuple[Field, ...]
    optional: tuple[str, ...]
    cuts: tuple[Index, Index]
    copies: str | None
    scattered: bool = False


def decode_body(programs: Sequence[Program]) -> DecodeBody:
    """The text of a format's decode, for all of its storages."""
    program = programs[0]
    fields = tuple(program.fields)
    read = [field for field in fields if field.name in {value.name for value in program.values if value.op in ("field", "entry")}]
    optional = tuple(f.name for f in fields if any(f.name in p.defaults or f.name in p.where for p in programs))
    if any(ix.flat_of(index) is not None for field in read for index in field.index):
        return _flat_decode(program, fields, read, optional)
    lookups = {number: value for number, value in enumerate(program.values) if len(_shape(program, value)) > 1}
    extents: dict[str, set[int]] = {"n": set(), "k": set()}
    for value in lookups.values():
        extents[program.row_axis(value) if value.op == "row" else "k"].add(_shape(program, value)[-1])
    period = lcm(*(int(value.const) * (value.range[1] + 1) for value in program.values if value.op == "digit" and value.range))
    extents["k"] |= {period} if period > 1 else set()
    shared = [*read, *(f for f in fields if f.number is None or f.table)]
    rows, columns = (_axis_levels(programs, shared, axis, extents[axis]) for axis in "nk")
    lines = [*_types(program), *_gather_lines(fields, optional)]
    together = joint(program)
    copied = _copied_field(program)
    taken = {program.values[value.args[0]].name for value in lookups.values()}
    taken |= {together.field} if together else set()
    taken |= {copied.name} if copied else set()
    prepared = [line for field in read if field.name not in taken
                for line in _convert_field(programs, fields, field, rows, columns, optional)]
    lines += _sort_lines(prepared, fields)
    names: dict[str, str] = {}
    for number, value in lookups.items():
        name, text = _table_row_lookup(programs, [*lookups.values()], value, rows, columns, together)
        lines.append(f"{name} = {text}")
        names[step_name(number) if value.op == "row" else _key(program, value, together)] = name
    if period > 1:
        lines.append(f"k = {_period_columns(read[0].name, period, columns)}")
    deep = (len(rows.blocks), len(columns.blocks))
    if deep != (1, 1):
        digits = "".join(f".unflatten({axis}, ({_count_text(fields, letter, levels, len(levels.blocks) - 1, optional)}))"
                         for axis, letter, levels in ((0, "n", rows), (deep[0], "k", columns)) if len(levels.blocks) > 1)
        first = len(_types(program)) + len(_gather_lines(fields, optional))
        lines.insert(first, _add_shapes(f"out = out if out is None else out{digits}", fields))
    *before, last_step = [f"{_cast_text(program, copied)} if out is None else out.copy_({copied.name})"] if copied else \
        _result_lines(program, names)
    lines += before
    flat = f"{f'.flatten({deep[0]})' if deep[1] > 1 else ''}{f'.flatten(0, {deep[0] - 1})' if deep[0] > 1 else ''}"
    lines.append(f"return ({last_step}){flat}" if flat and " else " in last_step else f"return {last_step}{flat}")
    last = program.values[-1]
    cuts = rows.blocks[0], Index(1) if columns.fixed else columns.blocks[0]
    return DecodeBody(tuple(lines), fields, optional, cuts, last.name if last.op == "field" else None)


def _period_columns(like: str, period: int, columns: AxisLevels) -> str:
    """The columns of one period of all digits, along the levels below it."""
    if not columns.fixed or Index(period) not in columns.blocks:
        raise Unsupported(f"digits of columns that begin again every {period}, where rows are no whole runs of them")
    sizes = [str(a.const // b.const) for a, b in pairwise(columns.blocks[columns.blocks.index(Index(period)):])]
    text = f"torch.arange({period}, dtype=torch.int32, device={like}.device)"
    return f"{text}.view({', '.join(sizes)})" if len(sizes) > 1 else text


def _types(program: Program) -> list[str]:
    """The types of parameters that decode rounds to, from the fields' dtypes."""
    names = dict.fromkeys(value.name for value in program.values if value.op == "round" and value.name in program.params)
    return [f"{name} = {next(field.name for field in program.fields if field.kind == name)}.dtype" for name in names]


def _copied_field(program: Program) -> Field | None:
    """The field that is the weight itself, in one of torch's floats: decode copies it."""
    last = program.values[-1]
    field = program.field(last.name) if last.op == "field" else None
    return field if field and field.number and field.number.name in FLOATS else None



def _flat_decode(program: Program, fields: tuple[Field, ...], read: Sequence[Field], optional: tuple[str, ...]) -> DecodeBody:
    """Decode of fields in blocks of the flat position: row-major order, split into the finest of the blocks.

    Values of larger blocks are repeated for the finest first.  Blocks are whole, or there is only one.
    """
    if optional or any(len(_shape(program, value)) > 1 for value in program.values):
        raise Unsupported("rows of tables, and fields that may be missing, beside blocks of the flat position")
    atoms = {field.name: atom for field in read for index in field.index if (atom := ix.flat_of(index)) is not None}
    finest = min(atoms, key=lambda name: _flat_size(atoms[name].args[1]))
    first, op = _flat_size(atoms[finest].args[1]), atoms[finest].op
    sizes = f"{finest}.shape[0], -1" if op == "div" else f"-1, {finest}.shape[0]"
    full = [field for field in read if field.name not in atoms and field.index]
    lines = [*_types(program), f"shape = {full[0].name}.shape", f"out = out if out is None else out.view({sizes})"]
    for field in read:
        text = _cast_text(program, field)
        if field in full:
            lines.append(f"{field.name} = {text}.reshape({sizes})")
        elif field.name in atoms:
            times = _flat_size(atoms[field.name].args[1]) // first
            text += f".repeat_interleave({times})[:{finest}.shape[0]]" if times > 1 else ""
            text += ".unsqueeze(-1)" if op == "div" else ""
            lines += [f"{field.name} = {text}"] if text != field.name else []
        elif text != field.name:
            lines.append(f"{field.name} = {text}")
    order = [line for line in lines if f"{finest} = " not in line[:len(finest) + 3]]
    lines = [*order, *(line for line in lines if line not in order)]
    *before, last = _result_lines(program, {})
    cut = ix.ceil(ix.name("N") * ix.name("K"), atoms[finest].args[1]) if op == "div" else Index(1)
    return DecodeBody((*lines, *before, f"return {last}.view(shape)"), fields, optional, (Index(1), cut), None, op == "mod")


def _flat_size(by: Index) -> int:
    """The size of a block, or its factor of a parameter; 1 if all weights lie at remainders."""
    return by.const if by.is_const else by.terms[0][1]


def _shape_of(field: str) -> str:
    """Where a line reads the shape of a field; `_sort_lines` writes how."""
    return f"<{field}>"


def _sort_lines(lines: Sequence[str], fields: Sequence[Field]) -> list[str]:
    """Orders lines `field = ...` so that a shape is read before its field gets more axes; else reads it first."""
    remaining = sorted(lines, key=lambda line: not any(_shape_of(field.name) in line for field in fields))
    ahead: list[str] = []
    ordered: list[str] = []
    while remaining:
        names = [line.split(" = ")[0] for line in remaining]
        free = next((i for i, name in enumerate(names) if not any(
            _shape_of(name) in line for line in (*remaining[:i], *remaining[i + 1:]))), None)
        if free is None:
            ahead.append(f"{names[0]}_shape = {names[0]}.shape")
            remaining = [line.replace(_shape_of(names[0]), f"{names[0]}_shape") for line in remaining]
        else:
            ordered.append(remaining.pop(free))
    return [*ahead, *(_add_shapes(line, fields) for line in ordered)]


def _add_shapes(line: str, fields: Sequence[Field]) -> str:
    """A line that reads shapes from the fields themselves."""
    for field in fields:
        line = line.replace(_shape_of(field.name), f"{field.name}.shape")
    return line


def _key(program: Program, value: Value, together: JoinedTable | None) -> str:
    """The key in `names` of the rows of a table, or of a joint table."""
    row = program.values[value.args[0]].name
    return step_name(together.step) if together and together.has(value.name, row) else f"{value.name}[{row}]"


def _shape(program: Program, value: Value) -> tuple[int, ...]:
    """The shape of the table, or of the stored table's rows, that a value is read from; () for other values."""
    return program.spec.table(value.name).shape if value.op == "table" else \
        program.field(value.name).table if value.op == "row" else ()


def _table_row_lookup(programs: Sequence[Program], lookups: Sequence[Value], value: Value, rows: AxisLevels, columns: AxisLevels,
                      together: JoinedTable | None) -> tuple[str, str]:
    """The variable for the rows of a table that a field selects, and their text on the common axes.

    Each row lies along the levels below its length.
    """
    program = programs[0]
    field = program.field(program.values[value.args[0]].name)
    block = _block(field, "k")
    if value.op == "row" and program.row_axis(value) == "n":
        return _vector_lookup(programs, lookups, value, rows, columns)
    if not columns.fixed or len(rows.blocks) > 1 or block is None or block not in columns.blocks:
        raise Unsupported(f"rows of table '{value.name}' for columns that are not in whole blocks")
    once = sum(other.name == value.name for other in lookups) == 1
    name, text = value.name, field.name
    if together and together.has(name, field.name):
        name, text, once = together.name, together.code, True
    at = columns.blocks.index(block)
    sizes = [str(a.const // b.const) for a, b in pairwise(columns.blocks)]
    text = f"{text}.unflatten(-1, ({', '.join(['-1', *sizes[:at]])}))" if at else text
    below = f".unflatten(-1, ({', '.join(sizes[at:])}))" if len(sizes) > at + 1 else ""
    rows_name = name if once else f"{name}_{lookups.index(value)}"
    if value.op == "table":
        return rows_name, f"{constant(name)}[{text}]{below}"
    stored = program.field(value.name)
    table = _broadcast_text(programs, program.fields, stored, rows, AxisLevels(columns.blocks[:at + 1], columns.fixed), ())
    return rows_name, f"entries({table}{plane_text(stored, value)}, {text}){below}"


def _vector_lookup(programs: Sequence[Program], lookups: Sequence[Value], value: Value, rows: AxisLevels, columns: AxisLevels,
                   ) -> tuple[str, str]:
    """The same if a row's entries belong to adjacent rows of the weight."""
    program = programs[0]
    field, stored = program.field(program.values[value.args[0]].name), program.field(value.name)
    if not rows.fixed or len(rows.blocks) != 2 or _block(stored, "n") is not None:
        raise Unsupported(f"rows of table '{value.name}' for rows of the weight that are not in whole blocks of one size")
    once = sum(other.name == value.name for other in lookups) == 1
    table, codes = (_broadcast_text(programs, program.fields, part, rows, columns, ()) for part in (stored, field))
    text = f"entries({table}{plane_text(stored, value)}, {codes}).movedim(-1, 1).squeeze(2)"
    return value.name if once else f"{value.name}_{lookups.index(value)}", text


def _result_lines(program: Program, names: Mapping[str, str]) -> list[str]:
    """The formula, operation by operation, each computed in the caller's memory for the weights."""
    value, following = step_lines(program, names)
    if not following:
        return [f"{value} if out is None else out.copy_({value})"]
    lines = ["space = workspace(out)"] if len(following) > 1 else []
    for i, (op, left, right) in enumerate(following):
        last = i == len(following) - 1
        into = "out" if last else "space"
        operands = f"{left or value}, {right or value}" if left or right else value
        text = f"rounded({value}, {right}, {into})" if op == "round" else f"torch.{OPS[op].torch}({operands}, out={into})"
        lines.append(text if last else f"w = {text}")
        value = "w"
    return lines


def _block(field: Field, axis: str) -> Index | None:
    """How many rows or columns share a value of the field; None if it does not vary along the axis or is gathered."""
    blocks = [block for index in field.index if (block := ix.block_of(index)) is not None]
    return next((by for of, by in blocks if of == axis), None)


def _gathered(field: Field) -> str | None:
    """The index field by which a field is subscripted."""
    return next((by for index in field.index if (by := ix.gathered_by(index)) is not None), None)


def _axis_levels(programs: Sequence[Program], fields: Sequence[Field], axis: str, extents: Collection[int]) -> AxisLevels:
    blocks = {block for field in fields if field.number is not None and (block := _block(field, axis)) is not None}
    gathers = [program.defaults.get(name) or program.where.get(name) for program in programs for field in fields
               if axis == "k" and (name := _gathered(field))]
    blocks |= {index.terms[0][0].args[1] for index in gathers if index is not None and index.terms[0][0].op == "div"}
    if gathers and len(blocks) == 1:
        blocks.add(ix.name("block"))
    if extents:
        blocks |= {Index(1), *map(Index, extents)}
    constant_blocks = [block for block in blocks if block.is_const]
    if len(constant_blocks) == len(blocks):
        order = tuple(sorted(constant_blocks, key=lambda block: -block.const))
        divides = all(_divisor(program, axis) % order[0].const == 0 for program in programs)
        nested = all(a.const % b.const == 0 for a, b in pairwise(order))
        return AxisLevels(order, divides) if nested and (divides or len(order) <= 2) else AxisLevels((Index(1),), True)
    return AxisLevels((next(block for block in blocks if block != Index(1)), Index(1)), False)


def _divisor(program: Program, axis: str) -> int:
    """A divisor of the axis that the storage guarantees."""
    return axis_divisor({"n": "N", "k": "K"}[axis], [var.extent for tensor in program.tensors for var in tensor.vars])


def _gather_lines(fields: Sequence[Field], optional: Collection[str]) -> list[str]:
    """Lines that turn values per group into values per column, if the checkpoint stores the group of each column."""
    lines: list[str] = []
    for index in fields:
        if index.number is None:
            by_name = {field.name: field for field in fields if _gathered(field) == index.name}
            taken = [f"{name}[{':, ' if len(field.index) == 2 else ''}{index.name}]" for name, field in by_name.items()]
            taken = [f"{name} if {name} is None else {text}" if name in optional else text
                     for name, text in zip(by_name, taken, strict=True)]
            lines += [f"if {index.name} is not None:", f"    {', '.join(by_name)} = {', '.join(taken)}"] if by_name else []
    return lines



def _convert_field(programs: Sequence[Program], fields: Sequence[Field], field: Field, rows: AxisLevels, columns: AxisLevels,
                   optional: Sequence[str]) -> list[str]:
    """A line that converts a field to a computing type and the common axes; none if it has both."""
    text = _broadcast_text(programs, fields, field, rows, columns, optional)
    if field.name in optional:
        default = next(p.defaults.get(field.name) or p.where.get(field.name) for p in programs
                       if field.name in p.defaults or field.name in p.where)
        return [f"{field.name} = {default} if {field.name} is None else {text}"]
    return [f"{field.name} = {text}"] if text != field.name else []


def _broadcast_text(programs: Sequence[Program], fields: Sequence[Field], field: Field, rows: AxisLevels, columns: AxisLevels,
                    optional: Sequence[str]) -> str:
    """A field in a computing type on the axes of these levels, followed by the axes of a stored table."""
    text = _cast_text(programs[0], field)
    shown: list[str] = []
    axis = 0
    for letter, levels in (("n", rows), ("k", columns)):
        block = _block(field, letter)
        if len(levels.blocks) == 1:
            if block is not None and block != Index(1):
                text = _repeat_text(programs, fields, text, block, axis, letter)
            block = Index(1)
        if letter == "k" and _gathered(field):
            block = levels.blocks[0]
        here = any(letter in i.names() or (letter == "k" and str(i) == _gathered(field)) for i in field.index)
        if not here:
            shown += ["None"] * len(levels.blocks) if field.index else []
            continue
        at = levels.blocks.index(block) if block in levels.blocks else 0
        if at > 0:
            text = f"{text}.unflatten({axis}, ({_count_text(fields, letter, levels, at, optional)}))"
        shown += [":"] * (at + 1) + ["None"] * (len(levels.blocks) - 1 - at)
        axis += at + 1
    return text + _new_axes([*shown, *(":" for _ in field.table)])


def _new_axes(shown: Sequence[str]) -> str:
    """The shortest subscript that adds axes of length 1, each 'None' in `shown`."""
    trailing = len(shown) - 1 - max((i for i, axis in enumerate(shown) if axis == ":"), default=-1)
    if "None" in shown[:len(shown) - trailing]:
        return f"[{', '.join(shown)}]"
    return "[" + ", ".join(["..."] + ["None"] * trailing) + "]" if trailing > 1 else ".unsqueeze(-1)" if trailing == 1 else ""


def _repeat_text(programs: Sequence[Program], fields: Sequence[Field], text: str, block: Index, axis: int, letter: str) -> str:
    """Every value repeated per weight of its block, with the last block shortened."""
    full = next((f for f in fields if f.index == (ix.name("n"), ix.name("k"))), None)
    if full is None:
        raise Unsupported("blocks that do not divide an axis, where no field has a value for every weight")
    cut = f"[{':, ' * axis}:{_shape_of(full.name)}[{0 if letter == 'n' else -1}]]"
    return f"{text}.repeat_interleave({block}, {axis}){cut}"


def _count_text(fields: Sequence[Field], letter: str, levels: AxisLevels, at: int, optional: Sequence[str]) -> str:
    """The sizes for unflattening an axis, down to level `at`."""
    if levels.fixed:
        return ", ".join(["-1", *(str(a.const // b.const) for a, b in zip(levels.blocks, levels.blocks[1:at + 1], strict=False))])
    coarse = next(f for f in sorted(fields, key=lambda f: f.name in optional) if f.number is not None
                  and (_block(f, letter) == levels.blocks[0] or (letter == "k" and _gathered(f))))
    place = [i for i, index in enumerate(coarse.index) if letter in index.names() or str(index) == _gathered(coarse)]
    return f"{_shape_of(coarse.name)}[{place[0]}], -1"


def _cast_text(program: Program, field: Field) -> str:
    number = field.number
    assert number is not None
    if number.name == "f32" and field.kind == "f32":
        return field.name
    if number.name in FLOATS or is_read_by_dtype(program, field):
        return f"{field.name}.float()"
    if number.is_float:
        return f"{number.name}({field.name})"
    bits = integer_fields(program).get(field.name)
    held_bits = 8 if number.kind == "signed" and number.bits <= 8 else 32 if number.bits > 8 else 0
    if bits == 8 and held_bits == 0 and number.bits < 8:
        return f"{field.name}.view(torch.int8)"
    return f"{field.name}.to(torch.int{bits})" if bits and bits > held_bits else field.name
