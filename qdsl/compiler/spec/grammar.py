"""The grammars inside a spec's scalars: expressions, types, record lines, tensor shapes and calls.

Everything is parsed into the dataclasses below, each with its span; no text of the spec is copied into generated code.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NoReturn, TypeVar

from qdsl.compiler.spec.source import Problem, Span, Text
from qdsl.compiler.spec.tokens import GrammarError, Token, tokens

_T = TypeVar("_T")

MAX_DEPTH = 40
MAX_ATOMS = 200
MAX_LINES = 256


@dataclass(frozen=True, slots=True)
class Number:
    """A number as written."""

    value: int | float
    span: Span


@dataclass(frozen=True, slots=True)
class Name:
    """A name as written."""

    name: str
    span: Span


@dataclass(frozen=True, slots=True)
class Subscript:
    """`name[index, ...]`"""

    name: str
    index: tuple[Expr, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class CallExpr:
    """`name(argument, ..., key=value, ...)`"""

    name: str
    arguments: tuple[Expr, ...]
    keywords: tuple[tuple[Name, Expr], ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Negate:
    """Minus an expression."""

    value: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class Binary:
    """`left op right`, op one of + - * / // % **, and ^ in a stored operation."""

    op: str
    left: Expr
    right: Expr
    span: Span


Expr = Number | Name | Subscript | CallExpr | Negate | Binary


@dataclass(frozen=True, slots=True)
class Type:
    """`e4m3`, `u{bits}`, `index(G)` or the name of a parameter that lists types."""

    name: str
    parameter: Name | None
    extent: Expr | None
    span: Span


@dataclass(frozen=True, slots=True)
class Loop:
    """`i<32`: a loop of a record line, or a digit of a tensor's axis."""

    name: str
    extent: Expr
    span: Span


@dataclass(frozen=True, slots=True)
class RecordItem:
    """`q[l + 16].hi:2`: part is 'whole', 'lo', 'hi', 'at' or, without a field, 'pad'.  again: a copy of bits stored elsewhere."""

    field: Name | None
    index: tuple[Expr, ...]
    part: str
    lo: Expr | None
    width: Expr | None
    span: Span
    again: bool = False


@dataclass(frozen=True, slots=True)
class LineGroup:
    """`(j<16: q[n, 16*t + j])`: the items of a line inside of another line."""

    line: RecordLine
    span: Span


@dataclass(frozen=True, slots=True)
class Digits(LineGroup):
    """`base3(j<5: q[l + 32*j])`: one byte of the line's items, the most significant digit first."""


@dataclass(frozen=True, slots=True)
class RecordLine:
    """A line of a record: loops, and items in storage order."""

    loops: tuple[Loop, ...]
    items: tuple[RecordItem | LineGroup, ...]
    span: Span

    @property
    def fields(self) -> Iterator[RecordItem]:
        """The items that are bits or digits, including those in groups."""
        for item in self.items:
            yield from item.line.fields if isinstance(item, LineGroup) else (item,)

    @property
    def extents(self) -> Iterator[Expr]:
        """The extents of its loops, including those of groups."""
        yield from (loop.extent for loop in self.loops)
        for item in self.items:
            yield from item.line.extents if isinstance(item, LineGroup) else ()


@dataclass(frozen=True, slots=True)
class Axis:
    """`t<K/8 word`: the digits of one axis of a tensor, slowest first; a None digit is the word."""

    digits: tuple[Loop | None, ...]
    span: Span


@dataclass(frozen=True, slots=True)
class Shape:
    """`i32[t<K/8 word, n<N] in i64`; within: the integer type in files, each of which holds several elements."""

    type: Type
    axes: tuple[Axis, ...]
    span: Span
    within: Type | None = None


@dataclass(frozen=True, slots=True)
class FieldType:
    """`f16[n, k // 32]`: a field's type and subscripts."""

    type: Type
    index: tuple[Expr, ...]
    span: Span


def names(expr: Expr | None) -> Iterator[str]:
    """Every name in an expression."""
    match expr:
        case Name(word):
            yield word
        case Subscript(word, index):
            yield word
            for part in index:
                yield from names(part)
        case CallExpr(_, arguments, keywords):
            for part in (*arguments, *(value for _, value in keywords)):
                yield from names(part)
        case Negate(value):
            yield from names(value)
        case Binary(_, left, right):
            yield from names(left)
            yield from names(right)


def expression(text: Text) -> Expr:
    """`d * (q - 8)`"""
    return _parse_whole(text, _Parser.expression)


def changed(text: Text) -> Expr:
    """`word - 5` or `word ^ 5`"""
    return _parse_whole(text, lambda parser: parser.binary(("^",), parser.expression))


def call(text: Text) -> CallExpr:
    """`absmax(code=q, scale=s)`, or only a name."""
    return _parse_whole(text, _Parser.call)


def typed(text: Text) -> FieldType:
    """`f16[n, k // 32]`"""
    return _parse_whole(text, _Parser.typed)


def shape(text: Text) -> Shape:
    """`i32[t<K/8 word, n<N]`"""
    return _parse_whole(text, _Parser.shape)


def table(text: Text) -> tuple[tuple[Loop, ...], Expr]:
    """`i<256 j<8: level[codes[i] // 4**j % 4]`"""
    return _parse_whole(text, _Parser.table)


def parse_record(text: Text) -> tuple[RecordLine, ...]:
    """Record lines: each line of the text with the lines after it that are indented further; empty lines are skipped."""
    parts: list[tuple[int, int, int]] = []                       # begin, end and indentation of each line
    begin = 0
    for row in text.value.split("\n"):
        indent, end = len(row) - len(row.lstrip()), begin + len(row)
        if row.strip() and parts and indent > parts[-1][2]:
            begin, _, indent = parts.pop()
        parts += [(begin, end, indent)] if row.strip() else []
        if len(parts) > MAX_LINES:
            raise GrammarError(Problem(f"a record has at most {MAX_LINES} lines", text.at(begin, begin + 1)))
        begin = end + 1
    if not parts:
        raise GrammarError(Problem("a record needs at least one item", text.span))
    return tuple(_Parser(text, begin, end).line() for begin, end, _ in parts)


def _parse_whole(text: Text, rule: Callable[[_Parser], _T]) -> _T:
    parser = _Parser(text, 0, len(text.value))
    result = rule(parser)
    parser.expect_end()
    return result


class _Parser:
    """Recursive descent over characters [begin, end) of one scalar."""

    def __init__(self, text: Text, begin: int, end: int) -> None:
        self.text = text
        self.tokens = tokens(text, begin, end)
        self.at = 0
        self.depth = 0
        self.atoms = 0

    @property
    def token(self) -> Token:
        return self.tokens[self.at]

    def fail(self, expected: str) -> NoReturn:
        token = self.token
        shown = f"'{token.text}'" if token.text else "the end"
        raise GrammarError(Problem(f"expected {expected}, found {shown}", self.text.at(token.begin, token.end)))

    def span(self, begin: int) -> Span:
        """The span from token number `begin` to the one before the current."""
        return self.text.at(self.tokens[begin].begin, self.tokens[max(begin, self.at - 1)].end)

    def take(self, *ops: str) -> str | None:
        """The current operator if it is one of these, and moves past it."""
        if self.token.kind == "op" and self.token.text in ops:
            self.at += 1
            return self.tokens[self.at - 1].text
        return None

    def expect(self, op: str) -> None:
        if self.take(op) is None:
            self.fail(f"'{op}'")

    def expect_end(self) -> None:
        if self.token.kind != "end":
            self.fail("the end")

    def name(self, what: str) -> Name:
        if self.token.kind != "name":
            self.fail(what)
        self.at += 1
        return Name(self.tokens[self.at - 1].text, self.span(self.at - 1))

    def many(self, rule: Callable[[], _T], close: str) -> tuple[_T, ...]:
        """Comma-separated items, up to and past `close`; may be empty."""
        items: list[_T] = []
        if self.take(close):
            return ()
        while True:
            items.append(rule())
            if self.take(close):
                return tuple(items)
            if not self.take(","):
                self.fail(f"',' or '{close}'")

    # -- expressions --------------------------------------------------------------------------------------------------

    def expression(self) -> Expr:
        return self.binary(("+", "-"), lambda: self.binary(("*", "/", "//", "%"), self.unary))

    def binary(self, ops: tuple[str, ...], operand: Callable[[], Expr]) -> Expr:
        begin = self.at
        left = operand()
        while op := self.take(*ops):
            left = Binary(op, left, operand(), self.span(begin))
        return left

    def unary(self) -> Expr:
        begin = self.at
        self.depth += 1
        if self.depth > MAX_DEPTH:
            self.fail(f"an expression at most {MAX_DEPTH} levels deep")
        value: Expr = Negate(self.unary(), self.span(begin)) if self.take("-") else self.power()
        self.depth -= 1
        return value

    def power(self) -> Expr:
        begin = self.at
        base = self.atom()
        return Binary("**", base, self.unary(), self.span(begin)) if self.take("**") else base

    def atom(self) -> Expr:
        begin = self.at
        self.atoms += 1
        if self.atoms > MAX_ATOMS:
            self.fail(f"an expression of at most {MAX_ATOMS} names and numbers")
        token = self.token
        if token.kind in ("int", "float"):
            self.at += 1
            if token.kind == "int" and len(token.text) > 1 and token.text[0] == "0":
                self.at -= 1
                self.fail("a number without leading zeros")
            if token.kind == "float" and math.isinf(float(token.text)):
                self.at -= 1
                self.fail("a finite number")
            return Number(float(token.text) if token.kind == "float" else int(token.text), self.span(begin))
        if self.take("("):
            value = self.expression()
            self.expect(")")
            return value
        name = self.name("a number, a name or '('")
        if self.take("["):
            return Subscript(name.name, self.many(self.expression, "]"), self.span(begin))
        return self.apply(name, begin) if self.take("(") else name

    def apply(self, name: Name, begin: int) -> CallExpr:
        parts = self.many(self.argument, ")")
        arguments = tuple(value for key, value in parts if key is None)
        keywords = tuple((key, value) for key, value in parts if key is not None)
        return CallExpr(name.name, arguments, keywords, self.span(begin))

    def argument(self) -> tuple[Name | None, Expr]:
        if self.token.kind == "name" and self.tokens[self.at + 1].text == "=":
            key = self.name("an option")
            self.expect("=")
            return key, self.expression()
        return None, self.expression()

    def call(self) -> CallExpr:
        begin = self.at
        name = self.name("the name of an encode scheme")
        return self.apply(name, begin) if self.take("(") else CallExpr(name.name, (), (), self.span(begin))

    # -- types, fields and tensors ------------------------------------------------------------------------------------

    def type(self) -> Type:
        begin = self.at
        name = self.name("a type")
        parameter = extent = None
        if self.take("{"):
            parameter = self.name("a parameter")
            self.expect("}")
        elif self.take("("):
            extent = self.expression()
            self.expect(")")
        return Type(name.name, parameter, extent, self.span(begin))

    def typed(self) -> FieldType:
        begin = self.at
        kind = self.type()
        self.expect("[")
        return FieldType(kind, self.many(self.expression, "]"), self.span(begin))

    def shape(self) -> Shape:
        begin, kind = self.at, self.type()
        self.expect("[")
        axes, ends = self.many(self.axis, "]"), self.token.text != "in"
        self.at += not ends
        return Shape(kind, axes, self.span(begin), None if ends else self.type())

    def axis(self) -> Axis:
        begin = self.at
        if self.token.text == "1":
            self.at += 1
            return Axis((), self.span(begin))
        digits: list[Loop | None] = []
        while not digits or self.token.kind == "name":
            if self.token.text == "word":
                self.at += 1
                digits.append(None)
            else:
                digits.append(self.digit())
        return Axis(tuple(digits), self.span(begin))

    def digit(self) -> Loop:
        """A dimension, with the variable that counts along it: `[n<N, j<K/2]`, not `[N, K/2]`."""
        if self.token.kind == "name" and self.tokens[self.at + 1].text != "<":
            wanted = "an axis is a variable and its extent, such as 'n<N' or 'j<K/2'"
            span = self.text.at(self.token.begin, self.token.end)
            raise GrammarError(Problem(f"'{self.token.text}' has no extent: {wanted}", span))
        return self.loop("a dimension such as 'n<N', 'word' (for all elements of a record, which are counted) or 1")

    def loop(self, what: str) -> Loop:
        begin = self.at
        name = self.name(what)
        self.expect("<")
        return Loop(name.name, self.expression(), self.span(begin))

    def table(self) -> tuple[tuple[Loop, ...], Expr]:
        loops = [self.loop("a loop such as 'i<256'")]
        while not self.take(":"):
            loops.append(self.loop("another loop, or ':'"))
        return tuple(loops), self.expression()

    # -- records ------------------------------------------------------------------------------------------------------

    def line(self) -> RecordLine:
        loops = self.loops()
        items: list[RecordItem | LineGroup] = [self.item()]
        while self.token.kind != "end":
            if self.token.text == ",":
                self.fail("the next item, without a comma between items")
            items.append(self.item())
        return RecordLine(tuple(loops), tuple(items), self.span(0))

    def loops(self) -> list[Loop]:
        """Loops and the colon after them, or nothing."""
        loops: list[Loop] = []
        if self.tokens[min(self.at + 1, len(self.tokens) - 1)].text == "<":
            while not self.take(":"):
                loops.append(self.loop("another loop such as 'i<32', or ':'"))
        return loops

    def inner(self) -> RecordLine:
        """The content of `base3(` or `(`, up to and past the closing bracket."""
        first, loops = self.at, self.loops()
        items = [self.field()]
        while not self.take(")"):
            items.append(self.field())
        return RecordLine(tuple(loops), tuple(items), self.span(first))

    def item(self) -> RecordItem | LineGroup:
        begin = self.at
        if (begin == 0 or self.tokens[begin - 1].end < self.token.begin) and self.take("("):
            return LineGroup(self.inner(), self.span(begin))
        if self.token.text == "base3" and self.tokens[self.at + 1].text == "(":
            self.at += 2
            return Digits(self.inner(), self.span(begin))
        if self.token.text == "again" and self.tokens[self.at + 1].text == "(":
            self.at += 2
            if self.token.text == "pad":
                self.fail("a field, as padding holds nothing")
            item = self.field()
            self.expect(")")
            return replace(item, again=True, span=self.span(begin))
        return self.field()

    def field(self) -> RecordItem:
        begin = self.at
        name = self.name("a field or 'pad:BITS'")
        if name.name == "pad" and self.take(":"):
            return RecordItem(None, (), "pad", None, self.width(), self.span(begin))
        index = self.many(self.expression, "]") if self.take("[") else ()
        if not self.take("."):
            return RecordItem(name, index, "whole", None, None, self.span(begin))
        part = self.name("'lo', 'hi' or 'at(bit)'")
        lo = None
        if part.name == "at":
            self.expect("(")
            lo = self.expression()
            self.expect(")")
        elif part.name not in ("lo", "hi"):
            self.at -= 1
            self.fail("'lo', 'hi' or 'at(bit)'")
        self.expect(":")
        width = self.width()
        return RecordItem(name, index, part.name, lo, width, self.span(begin))

    def width(self) -> Expr:
        if self.token.kind not in ("int", "name") and self.token.text != "(":
            self.fail("a number of bits")
        return self.atom()
