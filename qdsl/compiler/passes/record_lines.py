"""Reads the lines of a tensor's record: loops, widths, bits and subscripts, resolved to constants.

read_records uses it for each tensor, and then finds the variables that select the record of a field.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod

from qdsl.compiler.ir.index import Atom, Index, name
from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.passes.type_fields import AXES, parameters
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import model
from qdsl.compiler.spec.source import Problems, Span, did_you_mean
from qdsl.core.layout import BASE, DIGIT_BITS, PLACES, Affine, RecordItem, RecordLine

MAX_PIECES = 1 << 14
MAX_WIDTH = 64
MAX_GROUP = 1 << 8
Weights = dict[str, tuple[Atom, ...]]                             # extents by which a variable ('' for a number) is multiplied


class RecordReader:
    """Reads the lines of a tensor's record.

    used: the subscripts of each field, one per item.  weights: the factors of their variables.
    """

    def __init__(self, program: Program, item: model.Tensor, problems: Problems, constants: Mapping[str, Index]) -> None:
        self.program = program
        self.item = item
        self.problems = problems
        self.fields = {field.name: field for field in program.fields}
        self.constants = {**parameters(program), **{d: i for d, i in program.dims.items() if i.is_const}, **constants}
        self.extents = {"N": name("N"), "K": name("K"), **program.dims}
        self.used: dict[str, list[tuple[Affine, ...]]] = {}
        self.weights: dict[str, list[tuple[Weights, ...]]] = {}
        self.what = f"the record of '{item.name}'"

    def read_lines(self, record: tuple[g.RecordLine, ...], variables: set[str], local: bool = False,
                   ) -> tuple[RecordLine, ...] | None:
        """The record with constant loops, widths and linear subscripts."""
        lines: list[RecordLine] = []
        kept: list[g.RecordLine] = []
        pieces = 0
        for line in record:
            loops = self.read_loops(line.loops, variables)
            if loops is None:
                return None
            if 0 in (extent for _, extent in loops):
                continue                                         # a line that does not exist for these parameters
            names = variables | {loop for loop, _ in loops}
            read = [self.read_items(item, names, local) for item in line.items]
            items = tuple(item for some in read for item in some or ())
            if None in read:
                return None
            pieces += len(items) * prod(extent for _, extent in loops)
            if pieces > MAX_PIECES:
                self.problems.add(line.span, f"the record has more than {MAX_PIECES} pieces")
                return None
            kept.append(line)
            lines.append(RecordLine(tuple(loops), items))
            for item in items:
                if item.field is not None and not item.again:
                    self.used.setdefault(item.field, []).append(item.index[1:] if local else item.index)
        if not self.used:
            self.problems.add(self.item.record_text.span, f"{self.what} holds no field")
            return None
        return tuple(lines) if self.check_originals(kept, lines) else None

    def check_originals(self, record: Sequence[g.RecordLine], lines: Sequence[RecordLine]) -> bool:
        """Whether bits marked `again` are copies of items in equal loops; adds a problem if not."""
        stored = {_key(line, item) for line in lines for item in line.items if not item.again}
        spans = [item.span for line in record for item in line.fields if item.again]
        copies = [(line, item) for line in lines for item in line.items if item.again]
        for span, (line, item) in zip(spans, copies, strict=True):
            if _key(line, replace(item, again=False)) not in stored:
                self.problems.add(span, f"{self.what} has no item whose bits of '{item.field}' stand here again")
                return False
        return True

    def read_loops(self, loops: tuple[g.Loop, ...], taken: set[str]) -> list[tuple[str, int]] | None:
        """Name and extent of each loop; None, with a problem, if an extent is not a constant in range."""
        extents: list[tuple[str, int]] = []
        for loop in loops:
            if set(AXES.values()) & set(g.names(loop.extent)):
                self.problems.add(loop.span, "a loop over a whole axis stands alone: as the first loop of the only line of "
                                             f"{self.what}, of a tensor with the axis 'word'")
                return None
            extent = Scope(self.constants, self.what, self.problems).const(loop.extent, "a loop's extent")
            if loop.name in taken | {seen for seen, _ in extents} | self.constants.keys():
                self.problems.add(loop.span, f"loop '{loop.name}' has the name of an axis, a parameter or another loop; the axis "
                                             "of a record's elements is called 'word'")
            least = 0 if any(g.names(loop.extent)) else 1        # a loop of extent 0 omits the line for some parameters
            if extent is not None and not least <= extent <= MAX_PIECES:
                self.problems.add(loop.span, f"a loop runs from 1 to {MAX_PIECES} times, not {extent}")
                extent = None
            if extent is None:
                return None
            extents.append((loop.name, extent))
        return extents

    def read_items(self, item: g.RecordItem | g.LineGroup, names: set[str], local: bool) -> list[RecordItem] | None:
        """An item, or the items of a group in order, with its loops unrolled; None if one has a problem."""
        if isinstance(item, g.RecordItem):
            read = self.read_item(item, names, local)
            return None if read is None else [read]
        loops, is_byte = self.read_loops(item.line.loops, names), isinstance(item, g.Digits)
        if loops is None:
            return None
        inner = [loop for loop, _ in loops]
        forms = [(self.read_digit if is_byte else self.read_item)(part, names | set(inner), local) for part in item.line.fields]
        kept = [form for form in forms if form is not None]
        size = len(kept) * prod(extent for _, extent in loops)
        if len(kept) < len(forms) or (is_byte and not self.has_room_in_byte(item.span, kept, size)):
            return None
        if size > MAX_GROUP:
            self.problems.add(item.span, f"a group has at most {MAX_GROUP} items, its loops written out, not {size}")
            return None
        choices = [dict(zip(inner, values, strict=True)) for values in product(*(range(extent) for _, extent in loops))]
        written = [replace(form, index=tuple(_bound(part, values) for part in form.index), lo=_bound(form.lo, values))
                   for values in choices for form in kept]
        return [replace(form, place=place, last=place == size - 1) for place, form in enumerate(written)] if is_byte else written

    def has_room_in_byte(self, span: Span, digits: Sequence[RecordItem], size: int) -> bool:
        """Whether a byte has room for this number of digits, all of one field; adds a problem if not."""
        if not 1 <= size <= PLACES:
            self.problems.add(span, f"a byte has room for {PLACES} digits of base {BASE}, not {size}")
        elif len({form.field for form in digits}) > 1:
            self.problems.add(span, "the digits of a byte are of one field")
        else:
            return True
        return False

    def read_digit(self, item: g.RecordItem, names: set[str], local: bool) -> RecordItem | None:
        """An item of a byte of base-3 digits: a whole element of two bits."""
        if item.field is None:
            self.problems.add(item.span, f"digits of base {BASE} are fields, not padding", "places after the last digit are 0")
            return None
        if item.part != "whole":
            self.problems.add(item.span, f"a digit of base {BASE} is a whole field, without .lo, .hi or .at")
            return None
        read = self.read_item(item, names, local)
        number = self.fields[item.field.name].number if read is not None else None
        if number is not None and number.name == f"u{DIGIT_BITS}":
            return read
        if read is not None:
            self.problems.add(item.span, f"a digit of base {BASE} is of a field that is u{DIGIT_BITS}, with values 0 to "
                                         f"{BASE - 1}; '{item.field.name}' is {number.name if number else 'an index'}")
        return None

    def read_item(self, item: g.RecordItem, names: set[str], local: bool) -> RecordItem | None:
        """An item with its subscripts, lowest bit and width; None, with a problem, if one is wrong."""
        scope = Scope({**self.constants, **{word: name(word) for word in names}}, self.what, self.problems)
        if item.field is None:
            width = scope.const(item.width, "a width") if item.width is not None else None
            return None if not self.is_width_in_range(width, MAX_WIDTH, item.span) else RecordItem(None, (), Affine(), width or 0)
        field = self.fields.get(item.field.name)
        if field is None:
            self.problems.add(item.field.span,
                              f"unknown field '{item.field.name}' in {self.what}{did_you_mean(item.field.name, self.fields)}")
            return None
        rows = scope if local else Scope({**scope.names, **self.extents}, self.what, self.problems, self.program.domain)
        read = [self.read_subscript(rows, expr, names) for expr in item.index]
        index = [linear[0] if linear is not None else None for linear in read]
        width = field.bits if item.width is None else scope.const(item.width, "a width")
        if None in index or not self.is_width_in_range(width, field.bits, item.span):
            return None
        assert width is not None
        lo = self.read_bit(scope, item.lo) if item.lo is not None else Affine(field.bits - width if item.part == "hi" else 0)
        rank = len(field.extents)
        by_weight = rank == 2 and not field.table
        allowed = (0, 1) if local else (rank, 1) if by_weight else (rank,)
        if len(index) not in allowed:
            expected = "one local subscript, or none" if local else f"{rank}" + (", or one flat position" if by_weight else "")
            self.problems.add(item.span, f"field '{field.name}' has {len(index)} subscripts here; expected {expected}")
            return None
        if lo is None:
            return None
        if not item.again:
            self.weights.setdefault(field.name, []).append(tuple(linear[1] for linear in read if linear is not None))
        forms = tuple(form for form in index if form is not None) or ((Affine(),) if local else ())
        return RecordItem(field.name, (Affine(), *forms) if local else forms, lo, width, again=item.again)

    def is_width_in_range(self, width: int | None, most: int, span: Span) -> bool:
        """Whether a width is from 1 to `most` bits; adds a problem if not."""
        if width is not None and not 1 <= width <= most:
            self.problems.add(span, f"a width of {width} bits: expected 1 to {most}")
            return False
        return width is not None

    def read_bit(self, scope: Scope, expr: g.Expr) -> Affine | None:
        """A bit of an element, which may depend on loops."""
        index = scope.index(expr)
        if index is not None and all(atom.op == "name" for atom, _ in index.terms):
            return Affine(index.const, tuple((atom.name, coefficient) for atom, coefficient in index.terms))
        if index is not None:
            self.problems.add(expr.span, f"a bit is linear in the loops of its line, not {index}")
        return None

    def read_subscript(self, scope: Scope, expr: g.Expr, names: set[str]) -> tuple[Affine, Weights] | None:
        """A subscript as the elements of a record, and the factors of its variables and of these elements."""
        index = scope.index(expr)
        if index is None:
            return None
        parts: dict[str, int] = {}
        units: Weights = {}
        for factors, coefficient in expand_products(index).items():
            moving = [atom.name for atom in factors if atom.op == "name" and atom.name in names]
            unit = tuple(atom for atom in factors if atom.op != "name" or atom.name not in names)
            if len(moving) > 1 or any(Index(0, ((atom, 1),)).names() & names for atom in unit) or "".join(moving) in parts:
                self.problems.add(expr.span, f"a record's subscript is linear in its variables, not {index}")
                return None
            parts["".join(moving)] = coefficient
            units["".join(moving)] = unit
        return Affine(parts.pop("", 0), tuple(parts.items())), units


def expand_products(index: Index) -> dict[tuple[Atom, ...], int]:
    """An index as a sum of products: coefficient by atoms, none of which is a product."""
    sums: dict[tuple[Atom, ...], int] = {(): index.const} if index.const else {}
    for atom, coefficient in index.terms:
        parts: dict[tuple[Atom, ...], int] = {(atom,): 1}
        if atom.op == "mul":
            left, right = (expand_products(argument) for argument in atom.args)
            parts = {}
            for (a, x), (b, y) in product(left.items(), right.items()):
                key = tuple(sorted((*a, *b), key=lambda atom: atom.key))
                parts[key] = parts.get(key, 0) + x * y
        for key, value in parts.items():
            sums[key] = sums.get(key, 0) + coefficient * value
    return {key: value for key, value in sums.items() if value}


def _key(line: RecordLine, item: RecordItem) -> tuple[tuple[tuple[str, int], ...], RecordItem]:
    """An item, and the loops that it depends on."""
    names = {name for form in (*item.index, item.lo) for name, _ in form.terms}
    return tuple(loop for loop in line.loops if loop[0] in names), item


def _bound(form: Affine, values: Mapping[str, int]) -> Affine:
    """The form with values for some variables."""
    const = form.const + sum(coefficient * values[word] for word, coefficient in form.terms if word in values)
    return Affine(const, tuple(term for term in form.terms if term[0] not in values))
