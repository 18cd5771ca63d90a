"""Prints how the torch reference converts fields that a few columns share to a code per weight, and back."""

from __future__ import annotations

from qdsl.compiler.emit.formula import constant
from qdsl.compiler.emit.lines import wrap_items
from qdsl.compiler.ir.program import Program


def constant_name(program: Program) -> str:
    """The name of the constant in a module, different from all tables."""
    word = "row_codes"
    while any(table.name.value == word for table in program.spec.tables):
        word += "_"
    return constant(word)


def row_codes_constant(program: Program) -> list[list[str]]:
    """The lines of the constant; none for a program with the format's own fields."""
    codes = program.row_codes
    if codes is None:
        return []
    fields = [f"{factor.field}={constant(factor.table)}" if factor.table else
              f"{factor.field}=({len(factor.numbers)}, {factor.columns})" for factor in codes.factors]
    return [wrap_items(f"{constant_name(program)} = RowCodes(", [f"({', '.join(map(str, codes.order))},)", *fields], ")")]


def row_codes_lines(program: Program) -> list[str]:
    """Lines that compute the code; none for a program with the format's own fields."""
    codes = program.row_codes
    if codes is None:
        return []
    fields = ", ".join(f"{factor.field}={factor.field}" for factor in codes.factors)
    return [f"{codes.code} = {constant_name(program)}.codes({fields})"]


def field_entry(program: Program, field: str, text: str) -> str:
    """An entry of the dict of fields: the field, or instead of a code the fields that it encodes."""
    codes = program.row_codes
    return f'"{field}": {text},' if codes is None or field != codes.code else f"**{constant_name(program)}.fields({text}),"
