"""Specs with one mistake each, made from a spec by small changes of everything that decides what it means."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from difflib import SequenceMatcher
from functools import cache
from inspect import signature
from itertools import combinations, pairwise
from pathlib import Path
from typing import Any

from qdsl import encode
from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec import tables
from qdsl.compiler.spec.model import Param, Spec, Storage, StoredOperation, Table, Tensor
from qdsl.compiler.spec.schema import load
from qdsl.compiler.spec.source import Source, Span, Text
from qdsl.compiler.spec.tokens import GrammarError
from qdsl.core import numbers
from qdsl.core.schemes import SCHEMES

LONG = 64                                                        # entries of a table of a file, which is compared with gguf-py's
BYTES = ("ue4m3", "e8m0h")                                       # as elements of a tensor the same as u8: only the bits count
NOWHERE = Span(Source("mutant", ""), 1, 1)
# Rotated operands are mistakes of precedence or of the order of roundings; operands of + and * are never exchanged, because
# IEEE addition and multiplication commute.
SIGNS = {"+": "-", "-": "+", "*": "+", "//": "%", "%": "//", "/": "*", "^": "+"}
LETTERS = {"n": "k", "k": "n", "N": "K", "K": "N"}
KINDS = {
    "branch": "two side branches exchanged, or one left out",
    "axis": "n for k, N for K, an axis or subscript too few, axes exchanged", "ceil": "ceil left out or added",
    "digits": "a digit left out of a byte, or another added",
    "entry": "two entries of a table exchanged, the last left out, negated or one more",
    "field": "another field in decode or encode", "group-axis": "blocks along the other axis",
    "item-order": "two items of a record exchanged", "line-order": "two lines of a record exchanged",
    "loop-order": "two loops exchanged", "number": "one more, one less, twice",
    "operands": "operands of - / // % exchanged", "option": "an encode option left out, added or changed",
    "optional": "an optional tensor that is not", "order": "another precedence in decode", "part": "other bits of a field",
    "role": "roles of encode exchanged", "scheme": "another encode scheme", "sign": "another operation, a sign too many or few",
    "storage-order": "two storages exchanged", "stored": "a stored operation or its condition left out",
    "subscript": "subscripts of a record item exchanged", "tensor-order": "two tensors exchanged",
    "type": "a type as wide, or nearly", "values": "a parameter's values: others, fewer, in another order",
    "variable": "two variables of a record exchanged", "where": "a condition of a storage left out",
}


@dataclass(frozen=True)
class Mutant:
    """A spec with one mistake: `kind` is what was done, `name` which text became which."""

    kind: str
    name: str
    spec: Spec


# -- specs as text ----------------------------------------------------------------------------------------------------


def listing(spec: Spec) -> list[str]:
    """Everything of a spec that decides what it means, a line for each part; equal listings are the same spec."""
    rows = [f"weight: {dict(spec.fixed)}"] if spec.fixed else []
    rows += [f"params.{p.name}: [{', '.join(map(str, p.values))}]" for p in spec.params]
    rows += [f"dims.{dim.name}: {shown(dim.value)}" for dim in spec.dims]
    rows += [f"tables.{table.name}: {_entries(table)}" for table in spec.tables]
    rows += [f"fields.{field.name}: {shown(field.typed)}" for field in spec.fields]
    rows += [f"decode: {shown(spec.decode)}"] + ([f"encode: {shown(spec.encode)}"] if spec.encode else [])
    for storage in spec.storages:
        rows += [f"{storage.name}.where.{key}: {shown(value)}" for key, value in storage.where]
        rows += [f"{storage.name}.where.{key}: {list(values)}" for key, values in storage.only]
        rows += [f"{storage.name}.encode.{key}: {word}" for key, word in storage.options]
        rows += [f"{storage.name}.least.{key}: {extent}" for key, extent in storage.least]
        rows += [f"{storage.name}.transient"] if storage.transient else []
        rows += [f"{storage.name}.order: {storage.order}"] if storage.order else []
        rows += [f"{storage.name}.{storage.shape}: N, K"] if storage.shape else []
        for tensor in storage.tensors:
            place = f"{storage.name}.{tensor.name}"
            rows += [f"{place}: {shown(tensor.shape)}" if tensor.shape else f"{place}: run {tensor.run}"]
            rows += [f"{place}.record: {shown(line)}" for line in tensor.record]
            rows += [f"{place}.optional: {shown(tensor.optional)}"] if tensor.optional else []
            rows += [f"{place}.omit: true"] if tensor.omitted else []
            rows += [f"{place}.stored: {''.join(f'{key} in {values}, ' for key, values in rule.when)}{rule.target} = "
                     f"{shown(rule.value)}" for rule in tensor.stored]
    for branch in spec.plus:
        for tensor in branch.tensors:
            place = f"plus.{branch.kind}.{tensor.name}"
            rows += [f"{place}: {shown(tensor.shape)}"] if tensor.shape else []
            rows += [f"{place}.record: {shown(line)}" for line in tensor.record]
    return rows


def _entries(table: Table) -> str:
    if table.formula is not None:
        return f"{table.loops} to {table.shape}: {shown(table.formula)}"
    return f"[{', '.join(map(str, table.values))}]" if len(table.values) < LONG else f"{len(table.values)} numbers"


def recomputed(spec: Spec) -> Spec | None:
    """The spec with its computed tables computed again; None where one cannot be."""
    computed: dict[str, Table] = {}
    for table in spec.tables:
        try:
            computed[table.name.value] = table if table.formula is None else tables.evaluate_table(table, computed)
        except GrammarError:
            return None
    return replace(spec, tables=tuple(computed.values()))


def shown(node: Any) -> str:
    """A node of the grammar as text, every operation in parentheses but the last."""
    text = _shown(node)
    return text[1:-1] if isinstance(node, g.Binary) else text


def _shown(node: Any) -> str:
    def many(nodes: Sequence[Any]) -> str:
        return ", ".join(shown(part) for part in nodes)

    match node:
        case g.Number():
            return str(node.value)
        case g.Name():
            return node.name
        case g.Negate():
            return f"-{_shown(node.value)}"
        case g.Binary():
            return f"({_shown(node.left)} {node.op} {_shown(node.right)})"
        case g.Subscript():
            return f"{node.name}[{many(node.index)}]"
        case g.CallExpr():
            keywords = [f"{key.name}={shown(value)}" for key, value in node.keywords]
            return f"{node.name}({', '.join([*map(shown, node.arguments), *keywords])})"
        case g.Type():
            argument = f"{{{node.parameter.name}}}" if node.parameter else f"({shown(node.extent)})" if node.extent else ""
            return node.name + argument
        case g.Loop():
            return f"{node.name}<{shown(node.extent)}"
        case g.RecordItem():
            index = f"[{many(node.index)}]" if node.index else ""
            low = f"({shown(node.lo)})" if node.lo else ""
            part = "" if node.part == "whole" else f".{node.part}{low}:{shown(node.width)}"
            text = f"{node.field.name}{index}{part}" if node.field else f"pad:{shown(node.width)}"
            return f"again({text})" if node.again else text
        case g.LineGroup():
            return f"{'base3' if isinstance(node, g.Digits) else ''}({shown(node.line)})"
        case g.RecordLine():
            loops = "".join(f"{shown(loop)} " for loop in node.loops)
            return f"{loops[:-1]}{': ' if loops else ''}{' '.join(map(shown, node.items))}"
        case g.Axis():
            return " ".join("word" if digit is None else shown(digit) for digit in node.digits) or "1"
        case g.Shape():
            return f"{shown(node.type)}[{many(node.axes)}]" + (f" in {node.within.name}" if node.within else "")
        case g.FieldType():
            return f"{shown(node.type)}[{many(node.index)}]"
    raise TypeError(f"no text for {type(node).__name__}")


# -- mistakes ---------------------------------------------------------------------------------------------------------


Change = tuple[str, Any]                                         # kind, what a node becomes


def mistakes(node: Any, place: str, spec: Spec) -> Iterator[Change]:
    """Every mistake that can be made in a node of a spec or below it."""
    yield from _own(node, place, spec)
    if isinstance(node, tuple):
        for i, part in enumerate(node):
            for kind, new in mistakes(part, place, spec):
                yield kind, (*node[:i], new, *node[i + 1:])
    elif is_dataclass(node) and not isinstance(node, Text | Span | Source | g.Type):
        for field in fields(node):
            below = field.name if isinstance(node, Spec) else place
            for kind, new in mistakes(getattr(node, field.name), below, spec):
                yield kind, replace(node, **{field.name: new})   # type: ignore[type-var]


def _own(node: Any, place: str, spec: Spec) -> Iterator[Change]:
    """Mistakes in a node itself."""
    match node:
        case g.Number():
            yield from _numbers(node, place)
        case g.Name():
            yield from _names(node, place, spec)
        case g.Negate() | g.Binary():
            yield from _operations(node, place)
        case g.CallExpr():
            yield from _calls(node, place)
        case g.FieldType():
            yield from _subscripts(node, spec)
        case g.RecordItem():
            yield from _parts(node)
        case g.Shape() | g.Axis() | g.RecordLine() | g.Digits():
            yield from _layouts(node, spec)
        case Tensor() | StoredOperation() | Storage():
            yield from _stored(node)
        case Table() | Param() | Spec():
            yield from _declared(node)


def _layouts(node: g.Shape | g.Axis | g.RecordLine | g.Digits, spec: Spec) -> Iterator[Change]:
    """Another type or order of axes, variables, loops, items or digits; one left out, or added."""
    match node:
        case g.Shape():
            yield from (("type", replace(node, type=kind)) for kind in _types(node.type, spec) if kind.name not in BYTES)
            yield from _with("axis", node, "axes", (*_exchanged(node.axes), *_dropped(node.axes)))
        case g.Axis():
            yield from _with("axis", node, "digits", _exchanged(node.digits))
        case g.RecordLine():
            fixed = {named.name.value for named in (*spec.params, *spec.dims)}
            read = sorted({name for item in node.fields for part in item.index for name in g.names(part)} - fixed)
            for a, b in combinations(read, 2):
                yield "variable", replace(node, items=_renamed(node.items, {a: b, b: a}))
            yield from _with("loop-order", node, "loops", _exchanged(node.loops))
            yield from _with("item-order", node, "items", _exchanged(node.items))
        case g.Digits():
            items = node.line.items
            yield from _with("digits", node, "line", (replace(node.line, items=fewer) for fewer in _dropped(items) if fewer))
            yield "digits", replace(node, line=replace(node.line, items=(*items, items[-1])))


def _stored(node: Tensor | StoredOperation | Storage) -> Iterator[Change]:
    """Lines, tensors and conditions exchanged or left out; an optional tensor that is always there."""
    match node:
        case Tensor():
            yield from _with("line-order", node, "record", _exchanged(node.record))
            yield from [("optional", replace(node, optional=None, omitted=False))] if node.optional else []
            yield from [("optional", replace(node, omitted=False))] if node.omitted else []
            yield from _with("stored", node, "stored", _dropped(node.stored))
        case StoredOperation():
            yield from _with("stored", node, "when", (*_dropped(node.when), *_narrowed(node.when)))
        case Storage():
            yield from _with("where", node, "where", _dropped(node.where))
            yield from _with("where", node, "only", _narrowed(node.only))
            yield from _with("option", node, "options", _dropped(node.options))
            yield from [("where", replace(node, shape=None))] if node.shape else []
            holders = [tensor.inside for tensor in node.tensors]
            yield from _with("tensor-order", node, "tensors", (
                tensors for tensors in _exchanged(node.tensors) if holders == [tensor.inside for tensor in tensors]))


def _declared(node: Table | Param | Spec) -> Iterator[Change]:
    """Entries of a table, values of a parameter, and the order of storages and branches."""
    match node:
        case Table() if node.formula is None and len(node.values) < LONG:
            yield from _with("entry", node, "values", _exchanged(node.values))
            yield "entry", replace(node, values=node.values[:-1], shape=(len(node.values) - 1,))
            *others, last = node.values
            yield from _with("entry", node, "values", ((*others, new) for new in (-last, last + 1)))
        case Param():
            yield from _with("values", node, "values", (*_exchanged(node.values), *_dropped(node.values)))
            yield from _with("values", node, "values", (
                tuple(new if v == value else v for v in node.values)
                for value in node.values if isinstance(value, int) for new in (value + 1, value - 1, 2 * value)))
        case Spec():
            yield from [("where", replace(node, fixed={}))] if node.fixed else []
            yield from _with("where", node, "fixed", ({dim: extent + 1} for dim, extent in node.fixed.items()))
            yield from _with("storage-order", node, "storages", _exchanged(node.storages))
            yield from _with("branch", node, "plus", (*_exchanged(node.plus), *_dropped(node.plus)))


def _with(kind: str, node: Any, name: str, values: Iterable[Any]) -> Iterator[Change]:
    """The node with each of these as one of its attributes."""
    return ((kind, replace(node, **{name: value})) for value in values)


def _narrowed(conditions: tuple[tuple[Any, tuple[Any, ...]], ...]) -> Iterator[tuple[Any, ...]]:
    """Conditions of which one holds for a value fewer."""
    for i, (key, values) in enumerate(conditions):
        yield from ((*conditions[:i], (key, fewer), *conditions[i + 1:]) for fewer in _dropped(values))


def _exchanged(parts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    """With two neighbours in each other's place."""
    for i in range(len(parts) - 1):
        yield (*parts[:i], parts[i + 1], parts[i], *parts[i + 2:])


def _dropped(parts: tuple[Any, ...]) -> Iterator[tuple[Any, ...]]:
    for i in range(len(parts)):
        yield (*parts[:i], *parts[i + 1:])


def _renamed(node: Any, names: Mapping[str, str]) -> Any:
    """A node with variables under other names; names of fields stay."""
    if isinstance(node, tuple):
        return tuple(_renamed(part, names) for part in node)
    if isinstance(node, g.Name):
        return replace(node, name=names.get(node.name, node.name))
    if isinstance(node, g.RecordItem):
        return replace(node, index=_renamed(node.index, names))
    if isinstance(node, g.LineGroup):
        return replace(node, line=replace(node.line, items=_renamed(node.line.items, names)))
    if isinstance(node, g.Binary):
        return replace(node, left=_renamed(node.left, names), right=_renamed(node.right, names))
    return node


def _numbers(node: g.Number, place: str) -> Iterator[Change]:
    """One more, one less, twice; where a sign may stand, negated."""
    for value in (node.value + 1, node.value - 1, 2 * node.value):
        yield "number", g.Negate(replace(node, value=-value), NOWHERE) if value < 0 else replace(node, value=value)
    if place == "encode":
        yield "sign", g.Negate(node, NOWHERE)


def _names(node: g.Name, place: str, spec: Spec) -> Iterator[Change]:
    """The other axis, or another field."""
    if node.name in LETTERS:
        yield "axis", replace(node, name=LETTERS[node.name])
    if place in ("decode", "encode"):
        fields = [field.name.value for field in spec.fields]
        yield from (("field", replace(node, name=name)) for name in fields if name != node.name and node.name in fields)


def _operations(node: g.Negate | g.Binary, place: str) -> Iterator[Change]:
    """Another operation, the operands exchanged, and in decode the other precedence."""
    if isinstance(node, g.Negate):
        yield "sign", node.value
        return
    yield "sign", replace(node, op=SIGNS.get(node.op, "*"))
    if node.op not in ("+", "*"):
        yield "operands", replace(node, left=node.right, right=node.left)
    if node.op == "/" and place != "decode":
        yield "ceil", g.CallExpr("ceil", (node,), (), NOWHERE)
    if place == "decode" and isinstance(node.left, g.Binary):
        yield "order", replace(node.left, right=replace(node, left=node.left.right))
    if place == "decode" and isinstance(node.right, g.Binary):
        yield "order", replace(node.right, left=replace(node, right=node.right.left))


def _calls(node: g.CallExpr, place: str) -> Iterator[Change]:
    """ceil left out; another encode scheme, roles exchanged, options left out, added and changed."""
    if place != "encode":
        yield from (("ceil", argument) for argument in node.arguments)
        return
    scheme = SCHEMES[node.name]
    yield from (("scheme", replace(node, name=name)) for name in SCHEMES if name != node.name)
    yield from (("option", replace(node, keywords=keywords)) for keywords in _dropped(node.keywords))
    places = {key.name: i for i, (key, _) in enumerate(node.keywords)}
    for (a, left), (b, right) in pairwise(pair for pair in node.keywords if pair[0].name in scheme.roles):
        swapped = {a.name: right, b.name: left}
        yield "role", replace(node, keywords=tuple((key, swapped.get(key.name, value)) for key, value in node.keywords))
    defaults = signature(getattr(encode, node.name)).parameters
    for option, words in scheme.options.items():
        for word in words or ():
            if option not in places and word == str(defaults[option].default).lower():
                continue                                         # says what is so anyway
            at = places.get(option, len(node.keywords))
            changed = (g.Name(option, NOWHERE), g.Name(word, NOWHERE))
            yield "option", replace(node, keywords=(*node.keywords[:at], changed, *node.keywords[at + 1:]))


def _subscripts(node: g.FieldType, spec: Spec) -> Iterator[Change]:
    """Another type; a subscript too few; blocks along the other axis."""
    yield from (("type", replace(node, type=kind)) for kind in _types(node.type, spec))
    yield from (("axis", replace(node, index=index)) for index in _dropped(node.index))
    blocks = [part for part in node.index if isinstance(part, g.Binary) and isinstance(part.left, g.Name)
              and part.left.name in LETTERS]
    if len(node.index) == 2 and len(blocks) == 1:
        block = blocks[0]
        other = LETTERS[block.left.name]                         # type: ignore[union-attr]
        swapped = replace(block, left=g.Name(other, NOWHERE)), g.Name(LETTERS[other], NOWHERE)
        yield "group-axis", replace(node, index=swapped if other == "n" else swapped[::-1])


def _types(kind: g.Type, spec: Spec) -> Iterator[g.Type]:
    """Types that are as wide, or nearly."""
    word = kind.name
    if kind.parameter is not None:
        yield replace(kind, name={"u": "i", "i": "u"}[word])
    elif kind.extent is None and word in {p.name.value for p in spec.params}:
        yield from (replace(kind, name=str(value)) for p in spec.params if p.name.value == word for value in p.values)
    elif kind.extent is None:
        number = numbers.number(word)
        assert number is not None
        as_wide = [name for name, other in numbers.FLOATS.items() if other.bits == number.bits]
        widths = (number.bits, number.bits - 1, number.bits + 1, number.bits // 2)
        near = [f"{letter}{bits}" for letter in "ui" for bits in widths]
        yield from (replace(kind, name=name) for name in (*as_wide, *near) if name != word)


def _parts(node: g.RecordItem) -> Iterator[Change]:
    """Other bits of the same field; subscripts exchanged."""
    yield from (("subscript", replace(node, index=index)) for index in _exchanged(node.index))
    if node.part in ("lo", "hi"):
        yield "part", replace(node, part="hi" if node.part == "lo" else "lo")
        yield "part", replace(node, part="at", lo=g.Number(1, NOWHERE))
    if node.part == "at":
        yield from (("part", replace(node, part=part, lo=None)) for part in ("lo", "hi"))
    if node.width is not None and node.field is not None:
        yield "part", replace(node, part="whole", lo=None, width=None)


@cache
def mutants(path: Path) -> tuple[Mutant, ...]:
    """The mutants of a spec, no two of which are the same spec."""
    spec = load(path, path.name)
    rows = listing(spec)
    seen = {_meaning(spec)}
    listed: list[Mutant] = []
    for kind, change in mistakes(spec, "", spec):
        changed = change if change.tables is spec.tables else recomputed(change)
        if changed is not None and (now := _meaning(changed)) not in seen:
            seen.add(now)
            listed.append(Mutant(kind, _difference(rows, listing(changed)), changed))
    return tuple(listed)


def _meaning(spec: Spec) -> tuple[object, ...]:
    """What makes two specs the same: the listing, and of tables the numbers, however they were made."""
    rows = [row for row in listing(spec) if not row.startswith("tables.")]
    return *rows, *((table.name.value, table.shape, table.values) for table in spec.tables)


def _difference(before: Sequence[str], now: Sequence[str]) -> str:
    """The lines that are others, as 'place: old -> new'."""
    parts = []
    for tag, i, j, a, b in SequenceMatcher(None, before, now, autojunk=False).get_opcodes():
        if tag != "equal":
            place = before[i].split(": ")[0] if i < j else now[a].split(": ")[0]
            old, new = (" / ".join(row.removeprefix(f"{place}: ") for row in rows) for rows in (before[i:j], now[a:b]))
            parts.append(f"{place}: {old} -> {new}")
    return " and ".join(parts)
