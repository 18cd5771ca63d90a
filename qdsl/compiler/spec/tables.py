"""Tables of numbers, listed in a spec, read from a file beside it, or computed from other tables.

A file holds numbers apart by spaces and lines; '#' begins a comment.  A computed table, `grid: "i<256 j<8: level[codes[i] //
4**j % 4]"`, has a row for each value of its first loop and a column for each of its second, integers of 32 bits.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from pathlib import Path
from typing import NoReturn

from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Table
from qdsl.compiler.spec.source import Problem, Span, Text, did_you_mean
from qdsl.core.numbers import round_to_f32

MAX_TABLE = 1 << 14             # numbers of a table: the largest codebook of a format in use has 2048 rows of 8
MAX_FILE = 1 << 17
INT32 = 1 << 31
LARGEST = 2.0 ** 128 - 2.0 ** 104                                # float32's
_FILE = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.txt\Z")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,20})?(?:e[-+]?[0-9]{1,2})?\Z")


def is_number(word: str) -> bool:
    """Whether a table may hold it: an integer of up to nine digits, or a number in float32's range."""
    return _NUMBER.match(word) is not None and abs(float(word)) <= LARGEST


def numbers(words: Sequence[str]) -> tuple[int, ...] | tuple[float, ...]:
    """The numbers of a table: integers where all of them are, else each rounded to float32."""
    if all(_INTEGER.match(word) for word in words):
        return tuple(map(int, words))
    return tuple(round_to_f32(float(word)) for word in words)


def from_file(name: Text, place: Text, folder: Path | None) -> Table:
    """The numbers of a text file in the spec's folder or below it.  Raises GrammarError."""
    if not _FILE.match(place.value):
        _fail(place.span, f"a table's file is a .txt in the spec's folder or below it, not '{place}'")
    if folder is None:
        _fail(place.span, "a spec that is no file has no folder to read a table from")
    path = folder / place.value
    if path.exists() and not path.is_file():                     # a read of a pipe might never end
        _fail(place.span, f"'{place}' is no regular file")
    try:
        with open(path, "rb") as file:
            data = file.read(MAX_FILE + 1)
    except OSError as error:
        _fail(place.span, f"'{place}' cannot be read: {error.strerror}")
    if len(data) > MAX_FILE:
        _fail(place.span, f"'{place}' is over the limit of {MAX_FILE} bytes")
    words: list[str] = []
    for number, line in enumerate(data.decode("latin-1").split("\n"), 1):
        row = line.split("#")[0].split()
        if (wrong := next((word for word in row if not is_number(word)), None)) is not None:
            _fail(place.span, f"line {number} of '{place}' holds {wrong[:20]!r}, which is no number of float32")
        words += row
    if not 0 < len(words) <= MAX_TABLE:
        _fail(place.span, f"'{place}' holds {len(words)} numbers: expected 1 to {MAX_TABLE}")
    return Table(name, numbers(words), (len(words),))


def computed(name: Text, text: Text, tables: Mapping[str, Table]) -> Table:
    """The table that a line such as `i<256 j<8: level[codes[i] // 4**j % 4]` describes.  Raises GrammarError."""
    loops, formula = g.table(text)
    extents = [_Reader({}, tables).value(loop.extent) for loop in loops]
    if len(loops) > 2 or not 0 < prod(extents) <= MAX_TABLE or min(extents) < 1:
        _fail(text.span, f"a table has one or two loops and at most {MAX_TABLE} numbers")
    names = [loop.name for loop in loops]
    if len({*names, *tables}) < len(names) + len(tables):
        _fail(text.span, "a loop has the name of something else")
    return evaluated(Table(name, (), tuple(extents), tuple(names), formula), tables)


def evaluated(table: Table, tables: Mapping[str, Table]) -> Table:
    """A computed table with its numbers.  Raises GrammarError where one of them is none."""
    assert table.formula is not None
    values = tuple(_Reader(dict(zip(table.loops, at, strict=True)), tables).value(table.formula)
                   for at in product(*map(range, table.shape)))
    return replace(table, values=values)


class _Reader:
    """An integer expression over loops and tables, computed."""

    def __init__(self, loops: Mapping[str, int], tables: Mapping[str, Table]) -> None:
        self.loops = loops
        self.tables = tables

    def value(self, expr: g.Expr) -> int:
        number = self._value(expr)
        if not -INT32 <= number < INT32:
            _fail(expr.span, f"{number} does not fit 32 bits{self._where()}")
        return number

    def _where(self) -> str:
        return f", at {', '.join(f'{name} = {value}' for name, value in self.loops.items())}" if self.loops else ""

    def _value(self, expr: g.Expr) -> int:
        match expr:
            case g.Number(int(value)):
                return value
            case g.Name(word, span):
                if word not in self.loops:
                    _fail(span, f"unknown name '{word}' in a table{did_you_mean(word, (*self.loops, *self.tables))}")
                return self.loops[word]
            case g.Negate(value):
                return -self.value(value)
            case g.Binary():
                return self._binary(expr)
            case g.Subscript(word, index, span):
                return self._entry(word, [self.value(part) for part in index], span)
            case g.Apply("parity", (argument,), ()):
                value = self.value(argument)
                return value.bit_count() % 2 if value >= 0 else _fail(expr.span, f"parity of {value}, which is negative")
            case g.Apply(word, _, _, span):
                _fail(span, f"unknown function '{word}' in a table{did_you_mean(word, ['parity'])}")
        _fail(expr.span, "a computed table holds integers")

    def _binary(self, expr: g.Binary) -> int:
        a, b = self.value(expr.left), self.value(expr.right)
        if expr.op == "**":
            return int(a ** b) if 0 <= b <= 31 else _fail(expr.span, f"the exponent {b} is not from 0 to 31{self._where()}")
        if expr.op == "/":
            _fail(expr.span, "a computed table holds integers: divide with '//'")
        if expr.op in ("//", "%") and (a < 0 or b < 1):
            _fail(expr.span, f"'{expr.op}' needs a left side of at least 0 and a right side of at least 1, not {a} and {b}")
        match expr.op:
            case "+":
                return a + b
            case "-":
                return a - b
            case "*":
                return a * b
            case "//":
                return a // b
            case _:
                return a % b

    def _entry(self, word: str, at: list[int], span: Span) -> int:
        table = self.tables.get(word)
        if table is None or not table.is_int or len(table.shape) > 1:
            _fail(span, f"unknown table '{word}' of one row of integers{did_you_mean(word, self.tables)}")
        if len(at) != 1 or not 0 <= at[0] < table.shape[0]:
            _fail(span, f"table '{word}' [{table.shape[0]}] has no entry {at}{self._where()}")
        return int(table.values[at[0]])


def _fail(span: Span, message: str) -> NoReturn:
    raise g.GrammarError(Problem(message, span))
