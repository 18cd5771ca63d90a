"""Bit patterns of PTX's types as numbers, and numbers rounded to them.

A number on its way to a narrower type is a float64 that is exact, or rounded to odd: its last bit is set where bits were
lost.  Rounding it again to a type of at most 51 bits of precision then rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.analyze.execute.program import ExecutionError

Bits = NDArray[Any]                                              # unsigned integers, a bit pattern per thread
Floats = NDArray[Any]

UNSIGNED: dict[int, Any] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
SIGNED: dict[int, Any] = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}


@dataclass(frozen=True, slots=True)
class FloatType:
    """A binary float.  precision: bits with the hidden one.  lowest, highest: exponents of normal numbers.

    infinite: whether there are infinities.  largest: the largest finite number.  nan: the bits of the NaN that is written.
    """

    bits: int
    precision: int
    lowest: int
    highest: int
    infinite: bool
    largest: float
    nan: int


FLOATS = {
    "f64": FloatType(64, 53, -1022, 1023, True, float(np.finfo(np.float64).max), 0x7FF8_0000_0000_0000),
    "f32": FloatType(32, 24, -126, 127, True, float(np.finfo(np.float32).max), 0x7FFF_FFFF),
    "tf32": FloatType(32, 11, -126, 127, True, (2 - 2.0 ** -10) * 2.0 ** 127, 0x7FFF_FFFF),
    "f16": FloatType(16, 11, -14, 15, True, 65504.0, 0x7FFF),
    "bf16": FloatType(16, 8, -126, 127, True, (2 - 2.0 ** -7) * 2.0 ** 127, 0x7FFF),
    "e5m2": FloatType(8, 3, -14, 15, True, 57344.0, 0x7F),
    "e4m3": FloatType(8, 4, -6, 8, False, 448.0, 0x7F),
}
ROUNDINGS: dict[str, Callable[[Any], Any]] = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil,
             # to the nearest, ties away from zero
             "rna": lambda x: np.where(np.abs(x) < 2.0 ** 52, np.trunc(x + np.copysign(0.5, x)), x)}


def is_float(kind: str) -> bool:
    return kind in FLOATS


def decode(bits: Bits, kind: str) -> Floats:
    """Numbers of bit patterns: float64 for f64, else float32, which holds every narrower type exactly."""
    if kind == "f32":
        return bits.view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "tf32":
        return (bits & np.uint32(0xFFFF_E000)).view(np.float32)
    if kind == "f64":
        return bits.view(np.float64)
    if kind in TABLES:
        return TABLES[kind][bits]
    raise ExecutionError(f"no float type '.{kind}' is known")


def encode(x: Floats, kind: str, rounding: str = "rn", saturate: bool = False) -> Bits:
    """Bit patterns of numbers, exact or rounded to odd in float64.

    saturate: overflow becomes the largest finite number, as cvt.satfinite has it.
    """
    with np.errstate(all="ignore"):
        if kind == "f64" or (rounding == "rn" and not saturate and kind in ("f32", "f16")):
            wanted = {"f16": np.float16, "f32": np.float32, "f64": np.float64}[kind]
            narrow = x if x.dtype == wanted else x.astype(wanted)
            return _canonical(narrow.view(UNSIGNED[narrow.itemsize * 8]), np.isnan(narrow), FLOATS[kind].nan)
        return _encode(x.astype(np.float64), FLOATS[kind], rounding, saturate)


def _encode(x: NDArray[np.float64], to: FloatType, rounding: str, saturate: bool) -> Bits:
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.clip(exponent - 1, to.lowest, None) - (to.precision - 1))
    magnitude = np.abs(ROUNDINGS[rounding](x / step) * step)
    beyond = magnitude > to.largest
    if saturate:
        magnitude = np.where(beyond, to.largest, magnitude)
    elif to.infinite:
        away = {"rz": np.zeros(x.shape, bool), "rm": x < 0, "rp": x > 0}.get(rounding, np.ones(x.shape, bool))
        magnitude = np.where(beyond, np.where(away | np.isinf(x), np.inf, to.largest), magnitude)
    _, exponent = np.frexp(magnitude)
    mantissa_bits = to.precision - 1
    stored = np.clip(exponent - 1, to.lowest, None)
    normal = magnitude >= 2.0 ** to.lowest
    fraction = np.ldexp(np.where(np.isfinite(magnitude), magnitude, 0), mantissa_bits - stored)
    code = fraction.astype(np.uint64) + np.where(normal, (stored - to.lowest) << mantissa_bits, 0).astype(np.uint64)
    if to.infinite:
        infinity = ((to.highest - to.lowest + 2) << mantissa_bits)
        code = np.where(np.isinf(magnitude), np.uint64(infinity), code)
    else:
        code = np.where(beyond & (not saturate), np.uint64(to.nan), code)
    total = 19 if to is FLOATS["tf32"] else to.bits
    code |= np.signbit(x).astype(np.uint64) << np.uint64(total - 1)
    if to is FLOATS["tf32"]:
        code <<= np.uint64(13)
    return _canonical(code.astype(UNSIGNED[to.bits]), np.isnan(x), to.nan)


def _canonical(bits: Bits, is_nan: NDArray[np.bool_], nan: int) -> Bits:
    return np.where(is_nan, bits.dtype.type(nan), bits) if is_nan.any() else bits


def _table(kind: str) -> NDArray[np.float32]:
    """The 256 numbers of an 8-bit float."""
    to, codes = FLOATS[kind], np.arange(256)
    mantissa_bits = to.precision - 1
    exponent, fraction = codes >> mantissa_bits & (1 << 7 - mantissa_bits) - 1, codes & (1 << mantissa_bits) - 1
    normal = exponent > 0
    value = np.ldexp(fraction + normal * 2.0 ** mantissa_bits, np.where(normal, exponent - 1, 0) + to.lowest - mantissa_bits)
    top = exponent == to.highest - to.lowest + (2 if to.infinite else 1)
    if to.infinite:
        value = np.where(top, np.where(fraction > 0, np.nan, np.inf), value)
    else:
        value = np.where(top & (fraction == (1 << mantissa_bits) - 1), np.nan, value)
    return np.where(codes & 128, -value, value).astype(np.float32)


TABLES = {kind: _table(kind) for kind in ("e4m3", "e5m2")}


# -- arithmetic that rounds once ---------------------------------------------------------------------------------------


def sum_to_odd(a: Floats, b: Floats) -> NDArray[np.float64]:
    """a + b of float64 or narrower, rounded to odd."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)                    # exact, by Knuth
    return _to_odd(total, error)


def fused(a: Floats, b: Floats, c: Floats, kind: str) -> Floats:
    """a * b + c as one number: rounded to odd in float64; for f64 rounded to the nearest."""
    with np.errstate(all="ignore"):
        if kind != "f64":
            return sum_to_odd(a.astype(np.float64) * b, c)      # the product of two 24-bit numbers is exact
        return np.array([_exact_fma(*row) for row in np.broadcast(a, b, c)], np.float64)


def quotient(a: Floats, b: Floats) -> NDArray[np.float64]:
    """a / b of float32 or narrower, rounded to odd."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    with np.errstate(all="ignore"):
        value = a / b
        product = value * b                                      # its error, by Dekker, says whether digits were lost
        high, b_high = _halves(value), _halves(b)
        low, b_low = value - high, b - b_high
        error = ((high * b_high - product) + high * b_low + low * b_high) + low * b_low
        left = (a - product) - error
        return _to_odd(value, left * np.sign(b))


def square_root(x: Floats) -> NDArray[np.float64]:
    """The square root of float32 or narrower, rounded to odd."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        value = np.sqrt(wide)
        high = _halves(value)
        low = value - high
        product = value * value
        error = ((high * high - product) + 2 * high * low) + low * low
        return _to_odd(value, (wide - product) - error)


def _halves(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The upper 26 bits, by Veltkamp."""
    scaled = x * 134217729.0
    return scaled - (scaled - x)


def _to_odd(value: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest number and what it misses, as one that is rounded to odd."""
    bits = np.ascontiguousarray(value).view(np.int64).copy()
    inexact = np.isfinite(value) & (error != 0) & ~np.isnan(error)
    even = inexact & (bits & 1 == 0)
    away = (error > 0) == (value > 0)
    bits[even & away] += 1
    bits[even & ~away] -= 1
    return bits.view(np.float64)


def _exact_fma(a: float, b: float, c: float) -> float:
    if not all(map(np.isfinite, (a, b, c))):
        return float(np.float64(a) * np.float64(b) + np.float64(c))
    exact = Fraction(a) * Fraction(b) + Fraction(c)
    if not exact:
        return float(np.float64(a) * np.float64(b) + np.float64(c))     # the sign of a zero
    try:
        return float(exact)
    except OverflowError:
        return float("inf") if exact > 0 else float("-inf")
