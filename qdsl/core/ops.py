"""Operations on numbers in a spec's decode: one row each, with its bounds, its value, and its form in torch, Triton and C.

A row is all that a new operation needs: the language, types, constants and printers read this table.  Its second reading is in
tests/support/slow_reading.py, and docs/language/reference.md says what it does.  abs(s * q), a call of a word, has this row:

    Op("abs", 1, abs, _distance, "abs", "tl.abs", "fabsf({})", "({0} ^ {0} >> 31) - ({0} >> 31)", "(vf)((vi)({}) & 0x7fffffff)")
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

Bounds = tuple[int, int]                                         # the least and the largest integer


@dataclass(frozen=True, slots=True)
class Op:
    """An operation.  Integers among themselves are exact; other operands become float32, and so does the result.

    name: as decode has it, between its operands; a word is called.  operands: how many.  value: computes it from numbers.
    bounds: of integers, from the operands'; None if it is for floats only.  torch: the function of torch; '' for integers only.
    triton: the function of Triton; '' for Python's operator.  c, c_integers, c_vectors: texts in C, of floats, of integers and of
    vectors of floats; '' for the operator, and for the text of floats.  least: of integer operands.
    """

    name: str
    operands: int
    value: Callable[..., float]
    bounds: Callable[..., Bounds] | None
    torch: str = ""
    triton: str = ""
    c: str = ""
    c_integers: str = ""
    c_vectors: str = ""
    least: tuple[int, ...] = ()

    @property
    def is_called(self) -> bool:
        """Whether decode calls it by its name."""
        return self.name.isalpha() and self.name != "neg"

    def c_text(self, is_int: bool, is_vector: bool) -> str:
        """The text in C of operands in {0}, {1}."""
        return self.c_integers if is_int else (is_vector and self.c_vectors) or self.c


def _monotonic_bounds(value: Callable[[int, int], int]) -> Callable[[Bounds, Bounds], Bounds]:
    """The bounds of an operation that is monotonic in each operand."""
    def bounds(left: Bounds, right: Bounds) -> Bounds:
        ends = [value(a, b) for a in left for b in right]
        return min(ends), max(ends)
    return bounds


def _distance(of: Bounds) -> Bounds:
    """The bounds of an absolute value."""
    return max(of[0], -of[1], 0), max(-of[0], of[1])


OPS = {op.name: op for op in (
    Op("+", 2, operator.add, _monotonic_bounds(operator.add), "add"),
    Op("-", 2, operator.sub, _monotonic_bounds(operator.sub), "sub"),
    Op("*", 2, operator.mul, _monotonic_bounds(operator.mul), "mul"),
    Op("/", 2, operator.truediv, None, "div", "tl.div_rn", "{} / {}"),           # tl's `/` is approximate
    Op("//", 2, operator.floordiv, _monotonic_bounds(operator.floordiv), least=(0, 1)),
    Op("%", 2, operator.mod, lambda left, right: (0, right[1] - 1), least=(0, 1)),
    Op("neg", 1, operator.neg, lambda of: (-of[1], -of[0])),
    Op("abs", 1, abs, _distance, "abs", "tl.abs", "fabsf({})", "({0} ^ {0} >> 31) - ({0} >> 31)", "(vf)((vi)({}) & 0x7fffffff)"),
)}


def functions() -> dict[str, Op]:
    """The operations that decode calls, by name."""
    return {name: op for name, op in OPS.items() if op.is_called}


def triton_function(name: str) -> Op | None:
    """The operation for which Triton has a function of this name; None if there is none."""
    return next((op for op in OPS.values() if op.triton.rpartition(".")[2] == name), None)
