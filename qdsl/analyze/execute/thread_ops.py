"""Instructions of single threads that touch no memory: moves, bits, integers and floats."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

import numpy as np

from qdsl.analyze.execute import numbers
from qdsl.analyze.execute.machine import At, Step, ThreadBatch
from qdsl.analyze.execute.numbers import SIGNED, UNSIGNED, Bits, Floats, decode, encode, flushed, is_float
from qdsl.analyze.execute.operands import Context, Source, broadcast, element, joined, opcode, split_pairs
from qdsl.analyze.execute.ptx import Vector, type_bits

# -- moves and bits ------------------------------------------------------------------------------------------------------


@opcode("mov")
def mov(context: Context) -> Step:
    """Copies a value, packs words into a wider one, or unpacks them."""
    bits = type_bits(context.kind)
    to, of = context.operand(0), context.operand(1)
    if isinstance(to, Vector):
        value, parts = context.source(1, bits), context.targets(0)
        width = bits // len(parts)

        def unpack(batch: ThreadBatch, at: At) -> None:
            flush_and_round = value(batch, at)
            for place, put in enumerate(parts):
                put(batch, at, (flush_and_round >> UNSIGNED[bits].type(width * place)).astype(UNSIGNED[width]))
        return unpack
    if isinstance(of, Vector):
        sources, put = context.sources(1, bits // len(of.parts)), context.target()

        def pack(batch: ThreadBatch, at: At) -> None:
            values = broadcast(batch, at, [source(batch, at) for source in sources])
            put(batch, at, np.stack(values, 1).view(UNSIGNED[bits])[:, 0])
        return pack
    return _elementwise_step(context, [context.source(1, bits)], lambda value: value)


def _elementwise_step(context: Context, sources: list[Source], function: Callable[..., Bits]) -> Step:
    """A step that writes a function of some operands; each of the instruction's is read, or the instruction is unknown."""
    if len(sources) + 1 < len(context.instruction.operands):
        raise context.unknown("it has operands that are not read")
    put = context.target()
    if len(sources) == 1:
        (first,) = sources
        return lambda batch, at: put(batch, at, function(first(batch, at)))
    if len(sources) == 2:
        first, second = sources
        return lambda batch, at: put(batch, at, function(first(batch, at), second(batch, at)))
    return lambda batch, at: put(batch, at, function(*(source(batch, at) for source in sources)))


@opcode("cvta")
def cvta(context: Context) -> Step:
    """Addresses of a space as generic ones; both are the same here."""
    return _elementwise_step(context, [context.source(1, 64)], lambda value: value)


BITWISE: dict[str, Callable[[Any, Any], Any]] = {"and": np.bitwise_and, "or": np.bitwise_or, "xor": np.bitwise_xor}


@opcode("and", "or", "xor")
def bitwise(context: Context) -> Step:
    bits = type_bits(context.kind)
    return _elementwise_step(context, [context.source(1, bits), context.source(2, bits)], BITWISE[context.instruction.name])


@opcode("not")
def invert(context: Context) -> Step:
    return _elementwise_step(context, [context.source(1, type_bits(context.kind))], np.invert)


@opcode("shl", "shr")
def shift(context: Context) -> Step:
    """Shifts; by the width or more gives 0, or the sign."""
    bits, left, signed = type_bits(context.kind), context.instruction.name == "shl", context.kind[0] == "s"

    def shift_bits(value: Bits, by: Bits) -> Bits:
        far = by >= bits
        by = np.where(far, bits - 1, by).astype(value.dtype)
        if signed:
            return (value.view(SIGNED[bits]) >> by.view(SIGNED[bits])).view(UNSIGNED[bits])
        return np.where(far, value.dtype.type(0), value << by if left else value >> by)
    return _elementwise_step(context, [context.source(1, bits), context.source(2, 32)], shift_bits)


@opcode("shf")
def funnel_shift(context: Context) -> Step:
    """A word cut from two neighbours."""
    left, clamp = "l" in context.modifiers, "clamp" in context.modifiers

    def cut_word(low: Bits, high: Bits, by: Bits) -> Bits:
        both = high.astype(np.uint64) << np.uint64(32) | low
        by = (np.minimum(by, 32) if clamp else by & 31).astype(np.uint64)
        return ((both << by) >> np.uint64(32) if left else both >> by).astype(np.uint32)
    return _elementwise_step(context, [context.source(place, 32) for place in (1, 2, 3)], cut_word)


def _ones(count: Bits, bits: int) -> Bits:
    """So many low bits set."""
    some = (np.uint64(1) << np.minimum(count, 63).astype(np.uint64)) - np.uint64(1)
    return np.where(count >= bits, np.uint64((1 << bits) - 1), some).astype(UNSIGNED[bits])


@opcode("bfe")
def extract_bits(context: Context) -> Step:
    """A field of bits, with its sign where the type has one."""
    bits, signed = type_bits(context.kind), context.kind[0] == "s"

    def cut_bits(value: Bits, start: Bits, length: Bits) -> Bits:
        start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
        wide = value.view(SIGNED[bits]) if signed else value
        last = np.minimum(start + length - 1, bits - 1)
        field = np.where(start < bits, value >> np.minimum(start, bits - 1).astype(value.dtype), 0).astype(value.dtype)
        mask = _ones(length, bits)
        if not signed:
            return field & mask
        negative = (wide >> np.clip(last, 0, bits - 1).astype(wide.dtype) & 1 == 1) & (length > 0)
        kept = np.where(length >= bits - start, bits - start, length)
        mask = _ones(np.clip(kept, 0, bits), bits)
        return np.where(negative, field | ~mask, field & mask)
    return _elementwise_step(context, [context.source(1, bits), context.source(2, 32), context.source(3, 32)], cut_bits)


@opcode("bfi")
def insert_bits(context: Context) -> Step:
    """A field of bits put into a word."""
    bits = type_bits(context.kind)

    def replace_bits(value: Bits, into: Bits, start: Bits, length: Bits) -> Bits:
        start, length = (start & 255).astype(np.int64), (length & 255).astype(np.int64)
        mask = _ones(length, bits)
        by = np.minimum(start, bits - 1).astype(value.dtype)
        mask = np.where(start < bits, mask << by, 0).astype(value.dtype)
        return (into & ~mask) | ((value << by) & mask)
    return _elementwise_step(context, [context.source(place, bits if place < 3 else 32) for place in (1, 2, 3, 4)], replace_bits)


@opcode("lop3")
def ternary_logic(context: Context) -> Step:
    """Any function of three bits, by its table of 8 entries."""
    def combine_bits(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
        out = np.zeros(np.broadcast_shapes(a.shape, b.shape, c.shape), np.uint32)
        for row in range(8):
            if int(table[0]) >> row & 1:
                out |= (a if row & 4 else ~a) & (b if row & 2 else ~b) & (c if row & 1 else ~c)
        return out
    return _elementwise_step(context, [context.source(place, 32) for place in (1, 2, 3, 4)], combine_bits)


@opcode("popc", "clz", "brev", "bfind")
def count_bits(context: Context) -> Step:
    """Counts, leading zeros, reversal and the highest set bit."""
    bits = type_bits(context.kind)

    def bit_counts(value: Bits) -> Bits:
        digits = np.unpackbits(np.ascontiguousarray(value[:, None]).view(np.uint8), axis=1, bitorder="little")
        if context.instruction.name == "popc":
            return digits.sum(1).astype(np.uint32)
        if context.instruction.name == "brev":
            return np.packbits(digits[:, ::-1], axis=1, bitorder="little").view(UNSIGNED[bits])[:, 0]
        top = np.where(digits.any(1), bits - 1 - digits[:, ::-1].argmax(1), -1)
        return (top if context.instruction.name == "bfind" else bits - 1 - top).astype(np.int32).view(np.uint32)
    if context.instruction.name == "bfind" and (context.kind[0] == "s" or "shiftamt" in context.modifiers):
        raise context.unknown()
    return _elementwise_step(context, [context.source(1, bits)], bit_counts)


@opcode("prmt")
def permute_bytes(context: Context) -> Step:
    """Four bytes picked from two words, or their signs."""
    if context.modifiers - {"b32"}:
        raise context.unknown()

    def choose_bytes(a: Bits, b: Bits, selector: Bits) -> Bits:
        both = b.astype(np.uint64) << np.uint64(32) | a
        out: Any = np.uint32(0)
        for place in range(4):
            nibble = selector >> np.uint32(4 * place) & np.uint32(15)
            byte = (both >> (nibble & np.uint32(7)).astype(np.uint64) * np.uint64(8)).astype(np.uint32) & np.uint32(255)
            byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
            out = out | byte << np.uint32(8 * place)
        return out
    return _elementwise_step(context, [context.source(place, 32) for place in (1, 2, 3)], choose_bytes)


@opcode("selp")
def select(context: Context) -> Step:
    """One of two values by a predicate."""
    bits = type_bits(context.kind)
    return _elementwise_step(context, [context.source(3, 1), context.source(1, bits), context.source(2, bits)], np.where)


# -- integers and floats ---------------------------------------------------------------------------------------------------


def _float_step(context: Context, count: int, function: Callable[..., Floats]) -> Step:
    """A float function of operands: flushed to zero, rounded, clamped as the modifiers say.

    The function returns numbers that are exact, rounded to odd in float64, or rounded as the type has it.  Of two types in a
    name the second is that of all operands but the last.
    """
    kind, rounding = context.types[0], context.rounding
    part, kinds = element(kind), [context.kind] * (count - 1) + [context.types[0]]
    flush, clamp = "ftz" in context.modifiers, "sat" in context.modifiers

    def flush_and_round(*values: Bits) -> Bits:
        inputs = [decode(split_pairs(value, of), element(of)) for value, of in zip(values, kinds, strict=True)]
        if flush:
            inputs = [flushed(value, element(of)) for value, of in zip(inputs, kinds, strict=True)]
        result = function(*inputs)
        if clamp:
            result = np.where(np.isnan(result), 0, np.clip(result, 0, 1)).astype(result.dtype)
        coded = encode(result, part, rounding)
        if flush:
            coded = encode(flushed(decode(coded, part), part), part)
        return joined(coded, kind)
    sources = [context.source(place, type_bits(of)) for place, of in enumerate(kinds, 1)]
    return _elementwise_step(context, sources, flush_and_round)


def _integer_step(context: Context, count: int, function: Callable[..., Any]) -> Step:
    """An integer function of operands that wraps; signed where the type is."""
    kind = context.kind
    bits, part = type_bits(kind), element(kind)
    signed = SIGNED[type_bits(part)] if part[0] == "s" else None

    def flush_and_round(*values: Bits) -> Bits:
        inputs = [split_pairs(value, kind) if signed is None else split_pairs(value, kind).view(signed) for value in values]
        return joined(function(*inputs).view(UNSIGNED[type_bits(part)]), kind)
    return _elementwise_step(context, [context.source(place, bits) for place in range(1, count + 1)], flush_and_round)


def _minimum(a: Floats, b: Floats) -> Floats:
    """The minimum of two: a number rather than NaN, and -0 below +0."""
    return np.where((a == b) & np.signbit(a), a, np.where((a == b), b, np.fmin(a, b)))



EXACT: dict[str, Callable[..., Floats]] = {
    "add": numbers.sum_to_odd, "sub": lambda a, b: numbers.sum_to_odd(a, -b), "mul": lambda a, b: a.astype(np.float64) * b}


def _rounded_down(total: Floats, a: Floats, b: Floats) -> Floats:
    """A sum that is rounded down: where it is zero it is -0, but of two +0."""
    return np.where((total == 0) & ((a != 0) | (b != 0) | np.signbit(a) | np.signbit(b)), -0.0, total)


SIMPLE: dict[str, tuple[Callable[..., Any], Callable[..., Floats]]] = {
    "add": (np.add, np.add), "sub": (np.subtract, np.subtract), "mul": (np.multiply, np.multiply),
    "min": (np.minimum, _minimum), "max": (np.maximum, lambda a, b: -_minimum(-a, -b))}


@opcode("add", "sub", "mul", "min", "max")
def basic_arithmetic(context: Context) -> Step:
    """Sums, differences, products, minima and maxima of integers and floats."""
    name, kind = context.instruction.name, context.kind
    if not is_float(element(kind)):
        if name == "mul" and {"wide", "hi"} & context.modifiers:
            return _wide_product_step(context, added=False)
        if "sat" in context.modifiers:
            return _saturating(context)
        return _carry_step(context, carry_in=False) if "cc" in context.modifiers else _integer_step(context, 2, SIMPLE[name][0])
    if name in ("min", "max"):
        return _min_or_max_step(context)
    if context.rounding != "rn" and name in EXACT:
        if kind == "f64":
            raise context.unknown("f64 is rounded to the nearest alone")
        if context.rounding == "rm" and name != "mul":
            return _float_step(context, 2, lambda a, b: _rounded_down(EXACT[name](a, b), a, b if name == "add" else -b))
        return _float_step(context, 2, EXACT[name])
    return _float_step(context, 2, SIMPLE[name][1])


def _min_or_max_step(context: Context) -> Step:
    """The minimum or maximum of two floats, or of three."""
    propagate, number = SIMPLE[context.instruction.name]

    def of_two(a: Floats, b: Floats) -> Floats:
        if "NaN" in context.modifiers:
            return np.where(np.isnan(a) | np.isnan(b), propagate(a, b), number(a, b))
        return number(a, b)
    return _float_step(context, len(context.instruction.operands) - 1, lambda *values: reduce(of_two, values))


def _saturating(context: Context) -> Step:
    limits = np.iinfo(np.int32)
    operation = np.add if context.instruction.name == "add" else np.subtract
    return _integer_step(context, 2,
                         lambda a, b: np.clip(operation(a, b, dtype=np.int64), limits.min, limits.max).astype(np.int32))


@opcode("addc", "subc")
def with_carry(context: Context) -> Step:
    """Sums and differences that take a carry."""
    return _carry_step(context, carry_in=True)


def _carry_step(context: Context, carry_in: bool) -> Step:
    """Sums and differences of 32 bits with a carry from or to the next."""
    if type_bits(context.kind) != 32:
        raise context.unknown()
    a, b, put = context.source(1, 32), context.source(2, 32), context.target()
    minus, out = context.instruction.name.startswith("sub"), "cc" in context.modifiers

    def step(batch: ThreadBatch, at: At) -> None:
        carry = (batch.carry if at is None else batch.carry[at]).astype(np.int64) if carry_in else np.int64(0)
        left, right = (source(batch, at).astype(np.int64) for source in (a, b))
        total = left - right - carry if minus else left + right + carry
        put(batch, at, (total & 0xFFFF_FFFF).astype(np.uint32))
        if out:
            batch.carry = batch.carry.copy()
            batch.carry[batch.lanes(at)] = total < 0 if minus else total >> 32 > 0
    return step


def _wide_product_step(context: Context, added: bool) -> Step:
    """The whole product of two integers (wide) or its upper half (hi), with a third added."""
    kind = context.kind
    bits, signed, high = type_bits(kind), kind[0] == "s", "hi" in context.modifiers
    if bits == 64:
        if not high:
            raise context.unknown()
        return _elementwise_step(context, [context.source(place, 64) for place in ((1, 2, 3) if added else (1, 2))],
                                 lambda a, b, c=None: _high_product_64(a, b, signed) + (0 if c is None else c))
    wide = (SIGNED if signed else UNSIGNED)[2 * bits]
    narrow = SIGNED[bits] if signed else UNSIGNED[bits]

    def multiply_add_values(a: Bits, b: Bits, *added_to: Bits) -> Bits:
        product = (a.view(narrow).astype(wide) * b.view(narrow).astype(wide)).view(UNSIGNED[2 * bits])
        result = (product >> product.dtype.type(bits)).astype(UNSIGNED[bits]) if high else product
        return result + added_to[0] if added_to else result
    last = [context.source(3, bits if high else 2 * bits)] if added else []
    return _elementwise_step(context, [context.source(1, bits), context.source(2, bits), *last], multiply_add_values)


def _high_product_64(a: Bits, b: Bits, signed: bool) -> Bits:
    """The upper half of products of 64 bits."""
    low, half = np.uint64(0xFFFF_FFFF), np.uint64(32)
    a_low, a_high, b_low, b_high = a & low, a >> half, b & low, b >> half
    middle = a_high * b_low + (a_low * b_low >> half)
    other = a_low * b_high + (middle & low)
    high = a_high * b_high + (middle >> half) + (other >> half)
    if signed:
        high = high - np.where(a.view(np.int64) < 0, b, np.uint64(0)) - np.where(b.view(np.int64) < 0, a, np.uint64(0))
    return high


@opcode("mad")
def multiply_add(context: Context) -> Step:
    """Integer products plus a summand."""
    if is_float(context.kind):
        return fma(context)
    if {"wide", "hi"} & context.modifiers:
        return _wide_product_step(context, added=True)
    if context.modifiers & {"sat", "cc"}:
        raise context.unknown()
    return _integer_step(context, 3, lambda a, b, c: a * b + c)


@opcode("fma")
def fma(context: Context) -> Step:
    """Float products plus a summand, rounded once."""
    context.only("rn", "rz", "rm", "rp", "ftz", "sat", "relu")
    part = element(context.types[0])
    relu = "relu" in context.modifiers
    if part == "f64" and context.rounding != "rn":
        raise context.unknown("f64 is rounded to the nearest alone")

    def fused_values(a: Floats, b: Floats, c: Floats) -> Floats:
        value = numbers.fused_multiply_add(a, b, c, part)
        value = _rounded_down(value, a.astype(np.float64) * b, c) if context.rounding == "rm" else value
        return np.where(value < 0, 0, value) if relu else value
    return _float_step(context, 3, fused_values)


@opcode("div", "rem")
def divide(context: Context) -> Step:
    kind, remainder = context.kind, context.instruction.name == "rem"
    if is_float(kind):
        if kind == "f64":
            return _float_step(context, 2, np.divide)
        return _float_step(context, 2, numbers.quotient)             # .approx and .full may miss by 2 ulp

    def divide_integers(a: Bits, b: Bits) -> Bits:
        one = np.where(b == 0, b.dtype.type(1), b)
        left = np.fmod(a, one)
        value = left if remainder else (a - left) // one
        return np.where(b == 0, a if remainder else a.dtype.type(-1 if kind[0] == "s" else np.iinfo(a.dtype).max), value)
    return _integer_step(context, 2, divide_integers)


@opcode("abs", "neg")
def abs_or_neg(context: Context) -> Step:
    kind, negate = context.kind, context.instruction.name == "neg"
    part = element(kind)
    if not is_float(part):
        return _integer_step(context, 1, np.negative if negate else np.abs)
    bits = type_bits(kind)
    width = type_bits(part)
    mask = sum(1 << width * place + width - 1 for place in range(bits // width))
    top = UNSIGNED[bits].type(mask)
    return _elementwise_step(context, [context.source(1, bits)], lambda value: value ^ top if negate else value & ~top)


@opcode("dp4a", "dp2a")
def dot_of_bytes(context: Context) -> Step:
    """Sums of four products of bytes."""
    kinds = [np.int8 if kind == "s32" else np.uint8 for kind in context.types[-2:]]
    if context.instruction.name == "dp2a":
        raise context.unknown()

    def dot_values(a: Bits, b: Bits, c: Bits) -> Bits:
        left, right = (np.ascontiguousarray(value)[:, None].view(kind).astype(np.int64)
                       for value, kind in zip((a, b), kinds, strict=True))
        return ((left * right).sum(1) + c).astype(np.uint64).astype(np.uint32)
    return _elementwise_step(context, [context.source(place, 32) for place in (1, 2, 3)], dot_values)


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "ex2": np.exp2, "lg2": np.log2, "rcp": lambda x: 1 / x, "rsqrt": lambda x: 1 / np.sqrt(x), "sin": np.sin, "cos": np.cos,
    "tanh": np.tanh}


@opcode("ex2", "lg2", "rcp", "rsqrt", "sin", "cos", "tanh", "sqrt")
def unary_math(context: Context) -> Step:
    """Rounded to the nearest; what hardware approximates (.approx) may miss that by some ulp."""
    if context.instruction.name == "sqrt":
        return _float_step(context, 1, np.sqrt if context.kind == "f64" else numbers.square_root)
    if context.instruction.name == "rcp" and "approx" not in context.modifiers and context.kind != "f64":
        return _float_step(context, 1, lambda x: numbers.quotient(np.ones_like(x), x))
    function = FUNCTIONS[context.instruction.name]
    return _float_step(context, 1, lambda x: function(x.astype(np.float64)))


@opcode("copysign")
def copy_sign(context: Context) -> Step:
    """Magnitudes with the sign of another number."""
    return _float_step(context, 2, lambda signs, values: np.copysign(values, signs))
