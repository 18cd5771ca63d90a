"""Names in scope, and integer expressions over them."""

from __future__ import annotations

from collections.abc import Mapping
from math import lcm

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.source import Problems, Span, did_you_mean

MAX_INT = 1 << 33
MAX_TERMS = 64


class Scope:
    """The meaning of names at one place of a spec.  `what` completes 'unknown name x in ...'."""

    def __init__(self, names: Mapping[str, Index], what: str, problems: Problems, domain: Domain = Domain()) -> None:
        self.names = names
        self.what = what
        self.problems = problems
        self.domain = domain

    def index(self, expr: g.Expr) -> Index | None:
        """The expression as an Index; None, with a problem added, if it is not an integer expression in this scope."""
        try:
            return self._index(expr)
        except _InvalidExpression as error:
            self.problems.add(error.span, error.message, *error.notes)
            return None

    def const(self, expr: g.Expr, what: str) -> int | None:
        """An integer that is the same for every N and K."""
        value = self.index(expr)
        if value is None or value.is_const:
            return None if value is None else value.const
        self.problems.add(expr.span, f"{what} must be a constant; '{value}' depends on {', '.join(sorted(value.names()))}")
        return None

    def _index(self, expr: g.Expr) -> Index:
        match expr:
            case g.Number(value, span):
                if isinstance(value, float) or value >= MAX_INT:
                    raise _InvalidExpression(span, "an integer below 2**33 is expected here")
                return Index(value)
            case g.Name(word, span):
                if word not in self.names:
                    notes = [f"a parameter is declared by its values: `params: {{{word}: [32, 64]}}`"]
                    raise _InvalidExpression(span, f"unknown name '{word}' in {self.what}{did_you_mean(word, self.names)}",
                                             *(notes if "subscript" in self.what else []))
                return self.names[word]
            case g.Negate(value):
                return self._index(value) * -1
            case g.Binary():
                return self._binary(expr)
            case g.CallExpr():
                return self._apply(expr)
        raise _InvalidExpression(expr.span, f"'{expr.name}[...]' is not an integer expression")

    def _binary(self, expr: g.Binary) -> Index:
        left, right = self._index(expr.left), self._index(expr.right)
        if (size := left.size * right.size if expr.op == "*" else left.size + right.size) > MAX_TERMS:
            raise _InvalidExpression(expr.span, f"an expression of {size} terms, and at most {MAX_TERMS} are allowed")
        value = self._combine(expr, left, right)
        if any(abs(number) > MAX_INT for number in (value.const, *(coefficient for _, coefficient in value.terms))):
            raise _InvalidExpression(expr.span, "this has a number beyond 2**33")
        return value

    def _combine(self, expr: g.Binary, left: Index, right: Index) -> Index:
        if expr.op in ("/", "//", "%") and right.is_const and right.const < 1:
            raise _InvalidExpression(expr.right.span, f"'{expr.op}' needs a positive number on its right, not {right}")
        if expr.op == "**":
            if not (left.is_const and right.is_const and 0 <= right.const <= 32 and 0 <= left.const <= 2):
                raise _InvalidExpression(expr.span, "'**' takes constants: 2 ** a, with a from 0 to 32")
            return Index(left.const ** right.const)
        if expr.op == "/":
            if {"N", "K"} & right.names():
                raise _InvalidExpression(expr.right.span, f"'/' divides an axis; {right} is one itself")
            if left.is_const and right.is_const and left.const % right.const:
                raise _InvalidExpression(expr.span, f"'/' must divide, and {left} / {right} leaves {left.const % right.const}",
                                         "write ceil(a / b) to round up, or a // b to round down")
            return ix.exact(left, right)
        if expr.op in ("//", "%"):
            return (ix.div if expr.op == "//" else ix.mod)(left, right, self.domain)
        return left * right if expr.op == "*" else left + right if expr.op == "+" else left - right

    def _apply(self, expr: g.CallExpr) -> Index:
        arguments = expr.arguments
        if expr.name == "ceil" and len(arguments) == 1 and not expr.keywords:
            inner = arguments[0]
            if not isinstance(inner, g.Binary) or inner.op != "/":
                raise _InvalidExpression(expr.span, "ceil takes a quotient: ceil(a / b)")
            top, bottom = self._index(inner.left), self._index(inner.right)
            if bottom.is_const and bottom.const < 1:
                raise _InvalidExpression(inner.right.span, f"ceil needs a positive divisor, not {bottom}")
            return ix.ceil(top, bottom)
        if expr.name == "lcm" and len(arguments) == 2 and not expr.keywords:
            left, right = (self._index(argument) for argument in arguments)
            if not left.is_const or not right.is_const:
                raise _InvalidExpression(expr.span, "lcm takes constants")
            return Index(lcm(left.const, right.const))
        raise _InvalidExpression(expr.span, f"unknown function '{expr.name}' in {self.what}"
                                            f"{did_you_mean(expr.name, ('ceil', 'lcm'))}")


class _InvalidExpression(Exception):
    def __init__(self, span: Span, message: str, *notes: str) -> None:
        super().__init__(message)
        self.span = span
        self.message = message
        self.notes = notes
