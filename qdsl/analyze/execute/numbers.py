"""Bit patterns of PTX's types as numbers, and numbers rounded to them.

A number on its way to a narrower type is a float64 that is exact, or rounded to odd: its last bit is set where bits were
lost.  Rounding it again to a type of at most 51 bits of precision then rounds once.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.analyze.execute.ptx import ExecutionError
from qdsl.core.numbers import FLOATS as NUMBERS
from qdsl.core.numbers import Number

Bits = NDArray[Any]                                              # unsigned integers, a bit pattern per thread
Floats = NDArray[Any]

UNSIGNED: dict[int, Any] = {8: np.dtype(np.uint8), 16: np.dtype(np.uint16), 32: np.dtype(np.uint32), 64: np.dtype(np.uint64)}
SIGNED: dict[int, Any] = {8: np.dtype(np.int8), 16: np.dtype(np.int16), 32: np.dtype(np.int32), 64: np.dtype(np.int64)}


FLOATS = {**{name: NUMBERS[name] for name in ("f32", "f16", "bf16", "e5m2", "e4m3")},
          "f64": Number("f64", 64, "float", 11, 52, 1023, "ieee"), "tf32": Number("tf32", 19, "float", 8, 10, 127, "ieee")}
TF32_SHIFT = 13                                                  # tf32 is the upper 19 of 32 bits
TABLES = {kind: np.array([FLOATS[kind].decode(code) for code in range(256)], np.float32) for kind in ("e4m3", "e5m2")}
ROUNDINGS: dict[str, Callable[[Any], Any]] = {"rn": np.rint, "rz": np.trunc, "rm": np.floor, "rp": np.ceil,
             # to the nearest, ties away from zero
             "rna": lambda x: np.where(np.abs(x) < 2.0 ** 52, np.trunc(x + np.copysign(0.5, x)), x)}


def is_float(kind: str) -> bool:
    return kind in FLOATS



def flushed(x: Floats, kind: str) -> Floats:
    """Subnormal numbers of a type as zeros of their sign."""
    return np.where(np.abs(x) < 2.0 ** (1 - FLOATS[kind].bias), np.copysign(x.dtype.type(0), x), x)


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
            return _canonical(narrow.view(UNSIGNED[8 * narrow.itemsize]), np.isnan(narrow), kind)
        return _encode_float64(x.astype(np.float64), kind, rounding, saturate)


def _encode_float64(x: NDArray[np.float64], kind: str, rounding: str, saturate: bool) -> Bits:
    to = FLOATS[kind]
    lowest, infinity = 1 - to.bias, (1 << to.exponent) - 1 << to.mantissa
    _, exponent = np.frexp(x)
    step = np.ldexp(1.0, np.maximum(exponent - 1, lowest) - to.mantissa)
    magnitude = np.abs(ROUNDINGS[rounding](x / step) * step)
    beyond = magnitude > to.largest
    if saturate:
        magnitude = np.where(beyond, to.largest, magnitude)
    elif to.specials == "ieee" and rounding in ("rz", "rm", "rp"):         # to the largest, not to infinity, towards zero
        away = {"rz": np.isinf(x), "rm": (x < 0) | np.isinf(x), "rp": (x > 0) | np.isinf(x)}[rounding]
        magnitude = np.where(beyond & ~away, to.largest, magnitude)
    beyond = magnitude > to.largest
    _, exponent = np.frexp(magnitude)
    stored = np.maximum(exponent - 1, lowest)
    fraction = np.ldexp(np.where(beyond | np.isnan(x), 0, magnitude), to.mantissa - stored).astype(np.uint64)
    code = fraction + np.where(magnitude >= 2.0 ** lowest, stored - lowest << to.mantissa, 0).astype(np.uint64)
    code = np.where(beyond, np.uint64(infinity if to.specials == "ieee" else _nan(kind)), code)
    code |= np.signbit(x).astype(np.uint64) << np.uint64(to.bits - 1)
    if kind == "tf32":
        code <<= np.uint64(TF32_SHIFT)
    return _canonical(code.astype(UNSIGNED[32 if kind == "tf32" else to.bits]), np.isnan(x), kind)


def _nan(kind: str) -> int:
    """The NaN that is written: all ones without a sign, but for f64."""
    return 0x7FF8_0000_0000_0000 if kind == "f64" else (1 << (32 if kind == "tf32" else FLOATS[kind].bits) - 1) - 1


def _canonical(bits: Bits, is_nan: NDArray[np.bool_], kind: str) -> Bits:
    return np.where(is_nan, bits.dtype.type(_nan(kind)), bits) if is_nan.any() else bits


# -- arithmetic that rounds once ---------------------------------------------------------------------------------------


def sum_to_odd(a: Floats, b: Floats) -> NDArray[np.float64]:
    """a + b of float64 or narrower, rounded to odd."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    total = a + b
    part = total - a
    error = (a - (total - part)) + (b - part)                    # exact, by Knuth
    return _round_to_odd(total, error)


def fused_multiply_add(a: Floats, b: Floats, c: Floats, kind: str) -> Floats:
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
        return _round_to_odd(value, left * np.sign(b))


def square_root(x: Floats) -> NDArray[np.float64]:
    """The square root of float32 or narrower, rounded to odd."""
    with np.errstate(all="ignore"):
        wide = x.astype(np.float64)
        value = np.sqrt(wide)
        high = _halves(value)
        low = value - high
        product = value * value
        error = ((high * high - product) + 2 * high * low) + low * low
        return _round_to_odd(value, (wide - product) - error)


def _halves(x: NDArray[np.float64]) -> NDArray[np.float64]:
    """The upper 26 bits, by Veltkamp."""
    scaled = x * 134217729.0
    return scaled - (scaled - x)


def _round_to_odd(value: NDArray[np.float64], error: NDArray[np.float64]) -> NDArray[np.float64]:
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
