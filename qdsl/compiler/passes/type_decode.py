"""The decode expression as typed values.

Does: names, types and integer ranges of every step; folds constants; refuses integers that float32 cannot hold exactly where
they meet a float.  Does not: reorder or merge anything, because the order of roundings is the format's definition.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import replace
from functools import reduce

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Field, Program, Value
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.passes.type_fields import parameters, place_fields
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.source import Problems, Span, did_you_mean
from qdsl.core.numbers import round_to_f32
from qdsl.core.ops import OPS, Op, functions

F32_EXACT = 1 << 24
INT32 = 1 << 31
MAX_PERIOD = 1024                                                # columns after which a digit repeats


def type_decode(program: Program, problems: Problems) -> Program:
    """The program with its decode expression as typed values.

    >>> shown(decode="d * (q // 2 - 4)")
    values
    %0   field d          f32              [n, k // 32]
    %1   field q          int 0..15        [n, k]
    %2   const 2          int 2..2         []
    %3   // %1, %2        int 0..7         [n, k]
    %4   const 4          int 4..4         []
    %5   - %3, %4         int -4..3        [n, k]
    %6   float %5         f32              [n, k]
    %7   * %0, %6         f32              [n, k]
    """
    builder = _Builder(program, problems)
    root = builder.value(program.spec.decode)
    if root is None:
        return program
    if builder.values[root].is_int:
        root = builder.to_float(root)
    index = builder.values[root].index if root is not None else ()
    if root is not None and index != (ix.name("n"), ix.name("k")):
        problems.add(program.spec.decode.span, "no field of decode is stored for every weight [n, k]")
    read = {value.name for value in builder.values if value.op == "table"}
    for table in reversed(program.spec.tables):
        if table.formula is not None and table.name.value in read:
            read |= set(g.names(table.formula))
    for table in program.spec.tables:
        if root is not None and table.name.value not in read:
            problems.add(table.name.span, f"table '{table.name}' is not read by decode, nor by a table that is")
    return replace(program, values=tuple(builder.values))


class _Builder:
    def __init__(self, program: Program, problems: Problems) -> None:
        self.program = program
        self.problems = problems
        self.values: list[Value] = []

    def add(self, op: str, args: tuple[int, ...], span: Span, *, name: str = "", const: int | float = 0,
            range: tuple[int, int] | None = None, index: tuple[Index, ...] = ()) -> int:
        value = Value(op, args, name, const, range, index, span)
        if value in self.values:
            return self.values.index(value)
        self.values.append(value)
        return len(self.values) - 1

    def value(self, expr: g.Expr) -> int | None:
        """The number of an expression's value; None, with a problem added, if it is invalid."""
        match expr:
            case g.Number(value, span):
                fixed = (value, value) if isinstance(value, int) else None
                return self.check_value(self.add("const", (), span, const=value, range=fixed))
            case g.Name():
                return self.name(expr)
            case g.Negate(inner, span):
                arg = self.value(inner)
                return None if arg is None else self.negate(arg, span)
            case g.Binary() if _is_column_digit(expr):
                return self.digit(expr)
            case g.Binary():
                left, right = self.value(expr.left), self.value(expr.right)
                return None if left is None or right is None else self.binary(expr, left, right)
            case g.Subscript():
                return self.table_lookup(expr)
            case g.CallExpr():
                return self.call(expr)
        return None

    def call(self, expr: g.CallExpr) -> int | None:
        """A value rounded to a type, or a function of values."""
        op = functions().get(expr.name)
        match expr:
            case g.CallExpr("round", (inner, g.Name() as kind), ()):
                arg = self.value(inner)
                return None if arg is None else self.round_value(expr, arg, kind)
            case g.CallExpr("round"):
                self.problems.add(expr.span, "round takes a value and the type that it is rounded to: round(s * q, bf16)")
            case _ if op is None:
                word, spec = expr.name, self.program.spec
                fields, tables = ({one.name.value for one in part} for part in (spec.fields, spec.tables))
                note = f"'{word}' is a field: a product is {word} * (...)" if word in fields else \
                    f"'{word}' is a table: its entries are {word}[...]" if word in tables else ""
                near = "" if note else did_you_mean(word, ["round", *functions()])
                self.problems.add(expr.span, f"unknown function '{word}' in decode{near}", *([note] if note else []))
            case g.CallExpr(_, arguments, ()) if len(arguments) == op.operands:
                args = [arg for argument in arguments if (arg := self.value(argument)) is not None]
                return self.operation(op, expr.span, tuple(args)) if len(args) == op.operands else None
            case _:
                self.problems.add(expr.span, f"{op.name} takes {'one value' if op.operands == 1 else f'{op.operands} values'}")
        return None

    def digit(self, expr: g.Binary) -> int | None:
        """A digit of the column, k % m or k // a % m, with constants a and m."""
        index = self.index(expr)
        digit = None if index is None else ix.digit_of(index)
        if digit is None or digit[0] * digit[1] > MAX_PERIOD:
            self.problems.add(expr.span, "decode reads the column by its digits alone, k % m or k // a % m, with constants a and "
                                         f"m whose product is at most {MAX_PERIOD}")
            return None
        step, extent = digit
        return self.add("digit", (), expr.span, name=str(index), const=step, range=(0, extent - 1), index=(ix.name("k"),))

    def name(self, expr: g.Name) -> int | None:
        program = self.program
        if expr.name in {table.name.value for table in program.spec.tables}:
            self.problems.add(expr.span, f"'{expr.name}' is a table: it has a value by its subscript, {expr.name}[...]")
            return None
        parameter = program.params.get(expr.name)
        if isinstance(parameter, int):
            return self.add("const", (), expr.span, const=parameter, range=(parameter, parameter))
        field = next((f for f in program.fields if f.name == expr.name), None)
        if field is None or field.number is None:
            names = [f.name for f in program.fields if f.number] + [p for p, v in program.params.items() if isinstance(v, int)]
            what = "is an index field: it has no value of its own" if field else "is unknown in decode"
            self.problems.add(expr.span, f"'{expr.name}' {what}{'' if field else did_you_mean(expr.name, names)}")
            return None
        if field.table:
            self.problems.add(expr.span, f"'{expr.name}' is a stored table: it has a value by its subscripts, {expr.name}[...]")
            return None
        return self.add("field", (), expr.span, name=field.name, range=_integer_range(field), index=_reach(program, field.index))

    def round_value(self, expr: g.CallExpr, arg: int, kind: g.Name) -> int | None:
        """A value rounded to f16 or bf16, or to the type of a parameter, as a stored tensor has it."""
        program = self.program
        listed = next((param.values for param in program.spec.params if param.name.value == kind.name), (kind.name,))
        if not set(listed) <= {"f16", "bf16", *(["f32"] if kind.name in program.params else [])}:
            self.problems.add(kind.span, f"decode rounds to f16, to bf16, or to a parameter that lists these and f32, not to "
                                         f"'{kind.name}'")
            return None
        if kind.name in program.params and not any(
                tensor.kind == kind.name == program.field(placed.field).kind
                for tensor in program.tensors if not tensor.optional for placed in tensor.placements):
            self.problems.add(kind.span, f"no tensor of storage '{program.storage}' is of the type '{kind.name}'")
            return None
        value = self.to_float(arg)
        return None if value is None else self.add("round", (value,), expr.span, name=kind.name, index=self.values[value].index)

    def table_lookup(self, expr: g.Subscript) -> int | None:
        """A table lookup by an integer that stays in range; for a table of rows, the column's number in a row."""
        stored = next((field for field in self.program.fields if field.name == expr.name and field.table), None)
        if stored is not None:
            return self.stored_table_lookup(expr, stored)
        table = next((table for table in self.program.spec.tables if table.name.value == expr.name), None)
        if table is None:
            names = [table.name.value for table in self.program.spec.tables]
            names += [field.name for field in self.program.fields if field.table]
            self.problems.add(expr.span, f"unknown table '{expr.name}': fields stand in decode without subscripts"
                                         f"{did_you_mean(expr.name, names)}")
            return None
        if len(expr.index) != len(table.shape):
            wanted = "one subscript" if len(table.shape) == 1 else "two subscripts"
            self.problems.add(expr.span, f"table '{expr.name}' has {wanted}, not {len(expr.index)}")
            return None
        arg = self.row_subscript(expr, expr.index[0], table.shape)
        if arg is None:
            return None
        by = self.values[arg]
        limits = (int(min(table.values)), int(max(table.values))) if table.is_int else None
        index = by.index if len(table.shape) == 1 else _columns(by)
        return self.add("table", (arg,), expr.span, name=expr.name, range=limits, index=index)

    def stored_table_lookup(self, expr: g.Subscript, field: Field) -> int | None:
        """A lookup in a stored table: its block as in the field, planes by constants, then an entry or a column of a row."""
        if len(expr.index) != len(field.extents):
            self.problems.add(expr.span, f"stored table '{expr.name}' has {len(field.extents)} subscripts, not {len(expr.index)}")
            return None
        if not self.has_field_blocks(expr, field):
            return None
        at = expr.index[len(field.index):]
        rows = {"n", "k"} & set(g.names(at[-1])) and len(at) > 1
        shape = field.table[-2:] if rows else field.table[-1:]
        plane = 0
        for part, extent in zip(at, field.table[:len(at) - len(shape)], strict=False):
            if not isinstance(part, g.Number) or not isinstance(part.value, int) or not part.value < extent:
                self.problems.add(part.span, f"a subscript of '{expr.name}' before the {'row' if rows else 'last'} is a number "
                                             f"from 0 to {extent - 1}")
                return None
            plane = plane * extent + part.value
        arg = self.row_subscript(expr, at[-len(shape)], shape)
        if arg is None:
            return None
        by = self.values[arg]
        index = _finer_index(field.index, _columns(by, "n" if "n" in g.names(at[-1]) else "k") if rows else by.index)
        return self.add("row" if rows else "entry", (arg,), expr.span, name=field.name, const=plane, range=_integer_range(field),
                        index=index)

    def has_field_blocks(self, expr: g.Subscript, field: Field) -> bool:
        """Whether the first subscripts of a stored table are those of its field."""
        places = sorted(place_fields(self.program))[:field.by_places]
        for part, index in zip(expr.index, field.index, strict=False):
            if self.index(part, places) != index or (places and "k" in g.names(part)):
                shown = str(index).replace("k", places[0]) if places else index
                self.problems.add(part.span, f"stored table '{expr.name}' is shared by blocks: expected {shown} here")
                return False
        return True

    def index(self, expr: g.Expr, places: Collection[str] = ()) -> Index | None:
        """A subscript of rows and columns; None if it is something else.  places: index fields that replace k."""
        names = {word: ix.name(word) for word in ("n", "k", "N", "K")} | parameters(self.program) | dict(self.program.dims)
        return Scope(names | dict.fromkeys(places, ix.name("k")), "a subscript", Problems(), self.program.domain).index(expr)

    def row_subscript(self, expr: g.Subscript, at: g.Expr, shape: tuple[int, ...]) -> int | None:
        """The subscript that selects the row, or the entry of a table without columns: an integer that stays in range."""
        arg = self.value(at)
        if arg is None or (len(shape) > 1 and not self.reads_table_row(expr, at, shape[1], self.values[arg])):
            return None
        limits = self.values[arg].range
        if limits is None or limits[0] < 0 or limits[1] >= shape[0]:
            runs = "is no integer" if limits is None else f"runs from {limits[0]} to {limits[1]}"
            self.problems.add(at.span, f"table '{expr.name}' has entries 0 to {shape[0] - 1}, and its subscript {runs}")
            return None
        return arg

    def reads_table_row(self, expr: g.Subscript, at: g.Expr, columns: int, by: Value) -> bool:
        """Whether a lookup reads a row of a table: by a field of whole runs of columns, each column at its index in the row."""
        axes = ("n", "k") if any(field.name == expr.name for field in self.program.fields) else ("k",)
        match expr.index[-1]:
            case g.Binary("%", g.Name(axis), length) if axis in axes and self.index(length) == Index(columns):
                pass
            case other:
                wanted = " or ".join(f"{axis} % {columns}" for axis in reversed(axes))
                self.problems.add(other.span, f"a row of '{expr.name}' holds {columns} columns in order: expected {wanted}")
                return False
        blocks = [str(i) for i in by.index]
        if by.op != "field" or f"{axis} // {columns}" not in blocks or {f"{a} // {columns}" for a in "nk"} <= {*blocks}:
            what, shared = ("columns", f"[n, k // {columns}]") if axis == "k" else ("rows", f"[n // {columns}, k]")
            self.problems.add(at.span, f"a row of '{expr.name}' is for {columns} {what}: expected a field that as many share, "
                                       f"{shared}")
            return False
        return True

    def negate(self, arg: int, span: Span) -> int | None:
        value = self.values[arg]
        limits = None if value.range is None else (-value.range[1], -value.range[0])
        if value.op == "const":
            return self.add("const", (), span, const=-value.const, range=limits)
        return self.add("neg", (arg,), span, range=limits, index=value.index)

    def binary(self, expr: g.Binary, left: int, right: int) -> int | None:
        a, b = self.values[left], self.values[right]
        if expr.op == "**":
            if a.op == b.op == "const" and a.const == 2 and isinstance(b.const, int) and -126 <= b.const <= 30:
                power = 2 ** b.const
                return self.add("const", (), expr.span, const=power, range=(power, power) if b.const >= 0 else None)
            low, high = b.range or (-1, -1)
            if a.op == "const" and a.const == 2 and b.op != "const" and 0 <= low <= high <= 30:
                return self.add("**", (left, right), expr.span, range=(2 ** low, 2 ** high), index=b.index)
            self.problems.add(expr.span, "'**' is 2 ** a, with a constant a from -126 to 30 or an integer that is always 0 to 30",
                              _power_remedy(expr, a, b))
            return None
        if b.op == "const" and b.const == 0 and expr.op == "/":
            self.problems.add(expr.right.span, "division by zero")
            return None
        return self.operation(OPS[expr.op], expr.span, (left, right))

    def operation(self, op: Op, span: Span, args: tuple[int, ...]) -> int | None:
        """An operation on integers if all operands are, and it has bounds; else on floats."""
        values = [self.values[arg] for arg in args]
        if op.bounds is not None and all(value.is_int for value in values):
            return self.integer_operation(op, span, args)
        if not op.torch:
            self.problems.add(span, f"'{op.name}' is for integers")
            return None
        floats = tuple(number for arg in args if (number := self.to_float(arg)) is not None)
        if len(floats) < len(args):
            return None
        if all(value.op == "const" for value in values):
            folded = _round(op.value(*(_round(float(value.const)) for value in values)))
            if not math.isfinite(folded):
                self.problems.add(span, "the constant does not fit float32")
                return None
            return self.add("const", (), span, const=folded)
        return self.add(op.name, floats, span, index=reduce(_finer_index, (value.index for value in values)))

    def integer_operation(self, op: Op, span: Span, args: tuple[int, ...]) -> int | None:
        """The same on integers, whose bounds must fit 32 bits."""
        values = [self.values[arg] for arg in args]
        bounds = [value.range for value in values if value.range is not None]
        if op.least and any(low < least for (low, _), least in zip(bounds, op.least, strict=True)):
            (low, _), (small, _) = bounds
            self.problems.add(span, f"'{op.name}' needs a left side of at least 0 and a right side of at least 1; they run from "
                                    f"{low} and from {small}")
            return None
        assert op.bounds is not None
        low, high = op.bounds(*bounds)
        if not -INT32 <= low <= high < INT32:
            self.problems.add(span, f"the integer runs from {low} to {high}, which 32 bits cannot hold")
            return None
        if all(value.op == "const" for value in values):
            return self.add("const", (), span, const=int(op.value(*(value.const for value in values))), range=(low, high))
        return self.add(op.name, args, span, range=(low, high), index=reduce(_finer_index, (value.index for value in values)))

    def to_float(self, number: int) -> int | None:
        """The value as float32; integers must be exact there."""
        value = self.values[number]
        if value.range is None:
            return number
        low, high = value.range
        if max(-low, high) > F32_EXACT:
            self.problems.add(value.span, f"the integer runs from {low} to {high}, and float32 holds integers exactly only "
                                          f"up to {F32_EXACT}")
            return None
        if value.op == "const":
            return self.add("const", (), value.span, const=float(value.const))
        return self.add("float", (number,), value.span, index=value.index)

    def check_value(self, number: int) -> int | None:
        value = self.values[number]
        if value.range is not None and abs(int(value.const)) >= INT32:
            self.problems.add(value.span, f"{value.const} does not fit 32 bits")
            return None
        return number


def _is_column_digit(expr: g.Expr) -> bool:
    """Whether an expression divides the column k, or takes a remainder of it."""
    while isinstance(expr, g.Binary) and expr.op in ("//", "%"):
        expr = expr.left
        if isinstance(expr, g.Name) and expr.name == "k":
            return True
    return False


def _integer_range(field: Field) -> tuple[int, int] | None:
    """The integers that a field can be; None for a float."""
    number = field.number
    assert number is not None
    return None if number.is_float else (number.low, number.high)


def _columns(row: Value, axis: str = "k") -> tuple[Index, ...]:
    """The subscripts of a row's entries: those of the row, and every column, or for axis 'n' every row of the weight."""
    others = tuple(i for i in row.index if axis not in i.names())
    return (*others, ix.name("k")) if axis == "k" else (ix.name("n"), *others)


def _round(value: float) -> float:
    """The nearest float32, or infinity beyond the range."""
    return round_to_f32(value) if abs(value) < 3.4028235677973366e38 else math.inf


def _reach(program: Program, index: tuple[Index, ...]) -> tuple[Index, ...]:
    """A field's subscripts, with k for those by an index field."""
    indices = {field.name for field in program.fields if field.number is None}
    return tuple(ix.name("k") if i.names() & indices else i for i in index)


def _finer_index(a: tuple[Index, ...], b: tuple[Index, ...]) -> tuple[Index, ...]:
    """The subscripts of a value computed from two others; blocks of the flat position meet single weights and each other."""
    flat = [i for i in (*a, *b) if ix.flat_of(i) is not None]
    if flat:
        every = (ix.name("n"), ix.name("k"))
        return every if every in (a, b) else (min(flat, key=_flat_size),)
    subscripts: list[Index] = []
    for axis in ("n", "k"):
        both = {i for i in (*a, *b) if axis in i.names()}
        if both:
            subscripts.append(both.pop() if len(both) == 1 else _finest_block(both, axis))
    return tuple(subscripts)


def _flat_size(index: Index) -> int:
    """The size of a block of the flat position, or its factor of a parameter."""
    by = index.terms[0][0].args[1]
    return by.terms[0][1] if by.terms else by.const


def _finest_block(both: set[Index], axis: str) -> Index:
    """Of two subscripts along one axis, the one with nested blocks, else the axis itself."""
    by = {i: i.terms[0][0].args[1].const if i.terms[0][0].op == "div" and i.terms[0][0].args[1].is_const else 0 for i in both}
    small, large = sorted(both, key=lambda i: by[i])
    return small if by[small] and by[large] % by[small] == 0 else ix.name(axis)


def _power_remedy(expr: g.Binary, a: Value, b: Value) -> str:
    """What to write instead of a power that is not computed."""
    base, power = (_expression_text(side) for side in (expr.left, expr.right))
    if a.op == b.op == "const":
        value = a.const ** b.const if abs(b.const) < 128 and a.const else 0
        return f"write the number, {value:.9g}" if value and abs(value) < 1e38 else "no weight in float32 is that large"
    if b.op == "const" and b.const in (2, 3, 4):
        return f"write {' * '.join([base] * int(b.const))}"
    if a.op == "const" and a.const == 2 and b.is_int:
        low, high = b.range or (0, 0)
        return f"{power} is {low} to {high}: store it in fewer bits, or the power itself as e8m0, which is 2 ** (code - 127)"
    if a.op == "const" and a.const == 2:
        return f"{power} is a float: store an integer of at most 4 bits, or the power itself as e8m0, which is 2 ** (code - 127)"
    return "powers of other numbers than 2 are tables: tables: {power: [1, 3, 9, 27]}, and power[code] in decode"


def _expression_text(expr: g.Expr) -> str:
    """An expression as the spec has it, in parentheses unless it is one word."""
    span = expr.span
    written = span.source.text.split("\n")[span.line - 1][span.column - 1:span.column - 1 + span.length]
    return written if re.fullmatch(r"[\w.]+", written) else f"({written})"
