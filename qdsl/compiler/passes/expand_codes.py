"""A code per weight that replaces table rows and other fields which fewer columns share than a kernel's group.

Does: if decode reads such fields in only one part of its formula, computes all values of that part and writes a spec with a code
for them: `levels[q]`, or `a * q + b` if the values are evenly spaced.  IQ2's rows of {8, 25, 43} and their signs become codes of
six numbers.  The rest of decode stays unchanged, so that every weight keeps its bits.  Rows are recovered from their entries,
which must differ.  Sixteen floats that a code indexes get the order of pair_levels, if they have one.  Does not: read tables that
are stored with a weight, whose numbers the compiler does not know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, product

from qdsl.compiler.ir.index import name
from qdsl.compiler.ir.program import CodeFactor, Field, Program, RowCodes
from qdsl.compiler.passes.factor_decode import factor_decode
from qdsl.compiler.passes.pair_levels import pair_order
from qdsl.compiler.passes.type_decode import type_decode
from qdsl.compiler.passes.type_fields import type_fields
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Field as SpecField
from qdsl.compiler.spec.model import Table
from qdsl.compiler.spec.reserved import RESERVED
from qdsl.compiler.spec.source import Problems, Span, Text
from qdsl.core.numbers import round_to_f32
from qdsl.core.ops import OPS, Op

GROUP = 16                                                       # least columns that share a number of a group
MAX_NUMBERS = 256                                                # per code
MAX_LEVELS = 16                                                  # of a code that indexes a table
MAX_ROWS = 1 << 16                                               # combinations of entries that a search for rows may index
FRACTION = 16                                                    # bits of a fraction that are moved out of numbers

Numbers = tuple[int, ...] | tuple[float, ...]


def expand_codes(program: Program, divisor: int) -> Program | str:
    """The program with a code per weight, typed and factored; itself if it has one; or why there is none.

    divisor: the number that K is a multiple of in all storages.
    """
    fields = [field for field in program.fields if _columns_per_value(field) is not None and field.index != (name("k"),)]
    if not fields:
        return program
    if [field.index for field in fields] == [(name("n"), name("k"))]:
        return _pair_levels(program, fields[0])
    if any(value.op == "digit" for value in program.values):
        return "decode reads digits of the column, which a code per weight does not know"
    if stored := next((field for field in program.fields if field.table), None):
        return f"decode reads rows of '{stored.name}', whose numbers are stored with the weight"
    for field in fields:
        if field.number is None or field.number.kind != "unsigned" or len(field.index) != 2 \
                or divisor % (_columns_per_value(field) or 1):
            return f"'{field.name}' is no unsigned integer of whole runs of columns in every row"
    names = {field.name for field in fields}
    part = _part_reading(program.spec.decode, names, {field.name for field in program.fields})
    if part is None:
        return f"decode reads {', '.join(sorted(names))} in several parts of its formula"
    if _rounds(part):
        return f"decode rounds what it makes of {', '.join(sorted(names))}"
    factors = [_field_factor(program, field, part) for field in fields]
    wrong = next((factor for factor in factors if isinstance(factor, str)), None)
    code_factors = [one for one in factors if isinstance(one, CodeFactor)]
    return _replace_part_by_code(program, part, code_factors) if wrong is None else wrong


def _columns_per_value(field: Field) -> int | None:
    """How many columns share a value, if fewer than a kernel's group; else None."""
    if field.number is None or not field.index:
        return None
    if field.index[-1] == name("k"):
        return 1
    terms = field.index[-1].terms
    atom = terms[0][0] if len(terms) == 1 else None
    if atom is None or atom.op != "div" or atom.args[0] != name("k") or not atom.args[1].is_const:
        return None
    return atom.args[1].const if atom.args[1].const < GROUP else None


def _part_reading(expr: g.Expr, names: set[str], fields: set[str]) -> g.Expr | None:
    """The largest part of decode that reads all of these fields and no others; None if others are in between."""
    read = set(_field_names(expr)) & fields
    if read == names:
        return expr
    parts = [part for part in _operands(expr) if names & set(_field_names(part))]
    return _part_reading(parts[0], names, fields) if len(parts) == 1 else None


def _operands(expr: g.Expr) -> tuple[g.Expr, ...]:
    match expr:
        case g.Binary(_, left, right):
            return left, right
        case g.Negate(value):
            return (value,)
        case g.Subscript(_, index):
            return index
        case g.CallExpr(_, arguments):                              # round(value, type)
            return arguments[:1]
    return ()


def _rounds(expr: g.Expr) -> bool:
    """Whether a part of decode rounds to a type."""
    return isinstance(expr, g.CallExpr) or any(map(_rounds, _operands(expr)))


def _field_names(expr: g.Expr) -> Iterator[str]:
    """The names of fields in an expression, once per occurrence."""
    if isinstance(expr, g.Name):
        yield expr.name
    for part in _operands(expr):
        yield from _field_names(part)


def _field_factor(program: Program, field: Field, part: g.Expr) -> CodeFactor | str:
    """A field's factor of a weight, or why the field could not be recovered from it."""
    assert field.number is not None
    columns, count = _columns_per_value(field) or 1, field.number.high + 1
    if Counter(_field_names(part))[field.name] != 1:
        return f"decode reads '{field.name}' more than once"
    word = _row_table(part, field.name)
    if word == "":
        return CodeFactor(field.name, "", columns, tuple(range(count))) if count ** columns <= MAX_ROWS else \
            f"'{field.name}' has more values than can be looked for"
    table = program.spec.table(word)
    if len(table.shape) != 2 or table.shape[0] != count:
        return f"'{field.name}' does not choose each row of '{word}', a table of rows"
    rows = {table.values[i * columns:(i + 1) * columns] for i in range(count)}
    numbers = tuple(sorted(set(table.values)))
    if len(rows) < count:
        return f"two rows of '{word}' are alike, and '{field.name}' could not be found again"
    if len(numbers) ** columns > MAX_ROWS:
        return f"rows of '{word}' have too many different entries"
    return CodeFactor(field.name, word, columns, numbers)


def _row_table(expr: g.Expr, field: str) -> str:
    """The table whose rows a field selects; '' if the field is the number."""
    for part in _operands(expr):
        if isinstance(expr, g.Subscript) and field in _field_names(expr.index[0]):
            return expr.name
        if field in _field_names(part):
            return _row_table(part, field)
    return ""


def _evaluate(expr: g.Expr, numbers: Mapping[str, int | float]) -> int | float:
    """The number of a part of decode for these field values, rounded as in decode: integers exactly, floats to float32."""
    match expr:
        case g.Number(value):
            return value
        case g.Name(word):
            return numbers[word]
        case g.Negate(value):
            return -_evaluate(value, numbers)
        case g.Subscript(_, index):
            return numbers[next(word for word in _field_names(index[0]))]
        case g.Binary(op, left, right):
            return _evaluate_operation(OPS[op], (_evaluate(left, numbers), _evaluate(right, numbers)))
        case g.CallExpr(op, arguments) if op in OPS:
            return _evaluate_operation(OPS[op], [_evaluate(argument, numbers) for argument in arguments])
    raise AssertionError("a part that rounds is not computed")


def _evaluate_operation(op: Op, numbers: Sequence[int | float]) -> int | float:
    result: int | float
    if op.bounds is not None and all(isinstance(number, int) for number in numbers):
        result = op.value(*numbers)
        return result
    floats = [round_to_f32(number) for number in numbers]
    return 0.0 if op.name == "/" and not floats[1] else round_to_f32(op.value(*floats))


def _pair_levels(program: Program, code: Field) -> Program:
    """The program with sixteen floats that the code indexes in pairs; unchanged if they have no such order."""
    part = _part_reading(program.spec.decode, {code.name}, {field.name for field in program.fields})
    table = next((t for t in program.spec.tables if isinstance(part, g.Subscript) and t.name.value == part.name), None)
    if part is None or table is None or code.number is None or code.number.bits != 4 or len(table.values) != 16:
        return program
    order = None if all(isinstance(level, int) for level in table.values) else pair_order(table.values)
    if order is None:
        return program
    factor, numbers = CodeFactor(code.name, "", 1, tuple(range(16))), tuple(table.values[place] for place in order)
    paired = _program_with_code(program, part, [factor], order, numbers, 1, ("code", "paired"))
    assert isinstance(paired, Program)
    return paired


def _replace_part_by_code(program: Program, part: g.Expr, factors: list[CodeFactor]) -> Program | str:
    """The program of the spec in which a code replaces the part."""
    joint = [_evaluate(part, dict(zip([factor.field for factor in factors], numbers, strict=True)))
             for numbers in product(*(factor.numbers for factor in factors))]
    if len(joint) > MAX_NUMBERS:
        return f"a weight's code would have {len(joint)} values, and matrix units take {MAX_NUMBERS}"
    order = tuple(sorted(range(len(joint)), key=lambda place: (joint[place], place)))
    return _program_with_code(program, part, factors, order, *_scale_to_integers([joint[place] for place in order]))


def _program_with_code(program: Program, part: g.Expr, factors: list[CodeFactor], order: tuple[int, ...], numbers: Numbers,
                       unit: float, words: tuple[str, str] = ("q", "levels")) -> Program | str:
    """The program of the spec in which the part is a code's number times a unit.

    order: the joint number of each code.  words: names of the code and the table, if they are not taken.
    """
    span = program.spec.span
    steps = {b - a for a, b in pairwise(numbers)}
    is_even = len(steps) == 1 and 0 not in steps and isinstance(numbers[0], int)
    if not is_even and len(numbers) > MAX_LEVELS:
        return f"a weight's code would stand for {len(numbers)} numbers, and matrix units look up {MAX_LEVELS}"
    taken = {*RESERVED, *(f.name for f in program.fields), *program.params, *(t.name.value for t in program.spec.tables)}
    code, word = (_fresh(word, taken) for word in words)
    bits = max(1 if is_even else 3, (len(numbers) - 1).bit_length())
    levels = Table(Text(word, (span,)), (*numbers, *[numbers[-1]] * ((1 << bits) - len(numbers))), (1 << bits,))
    read = _evenly_spaced(code, numbers, span) if is_even else g.Subscript(word, (g.Name(code, span),), span)
    read = read if unit == 1 else g.Binary("*", g.Number(unit, span), read, span)
    decode = _replace_part(program.spec.decode, part, read)
    gone = {factor.field for factor in factors}
    fields = [field for field in program.spec.fields if field.name.value not in gone]
    declared = SpecField(Text(code, (span,)), g.typed(Text(f"u{bits}[n, k]", (span,))))
    tables = _tables_read([*program.spec.tables, levels], decode)
    spec = replace(program.spec, fields=(*fields, declared), tables=tables, decode=decode, encode=None, claims=())
    expanded = replace(program, spec=spec, encode=None, row_codes=RowCodes(code, tuple(factors), order))
    for step in (type_fields, type_decode, factor_decode):
        expanded = step(expanded, problems := Problems())
        if problems:
            return f"decode cannot be written over a code per weight: {next(iter(problems)).message}"
    return expanded


def _scale_to_integers(numbers: list[int | float]) -> tuple[Numbers, float | int]:
    """The numbers as integers times a power of two, if possible; else unchanged, times 1."""
    for bits in range(FRACTION):
        scaled = [number * 2 ** bits for number in numbers]
        if all(number == int(number) for number in scaled):
            return tuple(int(number) for number in scaled), 2.0 ** -bits if bits else 1
    return tuple(float(number) for number in numbers), 1


def _evenly_spaced(code: str, numbers: Numbers, span: Span) -> g.Expr:
    """step * code + first."""
    first, step = int(numbers[0]), int(numbers[1] - numbers[0])
    read: g.Expr = g.Name(code, span)
    read = read if step == 1 else g.Binary("*", g.Number(step, span), read, span)
    return g.Binary("+" if first > 0 else "-", read, g.Number(abs(first), span), span) if first else read


def _replace_part(expr: g.Expr, part: g.Expr, by: g.Expr) -> g.Expr:
    """An expression in which `by` replaces a part."""
    if expr is part:
        return by
    match expr:
        case g.Binary(_, left, right):
            return replace(expr, left=_replace_part(left, part, by), right=_replace_part(right, part, by))
        case g.Negate(value):
            return replace(expr, value=_replace_part(value, part, by))
        case g.CallExpr(_, (value, *others)):
            return replace(expr, arguments=(_replace_part(value, part, by), *others))
    return expr


def _tables_read(tables: list[Table], decode: g.Expr) -> tuple[Table, ...]:
    """The tables that decode reads, and the tables that these are computed from."""
    wanted = set(g.names(decode))
    for table in reversed(tables):
        if table.formula is not None and table.name.value in wanted:
            wanted |= set(g.names(table.formula))
    return tuple(table for table in tables if table.name.value in wanted)


def _fresh(word: str, taken: set[str]) -> str:
    return word if word not in taken else _fresh(f"{word}_", taken)
