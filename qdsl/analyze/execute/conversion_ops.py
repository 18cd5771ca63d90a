"""Comparisons, and conversions between integers and floats."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from qdsl.analyze.execute.machine import At, Step, ThreadBatch
from qdsl.analyze.execute.numbers import (
    ROUNDINGS,
    SIGNED,
    UNSIGNED,
    Bits,
    Floats,
    decode,
    encode,
    flushed,
    is_float,
    sum_to_odd,
)
from qdsl.analyze.execute.operands import Context, broadcast, element, joined, opcode, split_pairs
from qdsl.analyze.execute.ptx import type_bits
from qdsl.analyze.execute.thread_ops import BITWISE

COMPARE: dict[str, Callable[[Any, Any], Any]] = {
    "eq": np.equal, "ne": np.not_equal, "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal}
UNSIGNED_NAMES = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


@opcode("setp", "set")
def compare(context: Context) -> Step:
    """A predicate, or a number for `set`, from a comparison; both p and q if the target is p|q."""
    bits, holds, combine = type_bits(context.kind), _comparison_function(context), BITWISE.get(context.instruction.modifiers[1])
    first, second = context.source(1, bits), context.source(2, bits)
    if context.instruction.name == "set":
        true, put = np.uint32(0x3F80_0000 if context.types[0] == "f32" else 0xFFFF_FFFF), context.target()
        return lambda batch, at: put(batch, at, np.where(holds(first(batch, at), second(batch, at)), true, np.uint32(0)))
    other, puts = context.source(3, 1) if combine else None, context.targets(0)

    def step(batch: ThreadBatch, at: At) -> None:
        result = holds(first(batch, at), second(batch, at))
        for put, value in zip(puts, (result, ~result), strict=False):
            put(batch, at, value if combine is None or other is None else combine(value, other(batch, at)))
    return step


def _comparison_function(context: Context) -> Callable[[Bits, Bits], Any]:
    """Whether a comparison holds for bit patterns; NaN by the rules of the test."""
    test, kind = context.instruction.modifiers[0], context.kind
    if test not in (*COMPARE, *UNSIGNED_NAMES, "num", "nan", *(name + "u" for name in COMPARE)):
        raise context.unknown()

    def integers(a: Bits, b: Bits) -> Any:
        if kind[0] == "s":
            a, b = a.view(SIGNED[type_bits(kind)]), b.view(SIGNED[type_bits(kind)])
        return COMPARE[UNSIGNED_NAMES.get(test, test)](a, b)

    def floats(a: Bits, b: Bits) -> Any:
        x, y = decode(a, kind), decode(b, kind)
        if "ftz" in context.modifiers:
            x, y = flushed(x, kind), flushed(y, kind)
        nan = np.isnan(x) | np.isnan(y)
        if test in ("num", "nan"):
            return nan == (test == "nan")
        result = COMPARE[test[:2]](x, y)
        return result | nan if len(test) == 3 else result & ~nan       # 'ltu' also holds where they are unordered
    return floats if is_float(kind) else integers


# -- conversions ---------------------------------------------------------------------------------------------------------


TO_WHOLE = {"rni": "rn", "rzi": "rz", "rmi": "rm", "rpi": "rp"}


@opcode("cvt")
def convert(context: Context) -> Step:
    """Conversions between number types, alone or in pairs."""
    if len(context.types) != 2:
        raise context.unknown()
    to, of = context.types
    context.only("rn", "rz", "rm", "rp", "rna", "rni", "rzi", "rmi", "rpi", "ftz", "sat", "satfinite", "relu")
    if to.endswith("x2"):
        return _convert_pair(context, to, of)
    bits_of = type_bits(of) if of != "tf32" else 32
    whole = next((TO_WHOLE[part] for part in TO_WHOLE if part in context.modifiers), None)

    def function(value: Bits) -> Bits:
        if is_float(of):
            x = decode(value, of)
            x = flushed(x, of) if "ftz" in context.modifiers else x
            x = ROUNDINGS[whole](x) if whole else x
            return _convert_float(x, to, context)
        number = value.view(SIGNED[bits_of]) if of[0] == "s" else value
        if is_float(to):
            return encode(number.astype(np.float64) if to == "f64" else _round_integer_to_odd(number), to, context.rounding)
        width = type_bits(to)
        if "sat" in context.modifiers:
            limits = np.iinfo(SIGNED[width] if to[0] == "s" else UNSIGNED[width])
            number = np.array([min(max(int(n), limits.min), limits.max) for n in number], object)
        return number.astype(SIGNED[width] if to[0] == "s" else UNSIGNED[width])
    put = context.target()
    register = context.operand(0)
    width = getattr(register, "bits", 32)
    read = context.source(1, bits_of)

    def step(batch: ThreadBatch, at: At) -> None:
        value = function(read(batch, at))
        if 8 * value.dtype.itemsize < width:                     # a narrow result in a wide register keeps its sign
            value = value.astype(SIGNED[width] if value.dtype.kind == "i" else UNSIGNED[width])
        put(batch, at, value)
    return step


def _convert_float(x: Floats, to: str, context: Context) -> Bits:
    """A float as another, or as the nearest integer that there is; NaN is 0."""
    if is_float(to):
        if "relu" in context.modifiers:
            x = np.where(x < 0, x.dtype.type(0), x)
        if "sat" in context.modifiers:
            x = np.where(np.isnan(x), 0, np.clip(x, 0, 1)).astype(x.dtype)
        return encode(x, to, context.rounding, "satfinite" in context.modifiers)
    width, signed = type_bits(to), to[0] == "s"
    dtype = SIGNED[width] if signed else UNSIGNED[width]
    limits = np.iinfo(dtype)
    wide = np.where(np.isnan(x), 0, x).astype(np.float64)
    low, high = wide <= limits.min, wide >= float(limits.max)
    inside = np.where(low | high, 0, wide).astype(np.int64 if signed else np.uint64).astype(dtype)
    return np.where(low, dtype.type(limits.min), np.where(high, dtype.type(limits.max), inside))


def _round_integer_to_odd(number: Bits) -> Floats:
    """Integers as float64 that are exact, or rounded to odd beyond 53 bits."""
    if number.dtype.itemsize < 8:
        return number.astype(np.float64)
    low = (number & number.dtype.type(0x7FF)).astype(np.float64)
    return sum_to_odd((number - low.astype(number.dtype)).astype(np.float64), low)


def _convert_pair(context: Context, to: str, of: str) -> Step:
    """Two floats as a packed pair, the first operand in the upper half; or a packed pair as another."""
    part, saturate = element(to), "satfinite" in context.modifiers or element(to) in ("e4m3", "e5m2")
    put = context.target()

    def coded(x: Floats) -> Bits:
        if "relu" in context.modifiers:
            x = np.where(x < 0, x.dtype.type(0), x)
        return encode(x, part, context.rounding, saturate)
    if of == "f32":
        high, low = context.source(1, 32), context.source(2, 32)

        def two(batch: ThreadBatch, at: At) -> None:
            values = broadcast(batch, at, [low(batch, at), high(batch, at)])
            put(batch, at, joined(coded(decode(np.stack(values, 1), "f32")), to))
        return two
    bits = 16 if of[0] == "e" else 32
    read = context.source(1, bits)
    return lambda batch, at: put(batch, at, joined(coded(decode(split_pairs(read(batch, at), of), element(of))), to))
