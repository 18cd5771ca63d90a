"""Positions in the C of a decode function: sums of digits of a unit's number, which quotients and remainders take apart."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

ROWS = "n * K"                                                   # the numbers of the rows before row n
SHORT = 8                                                        # values of a digit that conditions take one by one
ENDLESS = 1 << 40                                                # more than a digit without an end has


class Unprintable(Exception):
    """A step that has no form in C, or not for vectors."""


@dataclass(frozen=True)
class Digit:
    """A loop over a unit's number.  extent: 0 for all units.  is_printed: value by value."""

    name: str
    extent: int = 0
    is_printed: bool = False


class DigitMustSplit(Exception):
    """A digit whose lowest `factor` values must be a digit of their own; 0: that must be printed value by value."""

    def __init__(self, digit: str, factor: int) -> None:
        super().__init__(digit)
        self.digit, self.factor = digit, factor

    def of(self, digits: Sequence[Digit]) -> list[Digit]:
        """The digits, slowest first, so divided."""
        result: list[Digit] = []
        for digit in digits:
            if digit.name != self.digit:
                result.append(digit)
            elif self.factor:
                result += [replace(digit, extent=digit.extent // self.factor), Digit(f"d{len(digits)}", self.factor)]
            else:
                result.append(replace(digit, is_printed=True))
        return result


@dataclass(frozen=True)
class Position:
    """A sum of symbols by their coefficients, and a constant."""

    terms: tuple[tuple[str, int], ...] = ()
    constant: int = 0

    @staticmethod
    def of(name: str) -> Position:
        return Position(((name, 1),))

    @property
    def text(self) -> str:
        names = [(name if name.isidentifier() else f"({name})", factor) for name, factor in self.terms]
        parts = [name if factor == 1 else f"{factor} * {name}" for name, factor in names]
        return " + ".join(parts + [str(self.constant)] * bool(self.constant or not parts))

    def step(self, lanes: str) -> int:
        """The distance between neighbouring lanes."""
        return dict(self.terms).get(lanes, 0)

    def at(self, values: Mapping[str, int]) -> int:
        """The number for values of symbols, which are 0 where they have none."""
        return self.constant + sum(factor * values.get(name, 0) for name, factor in self.terms)

    def plus(self, other: Position, sign: int = 1) -> Position:
        terms = dict(self.terms)
        for name, factor in other.terms:
            terms[name] = terms.get(name, 0) + sign * factor
        return Position(tuple((name, factor) for name, factor in terms.items() if factor), self.constant + sign * other.constant)

    def times(self, by: int) -> Position:
        return Position(tuple((name, factor * by) for name, factor in self.terms if by), self.constant * by)

    def scaled(self, size: int, other: int) -> Position:
        """A place in elements of `size` bytes as one in elements of `other` bytes."""
        if not self.terms and not self.constant:
            return self
        if any(factor * size % other for _, factor in self.terms) or self.constant * size % other:
            raise Unprintable("a pointer to the middle of an element")
        return Position(tuple((name, factor * size // other) for name, factor in self.terms), self.constant * size // other)


ORIGIN = Position()


@dataclass
class Positions:
    """Operations on positions.  extents: of digits.  multiples: what K turned out to be a multiple of.

    is_slow: whether a digit is divided at run time.
    """

    extents: Mapping[str, int]
    lanes: str
    multiples: list[int] = field(default_factory=list)
    is_slow: bool = False

    def operation(self, sign: str, left: Position, right: Position) -> Position | None:
        """The result, where it is a position."""
        if sign in "+-":
            return left.plus(right, -1 if sign == "-" else 1)
        if not left.terms and not right.terms:
            a, b = left.constant, right.constant
            operations = {"*": lambda: a * b, "/": lambda: a // b, "%": lambda: a % b, "&": lambda: a & b, "|": lambda: a | b,
                          "^": lambda: a ^ b, "<<": lambda: a << b, ">>": lambda: a >> b}
            return Position((), operations[sign]())
        if sign == "*" and not (left.terms and right.terms):
            return left.times(right.constant) if not right.terms else right.times(left.constant)
        if sign == "*" and {left.text, right.text} == {"n", "K"} and self.lanes != "n":
            return Position.of(ROWS)
        if sign in "/%" and not right.terms:
            return self._divided(sign, left, right.constant)
        return self._symbol(left, sign, right) if sign in "*/%" else None

    def _symbol(self, left: Position, sign: str, right: Position) -> Position | None:
        """A quotient, remainder or product of other symbols as a new one; None where lanes differ in it."""
        names = {name for side in (left, right) for name, _ in side.terms}
        if self.lanes in names:                                  # rows alone fit 32 bits
            if sign == "*" or names != {"n"}:
                raise Unprintable("a position of lanes that are no neighbours")
            return None
        self.is_slow |= sign != "*" and any(name in self.extents for name in names)
        return Position.of(f"({left.text}) {sign} ({right.text})")

    def _divided(self, sign: str, left: Position, by: int) -> Position | None:
        """A quotient or a remainder by a number."""
        if any(name not in self.extents and name != ROWS for name, _ in left.terms) or min(f for _, f in left.terms) < 0:
            return self._symbol(left, sign, Position((), by))
        whole, remainder = Position((), left.constant // by), Position((), left.constant % by)
        for name, factor in left.terms:
            part = Position.of(name).times(factor)
            if name == ROWS and factor == 1:                     # rows of whole blocks
                self.multiples.append(by)
                whole = whole.plus(Position.of(f"n * (K / {by})"))
            elif factor % by == 0:
                whole = whole.plus(Position.of(name).times(factor // by))
            else:
                remainder = remainder.plus(part)
        if remainder.constant + sum(self._last(name) * factor for name, factor in remainder.terms) < by:
            return whole if sign == "/" else remainder
        name, factor = max(remainder.terms, key=lambda term: self._last(term[0]) * term[1])
        part_values, extent = by // math.gcd(by, factor), self.extents.get(name, 0)
        if name not in self.extents or (extent and (extent % part_values or extent == part_values)):
            return self._symbol(left, sign, Position((), by))
        raise DigitMustSplit(name, part_values)

    def _last(self, name: str) -> int:
        """The largest value of a digit."""
        return (self.extents.get(name) or ENDLESS) - 1

    def compared(self, left: Position, limit: int) -> bool | None:
        """Whether a position is less than a number, where that is known."""
        high = left.constant + sum(self._last(name) * factor for name, factor in left.terms)
        if high < limit or left.constant >= limit:
            return high < limit
        name, factor = max(left.terms, key=lambda term: self.extents.get(term[0], 0) * term[1])
        extent = self.extents.get(name, 0)
        part = math.gcd((limit - left.constant) // factor, extent)
        if 1 < part < extent and extent > SHORT:
            raise DigitMustSplit(name, part)
        if extent:
            raise DigitMustSplit(name, 0)
        return None
