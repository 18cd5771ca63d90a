"""Proves that the fields of an encode scheme can hold what the scheme chooses for ordinary weights, of both signs.

A scheme that meets a type too narrow for its numbers clamps them, or divides by 0.  The format then loses every negative weight,
or refuses all weights.  check_encode calls this once the roles, options and constants are known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod

from qdsl.compiler.ir.program import Constant, Program
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.source import Problems, Span
from qdsl.core.numbers import Number
from qdsl.core.schemes import Scheme

OFFSETS = {"code": "offset", "scale": "scale_offset"}            # constants that decode subtracts from a role
NARROW = 1e-6                                                    # of levels that reach 1, but for rounding


class EncodeCall:
    """A spec's call of a scheme: what each role, option and constant is, and where it stands."""

    def __init__(self, program: Program, call: g.CallExpr, roles: Mapping[str, str], options: Mapping[str, str | int | float],
                 constants: Mapping[str, Constant]) -> None:
        self.program, self.call, self.roles, self.options, self.constants = program, call, roles, options, constants
        self.places = {key.name: value.span for key, value in call.keywords}

    def place(self, word: str) -> Span:
        """Where a role or option stands in the call; the call itself for one that is not written."""
        return self.places.get(word, self.call.span)

    def role_type(self, role: str) -> Number:
        number = self.program.field(self.roles[role]).number
        assert number is not None
        return number

    def role_range(self, role: str) -> tuple[float, float]:
        """The least and the largest number of a role, less what decode subtracts."""
        number, offset = self.role_type(role), self.constants.get(OFFSETS.get(role, ""), 0)
        assert isinstance(offset, int | float)
        if number.is_float:
            return (-number.largest if number.signed else 0.0) - offset, number.largest - offset
        return number.low - offset, number.high - offset

    def described(self, role: str) -> str:
        """The field of a role and its numbers, as messages have them."""
        low, high = self.role_range(role)
        return f"'{self.roles[role]}' is {low:g} to {high:g} in decode"

    def table_numbers(self, word: str) -> Sequence[float]:
        """The numbers of a table that decode reads, or of a part of decode that depends on a role."""
        constant = self.constants[word]
        if isinstance(constant, tuple):
            return constant
        return next(table.values for table in self.program.spec.tables if table.name.value == constant)

    def divisors(self) -> Iterator[tuple[float, Span]]:
        """The divisor of the scheme, and those that storages set."""
        own = self.options.get("divisor", self.constants.get("divisor"))
        if isinstance(own, int | float):
            yield own, self.place("divisor")
        for option, choice in self.program.authored.options:
            if option.value == "divisor":
                yield float(choice.value), choice.span


def check_ranges(encode: EncodeCall, scheme: Scheme, problems: Problems) -> None:
    """Adds a problem for each role, table or option with which the scheme cannot store ordinary weights."""
    for word in scheme.signs:
        if word in encode.roles:
            _check_role_signs(encode, word, problems)
        else:
            _check_table_signs(encode, word, problems)
    if not problems and (check := CHECKS.get(encode.call.name)):
        check(encode, problems)


def _check_role_signs(encode: EncodeCall, role: str, problems: Problems) -> None:
    low, high = encode.role_range(role)
    if low < 0 < high:
        return
    number, field = encode.role_type(role), encode.roles[role]
    if number.is_float:
        remedy = f"store '{field}' in a type with a sign, such as e4m3"
    elif number.kind == "signed" or number.bits == 1:
        remedy = f"store '{field}' as i{max(2, number.bits)}, and subtract nothing from it in decode"
    else:
        remedy = f"write ({field} - {1 << number.bits - 1}) in decode, or store '{field}' as i{number.bits}"
    name = encode.call.name
    problems.add(encode.place(role), f"'{name}' chooses a {role} of either sign, and {encode.described(role)}", remedy)


def _check_table_signs(encode: EncodeCall, word: str, problems: Problems) -> None:
    numbers = encode.table_numbers(word)
    if min(numbers) < 0 < max(numbers):
        return
    constant = encode.constants[word]
    what = f"table '{constant}'" if isinstance(constant, str) else f"what decode makes of '{encode.roles['code']}'"
    place = next((table.name.span for table in encode.program.spec.tables if table.name.value == constant), encode.call.span)
    problems.add(place, f"'{encode.call.name}' needs numbers of both signs: {what} has {min(numbers):g} to {max(numbers):g}",
                 "weights of the other sign would have no code")


# -- of single schemes -------------------------------------------------------------------------------------------------


def _check_reach(encode: EncodeCall, problems: Problems) -> None:
    """The code of the largest weight, divisor or -divisor, is nearly in reach of the codes."""
    low, high = encode.role_range("code")
    for divisor, place in encode.divisors():
        if divisor > max(-low, high):
            problems.add(place, f"{encode.described('code')}, and the largest weight of a block would be {divisor:g}",
                         f"write divisor={min(-low, high):g}")


def _check_signed_reach(encode: EncodeCall, problems: Problems) -> None:
    """The code of the weight of largest magnitude is the divisor, sign and all."""
    low, high = encode.role_range("code")
    for divisor, place in encode.divisors():
        if not low <= divisor <= high:
            problems.add(place, f"{encode.described('code')}, and the largest weight of a block would be {divisor:g}",
                         f"write divisor={low:g}")


def _check_zero_point(encode: EncodeCall, problems: Problems) -> None:
    """A zero point is a code: its type holds all codes."""
    code, zero, field = encode.role_type("code"), encode.role_type("zero"), encode.roles["zero"]
    low, high = encode.role_range("code")
    if zero.low > low or zero.high < high:
        problems.add(encode.place("zero"), f"a zero point is a code, {low:g} to {high:g}, and {encode.described('zero')}",
                     f"store '{field}' as {code.name}")


def _check_ternary(encode: EncodeCall, problems: Problems) -> None:
    if encode.role_type("code").high < 2:
        problems.add(encode.place("code"), f"codes are 0, 1 and 2, and '{encode.roles['code']}' has 1 bit",
                     f"store '{encode.roles['code']}' as u2")


def _check_progressive_types(encode: EncodeCall, problems: Problems) -> None:
    """Scales and zeros of all ranges of integers up to the divisor."""
    code, scale, zero = (encode.role_type(role) for role in ("code", "scale", "zero"))
    [(divisor, _)] = encode.divisors()
    largest = max(1, round(2 * divisor / code.high))
    farthest = max(min(round(divisor / step), code.high) * step for step in range(1, largest + 1))
    if scale.high < largest:
        problems.add(encode.place("scale"), f"scales are 1 to {largest}, and {encode.described('scale')}",
                     "store it in more bits, or codes in more bits")
    if zero.low > -farthest or zero.high < 0:
        problems.add(encode.place("zero"), f"zeros are {-farthest} to 0, and {encode.described('zero')}",
                     "store it as a signed integer of enough bits, or write a smaller divisor")


def _check_unit_levels(encode: EncodeCall, problems: Problems) -> None:
    """Levels of a unit are those of weights over the largest of their block."""
    largest = max(map(abs, encode.table_numbers("level")))
    if abs(largest - 1) > NARROW:
        table = next(table for table in encode.program.spec.tables if table.name.value == encode.constants["level"])
        problems.add(table.name.span, f"'{encode.call.name}' needs levels up to 1 or down to -1; here the largest is {largest:g}",
                     f"divide the table by {largest:g}, and scales grow by as much")


def _check_windows(encode: EncodeCall, problems: Problems) -> None:
    """15 bits are four levels, whose bits are exclusive ors of neighbours, and every column of a block has its own."""
    code, scale, choice = (encode.program.field(encode.roles[role]) for role in ("code", "scale", "choice"))
    values, name = encode.table_numbers("windows"), encode.call.name
    halves = [values[start:start + 16] for start in range(0, len(values), 32)]
    if list(values) != [value for half in halves for value in (*half, *half[::-1])] or \
            any(len({*half}) < 16 for half in halves) or len(halves) != 1 << choice.bits:
        problems.add(encode.call.span, f"'{name}' needs 16 levels for each choice, and these again in reverse",
                     "five bits and their complement are one level")
    group, place = (encode.constants[word] for word in ("group", "place"))
    assert isinstance(group, tuple) and isinstance(place, tuple)
    every = [(own, bit) for own in range(prod(code.table)) for bit in range(0, 16, 4)]
    if code.bits != 15 or sorted(zip(group, place, strict=True)) != every or not code.index == scale.index == choice.index:
        problems.add(encode.call.span, f"'{name}' needs 15 bits for every four columns of a block, each of which reads five")


CHECKS: Mapping[str, Callable[[EncodeCall, Problems], None]] = {
    "absmax": _check_reach, "nested_absmax": _check_reach, "unit_absmax": _check_reach, "signmax": _check_signed_reach,
    "minmax": _check_zero_point, "ternary": _check_ternary, "progressive": _check_progressive_types,
    "unit_level": _check_unit_levels, "unit_level_nested": _check_unit_levels,
    "least_squares_even": _check_windows}
