"""Prints the tables of a spec as constants of its module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qdsl.compiler.emit import row_codes
from qdsl.compiler.emit.formula import constant, table_types
from qdsl.compiler.emit.lines import wrap_items
from qdsl.compiler.emit.torch import joint
from qdsl.compiler.ir.program import Program
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Table

_LEVEL = {"+": 1, "-": 1, "*": 2, "/": 2, "//": 2, "%": 2, "**": 4}


def constant_tables(programs: Sequence[Program]) -> list[list[str]]:
    """The lines of every constant that the programs of a variant read."""
    lines = _constants(programs[0])
    for program in programs:
        lines += [line for line in [*_constants(program), *row_codes.row_codes_constant(program)] if line not in lines]
    return lines


def _constants(program: Program) -> list[list[str]]:
    """The tables that decode reads, and those that they are computed from, in the order of the spec; then the joint table."""
    kinds = table_types(program)
    wanted = set(kinds)
    for table in reversed(program.spec.tables):
        if table.name.value in wanted and table.formula is not None:
            wanted |= set(g.names(table.formula))
    lines = [_constant(table, kinds) for table in program.spec.tables if table.name.value in wanted]
    return [*lines, *([line] if (line := joint.joined_table_lines(program)) else [])]


def _constant(table: Table, kinds: Mapping[str, str]) -> list[str]:
    """A Table if decode reads it; a tuple if only other tables do."""
    name, kind = constant(table.name.value), kinds.get(table.name.value)
    head = [f'"{kind}"'] if kind else []
    if table.formula is None:
        return wrap_items(f"{name} = Table(" if kind else f"{name} = (", [*head, *map(repr, table.values)], ")")
    loops = " ".join(f"for {loop} in range({extent})" for loop, extent in zip(table.loops, table.shape, strict=True))
    values = f"{_text(table.formula, kinds)} {loops}"
    if not kind:
        return wrap_items(f"{name} = tuple(", [values], ")")
    shape = [f"columns={table.shape[1]}"] if len(table.shape) > 1 else []
    return wrap_items(f"{name} = Table(", [*head, f"*({values})", *shape], ")")


def _text(expr: g.Expr, kinds: Mapping[str, str], around: int = 0) -> str:
    """An expression of a computed table in Python."""
    match expr:
        case g.Number(value):
            return str(value)
        case g.Name(word):
            return word
        case g.Negate(value):
            return f"(-{_text(value, kinds, 3)})" if around > 2 else f"-{_text(value, kinds, 3)}"
        case g.Subscript(word, index):
            return f"{constant(word)}{'.numbers' if word in kinds else ''}[{_text(index[0], kinds)}]"
        case g.CallExpr(_, arguments):
            body = f"{_text(arguments[0], kinds, 5)}.bit_count() % 2"
            return f"({body})" if around > 1 else body
        case g.Binary(op, left, right):
            level = _LEVEL[op]
            body = f"{_text(left, kinds, level + (op == '**'))} {op} {_text(right, kinds, level + (op != '**'))}"
            return f"({body})" if around > level else body
