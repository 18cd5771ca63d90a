"""Joins a table's rows with a field of few values to one longer table of the torch reference.

torch is slow if short runs of weights meet one number, such as IQ1_M's rows of 8 and their shift.  The joint table has the result
of this step for every row and every code of the field, so that the step disappears.
"""

from __future__ import annotations

from dataclasses import dataclass

from qdsl.compiler.emit.formula import TORCH, constant, formula
from qdsl.compiler.ir.program import Program, Value

MOST = 1 << 12                                                   # rows that fit a cache


@dataclass(frozen=True, slots=True)
class JoinedTable:
    """A step of decode that depends only on a row and on a field with a code for each row.

    rows, codes: the number of rows of the table, and of values of the field.
    """

    step: int
    table: str
    row: str
    field: str
    rows: int
    codes: int

    @property
    def name(self) -> str:
        return f"{self.table}_{self.field}"

    def has(self, table: str, row: str) -> bool:
        """Whether it replaces the rows of a table that a field selects."""
        return (table, row) == (self.table, self.row)

    @property
    def code(self) -> str:
        """The code that indexes the joint table."""
        return f"torch.add({self.row}, {self.field}, alpha={self.rows})"


def joint(program: Program) -> JoinedTable | None:
    """The last such step, if it contains all uses of the row or the field."""
    candidates = [candidate for step in range(len(program.values)) if (candidate := _joined_table(program, step)) is not None]
    return candidates[-1] if candidates else None


def joined_table_lines(program: Program) -> list[str]:
    """The constant that holds the joint table."""
    step = joint(program)
    if step is None:
        return []
    text = formula(program, TORCH, {f"{step.table}[{step.row}]": step.table}, step=step.step)
    of = constant(step.table)
    return [f"{constant(step.name)} = {of}.with_codes(lambda {step.table}, {step.field}: {text}, {step.codes})"]


def _joined_table(program: Program, step: int) -> JoinedTable | None:
    leaves = _lookup_leaves(program, step)
    rows = [leaf for leaf in leaves if leaf.op == "table"]
    fields = [program.field(leaf.name) for leaf in leaves if leaf.op == "field"]
    if program.values[step].op == "float" or len(rows) != 1 or len(fields) != 1:
        return None
    if sum(leaf in leaves for leaf in _lookup_leaves(program, len(program.values) - 1)) > 2:
        return None
    row, field = program.field(program.values[rows[0].args[0]].name), fields[0]
    shape = program.spec.table(rows[0].name).shape
    if len(shape) < 2 or row.index != field.index or field.number is None or field.number.kind != "unsigned":
        return None
    candidate = JoinedTable(step, rows[0].name, row.name, field.name, shape[0], 1 << field.bits)
    others = {*(other.name for other in program.fields), *(other.name.value for other in program.spec.tables)}
    return candidate if candidate.rows * candidate.codes <= MOST and candidate.name not in others else None


def _lookup_leaves(program: Program, step: int) -> list[Value]:
    """The fields and table entries that a step computes with, without row indices."""
    value = program.values[step]
    if value.op in ("field", "entry", "row") or (value.op == "table" and len(program.spec.table(value.name).shape) > 1):
        return [value]
    return [leaf for arg in value.args for leaf in _lookup_leaves(program, arg)]
