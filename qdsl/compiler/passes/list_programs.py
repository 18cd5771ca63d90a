"""The programs of a spec: one per storage and per choice of the parameters that change its bits.

Does: finds the structural parameters (those that types, records, stored operations or decode read, also through dims), applies
the storages' `where`, and lists the combinations.  Does not: look into fields, records or expressions beyond their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from math import prod

from qdsl.compiler.ir.program import Program
from qdsl.compiler.passes.scope import Scope
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Param, Spec, Storage
from qdsl.compiler.spec.source import Problems, did_you_mean
from qdsl.core.numbers import KNOWN_TYPES, find_number, similar_type
from qdsl.core.shapes import ANY

MAX_PROGRAMS = 160


def list_programs(spec: Spec, problems: Problems) -> list[Program]:
    """The programs in the order of the storages, then of the parameters' values."""
    structural = _structural_names(spec)
    for param in spec.params:
        _check_values(param, param.name.value in structural, problems)
    shaping = [param for param in spec.params if param.name.value in structural]
    sizes = tuple(param.name.value for param in spec.params if param.name.value not in structural)
    programs: list[Program] = []
    for storage in spec.storages:
        fixed = _allowed_values(spec, storage, problems)
        choices = [fixed.get(p.name.value, p.values) for p in shaping]
        if len(programs) + prod(map(len, choices)) > MAX_PROGRAMS:
            problems.add(storage.name.span, f"storages and values of parameters make more than {MAX_PROGRAMS} programs",
                         f"these parameters shape the bits: {', '.join(p.name.value for p in shaping)}")
            return programs
        for values in product(*choices):
            params = {p.name.value: value for p, value in zip(shaping, values, strict=True)}
            programs.append(Program(spec, storage.name.value, params, sizes))
    return programs


def _structural_names(spec: Spec) -> set[str]:
    """Names of parameters and dims that change generated code; without those that are only block sizes."""
    parts = [part for field in spec.fields for part in field.typed.index]
    used = set(_computed_names(spec.decode)) | {word for part in parts if not _moves(part) for word in g.names(part)}
    stored = [tensor for storage in spec.storages for tensor in storage.tensors]
    for kind in [field.typed.type for field in spec.fields] + [
            tensor.shape.type for tensor in (*stored, *spec.branch_tensors) if tensor.shape]:
        used |= {kind.name} | ({kind.parameter.name} if kind.parameter else set())
    for storage in spec.storages:
        for tensor in storage.tensors:
            for line in tensor.record:
                used |= {word for extent in line.extents for word in g.names(extent)}
                used |= {word for item in line.fields for part in (item.lo, item.width) for word in g.names(part)}
            for rule in tensor.stored:
                used |= set(g.names(rule.value)) | {key.value for key, _ in rule.when}
    dims = {dim.name.value: set(g.names(dim.value)) for dim in spec.dims}
    while more := {word for dim in used & dims.keys() for word in dims[dim]} - used:
        used |= more
    return used


def _moves(part: g.Expr) -> bool:
    """Whether a subscript reads rows or columns, that is, is a block and not an extent."""
    return not {"n", "k"}.isdisjoint(g.names(part))


def _computed_names(expr: g.Expr) -> Iterator[str]:
    """The names that decode computes with: all but those in subscripts that only select the block of a stored table."""
    match expr:
        case g.Subscript(word, index):
            yield word
            for part in index:
                yield from () if _moves(part) else _computed_names(part)
        case g.Negate(value):
            yield from _computed_names(value)
        case g.Binary(_, left, right):
            yield from (*_computed_names(left), *_computed_names(right))
        case _:
            yield from g.names(expr)


def _check_values(param: Param, structural: bool, problems: Problems) -> None:
    name = param.name
    kinds = {type(value) for value in param.values}
    if len(kinds) > 1:
        problems.add(name.span, f"parameter '{name}' mixes integers and types")
    if param.is_open and (structural or kinds != {int}):
        problems.add(name.span, f"parameter '{name}': '{ANY}' stands for other block lengths, and this is no block length",
                     "its values are all in the list")
    for value in param.values:
        if isinstance(value, str):
            if find_number(value) is None:
                problems.add(name.span, f"parameter '{name}': unknown type '{value}'"
                                        + (f"; did you mean '{near}'?" if (near := similar_type(value)) else ""), KNOWN_TYPES)
            elif not structural:
                problems.add(name.span, f"parameter '{name}' lists types, but no field or tensor is of type '{name}'")
        elif value < 1 and (structural or value != -1):
            problems.add(name.span, f"parameter '{name}': {value} is not positive",
                         *(["-1 stands for the whole axis, of sizes that only subscripts and extents read"] if value == -1 else
                           [] if structural else ["-1 stands for the whole axis"]))


def _allowed_values(spec: Spec, storage: Storage, problems: Problems) -> dict[str, tuple[int | str, ...]]:
    """The values that a storage's `where` allows for parameters, in the order of the parameter's values."""
    params = {param.name.value: param for param in spec.params}
    fixed: dict[str, tuple[int | str, ...]] = {}
    for key, values in storage.only:
        allowed = params[key.value].values if key.value in params else ()
        if wrong := [value for value in values if value not in allowed]:
            problems.add(key.span, f"'{key}' is one of {', '.join(map(str, allowed))}, not {wrong[0]}" if allowed else
                         f"'{key}' has several values here, and is no parameter{did_you_mean(key.value, params)}")
        else:
            fixed[key.value] = tuple(value for value in allowed if value in values)
    for key, expr in storage.where:
        if key.value not in params:
            continue
        value: int | str | None
        if isinstance(expr, g.Name):
            value = expr.name
        else:
            index = Scope({}, "a parameter's value", problems).index(expr)
            value = index.const if index is not None and index.is_const else None
        if value is None or value not in params[key.value].values:
            listed = ", ".join(str(v) for v in params[key.value].values)
            problems.add(expr.span, f"'{key}' is one of {listed}")
        else:
            fixed[key.value] = (value,)
    return fixed
