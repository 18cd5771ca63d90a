"""Decode as a line in its code: w = scale * (code + zero) + offset.

Does: where decode reads one field that each weight has for itself, or what a table has for it, and reads it once and
linearly, finds scale, zero and offset as sums of products of the other fields; the matmul kernels then sum x * code and apply
the rest once per group.
Does not: change decode, whose order of roundings is the format's definition; leaves `affine` None for any other formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from math import frexp

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import Affine, Program, Terms, Value
from qdsl.compiler.spec.source import Problems

MAX_TERMS = 16
_Sum = Mapping[tuple[str, ...], Fraction]                        # coefficient by product of fields, or '/field', names sorted


def factor_decode(program: Program, problems: Problems) -> Program:
    """Never finds problems: a formula of another kind is computed weight by weight."""
    return replace(program, affine=_affine(program))


def _affine(program: Program) -> Affine | None:
    every = (ix.name("n"), ix.name("k"))
    codes = [field.name for field in program.fields if field.index == every]
    whole = _expanded(program)
    if len(codes) != 1 or whole is None:
        return None
    read = {name for product in whole for name in product if name == codes[0] or "[" in name}
    if len(read) != 1 or any(sum(name in read for name in product) > 1 for product in whole):
        return None
    code = read.pop()
    names = {name for product in whole for name in product}
    if any(name[0] == "/" and (name[1:] == codes[0] or name[1:] in names) for name in names):
        return None
    scale = {tuple(f for f in product if f != code): c for product, c in whole.items() if code in product}
    rest = {product: c for product, c in whole.items() if code not in product}
    if not scale:
        return None
    zero = _quotient(rest, scale)
    terms = [_terms(part) for part in (scale, zero or {}, rest if zero is None else {})]
    if None in terms:
        return None
    first, second, third = terms
    assert first is not None and second is not None and third is not None
    return Affine(codes[0], first, second, third, code.partition("[")[0] if code != codes[0] else "")


def _expanded(program: Program) -> _Sum | None:
    """Decode as a sum of products; None where it divides by a sum or a number that is no power of two, or is long."""
    found: list[_Sum | None] = []
    for value in program.values:
        args = [part for arg in value.args if (part := found[arg]) is not None]
        found.append(_step(value, args) if len(args) == len(value.args) else None)
    return found[-1]


def _step(value: Value, args: list[_Sum]) -> _Sum | None:
    if value.op == "field":
        return {(value.name,): Fraction(1)}
    if value.op == "table":                                      # of the code itself; of anything else it is no line
        (by,) = args[0] if len(args[0]) == 1 else ((),)
        return {(f"{value.name}[{by[0]}]",): Fraction(1)} if args[0] == {by: Fraction(1)} and len(by) == 1 else None
    if value.op == "entry":
        return None
    if value.op == "const":
        return {(): Fraction(value.const)} if value.const else {}
    if value.op == "float":
        return args[0]
    if value.op == "neg":
        return {product: -c for product, c in args[0].items()}
    left, right = args
    if value.op in ("+", "-"):
        sign = 1 if value.op == "+" else -1
        return _kept({p: left.get(p, Fraction(0)) + sign * right.get(p, Fraction(0)) for p in {**left, **right}})
    if value.op == "*":
        total: dict[tuple[str, ...], Fraction] = {}
        for a, x in left.items():
            for b, y in right.items():
                product = tuple(sorted((*a, *b)))
                total[product] = total.get(product, Fraction(0)) + x * y
        return _kept(total)
    if value.op != "/" or len(right) != 1:
        return None
    (by, divisor), = right.items()
    if frexp(abs(float(divisor)))[0] != 0.5 or any(name[0] == "/" or "[" in name for name in by):
        return None
    return _kept({tuple(sorted((*product, *(f"/{name}" for name in by)))): c / divisor for product, c in left.items()})


def _kept(terms: _Sum) -> _Sum | None:
    kept = {product: c for product, c in terms.items() if c}
    return kept if len(kept) <= MAX_TERMS and all(len(product) <= MAX_TERMS for product in kept) else None


def _quotient(rest: _Sum, scale: _Sum) -> _Sum | None:
    """rest / scale where that is a sum of products again: always for rest 0 or a multiple, else for a single product."""
    if not rest:
        return {}
    if rest.keys() == scale.keys():
        ratios = {rest[product] / scale[product] for product in scale}
        return {(): ratios.pop()} if len(ratios) == 1 else None
    if len(scale) > 1:
        return None
    (by, c), = scale.items()
    found: dict[tuple[str, ...], Fraction] = {}
    for product, coefficient in rest.items():
        left = list(product)
        for factor in by:
            if factor not in left:
                return None
            left.remove(factor)
        found[tuple(left)] = coefficient / c
    return found


def _terms(total: _Sum) -> Terms | None:
    """Coefficients as floats; None where float32 does not hold one."""
    if any(c != Fraction(float(c)) or abs(float(c)) > 2.0 ** 100 for c in total.values()):
        return None
    return tuple((float(c), product) for product, c in sorted(total.items(), key=lambda term: (-len(term[0]), term[0])))
