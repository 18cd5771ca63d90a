"""Prints the decode expression, for torch and Triton, which differ in three operations."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod

from qdsl.compiler.ir.program import Field, Program, Value
from qdsl.core.numbers import TORCH_FLOATS
from qdsl.core.ops import OPS, Op

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "neg": 3, "field": 4, "const": 4, "table": 4}


@dataclass(frozen=True, slots=True)
class Dialect:
    """The differences of a language.  negate: the prefix of floats.  function: the name of the function for an operation of
    floats or integers (is_int), and '' for an infix one.

    table: the text of a lookup.  round: the text that rounds a value to a type and converts it back to float32.
    """

    table: Callable[[str, str], str]
    round: Callable[[str, str], str]
    function: Callable[[Op], str]
    negate: str = "-"


def constant(table: str) -> str:
    """The name of a table in a generated module."""
    return table.upper()


TORCH = Dialect(lambda table, at: f"{constant(table)}[{at}]", "rounded({}, {})".format,
                lambda op: f"torch.{op.torch}" if op.is_called else "")
# tl's -x is 0 - x, which loses -0.
TRITON = Dialect(lambda table, at: f"tl.load({table} + {at})", "device.rounded({}, {})".format,
                 lambda op: op.triton, negate="-1.0 * ")


def formula(program: Program, dialect: Dialect = TORCH, names: Mapping[str, str] | None = None, around: int = 0,
            step: int = -1) -> str:
    """The text of weight [n, k], or of one step of it, in the order of operations of the spec.

    names: the texts of fields.  around: 2 if the text becomes the left side of a product.
    """
    return _value_text(program, step % len(program.values), dialect, names or {}, around)


def step_name(number: int) -> str:
    """The key in `names` of an already computed step."""
    return f"step {number}"


def _value_text(program: Program, number: int, dialect: Dialect, names: Mapping[str, str], around: int = 0) -> str:
    value = program.values[number]
    if known_name := names.get(step_name(number)):
        return known_name
    if value.op == "float":
        return _value_text(program, value.args[0], dialect, names, around)
    if value.op == "digit":
        return f"({value.name})" if around > _LEVEL["%"] else value.name
    if not value.args or value.op in ("table", "entry"):
        return _read_text(program, value, dialect, names)
    if value.op == "round":
        return dialect.round(_value_text(program, value.args[0], dialect, names, 0), value_type(program, value, dialect))
    if value.op == "neg":
        sign = "-" if value.is_int else dialect.negate
        level = 2 if "*" in sign else 3
        body = sign + _value_text(program, value.args[0], dialect, names, 3)
        return f"({body})" if around > level else body
    if value.op in OPS and (function := dialect.function(OPS[value.op])):
        operands = (_operand_text(program, side, dialect, names) for side in value.args)
        return f"{function}({', '.join(operands)})"
    left, right = value.args
    if (bits := _bits_text(program, value, dialect, names)) is not None:
        return f"({bits})" if around > 0 else bits
    level = _LEVEL[value.op]
    parts = _value_text(program, left, dialect, names, level), _value_text(program, right, dialect, names, level + 1)
    body = f"{parts[0]} {value.op} {parts[1]}"
    return f"({body})" if around > level else body


def _bits_text(program: Program, value: Value, dialect: Dialect, names: Mapping[str, str]) -> str | None:
    """Powers of two, and quotients and remainders by them, as shifts and masks, for nonnegative integers."""
    left, right = value.args
    by = program.values[right]
    if value.op == "**":
        return f"1 << {_value_text(program, right, dialect, names, 1)}"
    if value.op == "//" and by.op == "**":
        return f"{_value_text(program, left, dialect, names, 1)} >> {_value_text(program, by.args[1], dialect, names, 1)}"
    if value.op == "%" and by.op == "const" and int(by.const).bit_count() == 1:
        return f"{_value_text(program, left, dialect, names, 0)} & {int(by.const) - 1}"
    return None


def _read_text(program: Program, value: Value, dialect: Dialect, names: Mapping[str, str]) -> str:
    """A number, a field, or a lookup in a table or stored table."""
    if value.op == "field":
        return names.get(value.name, value.name)
    if value.op == "const":
        return repr(value.const) if value.const >= 0 else f"({value.const!r})"
    if value.op == "entry":
        table = f"{names.get(value.name, value.name)}{plane_text(program.field(value.name), value)}"
        return f"lookup({table}, {_value_text(program, value.args[0], dialect, names, 0)})"
    if len(program.spec.table(value.name).shape) > 1:
        return row_entry_text(program, value, dialect, names)
    return dialect.table(value.name, _value_text(program, value.args[0], dialect, names, 1 if dialect is TRITON else 0))


def value_type(program: Program, value: Value, dialect: Dialect) -> str:
    """The type that a value is rounded to: a constant; for a parameter a variable in torch, and a tensor's type in Triton."""
    if value.name not in program.params:
        return f"{'tl' if dialect is TRITON else 'torch'}.{TORCH_FLOATS[value.name]}"
    if dialect is TRITON:
        return next(f"{tensor.stored_name}.dtype.element_ty" for tensor in program.tensors
                    if tensor.kind == value.name and not tensor.optional)
    return value.name


def plane_text(field: Field, value: Value) -> str:
    """The subscript of a stored table's rows or numbers in torch, with constants before them; '' without these."""
    columns = 2 if value.op == "row" else 1
    before = field.table[:-columns]
    places = [str(int(value.const) // prod(before[i + 1:]) % extent) for i, extent in enumerate(before)]
    blocks = ["...", *places, *[":"] * columns] if field.index else places
    return f"[{', '.join(blocks)}]" if places else ""


def row_entry_text(program: Program, value: Value, dialect: Dialect, names: Mapping[str, str]) -> str:
    """An entry of a table of rows.  names: in torch the rows, in Triton the column's place in its row."""
    columns = program.spec.table(value.name).shape[1]
    row = program.values[value.args[0]].name
    if dialect is TORCH:
        return names.get(f"{value.name}[{row}]", value.name)
    return dialect.table(value.name, f"{columns} * {names.get(row, row)} + {names[f'k % {columns}']}")


def _operand_text(program: Program, number: int, dialect: Dialect, names: Mapping[str, str]) -> str:
    """An operand of a function that does not convert integers by itself, nor widen loaded ones."""
    value = program.values[number]
    kind = "int32" if value.is_int else "float32"
    if dialect is TRITON and (value.op == "float" or value.is_int) and value.op != "const":
        return f"{_value_text(program, number, dialect, names, 4)}.to(tl.{kind})"
    if dialect is TORCH and value.op == "const":
        return f'torch.tensor({value.const!r}, dtype=torch.{kind}, device="cpu")'
    return _value_text(program, number, dialect, names, 0)


def table_types(program: Program) -> dict[str, str]:
    """The tables that decode reads, with the type of their numbers: i32 for integer arithmetic, else f32.

    Rows are i8 if every integer step on them fits.
    """
    kinds: dict[str, str] = {}
    reads = {number: value for number, value in enumerate(program.values) if value.op == "table"}
    for number, value in reads.items():
        users = [user for user in program.values if number in user.args and user.op != "float"]
        kind = "i32" if value.is_int and users else "f32"
        if len(program.spec.table(value.name).shape) > 1 and value.is_int:
            kind = "i8" if all(-128 <= end < 128 for step in _with_users(program, number) for end in step.range or ()) else "i32"
        kinds[value.name] = kind if kinds.get(value.name, kind) == kind else "i32"
    return kinds


def _with_users(program: Program, number: int) -> list[Value]:
    """A value and the integers that are computed from it."""
    value = program.values[number]
    users = [i for i, user in enumerate(program.values) if number in user.args and user.is_int]
    return [value, *(step for i in users for step in _with_users(program, i))]


def step_lines(program: Program, names: Mapping[str, str]) -> tuple[str, list[tuple[str, str, str]]]:
    """The formula as its first operand and the operations on it, each (op, left, right) with one side empty.

    For "round" the right side is a type.  Every step has a value per weight, so that one tensor can hold them one after the
    other.  names: the texts of fields, rows of tables, and already computed steps.
    """
    values = program.values
    at = len(values) - 1
    operations: list[tuple[str, str, str]] = []
    while _is_step(values[at]) and not values[at].is_int and step_name(at) not in names:
        sides = [arg for arg in values[at].args if values[arg].index == values[-1].index]
        if not sides:
            break
        operand = next((arg for arg in sides if _is_step(values[arg])), sides[0])
        if values[at].op == "round":
            operations.append(("round", "", value_type(program, values[at], TORCH)))
            at = operand
            continue
        text = _operand_text if OPS[values[at].op].is_called else _value_text
        left, *others = ("" if arg == operand else text(program, arg, TORCH, names) for arg in values[at].args)
        right = "".join(others) if left or not others or others[0] else _value_text(program, operand, TORCH, names)    # a square
        operations.append((values[at].op, left, right))
        at = operand
    start = _value_text(program, at, TORCH, names, 0)
    inner = values[values[at].args[0]] if values[at].op == "float" else None
    cast = inner is not None and not (inner.op == "table" and table_types(program)[inner.name] == "f32")
    return f"as_float({start}, out)" if cast else start, operations[::-1]


def _is_step(value: Value) -> bool:
    return value.op == "round" or (value.op in OPS and OPS[value.op].torch != "")


def integer_fields(program: Program) -> dict[str, int]:
    """Fields in integer arithmetic or subscripts of tables, with the bits of a signed integer that holds all their steps."""
    widths: dict[str, int] = {}
    for value in program.values:
        if value.op in ("table", "entry", "row"):
            value = program.values[value.args[0]]
        elif not value.is_int or value.op == "field":
            continue
        if value.op != "const":
            leaves, low, high = _fields_and_range(program, value)
            bits = next(b for b in (8, 16, 32) if -(1 << b - 1) <= low and high < 1 << b - 1)
            widths.update({leaf: max(bits, widths.get(leaf, 8)) for leaf in leaves})
    return widths


def _fields_and_range(program: Program, value: Value) -> tuple[set[str], int, int]:
    """The fields below an integer value, and the range of all its steps."""
    assert value.range is not None
    low, high = value.range
    leaves = {value.name} if value.op in ("field", "entry", "row") else set()
    for arg in value.args if value.op not in ("table", "entry", "row") else ():
        names, small, large = _fields_and_range(program, program.values[arg])
        leaves |= names
        low, high = min(low, small), max(high, large)
    return leaves, low, high
