"""Tables of numbers, listed in a spec, read from a file next to it, or computed from other tables.

A file holds numbers separated by spaces and lines; '#' begins a comment.  A computed table, `grid: "i<256 j<8: level[codes[i] //
4**j % 4]"`, has a row for each value of its first loop and a column for each of its second, 32-bit integers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from math import prod
from operator import add, floordiv, mod, mul, neg, sub
from pathlib import Path
from typing import NoReturn

from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Table
from qdsl.compiler.spec.source import Problem, Span, Text, did_you_mean
from qdsl.compiler.spec.tokens import GrammarError
from qdsl.core.numbers import round_to_f32

MAX_TABLE = 1 << 14             # numbers per table: the largest codebook in use has 2048 rows of 8
MAX_FILE = 1 << 17
INT32 = 1 << 31
LARGEST = 2.0 ** 128 - 2.0 ** 104                                # the largest float32
OPERATORS: dict[str, Callable[[int, int], int]] = {"+": add, "-": sub, "*": mul, "//": floordiv, "%": mod, "**": pow}
_FILE = re.compile(r"(?:[A-Za-z0-9_]+/)*[A-Za-z0-9_]+\.txt\Z")
_INTEGER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})\Z")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]{0,8})(?:\.[0-9]{1,20})?(?:e[-+]?[0-9]{1,2})?\Z")


def is_number(word: str) -> bool:
    """Whether a table can hold it: an integer of up to nine digits, or a number in float32's range."""
    return _NUMBER.match(word) is not None and abs(float(word)) <= LARGEST


def parse_numbers(words: Sequence[str]) -> tuple[int, ...] | tuple[float, ...]:
    """The numbers of a table: integers if all of them are, else each rounded to float32."""
    if all(_INTEGER.match(word) for word in words):
        return tuple(map(int, words))
    return tuple(round_to_f32(float(word)) for word in words)


def read_table(name: Text, place: Text, folder: Path | None) -> Table:
    """The numbers of a text file in the spec's folder or below it.  Raises GrammarError."""
    if not _FILE.match(place.value):
        _fail(place.span, f"a table's file is a .txt in the spec's folder or below it, not '{place}'")
    if folder is None:
        _fail(place.span, "a spec that is no file has no folder to read a table from")
    path = folder / place.value
    if path.exists() and not path.is_file():                     # reading a pipe might never end
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
    return Table(name, parse_numbers(words), (len(words),))


def parse_computed_table(name: Text, text: Text, tables: Mapping[str, Table]) -> Table:
    """The table that a line such as `i<256 j<8: level[codes[i] // 4**j % 4]` describes.  Raises GrammarError."""
    loops, formula = g.table(text)
    extents = [_Reader({}, 1, tables).values(loop.extent)[0] for loop in loops]
    if len(loops) > 2 or not 0 < prod(extents) <= MAX_TABLE or min(extents) < 1:
        _fail(text.span, f"a table has one or two loops and at most {MAX_TABLE} numbers")
    names = [loop.name for loop in loops]
    if len({*names, *tables}) < len(names) + len(tables):
        _fail(text.span, "a loop has the name of something else")
    return evaluate_table(Table(name, (), tuple(extents), tuple(names), formula), tables)


def evaluate_table(table: Table, tables: Mapping[str, Table]) -> Table:
    """A computed table with its numbers.  Raises GrammarError if one of them is undefined."""
    assert table.formula is not None
    places = zip(*product(*map(range, table.shape)), strict=True)
    values = _Reader(dict(zip(table.loops, places, strict=True)), prod(table.shape), tables).values(table.formula)
    return replace(table, values=tuple(values))


class _Reader:
    """Evaluates integer expressions over loops and tables for all loop values at once: a list of `count` numbers.

    loops: the values of each loop.
    """

    def __init__(self, loops: Mapping[str, Sequence[int]], count: int, tables: Mapping[str, Table]) -> None:
        self.loops = loops
        self.count = count
        self.tables = tables

    def values(self, expr: g.Expr) -> list[int]:
        numbers = self._values(expr)
        if min(numbers) < -INT32 or max(numbers) >= INT32:
            place = self._first(not -INT32 <= number < INT32 for number in numbers)
            _fail(expr.span, f"{numbers[place]} does not fit 32 bits{self._where(place)}")
        return numbers

    def _first(self, wrong: Iterable[bool]) -> int:
        return next(place for place, is_wrong in enumerate(wrong) if is_wrong)

    def _where(self, place: int) -> str:
        return f", at {', '.join(f'{name} = {values[place]}' for name, values in self.loops.items())}" if self.loops else ""

    def _values(self, expr: g.Expr) -> list[int]:
        match expr:
            case g.Number(int(value)):
                return [value] * self.count
            case g.Name(word, span):
                if word not in self.loops:
                    _fail(span, f"unknown name '{word}' in a table{did_you_mean(word, (*self.loops, *self.tables))}")
                return list(self.loops[word])
            case g.Negate(value):
                return list(map(neg, self.values(value)))
            case g.Binary():
                return self._binary(expr)
            case g.Subscript(word, index, span):
                return self._entries(word, [self.values(part) for part in index], span)
            case g.CallExpr("parity", (argument,), ()):
                numbers = self.values(argument)
                if min(numbers) < 0:
                    _fail(expr.span, f"parity of {next(number for number in numbers if number < 0)}, which is negative")
                return [number.bit_count() % 2 for number in numbers]
            case g.CallExpr(word, _, _, span):
                _fail(span, f"unknown function '{word}' in a table{did_you_mean(word, ['parity'])}")
        _fail(expr.span, "a computed table holds integers")

    def _binary(self, expr: g.Binary) -> list[int]:
        left, right = self.values(expr.left), self.values(expr.right)
        if expr.op == "/":
            _fail(expr.span, "a computed table holds integers: divide with '//'")
        if expr.op == "**" and (min(right) < 0 or max(right) > 31):
            place = self._first(not 0 <= number <= 31 for number in right)
            _fail(expr.span, f"the exponent {right[place]} is not from 0 to 31{self._where(place)}")
        if expr.op in ("//", "%") and (min(left) < 0 or min(right) < 1):
            place = self._first(a < 0 or b < 1 for a, b in zip(left, right, strict=True))
            _fail(expr.span, f"'{expr.op}' needs a left side of at least 0 and a right side of at least 1, not {left[place]} and "
                  f"{right[place]}")
        return list(map(OPERATORS[expr.op], left, right))

    def _entries(self, word: str, index: list[list[int]], span: Span) -> list[int]:
        table = self.tables.get(word)
        if table is None or not table.is_int or len(table.shape) > 1:
            _fail(span, f"unknown table '{word}' of one row of integers{did_you_mean(word, self.tables)}")
        if len(index) != 1 or min(index[0]) < 0 or max(index[0]) >= table.shape[0]:
            place = 0 if len(index) != 1 else self._first(not 0 <= number < table.shape[0] for number in index[0])
            _fail(span, f"table '{word}' [{table.shape[0]}] has no entry {[part[place] for part in index]}{self._where(place)}")
        return [int(table.values[number]) for number in index[0]]


def _fail(span: Span, message: str) -> NoReturn:
    raise GrammarError(Problem(message, span))
