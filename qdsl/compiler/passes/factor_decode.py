"""Decode as an affine function of its code: w = (scale * (code + zero) + offset) * columns.

Does: if decode reads one field with a value per weight, or its table entry, once and linearly, finds scale, zero and offset as
sums of products of the other fields.  The matmul kernels then sum x * code and apply the rest once per group.  A field of columns
that multiplies or divides the whole formula scales x instead.  Does not: change decode, whose order of roundings is the format's
definition; leaves `affine` None for other formulas.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import AffineDecode, Program, Terms, Value
from qdsl.compiler.spec.source import Problems
from qdsl.core.numbers import round_to_f32

MAX_TERMS = 16
_Sum = Mapping[tuple[str, ...], Fraction]                        # coefficient by product of fields, or '/field', names sorted


def factor_decode(program: Program, problems: Problems) -> Program:
    """The program with `affine`; never adds problems: other formulas are computed weight by weight.

    >>> shown(decode="d * (q - 8)")
    affine code = q, scale = d, zero = -8
    >>> shown(decode="d * q * q")
    nothing
    """
    affine = _affine_form(program)
    return replace(program, affine=None if isinstance(affine, str) else affine)


def why_not_affine(program: Program) -> str:
    """Why decode is not affine in a code; '' if it is."""
    affine = _affine_form(program)
    return affine if isinstance(affine, str) else ""


def _affine_form(program: Program) -> AffineDecode | str:
    """The affine form, or why there is none."""
    codes = [field.name for field in program.fields if field.index == (ix.name("n"), ix.name("k"))]
    if len(codes) != 1:
        return f"decode needs one field with a value per weight, [n, k]; here: {', '.join(codes) or 'none'}"
    sums = _sum_of_products(program)
    if sums is None and (stored := next((value.name for value in program.values if value.op == "entry"), "")):
        return f"decode looks up '{stored}', a table that is stored with the weight"
    if sums is None:
        return ("decode is no sum of products: it divides by a sum, rounds to another type, or reads another table than that of "
                "the code, or rows of one")
    columns = _column_factor(program, sums)
    sums = {tuple(name for name in product if name != columns): c for product, c in sums.items()}
    read = {name for product in sums for name in product if name == codes[0] or name.endswith(f"[{codes[0]}]")}
    factors = {name for product in sums for name in product}
    lookups = {field: table for table, by, field in (name[:-1].partition("[") for name in factors - read if "[" in name)}
    if twice := next((field for field in lookups if sum(_looked_up(name) == field for name in factors) > 1), ""):
        return f"decode reads '{twice}' by itself and in a table, or in two tables"
    sums = {tuple(sorted(name if name in read else _looked_up(name) for name in product)): c for product, c in sums.items()}
    factors = {name for product in sums for name in product}
    if len(read) != 1 or any(sum(name in read for name in product) > 1 for product in sums):
        return f"decode must read '{codes[0]}' once and linearly, by itself or in one table"
    code = read.pop()
    if any(name[0] == "/" and (name[1:] == codes[0] or name[1:] in factors) for name in factors):
        return "decode multiplies and divides by the same field, or divides by the code"
    scale = {tuple(f for f in product if f != code): c for product, c in sums.items() if code in product}
    others = {product: c for product, c in sums.items() if code not in product}
    if not scale:
        return f"decode does not depend on '{codes[0]}'"
    zero = _divide_by_sum(others, scale)
    terms = [kept for part in (scale, zero or {}, others if zero is None else {}) if (kept := _float_terms(part)) is not None]
    if len(terms) < 3:
        return "decode has a constant that float32 does not hold"
    table = code.partition("[")[0] if code != codes[0] else ""
    return AffineDecode(codes[0], terms[0], terms[1], terms[2], table, columns, lookups)


def _column_factor(program: Program, sums: _Sum) -> str:
    """The field of [k] that every product contains once, '/name' if it divides; '' for none."""
    names = [field.name for field in program.fields if field.index == (ix.name("k"),) and field.number is not None]
    return next((factor for name in names for factor in (name, f"/{name}")
                 if sums and all(product.count(factor) == 1 for product in sums)), "")


def _looked_up(name: str) -> str:
    """The field of a factor, whether or not a table is looked up."""
    return name[:-1].partition("[")[2] if "[" in name else name


def _sum_of_products(program: Program) -> _Sum | None:
    """Decode as a sum of products; None if it divides by a sum, or is too long."""
    sums: list[_Sum | None] = []
    for value in program.values:
        args = [part for arg in value.args if (part := sums[arg]) is not None]
        sums.append(_step_as_sum(program, value, args) if len(args) == len(value.args) else None)
    return sums[-1]


def _step_as_sum(program: Program, value: Value, args: list[_Sum]) -> _Sum | None:
    """A step of decode as a sum of products, from those of its arguments; None if it has no such form."""
    match value.op, args:
        case "field", _:
            return {(value.name,): Fraction(1)}
        case "table", [index]:
            return _lookup_as_terms(program, value.name, index)
        case "entry", [index]:                                   # of a code that indexes a whole stored table
            codes = [field.name for field in program.fields if index == {(field.name,): 1}]
            return {(f"{value.name}[{codes[0]}]",): Fraction(1)} if codes else None
        case "const", _:
            return {(): Fraction(value.const)} if value.const else {}
        case "float", [inner]:
            return inner
        case "neg", [inner]:
            return {product: -c for product, c in inner.items()}
        case ("+" | "-"), [left, right]:
            sign = 1 if value.op == "+" else -1
            return _kept({p: left.get(p, Fraction(0)) + sign * right.get(p, Fraction(0)) for p in {**left, **right}})
        case "*", [left, right]:
            return _multiply(left, right)
        case "/", [left, right] if len(right) == 1:
            return _divide_by_product(left, right)
    return None


def _lookup_as_terms(program: Program, table: str, index: _Sum) -> _Sum | None:
    """A table lookup by a field, or by a code plus a choice: levels[16 * h + q] is levels[q] + 4 * h.

    The latter requires that the parts of the table, one per choice, differ by a constant step.  None for other subscripts.
    """
    fields = {product[0]: c for product, c in index.items() if len(product) == 1}
    codes = [name for name, c in fields.items() if c == 1]
    if len(fields) != len(index) or len(codes) != 1 or len(fields) > 2:
        return None
    line: dict[tuple[str, ...], Fraction] = {(f"{table}[{codes[0]}]",): Fraction(1)}
    for choice in fields.keys() - codes:
        code = program.field(codes[0])
        if code.number is None or fields[choice] != code.number.high + 1 or code.index != (ix.name("n"), ix.name("k")):
            return None
        step = _step_of_parts(program.spec.table(table).values, code.number.high + 1)
        if step is None:
            return None
        line[choice,] = step
    return line


def _step_of_parts(numbers: Sequence[int | float], length: int) -> Fraction | None:
    """The constant step between the parts of a table; None if it is not constant."""
    steps = {Fraction(after) - Fraction(before) for before, after in zip(numbers, numbers[length:], strict=False)}
    return steps.pop() if len(steps) == 1 else None


def _multiply(left: _Sum, right: _Sum) -> _Sum | None:
    total: dict[tuple[str, ...], Fraction] = {}
    for a, x in left.items():
        for b, y in right.items():
            product = tuple(sorted((*a, *b)))
            total[product] = total.get(product, Fraction(0)) + x * y
    return _kept(total)


def _divide_by_product(left: _Sum, right: _Sum) -> _Sum | None:
    """A sum of products divided by one product; None if that has a quotient or a table.

    A quotient of numbers is rounded to float32, because kernels multiply by it.
    """
    (by, divisor), = right.items()
    if not divisor or any(name[0] == "/" or "[" in name for name in by):
        return None
    return _kept({tuple(sorted((*product, *(f"/{name}" for name in by)))): Fraction(round_to_f32(float(c / divisor)))
                  for product, c in left.items()})


def _kept(terms: _Sum) -> _Sum | None:
    """The nonzero terms; None if they are too many or too long."""
    kept = {product: c for product, c in terms.items() if c}
    return kept if len(kept) <= MAX_TERMS and all(len(product) <= MAX_TERMS for product in kept) else None


def _divide_by_sum(dividend: _Sum, scale: _Sum) -> _Sum | None:
    """dividend / scale if that is a sum of products, found by the longest product of scale; else None."""
    if not dividend:
        return {}
    if dividend.keys() == scale.keys():
        ratios = {dividend[product] / scale[product] for product in scale}
        return {(): ratios.pop()} if len(ratios) == 1 else None
    by, c = max(scale.items(), key=lambda term: len(term[0]))
    quotient: dict[tuple[str, ...], Fraction] = {}
    for product, coefficient in dividend.items():
        left = list(product)
        for factor in by:
            if factor not in left:
                break
            left.remove(factor)
        else:
            quotient[tuple(left)] = coefficient / c
    return quotient if _multiply(quotient, scale) == dividend else None


def _float_terms(total: _Sum) -> Terms | None:
    """Coefficients as floats; None if float32 does not hold one exactly."""
    if any(c != Fraction(float(c)) or abs(float(c)) > 2.0 ** 100 for c in total.values()):
        return None
    return tuple((float(c), product) for product, c in sorted(total.items(), key=lambda term: (-len(term[0]), term[0])))
