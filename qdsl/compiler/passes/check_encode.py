"""Checks that the encode scheme exists, gets the fields that it chooses, and is the inverse of decode.

Does: checks roles and options, and that fields of one level share a subscript; matches decode with the formula that the scheme
inverts, and reads its constants; proves that fields hold what the scheme chooses (encode_ranges.py).  Does not: judge how good
the numbers are.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise, permutations, product
from math import isfinite, prod

from qdsl.compiler.ir.index import Index, flat_of
from qdsl.compiler.ir.program import Constant, Encode, Program, Value
from qdsl.compiler.passes.encode_ranges import EncodeCall, check_ranges
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.source import Problems, Source, Span, Text, did_you_mean
from qdsl.compiler.spec.tables import is_number
from qdsl.core.numbers import Number
from qdsl.core.ops import OPS
from qdsl.core.schemes import KINDS, SCHEMES, Scheme

Constants = dict[str, Constant]
Options = dict[str, str | int | float]
LEVELS = (("scale", "min", "zero"), ("super_scale", "super_min"), ("code", "residual"))    # roles of blocks of one size
MOST_FIELDS = 5                                                  # of decode, to look for the scheme that inverts it
ALIKE = (("scale", "choice"), ("code", "sign"))                  # of schemes that need no particular values


def check_encode(program: Program, problems: Problems) -> Program:
    """The program with its encode scheme: the fields of its roles, its options, and the constants from decode.

    >>> shown(more="encode: signmax(code=q, scale=d, divisor=-8, by=exact, ties=up)")   # the offset is that of decode
    encode signmax: code = q, scale = d, divisor = -8, by = exact, ties = up, offset = 8
    >>> shown(more="encode: absmax(code=q, scale=d)")
    error: 'absmax' of codes that are u4 needs 'divisor', such as divisor=7
    """
    call = program.spec.encode
    if call is None:
        for option, _ in program.authored.options:
            problems.add(option.span, f"'{option}' is an option of encode, which the format has not")
        return program
    scheme = SCHEMES.get(call.name)
    if scheme is None:
        near = did_you_mean(call.name, SCHEMES)
        problems.add(call.span, f"unknown encode scheme '{call.name}'{near}", *([] if near else _remedies(program, {})))
        return program
    roles, options = _read_arguments(program, call, scheme, problems)
    if problems:
        return program
    constants = _match_decode(program, scheme, roles)
    if constants is None:
        _add_difference(program, call, scheme, roles, problems)
        return program
    _check_blocks(program, call, scheme, roles, constants, problems)
    chosen = {*roles.values(), *program.unstored, *program.appended, *(f.name for f in program.fields if f.number is None)}
    for field in program.fields:
        if field.name not in chosen:
            problems.add(call.span, f"'{call.name}' does not choose field '{field.name}'")
    code = program.field(roles["code"]).number
    assert code is not None
    _check_options(call, scheme, options, constants, code, problems)
    _check_storage_options(program, call, scheme, code, problems)
    if not problems:
        check_ranges(EncodeCall(program, call, roles, options, constants), scheme, problems)
    return replace(program, encode=Encode(call.name, roles, options, constants, scheme.open(code), scheme.takes_importance(code)))


def _read_arguments(program: Program, call: g.CallExpr, scheme: Scheme, problems: Problems) -> tuple[dict[str, str], Options]:
    """(field of each role, options) from the spec's call of the scheme."""
    roles: dict[str, str] = {}
    options: Options = {}
    if call.arguments:
        problems.add(call.arguments[0].span, f"arguments of '{call.name}' are named: {', '.join(scheme.required)}")
        return roles, options
    for key, value in call.keywords:
        if key.name in roles or key.name in options:
            problems.add(key.span, f"'{key.name}' stands here twice")
        elif key.name in scheme.roles:
            _read_role(program, scheme, key, value, roles, problems)
        elif key.name in scheme.options:
            _read_option(scheme, key, value, options, problems)
        else:
            problems.add(key.span, f"'{call.name}' has no role or option '{key.name}'"
                                   f"{did_you_mean(key.name, (*scheme.roles, *scheme.options))}")
    if missing := [word for word in scheme.required if word not in {key.name for key, _ in call.keywords}]:
        problems.add(call.span, f"'{call.name}' needs " + " and ".join(f"'{word}'" for word in missing), scheme.summary,
                     *_remedies(program, roles, call.name))
    return roles, options


def _match_decode(program: Program, scheme: Scheme, roles: Mapping[str, str]) -> Constants | None:
    """The constants of the first pattern of the scheme that matches decode; None if none does."""
    for i, pattern in enumerate(scheme.patterns):
        parsed = g.expression(Text(pattern, (Span(Source("", pattern), 1, 1),)))
        if set(g.names(parsed)) & {*scheme.roles} - {*roles}:
            continue
        constants = _match_pattern(program, roles, parsed, _without_defaults(program, roles, program.values[-1]))
        if constants is not None:
            return {**constants, scheme.which: i} if scheme.which else constants
    return None


def _add_difference(program: Program, call: g.CallExpr, scheme: Scheme, roles: Mapping[str, str], problems: Problems) -> None:
    """Adds a problem for a decode that the scheme does not invert, with what decode should be, or the scheme that inverts it."""
    def as_spec(pattern: str) -> str:
        return re.sub("[a-z_]+", lambda word: roles.get(word[0], word[0]), pattern)

    unread = [name for name in roles.values() if name not in _names_read(program, program.values[-1])]
    wanted = " or ".join(as_spec(pattern) for pattern in scheme.patterns if all(
        re.search(rf"\b{role}\b", pattern) for role in roles if role != "sums")) or " or ".join(map(as_spec, scheme.patterns))
    remedies, decode = _remedies(program, roles), program.spec.decode.span
    if unread:
        problems.add(decode, f"'{call.name}' chooses '{unread[0]}', which decode does not read; it inverts {wanted}", *remedies)
    else:
        problems.add(decode, f"'{call.name}' inverts {wanted}, and decode is something else", *remedies)


def _remedies(program: Program, roles: Mapping[str, str], name: str = "") -> list[str]:
    """A note with a call that inverts decode, where there is one: of the scheme `name`, or else of the first."""
    calls = sorted(_inverting_calls(program, roles), key=lambda call: not call.startswith(f"{name}("))
    return [f"'{call}' inverts this decode" for call in calls[:1]]


def _inverting_calls(program: Program, roles: Mapping[str, str]) -> Iterator[str]:
    """Calls of schemes that invert decode with fields of the format, those with the roles' fields first."""
    read = _names_read(program, program.values[-1])
    fields = sorted((field.name for field in program.fields if field.number is not None and field.name in read),
                    key=lambda name: name not in roles.values())
    for name, scheme in SCHEMES.items():
        needed = [role for role in scheme.required if role in scheme.roles]
        for order in permutations(fields, len(needed)) if len(needed) == len(fields) <= MOST_FIELDS else ():
            chosen = dict(zip(needed, order, strict=True))
            numbers = {role: program.field(field).number for role, field in chosen.items()}
            fits = all(number is not None and KINDS[scheme.roles[role]][1](number) for role, number in numbers.items())
            if fits and _match_decode(program, scheme, chosen) is not None:
                code = numbers["code"]
                of_integers = () if code is None or code.is_float else scheme.of_integers
                further = [f"{option}=..." for option in (*scheme.required, *of_integers) if option not in scheme.roles]
                yield f"{name}({', '.join([*(f'{role}={field}' for role, field in chosen.items()), *further])})"


def _without_defaults(program: Program, roles: Mapping[str, str], value: Value) -> Value:
    """Decode without factors whose default is 1 and summands whose default is 0, because a scheme does not choose them."""
    inner, neutral = _before_rounding(program, value), {"*": 1, "/": 1, "+": 0, "-": 0}
    sides = [program.values[arg] for arg in inner.args] if inner.op in neutral else []
    for own, other in (sides, sides[::-1])[:2 if inner.op in ("*", "+") else 1] if sides else ():
        if _has_default(program, roles, _before_rounding(program, other), neutral[inner.op]):
            return _without_defaults(program, roles, own)
    return value


def _check_options(call: g.CallExpr, scheme: Scheme, options: Options, constants: Constants, code: Number, problems: Problems,
                   ) -> None:
    """Adds a problem for options of the spec that do not suit the type of its codes."""
    for word in () if code.is_float else scheme.of_integers:
        if word not in options:
            problems.add(call.span, f"'{call.name}' of codes that are {code.name} needs '{word}', such as "
                                    f"{word}={2 ** (code.bits - 1) - 1}", scheme.summary)
    for key, value in call.keywords:
        words = scheme.words(key.name, code) if scheme.options.get(key.name) else ()
        if key.name in options and scheme.options[key.name] and options[key.name] not in words:
            problems.add(value.span, f"'{key.name}' of codes that are {code.name} is {' or '.join(words)}" if words else
                         f"'{key.name}' is for codes that are floats; {code.name} is none")
        if key.name == "lost" and (options.get("by") != "exact" or not constants.get("offset")):
            problems.add(key.span, "'lost' is for codes with an offset and by=exact")


def _check_storage_options(program: Program, call: g.CallExpr, scheme: Scheme, code: Number, problems: Problems) -> None:
    """Adds a problem if a storage sets options that callers cannot choose, or illegal values."""
    offered = scheme.open(code)
    for option, choice in program.authored.options:
        words = scheme.options[option.value] if option.value in offered else ()
        if words is None:
            if not is_number(choice.value):
                problems.add(option.span, f"'{option}' of '{call.name}' is a number, not {choice}")
            continue
        allowed = scheme.words(option.value, code) if words else ()
        if choice.value not in allowed:
            problems.add(option.span, f"'{option}' of '{call.name}' is one of {', '.join(allowed)}, not {choice}" if allowed else
                         f"'{option}' is no option of '{call.name}' that a caller chooses{did_you_mean(option.value, offered)}")


def _read_role(program: Program, scheme: Scheme, key: g.Name, value: g.Expr, roles: dict[str, str], problems: Problems) -> None:
    fields = {field.name: field for field in program.fields if field.number is not None}
    if not isinstance(value, g.Name) or value.name not in fields:
        shown = value.name if isinstance(value, g.Name) else "an expression"
        problems.add(value.span, f"'{key.name}' is a field, not {shown}"
                                 f"{did_you_mean(value.name, fields) if isinstance(value, g.Name) else ''}")
        return
    number = fields[value.name].number
    assert number is not None
    words, fits = KINDS[scheme.roles[key.name]]
    if fits(number):
        roles[key.name] = value.name
    else:
        problems.add(value.span, f"{words}; '{value.name}' is {number.name}")


def _read_option(scheme: Scheme, key: g.Name, value: g.Expr, options: Options, problems: Problems) -> None:
    allowed = scheme.options[key.name]
    if allowed is None:
        sign = -1 if isinstance(value, g.Negate) else 1
        inner = value.value if isinstance(value, g.Negate) else value
        if isinstance(inner, g.Number) and inner.value:
            options[key.name] = sign * inner.value
        else:
            problems.add(value.span, f"'{key.name}' is a number other than 0")
    elif isinstance(value, g.Name) and value.name in allowed:
        options[key.name] = value.name
    else:
        problems.add(value.span, f"'{key.name}' is one of {', '.join(allowed)}")


# -- blocks -----------------------------------------------------------------------------------------------------------


def _check_blocks(program: Program, call: g.CallExpr, scheme: Scheme, roles: Mapping[str, str], constants: Constants,
                  problems: Problems) -> None:
    """Checks that fields of one level share a subscript, and that super-blocks, and grid rows in them, are whole blocks of a row.

    Levels must be rising integers.  A super-scale of blocks of any rows must be that of the whole weight, or of blocks of blocks
    of the flat position.
    """
    for table in program.spec.tables:
        if table.name.value == constants.get("levels") and not (table.is_int and all(a < b for a, b in pairwise(table.values))):
            problems.add(call.span, f"'{call.name}' needs a table of rising integers; '{table.name}' is none")
    if "sums" in roles:
        _check_sums(program, call, roles, constants, problems)
    _check_same_subscripts(program, call, roles, (*LEVELS, *ALIKE) if "values" in constants else LEVELS, problems)
    if "levels" in roles:
        _check_level_count(program, call, roles, problems)
    if scheme.across:
        above = program.field(roles["super_scale"]).index if "super_scale" in roles else ()
        if above and flat_of(above[0]) is None:
            problems.add(call.span, f"'{call.name}' needs a super-scale of the whole weight, which has no subscript")
        return
    nested = [role for role in ("code", "shift", "scale", "super_scale")[0 if "grid" in constants else 1:] if role in roles]
    if scheme.of_rows and [str(i) for i in program.field(roles["super_scale"]).index] == ["n"]:
        nested.remove("super_scale")
    sizes = [_block_columns(program.field(roles[role]).index) for role in nested]
    whole = [size for size in sizes if size is not None]
    if len(whole) < len(sizes) or any(large % small for small, large in pairwise(whole)):
        problems.add(call.span, f"'{call.name}' needs blocks of columns, n, k // size, in super-blocks of whole blocks")
    elif "grid" in constants:
        _check_table_rows(program, call, roles, constants, whole, problems)


def _check_same_subscripts(program: Program, call: g.CallExpr, roles: Mapping[str, str], levels: Sequence[tuple[str, ...]],
                           problems: Problems) -> None:
    """Adds a problem if fields of one level have different subscripts."""
    for level in levels:
        present = [role for role in level if role in roles]
        for role in present[1:]:
            if program.field(roles[role]).index != program.field(roles[present[0]]).index:
                problems.add(call.span, f"'{roles[present[0]]}' and '{roles[role]}' belong to different blocks")


def _check_level_count(program: Program, call: g.CallExpr, roles: Mapping[str, str], problems: Problems) -> None:
    """Adds a problem unless a stored table has a level for every code."""
    for role, table in (("code", "levels"), ("residual", "residuals" if "residuals" in roles else "levels")):
        code, levels = program.field(roles.get(role, roles["code"])), program.field(roles[table])
        if role in roles and (levels.table[-2:][0] != 1 << code.bits or levels.table[:-2] not in ((), (2,))):
            problems.add(call.span, f"'{call.name}' needs a level for every code: '{levels.name}' has "
                                    f"{' x '.join(map(str, levels.table[:-1] or levels.table))}, and '{code.name}' is "
                                    f"{code.kind}")
    if "scale" in roles and levels.index:
        problems.add(call.span, f"'{call.name}' chooses one table for all of the weight, and '{levels.name}' is of blocks")
    if "scale" in roles and len(levels.table) > 1 and [str(i) for i in program.field(roles["scale"]).index] != ["n"]:
        problems.add(call.span, f"'{call.name}' chooses a scale for every row, and '{roles['scale']}' is of other blocks")


def _check_sums(program: Program, call: g.CallExpr, roles: Mapping[str, str], constants: Constants, problems: Problems) -> None:
    """Checks sums over runs of columns: integers that hold the largest sum, or floats per block of the scale."""
    code, field = program.field(roles["code"]).number, program.field(roles["sums"])
    size, offset = _block_columns(field.index), constants.get("offset", 0)
    assert code is not None and field.number is not None
    if code.is_float or size is None:
        problems.add(call.span, f"sums are of integers, in runs of columns: '{field.name}' is for each n, k // size")
    elif field.number.is_float:
        if field.index != program.field(roles["scale"]).index:
            problems.add(call.span, f"'{field.name}' and '{roles['scale']}' need the same subscript", "sums are times the scale")
    elif isinstance(offset, int):
        ends = [size * (end - offset) for end in (code.low, code.high)]
        if ends[0] < field.number.low or ends[1] > field.number.high:
            problems.add(field.span, f"sums of {size} codes are {ends[0]} to {ends[1]}; {field.number.name} holds "
                                     f"{field.number.low} to {field.number.high}")


def _check_table_rows(program: Program, call: g.CallExpr, roles: Mapping[str, str], constants: Constants, sizes: list[int],
                      problems: Problems) -> None:
    """Checks that a table row has as many entries as columns share its code, and that other signs are per weight."""
    tables = {table.name.value: table for table in program.spec.tables}
    for role, name in (("code", "grid"), ("sign", "signs")):
        if name in constants and _block_columns(program.field(roles[role]).index) != tables[str(constants[name])].shape[1]:
            problems.add(call.span, f"'{roles[role]}' and a row of '{constants[name]}' are of different numbers of columns")
    if "signs" in constants and not set(tables[str(constants["signs"])].values) <= {1, -1}:
        problems.add(call.span, f"'{call.name}' needs signs of 1 and -1, and '{constants['signs']}' has others")
    if "sign" in roles and "signs" not in constants and program.field(roles["sign"]).index != program.values[-1].index:
        problems.add(call.span, f"'{call.name}' needs a sign for every weight, or rows of signs")
    steps = constants["steps"]
    assert isinstance(steps, tuple)
    if not all(low < high for low, high in pairwise((0, *steps))):
        problems.add(call.span, f"'{call.name}' needs scales that rise from above 0")
    if any(size & size - 1 for size in sizes):
        problems.add(call.span, f"'{call.name}' needs blocks of 2 ** a columns")


def _block_columns(index: tuple[Index, ...]) -> int | None:
    """The constant size of (n, k // size); None for any other subscript."""
    if len(index) != 2 or str(index[0]) != "n" or len(index[1].terms) != 1 or index[1].terms[0][0].op != "div":
        return None
    size = index[1].terms[0][0].args[1]
    return size.const if size.is_const and "k" in index[1].names() else None


# -- decode -----------------------------------------------------------------------------------------------------------



def _match_pattern(program: Program, roles: Mapping[str, str], pattern: g.Expr, value: Value) -> Constants | None:
    """The constants with which a value matches a pattern, in any order of factors and summands; None if it does not match.

    A name of the pattern that is no role is a constant, which may be absent: a summand is an integer, and a table has a name.  An
    application matches any value that depends only on that role; one to nothing, any that depends only on the column.
    """
    value = _before_rounding(program, value)
    match pattern:
        case g.Name(word) if word in roles:
            return {} if value.op == "field" and value.name == roles[word] else None
        case g.Name(word):
            default = program.unstored.get(value.name) if value.op == "field" else None
            number = value.const if value.op == "const" else None if default is None else default.const
            return {word: int(number)} if number is not None and number == int(number) else None
        case g.Number(number):
            return {} if value.op == "const" and value.const == number else None
        case g.Subscript(word, index) if word in roles:
            (*planes, row), op = (index, "entry") if len(index) == 1 else (index[:-1], "row")
            is_entry = value.op == op and value.name == roles[word] and len(program.field(value.name).table) == len(index)
            is_entry &= [value.const] * len(planes) == [plane.value for plane in planes if isinstance(plane, g.Number)]
            return _match_pattern(program, roles, row, program.values[value.args[0]]) if is_entry else None
        case g.Subscript(word, (row, *columns)):
            shape = [table.shape for table in program.spec.tables if value.op == "table" and table.name.value == value.name]
            row_match = _match_pattern(program, roles, row, program.values[value.args[0]]) if shape else None
            return None if row_match is None or len(shape[0]) != 1 + len(columns) else {**row_match, word: value.name}
        case g.CallExpr():
            return _product_steps(program, roles, pattern, [value])
        case g.Binary("-", left, g.Name(word)) if word not in roles:
            whole = _match_pattern(program, roles, left, value)
            return _match_sides(program, roles, pattern, value) if value.op == "-" and whole is None else whole
        case g.Binary("*"):
            return _match_factors(program, roles, pattern, value)
        case g.Binary(op) if op == value.op:
            return _match_sides(program, roles, pattern, value)
    return None


def _match_sides(program: Program, roles: Mapping[str, str], pattern: g.Binary, value: Value) -> Constants | None:
    """Matches a sum in both orders, a difference or a quotient in its own order."""
    sides = [program.values[i] for i in value.args]
    constants = _match_all(program, roles, (pattern.left, pattern.right), sides)
    if constants is not None or pattern.op in ("-", "/"):
        return constants
    return _match_all(program, roles, (pattern.right, pattern.left), sides)


def _match_factors(program: Program, roles: Mapping[str, str], pattern: g.Expr, value: Value) -> Constants | None:
    """Matches factors in any order.  Numbers are multiplied, and an optional factor with default 1 is ignored."""
    wanted, factors = list(_pattern_factors(pattern)), list(_value_factors(program, value))
    alone: Constants | None = {}
    for part in wanted:
        if isinstance(part, g.CallExpr) and alone is not None and set(g.names(part)) <= set(roles):
            mine = [factor for factor in factors if _names_read(program, factor) <= {roles[role] for role in g.names(part)}]
            steps = _product_steps(program, roles, part, mine)
            alone = None if steps is None else {**alone, **steps}
            factors = [factor for factor in factors if factor not in mine]
    if alone is None:
        return None
    wanted = [part for part in wanted if not isinstance(part, g.CallExpr)]
    free = [part.name for part in wanted if isinstance(part, g.Name) and part.name not in roles]
    number = prod(factor.const for factor in factors if factor.op == "const")
    number /= prod(part.value for part in wanted if isinstance(part, g.Number))
    if number != 1 and not free:
        return None
    parts = [part for part in wanted if not isinstance(part, g.Number) and not (isinstance(part, g.Name) and part.name in free)]
    varying = [factor for factor in factors if factor.op != "const" and not _has_default(program, roles, factor, 1)]
    if len(parts) != len(varying):
        return None
    matches = (_match_all(program, roles, order, varying) for order in permutations(parts))
    constants = next((match for match in matches if match is not None), None)
    return None if constants is None else {**alone, **constants, **({} if number == 1 else {free[0]: number})}


def _product_steps(program: Program, roles: Mapping[str, str], pattern: g.CallExpr, factors: list[Value]) -> Constants | None:
    """The product of values that depend only on these roles' fields, for each of their codes, the last role's the fastest.

    Without roles the value of each column of a block.
    """
    if not pattern.arguments:
        numbers = _numbers_of_columns(program, roles, factors[0]) if len(factors) == 1 else None
        return None if numbers is None else {pattern.name: numbers}
    fields = [program.field(roles[role.name]) for role in pattern.arguments if isinstance(role, g.Name)]
    if {field.name for field in fields} != {name for factor in factors for name in _names_read(program, factor)}:
        return None
    codes = [_code_numbers(field.number) for field in fields if field.number is not None]
    names = [field.name for field in fields]
    values = tuple(prod(_evaluate(program, factor, dict(zip(names, at, strict=True))) for factor in factors)
                   for at in product(*codes))
    return {pattern.name: values} if all(map(isfinite, values)) else None


def _numbers_of_columns(program: Program, roles: Mapping[str, str], value: Value) -> tuple[float, ...] | None:
    """A value that depends on the column alone, for each column of a code's block; None for others."""
    columns = _block_columns(program.field(roles["code"]).index)
    digits = [part.const * (part.range[1] + 1) for part in _values_below(program, value) if part.op == "digit" and part.range]
    if columns is None or _names_read(program, value) or any(columns % period for period in digits):
        return None
    return tuple(_evaluate(program, value, {"k": column}) for column in range(columns))


def _values_below(program: Program, value: Value) -> Iterator[Value]:
    yield value
    for place in value.args:
        yield from _values_below(program, program.values[place])


def _code_numbers(number: Number) -> list[float]:
    if number.is_float:
        return [number.decode(code) for code in range(1 << number.bits)]
    return list(range(number.low, number.high + 1))


def _names_read(program: Program, value: Value) -> set[str]:
    """The fields and tables of rows that a value reads, and the types that it rounds to."""
    rows = {table.name.value for table in program.spec.tables if len(table.shape) > 1}
    is_own = value.op in ("field", "entry", "row", "round") or (value.op == "table" and value.name in rows)
    own = {value.name} if is_own else set()
    return own.union(*(_names_read(program, program.values[i]) for i in value.args))


def _evaluate(program: Program, value: Value, numbers: Mapping[str, float]) -> float:
    """The number of a value that depends only on fields, for these numbers of the fields."""
    if value.op in ("field", "const"):
        return numbers[value.name] if value.op == "field" else value.const
    if value.op == "digit" and value.range:
        return numbers["k"] // value.const % (value.range[1] + 1)
    arguments = [_evaluate(program, program.values[i], numbers) for i in value.args]
    if value.op == "table":
        table = next(table for table in program.spec.tables if table.name.value == value.name)
        return table.values[int(arguments[0])]
    return float(*arguments) if value.op == "float" else OPS[value.op].value(*arguments)


def _has_default(program: Program, roles: Mapping[str, str], value: Value, number: int) -> bool:
    """Whether a value is a field that a scheme does not choose, and that is this number where it is not stored."""
    default = program.unstored.get(value.name) if value.op == "field" and value.name not in roles.values() else None
    return default is not None and default.is_const and default.const == number


def _match_all(program: Program, roles: Mapping[str, str], patterns: Sequence[g.Expr], values: Sequence[Value],
               ) -> Constants | None:
    """The constants of all patterns, one for each value; None if a value does not match its pattern."""
    total: Constants = {}
    for pattern, value in zip(patterns, values, strict=True):
        constants = _match_pattern(program, roles, pattern, value)
        if constants is None:
            return None
        total |= constants
    return total


def _pattern_factors(pattern: g.Expr) -> Iterator[g.Expr]:
    if isinstance(pattern, g.Binary) and pattern.op == "*":
        yield from (*_pattern_factors(pattern.left), *_pattern_factors(pattern.right))
    else:
        yield pattern


def _value_factors(program: Program, value: Value) -> Iterator[Value]:
    value = _before_rounding(program, value)
    if value.op == "*":
        for i in value.args:
            yield from _value_factors(program, program.values[i])
    else:
        yield value


def _before_rounding(program: Program, value: Value) -> Value:
    """The value before a conversion to float or rounding to a shorter type."""
    while value.op in ("float", "round"):
        value = program.values[value.args[0]]
    return value
