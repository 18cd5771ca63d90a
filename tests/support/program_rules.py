"""Invariants of a program that hold after every pass: named rules, which tests run after each pass.

A rule reads what the passes so far have filled in and yields its violations.  A violation is a bug of the compiler, not of a
spec.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import pairwise
from math import prod

from qdsl.compiler.ir.index import Domain, Index, flat_of, value_bounds
from qdsl.compiler.ir.program import Program
from qdsl.compiler.ir.text import text
from qdsl.core.layout import BYTE, RecordBit, record_bits, record_pieces

Rule = Callable[[Program], Iterator[str]]
RULES: dict[str, Rule] = {}
F32_EXACT = 1 << 24
SIDE = 1 << 20                                                   # N and K of a large weight


class IllegalProgram(AssertionError):
    """A pass left a program that violates a rule."""


def check(program: Program, after: str) -> None:
    """Raises IllegalProgram with the rule's name, the violation, and the program as text."""
    for name, rule in RULES.items():
        for problem in rule(program):
            raise IllegalProgram(f"after {after}: {name} is violated: {problem}\n\n{text(program)}")


def _rule(function: Rule) -> Rule:
    RULES[function.__name__.replace("_", "-")] = function
    return function


@_rule
def subscripts_are_known(program: Program) -> Iterator[str]:
    """Subscripts of a field use n, k and index fields, in blocks of constants and sizes; each has an extent."""
    allowed = {"n", "k", *program.sizes, *(field.name for field in program.fields if field.number is None)}
    for field in program.fields:
        if not all(extent.is_const for extent in field.extents[len(field.index):]):
            yield f"{field.name} has {len(field.index)} subscripts and {len(field.extents)} extents"
        for index in field.index:
            if not index.names() <= allowed | ({"N", "K"} if flat_of(index) is not None else set()):
                yield f"{field.name} is subscripted by {index}"


@_rule
def positions_are_at_most_weights(program: Program) -> Iterator[str]:
    """No part of a subscript exceeds N * K: launches choose 32 or 64 bits for positions by the number of weights."""
    n, k = (program.spec.fixed.get(axis, SIDE) for axis in "NK")
    groups = (field.name for field in program.fields if field.number is None)
    domain = Domain({"N": (n, n), "K": (k, k), "n": (0, n - 1), "k": (0, k - 1), **dict.fromkeys(groups, (0, k - 1)),
                     **dict.fromkeys(program.sizes, (1, k))})
    for field in program.fields:
        for part in (part for index in field.index for part in _index_parts(index)):
            high = value_bounds(part, domain)[1]
            if high is None or high > n * k:
                yield f"{field.name} is subscripted by {part}, which is up to {high} with {n * k} weights"


def _index_parts(index: Index) -> Iterator[Index]:
    """An index, and all indices that it divides and multiplies."""
    yield index
    for atom, _ in index.terms:
        for argument in atom.args:
            yield from _index_parts(argument)


@_rule
def placements_are_of_fields(program: Program) -> Iterator[str]:
    """A placement has a tile for each coordinate of its field; variables of its tensor carry the tile."""
    fields = {field.name: field for field in program.fields}
    for tensor in program.tensors:
        variables = {var.name for var in tensor.vars} | {""}
        for placement in tensor.placements:
            if placement.field not in fields:
                yield f"{tensor.name} stores {placement.field}, which is no field"
            elif not placement.flat and len(placement.digits) != len(fields[placement.field].extents):
                yield f"{placement.field} in {tensor.name} has {len(placement.digits)} tiles"
            if len(placement.extents) != len(placement.digits) or any(digits.count("") != 1 for digits in placement.digits):
                yield f"{placement.field} in {tensor.name} has coordinates without a digit for what a record holds"
            if not set(placement.vars) <= variables:
                yield f"{placement.field} in {tensor.name} moves with variables that {tensor.name} does not have"


@_rule
def slices_say_what_records_say(program: Program) -> Iterator[str]:
    """Slices place every piece of a record where the record does, and no bit is claimed twice."""
    for tensor in program.tensors:
        if not all(placement.slices for placement in tensor.placements):
            continue
        wanted: list[RecordBit | None] = [None] * tensor.record_bits
        for piece in record_pieces(tensor.lines):
            for t in range(0 if piece.field is None else piece.width if piece.place is None else BYTE):
                before = wanted[piece.at + t].elements if piece.place else ()       # type: ignore[union-attr]
                wanted[piece.at + t] = RecordBit(str(piece.field), (*before, piece.index), piece.lo + t, piece.place is not None)
        placed = record_bits({placement.field: placement.slices for placement in tensor.placements}, tensor.record_bits)
        for bit, (a, b) in enumerate(zip(wanted, placed, strict=True)):
            if a != b:
                yield f"bit {bit} of {tensor.name} is {a} in the record and {b} in the slices"
                break


@_rule
def fields_are_stored_once(program: Program) -> Iterator[str]:
    """The slices of a stored field, over all tensors, cover its bits once in every range of its elements."""
    placed = [placement for tensor in program.tensors for placement in tensor.placements]
    if not placed or not all(placement.slices for placement in placed):
        return
    for field in program.fields:
        parts = sorted((part.lo, part.lo + part.width) for p in placed if p.field == field.name for part in p.slices
                       if part.start == 0)
        if field.name in program.where:
            if parts:
                yield f"{field.name} is stored though its value is fixed"
        elif not parts or parts[0][0] != 0 or parts[-1][1] != field.bits or any(a[1] != b[0] for a, b in pairwise(parts)):
            yield f"{field.name} has bits {parts} of {field.bits}"


@_rule
def values_refer_back(program: Program) -> Iterator[str]:
    """A value is computed from earlier values, and varies over at least as many axes as they do."""
    for number, value in enumerate(program.values):
        for arg in value.args:
            if arg >= number:
                yield f"%{number} reads %{arg}"
            elif len(program.values[arg].index) > len(value.index):
                yield f"%{number} varies over less than its argument %{arg}"


@_rule
def types_agree(program: Program) -> Iterator[str]:
    """Operands are both integers or both floats; the result of decode is a float."""
    for number, value in enumerate(program.values):
        if value.op in ("field", "const", "float", "table", "entry", "row", "digit"):
            continue
        if any(program.values[arg].is_int != value.is_int for arg in value.args):
            yield f"%{number} mixes integers and floats"
        elif value.op in ("//", "%", "**") and not value.is_int:
            yield f"%{number} is an operation of integers on floats"
    if program.values and program.values[-1].is_int:
        yield "the last value is an integer"


@_rule
def integers_are_in_range(program: Program) -> Iterator[str]:
    """An integer becomes a float only if float32 holds it exactly, and a subscript stays inside its table."""
    for number, value in enumerate(program.values):
        if value.op not in ("float", "table", "entry", "row"):
            continue
        low, high = program.values[value.args[0]].range or (-1, F32_EXACT + 1)
        if value.op == "float" and max(-low, high) > F32_EXACT:
            yield f"%{number} is not exact in float32"
        elif value.op == "table" and (low < 0 or high >= len(program.spec.table(value.name).values)):
            yield f"%{number} reads outside of table {value.name}"
        elif value.op in ("entry", "row"):
            *planes, rows = program.field(value.name).table[:-1 if value.op == "row" else None]
            if low < 0 or high >= rows or not 0 <= value.const < prod(planes):
                yield f"%{number} reads outside of stored table {value.name}"


@_rule
def units_fill_their_tiles(program: Program) -> Iterator[str]:
    """The digits and lanes of a unit count every weight of a record once."""
    units = program.units
    if units is None:
        return
    for axis in "nk":
        digits = [(weight, extent) for _, weight, extent in units.digits if axis == "k" and extent]
        digits += [(lane.weight, lane.extent) for lane in units.lanes if lane.axis == axis]
        if prod(extent for _, extent in digits) != units.tiles[axis]:
            yield f"{axis}: {digits} do not count {units.tiles[axis]}"
        filled = 1
        for weight, extent in sorted(digits):
            if weight != filled:
                yield f"{axis}: weight {weight} follows {filled}"
            filled *= extent
