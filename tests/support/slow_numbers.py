"""Stored numbers as their types define them, one at a time: the value of a word, and the word nearest to a value."""

from __future__ import annotations

import re
from bisect import bisect
from fractions import Fraction
from functools import cache
from itertools import pairwise
from math import floor, ldexp

import numpy as np
import numpy.typing as npt

Codes = npt.NDArray[np.int64]
Scalar = int | np.float32
_SMALL = re.compile(r"e(\d)m(\d)(fnuz)?\Z")


class Unread(Exception):
    """Something of the language that this reading does not know yet."""


@cache
def value(kind: str, code: int) -> Scalar:
    """What a code of a type means: an int for integers, else the float32."""
    if kind[0] in "ui" and kind[1:].isdigit():
        bits = int(kind[1:])
        return code - (1 << bits) if kind[0] == "i" and code >> bits - 1 else code
    if kind in ("f32", "bf16"):
        return np.uint32(code << 16 if kind == "bf16" else code).view(np.float32)
    if kind == "f16":
        return np.float32(np.uint16(code).view(np.float16))
    if kind == "e8m0":
        return np.float32(np.nan if code == 255 else ldexp(1, code - 127))
    if kind == "e8m0h":
        return np.float32(ldexp(1, code - 128))
    if kind == "ue4m3":
        return np.float32(0) if code & 127 == 127 else value("e4m3", code & 127)
    match = _SMALL.match(kind)
    if match is None:
        raise Unread(f"no second reading of type '{kind}': add it to tests/support/slow_reading.py")
    exponent, mantissa, fnuz = int(match[1]), int(match[2]), match[3] is not None
    negative = code >> exponent + mantissa & 1
    magnitude = code & (1 << exponent + mantissa) - 1
    power, fraction = magnitude >> mantissa, magnitude & (1 << mantissa) - 1
    if (fnuz and negative and not magnitude) or (kind == "e4m3" and magnitude == 127) or (kind == "e5m2" and magnitude > 124):
        return np.float32(np.nan)
    if kind == "e5m2" and magnitude == 124:
        return np.float32(-np.inf if negative else np.inf)
    bias = (1 << exponent - 1) - (0 if fnuz else 1)
    whole = ldexp(fraction + ((1 << mantissa) if power else 0), max(power, 1) - bias - mantissa)
    return np.float32(-whole if negative else whole)


@cache
def magnitudes(kind: str) -> list[tuple[float, int]]:
    """The finite values of a small float that are not negative, with their codes."""
    positive = range(1 << width(kind) - 1)
    return sorted((float(value(kind, code)), code) for code in positive if np.isfinite(value(kind, code)))


def width(kind: str) -> int:
    widths = {"f32": 32, "f16": 16, "bf16": 16, "e8m0": 8, "e8m0h": 8, "ue4m3": 8}
    return widths.get(kind) or (int(kind[1:]) if kind[0] in "ui" else 1 + int(kind[1]) + int(kind[3]))


def nearest(kind: str, x: np.float32, ties: str = "even") -> int:
    """The code of the float type nearest to x, ties to the even code, or to zero; beyond the largest, the largest."""
    if kind == "f32":
        return int(x.view(np.uint32))
    if kind == "f16":
        with np.errstate(over="ignore"):
            return int(x.astype(np.float16).view(np.uint16))
    if kind == "bf16":
        bits = int(x.view(np.uint32))
        return bits + 0x7FFF + (bits >> 16 & 1) >> 16
    finite = magnitudes(kind)
    size = abs(float(x))
    at = min(bisect(finite, (size, -1)), len(finite) - 1)
    near = finite[max(0, at - 1):at + 1]
    code = min(near, key=lambda pair: (abs(Fraction(pair[0]) - Fraction(size)), pair[1] & 1 if ties == "even" else pair[0]))[1]
    return code | int(np.signbit(x)) << width(kind) - 1


def whole(kind: str, x: np.float32, ties: str = "even", offset: int = 0) -> int:
    """The integer nearest to x plus an offset, cut to the type's range, as a code."""
    bits = int(kind[1:])
    if ties == "up":                                             # the one rule that is defined by a sum in float32
        code = floor(x + np.float32(offset + 0.5))
    elif ties == "away":
        code = (1 if x > 0 else -1) * floor(abs(float(x)) + 0.5) + offset
    else:
        code = round(float(x)) + offset
    low = -(1 << bits - 1) if kind[0] == "i" else 0
    return min(max(code, low), low + (1 << bits) - 1) & (1 << bits) - 1


def ue4m3(x: np.float32) -> int:
    """The code of the nearest value, ties up; below the normal numbers at most 7, and past 248 the largest."""
    if x < 2 ** -6:
        return min(7, int(x * np.float32(512) + np.float32(0.5)))
    values = [float(value("ue4m3", code)) for code in range(8, 120)] + [256.0]
    middles = [(a + b) / 2 for a, b in pairwise(values)]
    return 126 if x >= middles[-1] else 8 + bisect(middles, float(x))
