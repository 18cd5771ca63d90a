"""The encode scheme: known, given the fields that it chooses, and the inverse of decode.

Does: checks roles and options; reads the code's offset off decode, which must be what the scheme inverts.  Does not: judge
whether a scheme suits a format.
"""

from __future__ import annotations

from dataclasses import replace

from qdsl.ir.program import Encode, Program
from qdsl.passes.schemes import SCHEMES, Scheme
from qdsl.spec import grammar as g
from qdsl.spec.source import Problems, did_you_mean


def check_encode(program: Program, problems: Problems) -> Program:
    call = program.spec.encode
    if call is None:
        return program
    scheme = SCHEMES.get(call.name)
    if scheme is None:
        problems.add(call.span, f"unknown encode scheme '{call.name}'{did_you_mean(call.name, SCHEMES)}")
        return program
    if call.arguments:
        problems.add(call.arguments[0].span, f"arguments of '{call.name}' are named: {', '.join(scheme.required)}")
        return program
    roles: dict[str, str] = {}
    options: dict[str, str | int | float] = {}
    for key, value in call.keywords:
        if key.name in roles or key.name in options:
            problems.add(key.span, f"'{key.name}' stands here twice")
        elif key.name in scheme.roles:
            _role(program, scheme, key, value, roles, problems)
        elif key.name in scheme.options:
            _option(scheme, key, value, options, problems)
        else:
            problems.add(key.span, f"'{call.name}' has no role or option '{key.name}'"
                                   f"{did_you_mean(key.name, (*scheme.roles, *scheme.options))}")
    for word in scheme.required:
        if word not in {key.name for key, _ in call.keywords}:
            problems.add(call.span, f"'{call.name}' needs '{word}'", scheme.summary)
    if problems:
        return program
    offset = _offset(program, roles)
    if offset is None:
        problems.add(call.span, f"'{call.name}' inverts {scheme.inverts}, and decode is something else")
        return program
    chosen = set(roles.values()) | set(program.where) | {f.name for f in program.fields if f.number is None}
    for field in program.fields:
        if field.name not in chosen and field.name not in program.defaults:
            problems.add(call.span, f"'{call.name}' does not choose field '{field.name}'")
    code = program.field(roles["code"]).number
    assert code is not None
    offered = scheme.open(code)
    for key, _ in call.keywords:
        if scheme.options.get(key.name) is not None and key.name not in offered:
            problems.add(key.span, f"'{key.name}' is for integer codes; {code.name} rounds to even")
    return replace(program, encode=Encode(call.name, roles, options, offset, offered))


def _role(program: Program, scheme: Scheme, key: g.Name, value: g.Expr, roles: dict[str, str], problems: Problems) -> None:
    fields = {field.name: field for field in program.fields if field.number is not None}
    if not isinstance(value, g.Name) or value.name not in fields:
        shown = value.name if isinstance(value, g.Name) else "an expression"
        problems.add(value.span, f"'{key.name}' is a field, not {shown}"
                                 f"{did_you_mean(value.name, fields) if isinstance(value, g.Name) else ''}")
        return
    number = fields[value.name].number
    assert number is not None
    if key.name == "scale" and not (number.is_float and number.bits >= 16):
        problems.add(value.span, f"a scale is f32, f16 or bf16; '{value.name}' is {number.name}")
    elif key.name == "code" and (number.is_float and number.bits > 8) != ("scale" not in scheme.roles):
        allowed = "an integer or a float of at most 8 bits" if "scale" in scheme.roles else "f32, f16 or bf16"
        problems.add(value.span, f"a code is {allowed}; '{value.name}' is {number.name}")
    elif key.name == "zero" and number.is_float:
        problems.add(value.span, f"a zero point is an integer; '{value.name}' is {number.name}")
    else:
        roles[key.name] = value.name


def _option(scheme: Scheme, key: g.Name, value: g.Expr, options: dict[str, str | int | float], problems: Problems) -> None:
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


def _offset(program: Program, roles: dict[str, str]) -> int | None:
    """The constant of scale * (code - constant); 0 for scale * (code - zero), scale * code, code; None for anything else."""
    root = program.values[-1]
    if "scale" not in roles:
        return 0 if root.op == "field" and root.name == roles["code"] else None
    if root.op != "*":
        return None
    sides = [program.values[i] for i in root.args]
    scales = [i for i, side in enumerate(sides) if side.op == "field" and side.name == roles["scale"]]
    if not scales:
        return None
    other = sides[1 - scales[0]]
    inner = program.values[other.args[0]] if other.op == "float" else other
    if inner.op == "field" and inner.name == roles["code"] and "zero" not in roles:
        return 0
    if inner.op != "-":
        return None
    left, right = (program.values[i] for i in inner.args)
    if not (left.op == "field" and left.name == roles["code"]):
        return None
    if right.op == "const" and "zero" not in roles:
        return int(right.const)
    optional = right.op == "field" and right.name in program.defaults and "zero" not in roles
    if optional:
        return int(program.defaults[right.name].const)
    return 0 if right.op == "field" and right.name == roles.get("zero") else None
