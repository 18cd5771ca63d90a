"""Prints the C functions that complete the loops over interleaved rows (runtime/cpu/row_loops.h).

A format whose decode is affine in a code has two: `number`, the numbers of a vector of codes, and `group`, the scale and the
offset of a group of columns.  Lanes are rows of the weight.  A constant zero point is part of the numbers.  Where these are small
integers times a power of two, UNIT, a third function makes bytes of codes, for x in 8 bits: number = UNIT * (byte + BASE).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence

from qdsl.compiler.emit.formula import constant
from qdsl.compiler.emit.lines import wrap_items
from qdsl.compiler.emit.literals import quoted, tupled
from qdsl.compiler.emit.row_codes import constant_name
from qdsl.compiler.ir.program import AffineDecode, Field, Program, Terms
from qdsl.compiler.passes.derive_planar import PLANAR, is_stored
from qdsl.core.numbers import Number, round_to_f32

NAME = "ROW_FUNCTIONS"                                           # the constant of a module
LOOKED_UP = (16, 32, 64)                                         # lengths of tables in registers
BYTE_FLOATS = ("e4m3", "e5m2")                                   # codes that are converted by arithmetic
UNITS = (1.0, 0.5, 0.25, 0.125)                                  # of numbers that x in 8 bits is multiplied by
MOST_FIELDS = 8
TAKEN = frozenset(("w", "at", "k", "scale", "offset", "codes", "levels"))


def row_functions(programs: Sequence[Program]) -> list[list[str]]:
    """The constant with the C functions of a variant; none for a format that has none."""
    program = _planar_program(programs)
    if program is None:
        return []
    functions = [*_number_function(program), *_bytes_function(program), *_group_function(program)]
    return [[f'{NAME} = """', f"/* w = {program.spec.decode_text} */", *_definition_lines(program), *functions, '"""']]


def row_loops(programs: Sequence[Program]) -> list[str]:
    """The argument of a variant that describes its C functions; none for a format that has none."""
    program = _planar_program(programs)
    if program is None:
        return []
    affine, code = _parts(program)
    arguments = [NAME, quoted(code.name if program.row_codes is None else ""), str(_bits(program)), tupled(affine.fields)]
    if program.row_codes is not None:
        arguments.append(f"row_codes={constant_name(program)}")
    if affine.lookups:
        tables = (f"{quoted(name)}: {constant(table)}" for name, table in affine.lookups.items())
        arguments.append(f"lookups={{{', '.join(tables)}}}")
    if is_stored(program, affine.table):
        arguments.append(f"levels={quoted(affine.table)}")
    if affine.columns:
        arguments.append(f"columns={quoted(affine.columns)}")
    return [f"row_loops=RowLoops({', '.join(arguments)})"]


def _planar_program(programs: Sequence[Program]) -> Program | None:
    """The planar program of a variant, if vectors of rows serve it."""
    program = next((program for program in programs if program.storage == PLANAR and program.affine is not None), None)
    if program is None:
        return None
    affine, _ = _parts(program)
    has_numbers = _code_numbers(program) or _uses_levels(program) or _is_arithmetic(program)
    return program if has_numbers and len(affine.fields) <= MOST_FIELDS else None


def _parts(program: Program) -> tuple[AffineDecode, Field]:
    assert program.affine is not None
    return program.affine, program.field(program.affine.code)


def _code_type(program: Program) -> Number:
    assert program.affine is not None
    number = program.field(program.affine.code).number
    assert number is not None
    return number


def _bits(program: Program) -> int:
    return _code_type(program).bits


def _constant_zero(program: Program) -> float | None:
    """The constant that is added to every code, 0 without one; None for a zero point that groups have."""
    assert program.affine is not None
    zero = program.affine.zero
    return 0.0 if not zero else zero[0][0] if [product for _, product in zero] == [()] else None


def _code_numbers(program: Program) -> list[float]:
    """The number of every code, if a table in registers holds them; else none."""
    assert program.affine is not None
    kind, table = _code_type(program), program.affine.table
    if kind.bits > 6 or is_stored(program, table) or (not table and not kind.is_float and kind.bits > 5):
        return []
    count = 1 << kind.bits
    values = program.spec.table(table).values[:count] if table else [kind.decode(code) for code in range(count)]
    numbers = [float(value) + (_constant_zero(program) or 0.0) for value in values]
    is_exact = all(round_to_f32(number) == number for number in numbers)
    return numbers if len(numbers) == count and is_exact else []


def _has_bfloat16_numbers(program: Program) -> bool:
    """Whether bfloat16 holds the numbers of all codes, and vectors look them up: not those of integers of 8 bits."""
    kind, zero = _code_type(program), _constant_zero(program) or 0.0
    if _is_arithmetic(program):
        return kind.is_float or (kind.bits == 6 and zero == int(zero) and abs(zero) <= 64)
    return all(struct.pack("<f", number)[:2] == bytes(2) for number in _code_numbers(program) or [math.pi])


def _uses_levels(program: Program) -> bool:
    """Whether codes index a table that is stored with the weight, one for all rows."""
    assert program.affine is not None
    table = program.affine.table
    if not is_stored(program, table) or _bits(program) > 6 or _constant_zero(program) != 0:
        return False
    field = program.field(table)
    return not field.index and field.table == (1 << _bits(program),)


def _is_arithmetic(program: Program) -> bool:
    """Whether arithmetic makes numbers of codes: integers of 6 bits and more, and 8-bit floats."""
    assert program.affine is not None
    kind = _code_type(program)
    return not program.affine.table and (kind.name in BYTE_FLOATS if kind.is_float else kind.bits > 5)


def _definition_lines(program: Program) -> list[str]:
    """BITS, FIELDS and HAS_OFFSET; the table of numbers; BRAIN_NUMBERS if bfloat16 holds them."""
    affine, _ = _parts(program)
    lines = [f"#define BITS {_bits(program)}", f"#define FIELDS {len(affine.fields)}"]
    lines += ["#define HAS_OFFSET"] if affine.offset or _constant_zero(program) is None else []
    lines += ["#define BRAIN_NUMBERS"] if _has_bfloat16_numbers(program) else []
    numbers = _code_numbers(program)
    if numbers:
        size = next(size for size in LOOKED_UP if size >= len(numbers))
        shown = [_float(number) for number in numbers]
        lines += wrap_items(f"static const float numbers[{size}] = {{", shown, "};")
    return lines


def _number_function(program: Program) -> list[str]:
    """The function that makes numbers of a vector of codes."""
    numbers = _code_numbers(program)
    if numbers or _uses_levels(program):
        size = next(size for size in LOOKED_UP if size >= 1 << _bits(program))
        text = f"lookup_{size}({'numbers' if numbers else '(const float *)w->levels'}, codes)"
    else:
        kind, zero = _code_type(program), _constant_zero(program) or 0.0
        text = f"float_of_{kind.name}((vi)(codes & 255))" if kind.is_float else f"{kind.kind}_number(codes)"
        text += f" {'-' if zero < 0 else '+'} {_float(abs(zero))}" if zero else ""
    return [f"INLINE vf number(const Weight *w, vu codes) {{ return {text}; }}"]


def _bytes_function(program: Program) -> list[str]:
    """The function that makes bytes of a vector of codes, BASE and UNIT; none where numbers are no integers of 8 bits."""
    affine, _ = _parts(program)
    kind, zero, numbers = _code_type(program), _constant_zero(program) or 0.0, _code_numbers(program)
    if numbers and kind.bits <= 5:
        unit = next((unit for unit in UNITS if all(number % unit == 0 for number in numbers)), 0.0)
        integers = [int(number / unit) for number in numbers] if unit else [0, 256]
        base = min(integers)
        is_linear = integers == list(range(base, base + len(integers)))
        if max(integers) - base > 255 or (kind.bits > 4 and not is_linear):
            return []
        shown = ", ".join(str(integer - base) for integer in integers)
        text = "codes" if is_linear else "lookup(vload_16(byte_numbers), codes)"
        table = [] if is_linear else wrap_items("static const uint8_t byte_numbers[16] = {", shown.split(", "), "};")
    elif not numbers and not affine.table and not kind.is_float and zero == int(zero):
        high = 1 << kind.bits - 1 if kind.kind == "signed" else 0
        unit, base, text, table = 1.0, int(zero) - high, f"codes ^ {high}" if high else "codes", []
    else:
        return []
    return [f"#define BASE ({base})", f"#define UNIT {_float(unit)}", *table,
            f"INLINE vb bytes_of_codes(vb codes) {{ return {text}; }}"]


def _group_function(program: Program) -> list[str]:
    """The function that computes the scale and the offset of a group."""
    affine, _ = _parts(program)
    names = {field: f"{field}_" if field in TAKEN else field for field in affine.fields}
    fields = [f"    const vf {names[field]} = FIELD({place});" for place, field in enumerate(affine.fields)]
    offset = [_sum_text(affine.offset, names)] if affine.offset else []
    offset += [f"*scale * ({_sum_text(affine.zero, names)})"] if _constant_zero(program) is None else []
    return ["INLINE void group(const Weight *w, Place at, int64_t k, vf *scale, vf *offset) {", *fields,
            f"    *scale = {_sum_text(affine.scale, names)};", *([f"    *offset = {' + '.join(offset)};"] if offset else []), "}"]


def _sum_text(terms: Terms, names: dict[str, str]) -> str:
    """A sum of products as an expression of vectors."""
    text = ""
    for coefficient, product in terms:
        size = abs(coefficient)
        factors = [names[field] for field in product if field[0] != "/"]
        shown = " * ".join([*([_float(size)] if size != 1 or not factors else []), *factors])
        shown = " / ".join([shown, *(names[field[1:]] for field in product if field[0] == "/")])
        text += (" - " if coefficient < 0 else " + ") + shown if text else ("-" if coefficient < 0 else "") + shown
    return text if any(product for _, product in terms) else f"all_float({text or '0.0f'})"


def _float(number: float) -> str:
    """A float32 as a C literal."""
    return f"{number!r}f"
