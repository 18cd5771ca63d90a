"""Instructions of the PTX machine, one by one, against Python's integers and fractions, which round as the ISA says."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import reduce
from itertools import product
from typing import Any

import numpy as np
import pytest

from qdsl.analyze.execute import ExecutionError
from tests.support.ptx import evaluate, run

RANDOM = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def same_numbers_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(globals(), "RANDOM", np.random.default_rng(0))


def samples(width: int, count: int = 60) -> Any:
    """Corners and random patterns of a width."""
    top = 1 << width
    corners = [0, 1, 2, 31, 32, 33, top // 2 - 1, top // 2, top // 2 + 1, top - 2, top - 1]
    some = [int(value) for value in RANDOM.integers(0, min(top, 1 << 62), count)]
    return np.array([value % top for value in corners + some + [value >> width // 2 for value in some]], f"u{width // 8}")


def signed(value: int, bits: int) -> int:
    return value - (1 << bits) if value >> (bits - 1) else value


def truncated(a: int, b: int) -> int:
    return abs(a) // abs(b) * (1 if (a < 0) == (b < 0) else -1)


def field(value: int, start: int, length: int, bits: int, is_signed: bool) -> int:
    """bfe as the ISA writes it: bit by bit, filled with the sign bit."""
    start, length, top = start & 255, length & 255, bits - 1
    fill = 0 if not is_signed or length == 0 else value >> min(start + length - 1, top) & 1
    return sum((value >> start + i & 1 if i < length and start + i <= top else fill) << i for i in range(bits))


def placed(value: int, into: int, start: int, length: int, bits: int) -> int:
    for i in range(length & 255):
        if (start & 255) + i < bits:
            into = into & ~(1 << (start & 255) + i) | (value >> i & 1) << (start & 255) + i
    return into


def bytes_chosen(a: int, b: int, selector: int) -> int:
    source, out = (a | b << 32).to_bytes(8, "little"), 0
    for i in range(4):
        nibble = selector >> 4 * i & 15
        byte = source[nibble & 7]
        out |= (byte if not nibble & 8 else 255 if byte & 128 else 0) << 8 * i
    return out


def looked_up(table: int) -> Callable[[int, int, int], int]:
    return lambda a, b, c: sum((table >> ((a >> i & 1) << 2 | (b >> i & 1) << 1 | c >> i & 1) & 1) << i for i in range(32))


def dot(a: int, b: int, c: int, left: bool, right: bool) -> int:
    parts = [(value >> 8 * i & 255, flag) for i in range(4) for value, flag in ((a, left), (b, right))]
    numbers = [signed(value, 8) if flag else value for value, flag in parts]
    return sum(x * y for x, y in zip(numbers[::2], numbers[1::2], strict=True)) + c


# Instruction, widths and signs of operands, width of the result, what it is.
INTEGER: list[tuple[str, str, int, Callable[..., int]]] = [
    *((f"{name}.{kind}", f"{kind} {kind}", int(kind[1:]), function) for name, function in (
        ("add", lambda a, b: a + b), ("sub", lambda a, b: a - b), ("min", min), ("max", max)) for kind in ("s16", "u16", "s32",
            "u32", "s64", "u64")),
    *((f"mul.lo.{kind}", f"{kind} {kind}", int(kind[1:]), lambda a, b: a * b) for kind in ("s16", "s32", "u32", "s64")),
    *((f"mul.wide.{kind}", f"{kind} {kind}", 2 * int(kind[1:]), lambda a, b: a * b) for kind in ("s16", "u16", "s32", "u32")),
    *((f"mul.hi.{kind}", f"{kind} {kind}", int(kind[1:]), lambda a, b, bits=int(kind[1:]): a * b >> bits)
      for kind in ("s16", "u16", "s32", "u32", "s64", "u64")),
    *((f"mad.lo.{kind}", f"{kind} {kind} {kind}", int(kind[1:]), lambda a, b, c: a * b + c) for kind in ("s32", "u32", "s64")),
    *((f"mad.wide.{kind}", f"{kind} {kind} {wide}", 64, lambda a, b, c: a * b + c) for kind, wide in (("s32", "s64"), ("u32",
        "u64"))),
    ("mad.hi.s32", "s32 s32 s32", 32, lambda a, b, c: (a * b >> 32) + c),
    *((f"div.{kind}", f"{kind} {kind}", int(kind[1:]), lambda a, b: truncated(a, b) if b else -1) for kind in ("s32", "u32",
        "s64", "u64")),
    *((f"rem.{kind}", f"{kind} {kind}", int(kind[1:]), lambda a, b: a - truncated(a, b) * b if b else a) for kind in ("s32",
        "u32", "s64")),
    *((f"abs.{kind}", kind, int(kind[1:]), abs) for kind in ("s16", "s32", "s64")),
    *((f"neg.{kind}", kind, int(kind[1:]), lambda a: -a) for kind in ("s16", "s32", "s64")),
    *((f"{name}.b{bits}", f"u{bits} u{bits}", bits, function) for name, function in (
        ("and", lambda a, b: a & b), ("or", lambda a, b: a | b), ("xor", lambda a, b: a ^ b)) for bits in (16, 32, 64)),
    *((f"not.b{bits}", f"u{bits}", bits, lambda a: ~a) for bits in (16, 32, 64)),
    *((f"shl.b{bits}", f"u{bits} u32", bits, lambda a, b, bits=bits: a << b if b < bits else 0) for bits in (16, 32, 64)),
    *((f"shr.{kind}", f"{kind} u32", int(kind[1:]), lambda a, b, bits=int(kind[1:]): a >> min(b, bits)) for kind in ("s16",
        "u16", "s32", "u32", "s64", "u64")),
    ("shf.l.wrap.b32", "u32 u32 u32", 32, lambda a, b, c: (b << 32 | a) << (c & 31) >> 32),
    ("shf.r.wrap.b32", "u32 u32 u32", 32, lambda a, b, c: (b << 32 | a) >> (c & 31)),
    ("shf.l.clamp.b32", "u32 u32 u32", 32, lambda a, b, c: (b << 32 | a) << min(c, 32) >> 32),
    ("shf.r.clamp.b32", "u32 u32 u32", 32, lambda a, b, c: (b << 32 | a) >> min(c, 32)),
    *((f"bfe.{kind}", f"{kind.replace('s', 'u')} u32 u32", int(kind[1:]), lambda a, b, c, bits=int(kind[1:]),
       s=kind[0] == "s": field(a, b, c, bits, s))
      for kind in ("u32", "s32", "u64", "s64")),
    *((f"bfi.b{bits}", f"u{bits} u{bits} u32 u32", bits, lambda a, b, c, e, bits=bits: placed(a, b, c, e, bits)) for bits in (32,
        64)),
    *((f"popc.b{bits}", f"u{bits}", 32, lambda a: a.bit_count()) for bits in (32, 64)),
    *((f"clz.b{bits}", f"u{bits}", 32, lambda a, bits=bits: bits - a.bit_length()) for bits in (32, 64)),
    *((f"brev.b{bits}", f"u{bits}", bits, lambda a, bits=bits: int(f"{a:0{bits}b}"[::-1], 2)) for bits in (32, 64)),
    ("bfind.u32", "u32", 32, lambda a: a.bit_length() - 1),
    ("prmt.b32", "u32 u32 u32", 32, bytes_chosen),
    *((f"dp4a.{a}.{b}", "u32 u32 s32", 32, lambda x, y, z, a=a, b=b: dot(x, y, z, a == "s32", b == "s32")) for a in ("s32",
        "u32") for b in ("s32", "u32")),
    ("add.sat.s32", "s32 s32", 32, lambda a, b: max(-1 << 31, min(a + b, (1 << 31) - 1))),
    *((f"cvt.{to}.{of}", of, int(to[1:]), lambda a: a) for to, of in (
        ("s64", "s32"), ("u64", "u32"), ("u16", "u32"), ("u32", "u16"), ("s32", "s16"), ("s16", "s32"), ("u32", "u64"), ("s64",
            "s16"))),
    ("cvt.sat.s16.s32", "s32", 16, lambda a: max(-1 << 15, min(a, (1 << 15) - 1))),
    ("cvt.sat.u16.s32", "s32", 16, lambda a: max(0, min(a, (1 << 16) - 1))),
]


@pytest.mark.parametrize(("name", "kinds", "width", "function"), INTEGER, ids=[row[0] for row in INTEGER])
def test_integers(name: str, kinds: str, width: int, function: Callable[..., int]) -> None:
    widths = [int(kind[1:]) for kind in kinds.split()]
    columns = [RANDOM.permutation(np.resize(samples(bits), 256)) for bits in widths]
    if name[:4] in ("bfe.", "bfi."):                             # places in a word
        columns[-2:] = [RANDOM.integers(0, 70, 256).astype(np.uint32) for _ in range(2)]
    letters = ", ".join(f"{{{letter}}}" for letter, _ in zip("abce", widths, strict=False))
    results = evaluate(f"{name} {{d}}, {letters};", widths, width, columns)
    for place, result in enumerate(results):
        operands = [signed(int(column[place]), bits) if kind[0] == "s" else int(column[place])
                    for column, kind, bits in zip(columns, kinds.split(), widths, strict=True)]
        assert int(result) == function(*operands) % (1 << width), operands


def test_logic_of_three_operands() -> None:
    columns = [np.resize(samples(32), 64)[order] for order in (slice(None), slice(None, None, -1), RANDOM.permutation(64))]
    for table in (0x80, 0xFE, 0x96, 0x1B, 0xF8, 0x6A):
        results = evaluate(f"lop3.b32 {{d}}, {{a}}, {{b}}, {{c}}, {table};", [32] * 3, 32, columns)
        assert [int(result) for result in results] == [looked_up(table)(*map(int, row)) for row in zip(*columns, strict=True)]


def test_carries_pass_from_one_word_to_the_next() -> None:
    columns = [np.resize(samples(64), 96), RANDOM.permutation(np.resize(samples(64), 96))]
    for name, function in (("add", lambda a, b: a + b), ("sub", lambda a, b: a - b)):
        body = (f"mov.b64 {{{{%r1, %r2}}}}, {{a}}; mov.b64 {{{{%r3, %r4}}}}, {{b}}; {name}.cc.u32 %r5, %r1, %r3; "
                f"{name}c.u32 %r6, %r2, %r4; mov.b64 {{d}}, {{{{%r5, %r6}}}};")
        results = evaluate(body, [64, 64], 64, columns)
        assert [int(result) for result in results] == [function(int(a), int(b)) % (1 << 64) for a, b in zip(*columns,
            strict=True)]


# -- floats ----------------------------------------------------------------------------------------------------------------

# Bits, precision with the hidden bit, exponent of the smallest normal number, largest exponent; whether there are infinities.
TYPES = {"f32": (32, 24, -126, 127, True), "f16": (16, 11, -14, 15, True), "bf16": (16, 8, -126, 127, True),
         "e4m3": (8, 4, -6, 8, False), "e5m2": (8, 3, -14, 15, True), "f64": (64, 53, -1022, 1023, True)}
NAN = {"f32": 0x7FFFFFFF, "f16": 0x7FFF, "bf16": 0x7FFF, "e4m3": 0x7F, "e5m2": 0x7F, "f64": 0x7FF8 << 48}


def number(code: int, kind: str) -> Fraction | float:
    """What a bit pattern means; -0.0, infinities and NaN as floats."""
    bits, precision, least, _, infinite = TYPES[kind]
    fraction, exponent = code & (1 << precision - 1) - 1, code >> precision - 1 & (1 << bits - precision) - 1
    sign = -1 if code >> bits - 1 else 1
    if exponent == (1 << bits - precision) - 1:
        if infinite:
            return math.nan if fraction else sign * math.inf
        if fraction == (1 << precision - 1) - 1:
            return math.nan
    if not exponent and not fraction:
        return sign * 0.0
    return sign * (Fraction(fraction + (1 << precision - 1 if exponent else 0)) * Fraction(2) ** (max(exponent,
        1) - 1 + least - precision + 1))


def coded(value: Fraction | float, kind: str, rounding: str = "rn", saturate: bool = False) -> int:
    """The bit pattern of a number rounded once."""
    bits, precision, least, _, infinite = TYPES[kind]
    if isinstance(value, float) and math.isnan(value):
        return NAN[kind]
    negative = math.copysign(1, value) < 0 if isinstance(value, float) else value < 0
    top = ((1 << bits - precision) - 1 << precision - 1) if infinite else NAN[kind]
    largest = top - 1
    code: int
    if isinstance(value, float) and math.isinf(value):
        code = largest if saturate else top
    else:
        exact = abs(Fraction(value))
        exponent = exact.numerator.bit_length() - exact.denominator.bit_length() if exact else least
        exponent = max(least, exponent - (exact < Fraction(2) ** exponent))
        scaled = exact / Fraction(2) ** (exponent - precision + 1)
        whole = scaled.numerator // scaled.denominator
        up = {"rn": round(scaled) > whole, "rz": False, "rm": negative and whole != scaled,
              "rp": not negative and whole != scaled,
              "rna": scaled - whole >= Fraction(1, 2)}[rounding]
        whole += up
        code = whole + (exponent - least << precision - 1)
        if code > largest:
            towards = rounding == "rz" or (rounding == "rm" and not negative) or (rounding == "rp" and negative)
            code = largest if saturate or towards else top
    return code | negative << bits - 1


def floats(kind: str, count: int = 160) -> Any:
    """Bit patterns of a type: corners, NaN, random ones, and pairs near each other."""
    bits, precision, *_ = TYPES[kind]
    top = 1 << bits - 1
    one = coded(Fraction(1), kind)
    corners = [0, 1, (1 << precision - 1) - 1, 1 << precision - 1, one, one + 1, top - 1,
               ((1 << bits - precision) - 1) << precision - 1]
    some = [int(RANDOM.integers(0, 1 << min(bits, 62))) for _ in range(count)]
    some += [one + int(RANDOM.integers(-999, 999)) % (1 << precision) for _ in range(count)]
    return RANDOM.permutation(np.array([value % (1 << bits) for value in corners + [top | corner for corner in corners] + some],
                                       f"u{bits // 8}"))


def zero(a: Any, b: Any, rounding: str) -> float:
    """The sign of a sum that is zero."""
    both = math.copysign(1, a) < 0 and math.copysign(1, b) < 0
    return -0.0 if both or (rounding == "rm" and not (a == b == 0 and math.copysign(1, a) > 0 and math.copysign(1,
        b) > 0)) else 0.0


def total(a: Any, b: Any, rounding: str = "rn") -> Any:
    if not all(map(math.isfinite, (a, b))):
        return float(a) + float(b) if not (isinstance(a, Fraction) and isinstance(b, Fraction)) else math.nan
    exact = Fraction(a) + Fraction(b)
    return exact or zero(a, b, rounding)


def times(a: Any, b: Any) -> Any:
    if not all(map(math.isfinite, (a, b))) or not a or not b:
        return math.copysign(1, a) * math.copysign(1, b) * (math.nan if math.isnan(a) or math.isnan(b)
                                                            or ((not a or not b) and not (
            math.isfinite(a) and math.isfinite(b))) else 0.0 if math.isfinite(a) and math.isfinite(b) else math.inf)
    return Fraction(a) * Fraction(b)


def divided(a: Any, b: Any) -> Any:
    if math.isnan(a) or math.isnan(b) or (math.isinf(a) and math.isinf(b)) or (not a and not b):
        return math.nan
    sign = math.copysign(1, a) * math.copysign(1, b)
    if not b or math.isinf(a):
        return sign * math.inf
    return sign * 0.0 if not a or math.isinf(b) else Fraction(a) / Fraction(b)


def least(a: Any, b: Any) -> Any:
    if math.isnan(a) or math.isnan(b):
        return b if math.isnan(a) else a
    return a if (a, math.copysign(1, a)) <= (b, math.copysign(1, b)) else b


ARITHMETIC = [*((f"{name}.{rounding}.{kind}", kind, rounding) for name, kind, rounding in product(
    ("add", "sub", "mul"), ("f32",), ("rn", "rz", "rm", "rp"))), *((f"{name}.rn.{kind}", kind, "rn") for name,
                                                                   kind in product(("add", "mul"), ("f16", "bf16"))),
    *((f"fma.{rounding}.f32", "f32", rounding) for rounding in ("rn", "rz", "rm", "rp")), ("fma.rn.f16", "f16",
                                                                                           "rn"), ("fma.rn.bf16", "bf16", "rn"),
    *((f"div.{rounding}.f32", "f32", rounding) for rounding in ("rn", "rz", "rm", "rp")), ("fma.rn.f64", "f64", "rn"),
    *((f"{name}.{kind}", kind, "rn") for name in ("min", "max") for kind in ("f32", "f16", "bf16"))]


@pytest.mark.parametrize(("name", "kind", "rounding"), ARITHMETIC, ids=[row[0] for row in ARITHMETIC])
def test_arithmetic_rounds_once(name: str, kind: str, rounding: str) -> None:
    bits, operation = TYPES[kind][0], name.partition(".")[0]
    count = 3 if operation == "fma" else 2
    columns = [floats(kind) for _ in range(count)]
    letters = ", ".join(f"{{{letter}}}" for letter in "abc"[:count])
    for place, result in enumerate(evaluate(f"{name} {{d}}, {letters};", [bits] * count, bits, columns)):
        a, b, *c = (number(int(column[place]), kind) for column in columns)
        value = {"add": lambda a=a, b=b: total(a, b, rounding), "sub": lambda a=a, b=b: total(a, -b, rounding),
                 "mul": lambda a=a, b=b: times(a, b), "div": lambda a=a, b=b: divided(a, b), "min": lambda a=a, b=b: least(a, b),
                 "max": lambda a=a, b=b: -least(-a, -b), "fma": lambda a=a, b=b, c=c: total(times(a, b), c[0],
                                                                                            rounding)}[operation]()
        assert int(result) == coded(value, kind, rounding), (a, b, *c)


def test_minimum_and_maximum_of_three() -> None:
    """Blackwell takes three floats, and prefers numbers to NaN as with two."""
    columns = [floats("f32") for _ in range(3)]
    wanted = [[number(int(value), "f32") for value in row] for row in zip(*columns, strict=True)]
    for name, function in {"min": lambda row: reduce(least, row), "max": lambda row: -reduce(least, [-v for v in row])}.items():
        results = evaluate(f"{name}.f32 {{d}}, {{a}}, {{b}}, {{c}};", [32] * 3, 32, columns)
        assert [int(result) for result in results] == [coded(function(row), "f32") for row in wanted], name


@pytest.mark.parametrize("rounding", ["rn", "rz", "rm", "rp"])
def test_zeros_have_a_sign(rounding: str) -> None:
    """A sum that is zero is -0 where it is rounded down, unless both are +0; else +0, unless both are -0."""
    one, zeros = coded(Fraction(1), "f32"), (0, 1 << 31)
    pairs = [(one, one | 1 << 31), (one | 1 << 31, one), *product(zeros, zeros)]
    columns = [np.array(column, np.uint32) for column in zip(*pairs, strict=True)]
    wanted = [coded(total(number(a, "f32"), number(b, "f32"), rounding), "f32") for a, b in pairs]
    assert evaluate(f"add.{rounding}.f32 {{d}}, {{a}}, {{b}};", [32, 32], 32, columns).tolist() == wanted
    ones = np.full(len(pairs), one, np.uint32)
    assert evaluate(f"fma.{rounding}.f32 {{d}}, {{a}}, {{b}}, {{c}};", [32] * 3, 32, [columns[0], ones,
                                                                                      columns[1]]).tolist() == wanted
    minus = [coded(total(number(a, "f32"), -number(b, "f32"), rounding), "f32") for a, b in pairs]
    assert evaluate(f"sub.{rounding}.f32 {{d}}, {{a}}, {{b}};", [32, 32], 32, columns).tolist() == minus


@pytest.mark.parametrize("kind", ["f16", "bf16"])
def test_halves_meet_floats_without_a_conversion(kind: str) -> None:
    """Blackwell's add, sub and fma of float32 with narrower operands."""
    halves, others, sums = floats(kind), floats(kind), floats("f32")
    for name, columns, function in (("add", (halves, sums), total), ("sub", (halves, sums), lambda a, c: total(a, -c)),
                                    ("fma", (halves, others, sums), lambda a, b, c: total(times(a, b), c))):
        widths = [8 * column.dtype.itemsize for column in columns]
        letters = ", ".join(f"{{{letter}}}" for letter in "abc"[:len(columns)])
        for place, result in enumerate(evaluate(f"{name}.rn.f32.{kind} {{d}}, {letters};", widths, 32, columns)):
            operands = [number(int(column[place]), of) for column, of in zip(columns, (*[kind] * (len(columns) - 1), "f32"),
                                                                             strict=True)]
            assert int(result) == coded(function(*operands), "f32"), operands


def test_fma_where_64_bit_extended_floats_round_twice() -> None:
    """A product just above half a unit of c's last place, by less than extended precision holds."""
    a, b, c = (struct.unpack("<I", struct.pack("<f", value))[0] for value in (1 + 2.0 ** -23, 1 + 2.0 ** -23, 2.0 ** 24))
    tiny = struct.unpack("<I", struct.pack("<f", 2.0 ** -60))[0]
    columns = [np.array([a, tiny, tiny], np.uint32), np.array([b, tiny, a], np.uint32), np.array([c, a, c + 1], np.uint32)]
    results = evaluate("fma.rn.f32 {d}, {a}, {b}, {c};", [32] * 3, 32, columns)
    for result, row in zip(results, zip(*columns, strict=True), strict=True):
        x, y, z = (Fraction(number(int(code), "f32")) for code in row)
        assert int(result) == coded(x * y + z, "f32")


CONVERSIONS = [("f16", "f32", "rn"), ("bf16", "f32", "rn"), ("bf16", "f32", "rz"), ("f16", "f32", "rz"), ("f32", "f16", ""),
               ("f32", "bf16", ""),
               ("f32", "f64", "rn"), ("f64", "f32", ""), ("f32", "f64", "rz"), ("f16", "f32", "rp"), ("f16", "f64",
                   "rn"), ("f32", "f64", "rm")]


@pytest.mark.parametrize(("to", "of", "rounding"), CONVERSIONS)
def test_conversions_of_floats(to: str, of: str, rounding: str) -> None:
    column = floats(of)
    results = evaluate(f"cvt{'.' * bool(rounding)}{rounding}.{to}.{of} {{d}}, {{a}};", [TYPES[of][0]], TYPES[to][0], [column])
    assert [int(result) for result in results] == [coded(number(int(code), of), to, rounding or "rn") for code in column]


@pytest.mark.parametrize("kind", ["e4m3", "e5m2"])
def test_conversions_of_8_bit_floats(kind: str) -> None:
    """Two at a time, the first operand in the upper half; what is too large becomes the largest number."""
    columns = [floats("f32"), floats("f32")]
    results = evaluate(f"cvt.rn.satfinite.{kind}x2.f32 {{d}}, {{a}}, {{b}};", [32, 32], 16, columns)
    for place, result in enumerate(results):
        high, low = (coded(number(int(column[place]), "f32"), kind, saturate=True) for column in columns)
        assert int(result) == high << 8 | low
    codes = np.arange(0, 1 << 16, 251, dtype=np.uint16)
    results = evaluate(f"cvt.rn.f16x2.{kind}x2 {{d}}, {{a}};", [16], 32, [codes])
    assert [int(result) for result in results] == [
        coded(number(int(code) >> 8, kind), "f16") << 16 | coded(number(int(code) & 255, kind), "f16") for code in codes]


@pytest.mark.parametrize(("to", "rounding"), [("bf16", "rn"), ("f16", "rn"), ("bf16", "rz")])
def test_pairs_of_halves(to: str, rounding: str) -> None:
    columns = [floats("f32"), floats("f32")]
    results = evaluate(f"cvt.{rounding}.{to}x2.f32 {{d}}, {{a}}, {{b}};", [32, 32], 32, columns)
    for place, result in enumerate(results):
        high, low = (coded(number(int(column[place]), "f32"), to, rounding) for column in columns)
        assert int(result) == high << 16 | low
    for name, function in (("add", total), ("mul", times)):
        results = evaluate(f"{name}.rn.{to}x2 {{d}}, {{a}}, {{b}};", [32, 32], 32, columns)
        for place, result in enumerate(results):
            for shift in (0, 16):
                a, b = (number(int(column[place]) >> shift & 0xFFFF, to) for column in columns)
                assert int(result) >> shift & 0xFFFF == coded(function(a, b), to), (a, b)


@pytest.mark.parametrize("mode", ["rni", "rzi", "rmi", "rpi"])
@pytest.mark.parametrize("to", ["s32", "u32", "s16", "s64"])
def test_floats_become_integers(to: str, mode: str) -> None:
    """Rounded to a whole number, then clamped; NaN is 0."""
    column = np.concatenate([floats("f32"), np.array([0x3F000000, 0x3FC00000, 0x40200000, 0xBF000000, 0x4F000000, 0xCF000000],
                                                     np.uint32)])
    bits = int(to[1:])
    low, high = (-(1 << bits - 1), (1 << bits - 1) - 1) if to[0] == "s" else (0, (1 << bits) - 1)
    whole = {"rni": round, "rzi": math.trunc, "rmi": math.floor, "rpi": math.ceil}[mode]
    for code, result in zip(column, evaluate(f"cvt.{mode}.{to}.f32 {{d}}, {{a}};", [32], bits, [column]), strict=True):
        value = number(int(code), "f32")
        wanted = 0 if math.isnan(value) else (high if value > 0 else low) if math.isinf(value) else max(low, min(whole(value),
            high))
        assert int(result) == wanted % (1 << bits), value


@pytest.mark.parametrize(("of", "to", "rounding"), [("s32", "f32", "rn"), ("u32", "f32", "rz"), ("s64", "f32", "rn"), ("u64",
    "f32", "rp"),
                                                    ("s16", "f32", "rn"), ("s32", "bf16", "rn"), ("u16", "f16", "rn"), ("s64",
                                                        "f64", "rn")])
def test_integers_become_floats(of: str, to: str, rounding: str) -> None:
    bits = int(of[1:])
    column = samples(bits)
    results = evaluate(f"cvt.{rounding}.{to}.{of} {{d}}, {{a}};", [bits], TYPES[to][0], [column])
    for code, result in zip(column, results, strict=True):
        value = signed(int(code), bits) if of[0] == "s" else int(code)
        assert int(result) == coded(Fraction(value) if value else 0.0, to, rounding), value


@pytest.mark.parametrize("kind", ["f32", "f16", "s32", "u32", "s64", "u16"])
def test_comparisons(kind: str) -> None:
    bits = TYPES[kind][0] if kind[0] == "f" else int(kind[1:])
    columns = [floats(kind, 100), floats(kind, 100)] if kind[0] == "f" else [samples(bits), RANDOM.permutation(samples(bits))]
    columns[1][::3] = columns[0][::3]
    ordered = {"eq": lambda a, b: a == b, "ne": lambda a, b: a != b, "lt": lambda a, b: a < b, "le": lambda a, b: a <= b,
               "gt": lambda a, b: a > b, "ge": lambda a, b: a >= b}
    for test in [*ordered, *(f"{name}u" for name in ordered), "num", "nan"] if kind[0] == "f" else list(ordered):
        results = evaluate(f"setp.{test}.{kind} %p1, {{a}}, {{b}}; selp.b32 {{d}}, 1, 0, %p1;", [bits] * 2, 32, columns)
        for place, result in enumerate(results):
            codes = [int(column[place]) for column in columns]
            a, b = (number(code, kind) if kind[0] == "f" else signed(code, bits) if kind[0] == "s" else code for code in codes)
            nan = math.isnan(a) or math.isnan(b)
            if test in ("num", "nan"):
                wanted = nan == (test == "nan")
            else:
                wanted = test.endswith("u") if nan else ordered[test[:2]](a, b)
            assert bool(result) == wanted, (test, a, b)


def test_functions_that_hardware_approximates_are_within_two_units() -> None:
    column = np.linspace(-20, 20, 401, dtype=np.float32)
    for name, function in (("ex2", np.exp2), ("sin", np.sin), ("cos", np.cos), ("tanh", np.tanh), ("rcp", lambda x: 1 / x),
                           ("sqrt", np.sqrt), ("rsqrt", lambda x: 1 / np.sqrt(x)), ("lg2", np.log2)):
        x = np.abs(column) + np.float32(0.25) if name in ("sqrt", "rsqrt", "lg2", "rcp") else column
        result = evaluate(f"{name}.approx.f32 {{d}}, {{a}};", [32], 32, [x.view(np.uint32)]).view(np.float32)
        wanted = function(x.astype(np.float64))
        assert (np.abs(result - wanted) <= 2 * np.spacing(np.abs(wanted).astype(np.float32))).all(), name


# -- warps -----------------------------------------------------------------------------------------------------------------


def lanes_of(instruction: str, values: np.ndarray[Any, Any]) -> list[int]:
    return [int(value) for value in evaluate(instruction, [32], 32, [values.astype(np.uint32)])]


def test_shuffles() -> None:
    values = np.arange(100, 132)
    for mode, by, clamp, source in (("bfly", 5, 0x1F, lambda i: i ^ 5), ("idx", 9, 0x1F, lambda i: 9), ("up", 3, 0,
        lambda i: i - 3 if i >= 3 else i),
                                    ("down", 4, 0x1F, lambda i: i + 4 if i + 4 < 32 else i), ("bfly", 2, 0x1C1F, lambda i: i ^ 2),
                                    ("idx", 1, 0x181F, lambda i: i & 24 | 1), ("up", 1, 0x1800, lambda i: i - 1 if i % 8 else i)):
        assert lanes_of(f"shfl.sync.{mode}.b32 {{d}}, {{a}}, {by}, {clamp}, -1;",
                        values) == [100 + source(i) for i in range(32)], mode


def test_reductions_and_votes() -> None:
    values = np.array([(17 * i) % 32 - 9 for i in range(32)])
    lanes = [int(value) for value in values]
    for name, function in (("add.s32", sum), ("min.s32", min), ("max.s32", max)):
        assert lanes_of(f"redux.sync.{name} {{d}}, {{a}}, -1;", values) == [function(lanes) % (1 << 32)] * 32
    ballot = sum((value > 0) << lane for lane, value in enumerate(lanes))
    assert lanes_of("setp.gt.s32 %p1, {a}, 0; vote.sync.ballot.b32 {d}, %p1, -1;", values) == [ballot] * 32
    assert lanes_of("setp.gt.s32 %p1, {a}, 0; vote.sync.any.pred %p2, %p1, -1; selp.b32 {d}, 1, 0, %p2;", values) == [1] * 32


# -- what is not known -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("instruction", ["frobnicate.b32 %r1, %r2;",
                                         "mma.sp.sync.aligned.m16n8k32.row.col.f32.f16.f16.f32 %r1, %r2, %r3, %r4;",
                                         "cp.async.bulk.commit_group;", "cvt.rn.satfinite.e2m1x2.f32 %h1, %r1, %r2;",
                                         "setp.xx.s32 %p1, %r1, %r2;", "add.rn.f32 %r1, %r2, %r3, %r4;"])
def test_an_instruction_that_is_not_known_is_named(instruction: str) -> None:
    with pytest.raises(ExecutionError, match=r"line \d+: " + instruction.partition(" ")[0].rstrip(";").replace(".", r"\.")):
        run(instruction)
