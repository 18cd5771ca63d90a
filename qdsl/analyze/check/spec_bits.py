"""Computes from a spec which bit of which field element is stored at each bit of the tensors, for given N, K and parameters.

Plain nested loops over the parsed spec that share no code with the compiler's passes: generated code is checked against them.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from itertools import product
from math import lcm, prod

from qdsl.compiler.spec import grammar as g
from qdsl.compiler.spec.model import Field, Spec, Storage, Tensor

Bit = tuple[str, tuple[int, ...], int]                           # field, element, bit of the element
Stored = tuple[str, tuple[int, ...], int, Bit, int]              # tensor, element, its bit, the field's bit, its place or these:
PLAIN, AGAIN = -1, -2                                            # no digit; a second copy of a bit


def evaluate(expr: g.Expr, env: Mapping[str, int]) -> int:
    """Evaluates an integer expression by the rules of the language."""
    if isinstance(expr, g.Name):                                 # the most frequent first: this runs for every stored bit
        return env[expr.name]
    if isinstance(expr, g.Binary):
        return OPERATORS[expr.op](evaluate(expr.left, env), evaluate(expr.right, env))
    if isinstance(expr, g.Number):
        return int(expr.value)
    if isinstance(expr, g.Negate):
        return -evaluate(expr.value, env)
    assert isinstance(expr, g.CallExpr)
    if expr.name == "lcm":
        return lcm(*(evaluate(a, env) for a in expr.arguments))
    (inner,) = expr.arguments
    assert expr.name == "ceil" and isinstance(inner, g.Binary) and inner.op == "/"
    return -(-evaluate(inner.left, env) // evaluate(inner.right, env))


def _whole(a: int, b: int) -> int:
    assert a % b == 0, f"{a} / {b}"
    return a // b


OPERATORS: dict[str, Callable[[int, int], int]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "/": _whole, "//": lambda a, b: a // b if b else 0,
    "%": lambda a, b: a % b if b else 0, "**": lambda a, b: int(a ** b) if 0 <= b < 64 else 0, "^": operator.xor}


def size_environment(spec: Spec, n: int, k: int, params: Mapping[str, int | str], sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns the values of N, K, parameters (sizes with -1 written out) and dims."""
    env = {"N": n, "K": k, **{p: v for p, v in params.items() if isinstance(v, int)}, **sizes}
    for dim in spec.dims:
        env[dim.name.value] = evaluate(dim.value, env)
    return env


def has_operations(spec: Spec, storage: str, params: Mapping[str, int | str]) -> bool:
    """Whether a storage has stored operations for these parameters."""
    tensors = [tensor for own in spec.storages if own.name.value == storage for tensor in own.tensors]
    return any(all(params.get(key.value) in values for key, values in rule.when) for tensor in tensors for rule in tensor.stored)


def field_bits(spec: Spec, field: str, params: Mapping[str, int | str]) -> int:
    kind = next(f for f in spec.fields if f.name.value == field).typed.type
    word = str(params.get(kind.name, kind.name)) + (str(params[kind.parameter.name]) if kind.parameter else "")
    return _width(word)


def element_bits(tensor: Tensor, params: Mapping[str, int | str]) -> int:
    """Bits of an element of a tensor; a tensor of records has bytes."""
    if tensor.shape is None:
        return 8
    kind = tensor.shape.type
    return _width(str(params.get(kind.name, kind.name)))


def _width(kind: str) -> int:
    named = {"f32": 32, "f16": 16, "bf16": 16, "e8m0": 8, "e8m0h": 8, "ue4m3": 8, "index": 32}
    return named.get(kind) or (int(kind[1:]) if kind[0] in "ui" and kind[1:].isdigit() else
                               1 + int(kind[1]) + int(kind[3]))  # eXmY


def stored(spec: Spec, storage: Storage, env: Mapping[str, int], params: Mapping[str, int | str]) -> Iterator[Stored]:
    """Every stored bit except padding, by tensor."""
    for tensor in storage.tensors:
        yield from _stored_bits(spec, storage, tensor, env, params)



def digit_fields(spec: Spec) -> set[str]:
    """Fields that some storage holds as base-3 digits."""
    return {part.field.name for storage in spec.storages for tensor in storage.tensors for line in tensor.record
            for item in line.items if isinstance(item, g.Digits) for part in item.line.items
            if isinstance(part, g.RecordItem) and part.field is not None}


def _stored_bits(spec: Spec, storage: Storage, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str],
                 ) -> Iterator[Stored]:
    """The bits of a tensor; for a section at the elements of the tensor that holds it."""
    inside = tensor.inside
    if inside is None:
        yield from _bits_by_axes(spec, tensor, env, params)
        return
    rows = 1 if inside.by_rows else 0
    before = [other for other in storage.tensors[:storage.tensors.index(tensor)] if other.inside is inside]
    first = sum(prod(axis_extents(spec, other, env, params)[rows:]) for other in before)
    own = axis_extents(spec, tensor, env, params)
    for _, element, bit, what, place in _bits_by_axes(spec, tensor, env, params):
        position = 0
        for index, extent in list(zip(element, own, strict=True))[rows:]:
            position = position * extent + index
        yield inside.name.value, (*element[:rows], first + position), bit, what, place


def axis_extents(spec: Spec, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str]) -> list[int]:
    if tensor.shape is None:
        run, size = _record_columns_bytes(spec, tensor, env, params)
        return [env["N"], env["K"] // run * size]
    loops = {digit.name: 0 for axis in tensor.shape.axes for digit in axis.digits if digit is not None}
    width = sum(width for *_, width, _ in _record(spec, tensor, {**env, **loops}, params))
    words = -(-width // element_bits(tensor, params))
    return [prod(words if digit is None else evaluate(digit.extent, env) for digit in axis.digits) for axis in tensor.shape.axes]


def _bits_by_axes(spec: Spec, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str]) -> Iterator[Stored]:
    size = element_bits(tensor, params)
    fields = {f.name.value: f for f in spec.fields}
    if tensor.shape is None:
        yield from _bits_by_records(spec, tensor, env, params)
        return
    digits = [digit for axis in tensor.shape.axes for digit in axis.digits if digit is not None]
    extents = [evaluate(digit.extent, env) for digit in digits]
    shapes: dict[str, tuple[int, ...]] = {}
    for values in product(*(range(extent) for extent in extents)):
        local = {**env, **{digit.name: value for digit, value in zip(digits, values, strict=True)}}
        at = 0
        placed: list[tuple[int, Bit, int]] = []
        for field, index, low, width, place in _record(spec, tensor, local, params):
            if field:
                if field not in shapes:
                    shapes[field] = field_shape(spec, fields[field], env)
                shape = shapes[field]
                if len(index) == 1 and len(shape) == 2:          # a flat position
                    index = (index[0] // shape[1], index[0] % shape[1]) if index[0] < prod(shape) else (shape[0], 0)
                if all(i < s for i, s in zip(index, shape, strict=True)):
                    placed += [(at + b, (field, index, low + b), place) for b in range(width if place < 0 else 1)]
            at += width
        words = -(-at // size)
        elements = [_word_element(tensor, local, env, words, word) for word in range(words)]
        for bit, what, place in placed:
            yield tensor.name.value, elements[bit // size], bit % size, what, place



def _word_element(tensor: Tensor, local: Mapping[str, int], env: Mapping[str, int], words: int, word: int) -> tuple[int, ...]:
    """The element of the stored tensor that holds a word of a record."""
    assert tensor.shape is not None
    place: list[int] = []
    for axis in tensor.shape.axes:
        position = 0
        for digit in axis.digits:
            if digit is None:
                position = position * words + word
            else:
                position = position * evaluate(digit.extent, env) + local[digit.name]
        place.append(position)
    return tuple(place)


Part = tuple[str, tuple[int, ...], int, int, int]                # field, element, its lowest bit, bits of the record, place or -1


def _record(spec: Spec, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str]) -> Iterator[Part]:
    for line in tensor.record:
        yield from _line_parts(spec, line, env, params)


def _line_parts(spec: Spec, line: g.RecordLine, env: Mapping[str, int], params: Mapping[str, int | str]) -> Iterator[Part]:
    names = [loop.name for loop in line.loops]
    for counters in product(*(range(evaluate(loop.extent, env)) for loop in line.loops)):
        local = {**env, **dict(zip(names, counters, strict=True))}
        for item in line.items:
            if isinstance(item, g.Digits):
                parts = list(_line_parts(spec, item.line, local, params))
                yield from ((name, index, low, 8 * (place == len(parts) - 1), place)
                            for place, (name, index, low, _, _) in enumerate(parts))
                continue
            if isinstance(item, g.LineGroup):
                yield from _line_parts(spec, item.line, local, params)
                continue
            if item.field is None:
                assert item.width is not None
                yield "", (), 0, evaluate(item.width, local), PLAIN
                continue
            whole = field_bits(spec, item.field.name, params)
            width = whole if item.width is None else evaluate(item.width, local)
            low = evaluate(item.lo, local) if item.lo is not None else whole - width if item.part == "hi" else 0
            yield item.field.name, tuple(evaluate(i, local) for i in item.index), low, width, AGAIN if item.again else PLAIN


def table_extents(spec: Spec, field: Field) -> tuple[g.Expr, ...]:
    """The extents of a stored table, which come last; () for other fields."""
    moving = {"n", "k", *(f.name.value for f in spec.fields if f.typed.type.name == "index")}
    blocks = sum(not moving.isdisjoint(g.names(expr)) for expr in field.typed.index)
    return field.typed.index[blocks:]


def field_shape(spec: Spec, field: Field, env: Mapping[str, int]) -> tuple[int, ...]:
    """Elements of a field along each of its subscripts."""
    fields = {f.name.value: f for f in spec.fields}
    shape: list[int] = []
    extents = table_extents(spec, field)
    for expr in field.typed.index[:len(field.typed.index) - len(extents)]:
        if isinstance(expr, g.Name):
            if expr.name in ("n", "k"):
                shape.append(env[{"n": "N", "k": "K"}[expr.name]])
            else:
                extent = fields[expr.name].typed.type.extent
                assert extent is not None
                shape.append(evaluate(extent, env))
        else:
            assert isinstance(expr, g.Binary)
            # The last weight has the last block, but remainders take all values.
            whole = evaluate(expr.left, {**dict.fromkeys(fields, env["K"] - 1), **env, "n": env["N"] - 1, "k": env["K"] - 1}) + 1
            by = evaluate(expr.right, env)
            shape.append(by if expr.op == "%" else -(-whole // by))
    return (*shape, *(evaluate(expr, env) for expr in extents))


def _record_columns_bytes(spec: Spec, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str]) -> tuple[int, int]:
    """Columns and bytes of a record along k."""
    pieces = list(_record(spec, tensor, env, params))
    shared = _columns_per_value(spec, env, pieces)
    return max((1 + (index[0] if index else 0)) * shared[name] for name, index, *_ in pieces if name), \
        sum(width for *_, width, _ in pieces) // 8


def _columns_per_value(spec: Spec, env: Mapping[str, int], pieces: list[Part]) -> dict[str, int]:
    """How many columns share a value of each field of a record."""
    names = {name for name, *_ in pieces}
    fields = {f.name.value: f for f in spec.fields if f.name.value in names}
    return {name: 1 if isinstance(f.typed.index[1], g.Name) else evaluate(f.typed.index[1].right, env)  # type: ignore[union-attr]
            for name, f in fields.items()}


def _bits_by_records(spec: Spec, tensor: Tensor, env: Mapping[str, int], params: Mapping[str, int | str]) -> Iterator[Stored]:
    """Bytes in records along k, with local subscripts."""
    pieces = list(_record(spec, tensor, env, params))
    shared = _columns_per_value(spec, env, pieces)
    run, size = _record_columns_bytes(spec, tensor, env, params)
    for n in range(env["N"]):
        for t in range(env["K"] // run):
            at = 0
            for name, index, low, width, place in pieces:
                for b in range(0 if not name else width if place < 0 else 1):
                    element = (n, t * (run // shared[name]) + (index[0] if index else 0))
                    yield tensor.name.value, (n, t * size + (at + b) // 8), (at + b) % 8, (name, element, low + b), place
                at += width
