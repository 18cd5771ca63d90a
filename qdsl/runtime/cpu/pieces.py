"""A traced decode as affine pieces: what keeps a CPU compiler from vectorising is taken out of it, bit for bit.

A generated reference puts the parts of a packed word beside one another with `stack`.  A compiler that fuses that with what
follows asks of every weight which part it is, and its inner loop is no longer a vector loop.  Here an axis is a list of
digits, outermost first, and `stack` makes a digit that is unrolled, a lane: for every choice of lanes there is one tensor, a
plain expression over strided views of the packed tensors.  The arithmetic is the same, operation by operation, except that
integers below 32 bits are computed in 32 and cut back only where they could have left their type.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from math import prod
from typing import Any

import torch
from torch import Tensor, fx

from qdsl.runtime.torch.private_apis import is_mutable, overload_name, shares_memory

aten = torch.ops.aten
NARROW = (torch.uint8, torch.int8, torch.int16)
MERGED = 16                                                      # entries of digits that are cut anew, each of them a lane
LANES = 128                                                      # at most; a program of more takes a minute to compile
SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32}   # torch shifts no unsigned words


class Unsupported(Exception):
    """The traced decode has an operation that has no form in pieces."""


@dataclass(frozen=True, slots=True)
class Digit:
    """A factor of an axis: a loop of the tensors, or a lane, of which every choice has a tensor of its own."""

    extent: int
    lane: bool = False


Axes = tuple[tuple[Digit, ...], ...]


@dataclass(frozen=True)
class Pieces:
    """A tensor: by the choices of its lanes, in order, a tensor that has one axis per loop.

    dtype: what it is in the traced program.  bounds: of integers that are stored as int32 instead, the least and the largest
    they can be; None where tensors have their own dtype.
    """

    axes: Axes
    parts: Mapping[tuple[int, ...], Tensor]
    dtype: torch.dtype
    bounds: tuple[int, int] | None = None

    def __post_init__(self) -> None:
        if len(self.parts) > LANES:
            raise Unsupported(f"{len(self.parts)} lanes")

    @property
    def shape(self) -> list[int]:
        return [prod(digit.extent for digit in axis) for axis in self.axes]

    def map_parts(self, function: Callable[[Tensor], Tensor]) -> dict[tuple[int, ...], Tensor]:
        return {key: function(part) for key, part in self.parts.items()}


def whole(tensor: Tensor) -> Pieces:
    """A tensor as it is: every axis one loop."""
    axes = tuple((Digit(extent),) if extent != 1 else () for extent in tensor.shape)
    return Pieces(axes, {(): tensor.squeeze()}, tensor.dtype)


def _digits(axes: Axes) -> list[Digit]:
    return [digit for axis in axes for digit in axis]


def _place(digits: Sequence[Digit], at: int) -> int:
    """Where digit `at` is among those of its kind: an axis of the tensors, or an entry of the keys."""
    return sum(digit.lane == digits[at].lane for digit in digits[:at])


def _split(value: Pieces, at: int, inner: int) -> Pieces:
    """Digit `at` of all, as two, the inner one of `inner`."""
    digits = _digits(value.axes)
    digit, place = digits[at], _place(digits, at)
    outer = digit.extent // inner
    if digit.lane:
        parts = {(*key[:place], key[place] // inner, key[place] % inner, *key[place + 1:]): part
                 for key, part in value.parts.items()}
    else:
        parts = value.map_parts(lambda part: part.unflatten(place, (outer, inner)))  # type: ignore[no-untyped-call]
    axes, seen = [], 0
    for axis in value.axes:
        cut = at - seen
        seen += len(axis)
        pair = (Digit(outer, digit.lane), Digit(inner, digit.lane))
        axes.append((*axis[:cut], *pair, *axis[cut + 1:]) if 0 <= cut < len(axis) else axis)
    return replace(value, axes=tuple(axes), parts=parts)


def _unroll(value: Pieces, at: int) -> Pieces:
    """Digit `at` as a lane."""
    digits = _digits(value.axes)
    if digits[at].lane:
        return value
    axis = _place(digits, at)
    place = sum(digit.lane for digit in digits[:at])
    parts = {(*key[:place], i, *key[place:]): part.select(axis, i)
             for key, part in value.parts.items() for i in range(digits[at].extent)}
    digits[at] = Digit(digits[at].extent, True)
    return replace(value, axes=_grouped(digits, map(len, value.axes)), parts=parts)


def _merge(value: Pieces, at: int) -> Pieces:
    """Digits `at` and `at` + 1 as one lane, of few entries."""
    digits = _digits(value.axes)
    if at + 1 == len(digits) or digits[at].extent * digits[at + 1].extent > MERGED:
        raise Unsupported(f"an axis of {digits[at].extent} is cut elsewhere")
    value = _unroll(_unroll(value, at), at + 1)
    inner, place = digits[at + 1].extent, _place(_digits(value.axes), at)
    parts = {(*key[:place], key[place] * inner + key[place + 1], *key[place + 2:]): part for key, part in value.parts.items()}
    digits = _digits(value.axes)
    digits[at:at + 2] = [Digit(digits[at].extent * inner, True)]
    return replace(value, axes=(tuple(digits),), parts=parts)    # the caller gives the digits to axes anew


def _grouped(digits: Sequence[Digit], counts: Iterable[int]) -> Axes:
    remaining = iter(digits)
    return tuple(tuple(next(remaining) for _ in range(count)) for count in counts)


# -- shapes ------------------------------------------------------------------------------------------------------------


def reshape(value: Pieces, shape: Sequence[int]) -> Pieces:
    """The same elements in order, in another shape."""
    if -1 in shape:
        specified = prod(extent for extent in shape if extent != -1)
        shape = [prod(value.shape) // specified if extent == -1 else extent for extent in shape]
    at, counts = 0, []
    for extent in shape:
        left, count = extent, 0
        while left > 1:
            digit = _digits(value.axes)[at]
            if left % digit.extent:
                if digit.extent % left:
                    value = _merge(value, at)
                    continue
                value = _split(value, at, digit.extent // left)
                digit = Digit(left)
            left //= digit.extent
            at, count = at + 1, count + 1
        counts.append(count)
    return replace(value, axes=_grouped(_digits(value.axes), counts))


def permute(value: Pieces, order: Sequence[int]) -> Pieces:
    order = [dim % len(value.axes) for dim in order]
    starts, seen = [], 0
    for axis in value.axes:
        starts.append(seen)
        seen += len(axis)
    old = _digits(value.axes)
    moved = [starts[axis] + i for axis in order for i in range(len(value.axes[axis]))]
    loops = [_place(old, at) for at in moved if not old[at].lane]
    lanes = [_place(old, at) for at in moved if old[at].lane]
    parts = {tuple(key[i] for i in lanes): part.permute(loops) for key, part in value.parts.items()}
    return replace(value, axes=tuple(value.axes[axis] for axis in order), parts=parts)


def select(value: Pieces, axis: int, index: int) -> Pieces:
    """The entry `index` of an axis, which goes away."""
    axis %= len(value.axes)
    first = sum(map(len, value.axes[:axis]))
    index %= value.shape[axis]
    for digit in reversed(value.axes[axis]):
        at = first + len(value.axes[axis]) - 1
        value = _pick(value, axis, at, index % digit.extent)
        index //= digit.extent
    return replace(value, axes=(*value.axes[:axis], *value.axes[axis + 1:]))


def _pick(value: Pieces, axis: int, at: int, index: int) -> Pieces:
    digits = _digits(value.axes)
    place = _place(digits, at)
    if digits[at].lane:
        parts = {(*key[:place], *key[place + 1:]): part for key, part in value.parts.items() if key[place] == index}
    else:
        parts = value.map_parts(lambda part: part.select(place, index))
    axes = (*value.axes[:axis], value.axes[axis][:-1], *value.axes[axis + 1:])
    return replace(value, axes=axes, parts=parts)


def expand(value: Pieces, shape: Sequence[int]) -> Pieces:
    """Axes of one entry repeated."""
    value = replace(value, axes=((),) * (len(shape) - len(value.axes)) + value.axes)
    for axis, extent in enumerate(shape):
        if extent > 1 and not value.axes[axis]:
            place = sum(not digit.lane for digit in _digits(value.axes[:axis]))
            parts = {key: part.unsqueeze(place).expand(*part.shape[:place], extent, *part.shape[place:])
                     for key, part in value.parts.items()}
            value = replace(value, axes=(*value.axes[:axis], (Digit(extent),), *value.axes[axis + 1:]), parts=parts)
    return value


def cut(value: Pieces, axis: int = 0, start: int | None = None, stop: int | None = None, step: int = 1) -> Pieces:
    """A range of an axis, along its outermost digit."""
    axis %= len(value.axes)
    extent = value.shape[axis]
    first, last, _ = slice(start, stop).indices(extent)
    if (first, last, step) == (0, extent, 1):
        return value
    inner = prod(digit.extent for digit in value.axes[axis][1:])
    if step != 1 or first % inner or last % inner or last <= first:
        raise Unsupported(f"[{start}:{stop}:{step}] of an axis of {extent}")
    first, count = first // inner, (last - first) // inner
    digits = _digits(value.axes)
    at = sum(map(len, value.axes[:axis]))
    place = _place(digits, at)
    if digits[at].lane:
        parts = {(*key[:place], key[place] - first, *key[place + 1:]): part
                 for key, part in value.parts.items() if first <= key[place] < first + count}
    else:
        parts = value.map_parts(lambda part: part.narrow(place, first, count))
    changed = (Digit(count, digits[at].lane), *value.axes[axis][1:])
    section = replace(value, axes=(*value.axes[:axis], changed, *value.axes[axis + 1:]), parts=parts)
    return section if count > 1 else _pick_first(section, axis, at)


def _pick_first(value: Pieces, axis: int, at: int) -> Pieces:
    """Without digit `at`, the outermost of its axis, whose extent is 1."""
    rotated = (*value.axes[axis][1:], value.axes[axis][0])
    if len(rotated) > 1:
        raise Unsupported("one entry of an outer digit")
    return _pick(value, axis, at, 0)


def stack(values: Sequence[Pieces], axis: int = 0) -> Pieces:
    """A new axis that is a lane."""
    aligned, axes = align(values)
    axis %= len(axes) + 1
    place = sum(digit.lane for digit in _digits(axes[:axis]))
    parts = {(*key[:place], i, *key[place:]): part for i, value in enumerate(aligned) for key, part in value.parts.items()}
    one = ((Digit(len(values), True),) if len(values) > 1 else (),)
    if len(values) == 1:
        return replace(aligned[0], axes=(*axes[:axis], *one, *axes[axis:]))
    bounds = None
    if any(value.bounds for value in aligned):
        aligned = [_wide(value) for value in aligned]
        parts = {(*key[:place], i, *key[place:]): part for i, value in enumerate(aligned) for key, part in value.parts.items()}
        ranges = [value.bounds for value in aligned if value.bounds]
        bounds = (min(low for low, _ in ranges), max(high for _, high in ranges))
    return Pieces((*axes[:axis], *one, *axes[axis:]), parts, values[0].dtype, bounds)


def align(values: Sequence[Pieces]) -> tuple[list[Pieces], Axes]:
    """Values of the same digits, lanes where one of them has a lane; an axis of one entry has none, and stays so."""
    rank = max(len(value.axes) for value in values)
    aligned = [replace(value, axes=((),) * (rank - len(value.axes)) + value.axes) for value in values]
    axes: list[tuple[Digit, ...]] = []
    for axis in range(rank):
        place = 0
        while any(place < len(value.axes[axis]) for value in aligned):
            long = [i for i, value in enumerate(aligned) if value.axes[axis]]
            least = min(aligned[i].axes[axis][place].extent for i in long)
            for i in long:
                at = sum(map(len, aligned[i].axes[:axis])) + place
                extent = aligned[i].axes[axis][place].extent
                if extent % least:
                    raise Unsupported(f"digits of {extent} beside {least}")
                if extent != least:
                    aligned[i] = _split(aligned[i], at, extent // least)
            if any(aligned[i].axes[axis][place].lane for i in long):
                for i in long:
                    aligned[i] = _unroll(aligned[i], sum(map(len, aligned[i].axes[:axis])) + place)
            place += 1
        axes.append(next((value.axes[axis] for value in aligned if value.axes[axis]), ()))
    return aligned, tuple(axes)


# -- arithmetic --------------------------------------------------------------------------------------------------------


def _range(dtype: torch.dtype) -> tuple[int, int]:
    info = torch.iinfo(dtype)
    return info.min, info.max


def _wide(value: Pieces) -> Pieces:
    """Narrow integers as int32."""
    if value.dtype not in NARROW or value.bounds is not None:
        return value
    return replace(value, parts=value.map_parts(lambda part: part.to(torch.int32)), bounds=_range(value.dtype))


def _narrowed(value: Pieces, dtype: torch.dtype) -> Pieces:
    """int32 values wrapped to a narrow integer type, where they can exceed its range."""
    assert value.bounds is not None
    low, high = _range(dtype)
    if low <= value.bounds[0] and value.bounds[1] <= high:
        return replace(value, dtype=dtype)
    bits = 8 * dtype.itemsize
    if dtype.is_signed:
        return Pieces(value.axes, value.map_parts(lambda part: part << 32 - bits >> 32 - bits), dtype, (low, high))
    return Pieces(value.axes, value.map_parts(lambda part: part & high), dtype, (low, high))


def view_as(value: Pieces, dtype: torch.dtype) -> Pieces:
    """The bits as another type: of the same size, a larger one where bytes lie together, or a word's bytes as lanes."""
    before, after = value.dtype.itemsize, dtype.itemsize
    if before == after:
        if value.dtype in NARROW and dtype in NARROW:
            return _narrowed(_wide(value), dtype)
        if value.bounds is not None:
            value = replace(value, parts=value.map_parts(lambda part: part.to(value.dtype)), bounds=None)
        return replace(value, parts=value.map_parts(lambda part: part.view(dtype)), dtype=dtype)
    last = value.axes[-1]
    if before > after == 1 and not value.dtype.is_floating_point and before <= 4 and value.bounds is None:
        lanes = sum(digit.lane for digit in _digits(value.axes))
        signed = value.map_parts(lambda part: part.view(SIGNED.get(part.dtype, part.dtype)))
        parts = {(*key[:lanes], i): part >> 8 * i & 255 for key, part in signed.items() for i in range(before)}
        as_bytes = Pieces((*value.axes[:-1], (*last, Digit(before, True))), parts, torch.uint8, (0, 255))
        return as_bytes if dtype == torch.uint8 else _narrowed(as_bytes, dtype)
    if before < after and value.bounds is None and len(last) == 1 and not last[0].lane:
        step = after // before
        if last[0].extent % step:
            raise Unsupported("bytes that are no whole number of words")
        has_loop = last[0].extent != step
        parts = value.map_parts(lambda part: part.view(dtype) if has_loop else part.view(dtype).squeeze(-1))
        axis = (Digit(last[0].extent // step),) if has_loop else ()
        return Pieces((*value.axes[:-1], axis), parts, dtype)
    raise Unsupported(f"{value.dtype} as {dtype}")


def pointwise(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], dtype: torch.dtype) -> Pieces:
    """An elementwise operation, lane by lane, on integers as int32."""
    places = [i for i, arg in enumerate(args) if isinstance(arg, Pieces)]
    aligned, axes = align([_wide(args[i]) for i in places])
    lanes = [digit.extent for digit in _digits(axes) if digit.lane]
    parts = {}
    for key in product(*(range(extent) for extent in lanes)):
        filled = list(args)
        for place, value in zip(places, aligned, strict=True):
            filled[place] = _part(value, axes, key)
        parts[key] = target(*filled, **kwargs)
    if dtype not in NARROW:
        return Pieces(axes, parts, dtype)
    bounds = _result_range(target, [next(v for p, v in zip(places, aligned, strict=True) if p == i) if i in places else arg
                              for i, arg in enumerate(args)])
    return _narrowed(Pieces(axes, parts, dtype, bounds), dtype)


def _part(value: Pieces, axes: Axes, key: tuple[int, ...]) -> Tensor:
    """The tensor of a value for lanes of `axes`, with an axis of 1 for every loop of an axis that the value has not."""
    own, loops, seen = [], [], 0
    for axis, wanted in zip(value.axes, axes, strict=True):
        for digit in wanted:
            if digit.lane:
                own += [key[seen]] if axis else []
                seen += 1
            else:
                loops.append(bool(axis))
    part = value.parts[tuple(own)]
    for place, has_axis in enumerate(loops):
        part = part if has_axis else part.unsqueeze(place)
    return part


def _result_range(target: Any, args: Sequence[Any]) -> tuple[int, int]:
    """The least and largest integer that an operation can return; the range of int32 where it is unknown."""
    ranges = [arg.bounds or (-(1 << 31), (1 << 31) - 1) if isinstance(arg, Pieces) else (arg, arg)
              for arg in args if isinstance(arg, Pieces | int)]
    name = target.overloadpacket.__name__.strip("_").removesuffix("_")
    if len(ranges) == 2:
        (a, b), (c, d) = ranges
        if name == "bitwise_and" and max(min(a, b), min(c, d)) >= 0:
            return 0, min(b, d)
        if name == "bitwise_and" and c >= 0:
            return 0, d
        if name in ("bitwise_or", "bitwise_xor") and a >= 0 and c >= 0:
            return 0, (1 << max(b, d).bit_length()) - 1
        if name in ("rshift", "bitwise_right_shift") and c == d >= 0:
            return a >> c, b >> c
        corners = {"add": (a + c, b + d), "sub": (a - d, b - c), "mul": _spread(x * y for x in (a, b) for y in (c, d)),
                   "lshift": (a << c, b << d) if c == d >= 0 else None}
        corners["bitwise_left_shift"] = corners["lshift"]
        bounds = corners.get(name)
        if bounds is not None and max(map(abs, bounds)) < 1 << 31:
            return bounds
    return -(1 << 31), (1 << 31) - 1


def _spread(values: Iterable[int]) -> tuple[int, int]:
    every = list(values)
    return min(every), max(every)


# The operators that `&=` and its like are traced as.
IN_PLACE = {"__iand__": "bitwise_and", "__ior__": "bitwise_or", "__ixor__": "bitwise_xor",
            "__ilshift__": "bitwise_left_shift", "__irshift__": "bitwise_right_shift"}


class Interpreter(fx.Interpreter):
    """Runs a traced decode on pieces.  Raises Unsupported."""

    def run_node(self, n: fx.Node) -> Any:
        self.dtype = n.meta["val"].dtype if isinstance(n.meta.get("val"), Tensor) else None
        if n.op == "call_function" and is_mutable(n.target):
            _check_last_use(n)
        return super().run_node(n)

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if is_mutable(target):
            name = target.overloadpacket.__name__
            packet = getattr(aten, IN_PLACE.get(name, name.removesuffix("_")))
            target = getattr(packet, overload_name(target))
        first = args[0]
        packet = getattr(target, "overloadpacket", None)
        if target is aten.view.dtype:
            return view_as(first, args[1])
        if packet in (aten.view, aten._unsafe_view, aten.reshape):
            return reshape(first, args[1])
        if packet in (aten.clone, aten.detach, aten.alias, aten.lift_fresh_copy):
            return first
        if packet is aten.permute:
            return permute(first, args[1])
        if packet is aten.t:
            return permute(first, (1, 0))
        if packet is aten.transpose:
            order = list(range(len(first.axes)))
            a, b = (dim % len(order) for dim in args[1:3])
            order[a], order[b] = b, a
            return permute(first, order)
        if packet is aten.unsqueeze:
            axis = args[1] % (len(first.axes) + 1)
            return replace(first, axes=(*first.axes[:axis], (), *first.axes[axis:]))
        if packet is aten.squeeze:
            gone = {dim % len(first.axes) for dim in ([args[1]] if isinstance(args[1], int) else args[1])}
            return replace(first, axes=tuple(axis for i, axis in enumerate(first.axes) if i not in gone or axis))
        if packet is aten.expand:
            return expand(first, args[1])
        if packet is aten.select:
            return select(first, args[1], args[2])
        if packet is aten.slice:
            return cut(first, *args[1:])
        if packet is aten.stack:
            return stack(first, *args[1:])
        if packet is aten._to_copy and self.dtype is not None:
            return converted(first, self.dtype)
        if torch.Tag.pointwise in getattr(target, "tags", ()) and self.dtype is not None:
            return pointwise(target, args, kwargs, self.dtype)
        raise Unsupported(str(target))


def _check_last_use(node: fx.Node) -> None:
    """Raises Unsupported for an in-place operation whose tensor, or the base of that view, is read again later."""
    order = {step: i for i, step in enumerate(node.graph.nodes)}
    changed = node.args[0]
    while isinstance(changed, fx.Node):
        if changed.op == "placeholder" or any(order[user] > order[node] for user in changed.users):
            raise Unsupported(f"{node.target} of a tensor that is read again")
        if not shares_memory(changed.target):
            return
        changed = changed.args[0]


def converted(value: Pieces, dtype: torch.dtype) -> Pieces:
    """Elements as another type."""
    value = _wide(value)
    if value.bounds is not None and dtype in NARROW:
        return _narrowed(value, dtype)
    return Pieces(value.axes, value.map_parts(lambda part: part.to(dtype)), dtype)


# -- whole decodes -----------------------------------------------------------------------------------------------------


def split_last(value: Pieces, axis: int, vector: int, lanes: int) -> Pieces:
    """The innermost loop of an axis as one of a vector's length inside lanes: no loop of a few steps, several sums at once.

    lanes: how many there may be altogether.
    """
    at = _innermost(value, axis)
    extent = 0 if at is None else _digits(value.axes)[at].extent
    if at is None or extent % vector or extent == vector:
        return value
    steps, have = extent // vector, prod(digit.extent for digit in _digits(value.axes) if digit.lane)
    count = next(factor for factor in (4, 2, 1) if steps % factor == 0 and (factor == 1 or factor * have <= lanes))
    value = _split(value, at, vector)
    if count == 1:
        return value
    return _unroll(value, at) if count == steps else _unroll(_split(value, at, count), at + 1)


def unroll_last(value: Pieces, axis: int, count: int) -> Pieces:
    """`count` steps of the innermost loop of an axis without lanes as one: what they share is read once."""
    at = _innermost(value, axis)
    if at is None or any(digit.lane for digit in value.axes[axis]) or _digits(value.axes)[at].extent % count:
        return value
    return _unroll(value, at) if _digits(value.axes)[at].extent == count else _unroll(_split(value, at, count), at + 1)


def _innermost(value: Pieces, axis: int) -> int | None:
    """Among all digits, the last loop of an axis."""
    first = sum(map(len, value.axes[:axis]))
    return max((first + i for i, digit in enumerate(value.axes[axis]) if not digit.lane), default=None)


def joined(value: Pieces) -> Tensor:
    """The tensor itself, of narrow integers too."""
    if value.bounds is not None:
        value = replace(value, parts=value.map_parts(lambda part: part.to(value.dtype)), bounds=None)
    return _joined(value.parts, (), _digits(value.axes), 0).reshape(value.shape)


def _joined(parts: Mapping[tuple[int, ...], Tensor], key: tuple[int, ...], digits: Sequence[Digit], axis: int) -> Tensor:
    """The tensor with one axis per digit."""
    if not digits:
        return parts[key]
    if not digits[0].lane:
        return _joined(parts, key, digits[1:], axis + 1)
    return torch.stack([_joined(parts, (*key, i), digits[1:], axis) for i in range(digits[0].extent)], axis)


def by_rows(value: Pieces, rows: Sequence[Digit]) -> Tensor:
    """A field [N, G] as a tensor [lanes of rows, G, loops of rows]: what a loop along rows reads lies together."""
    tensor = _joined(_wide(value).parts, (), _digits(value.axes), 0).reshape(*(digit.extent for digit in rows), -1)
    lanes = [i for i, digit in enumerate(rows) if digit.lane]
    loops = [i for i, digit in enumerate(rows) if not digit.lane]
    return tensor.permute(*lanes, len(rows), *loops).contiguous()


def from_rows(tensor: Tensor, rows: Sequence[Digit], field: Pieces) -> Pieces:
    """The field that `by_rows` made a tensor of."""
    lanes = [digit.extent for digit in rows if digit.lane]
    parts = {key: tensor[key].movedim(0, -1) for key in product(*(range(extent) for extent in lanes))}
    groups = tensor.shape[len(lanes)]
    if groups == 1:
        parts = {key: part.squeeze(-1) for key, part in parts.items()}
    return Pieces((tuple(rows), (Digit(groups),) if groups > 1 else ()), parts, field.dtype, _wide(field).bounds)


def by_columns(x: Tensor, columns: Sequence[Digit]) -> Tensor:
    """x [M, K] as [M, lanes of columns, loops of columns]: what a loop along columns reads lies together."""
    lanes = [i + 1 for i, digit in enumerate(columns) if digit.lane]
    loops = [i + 1 for i, digit in enumerate(columns) if not digit.lane]
    return x.reshape(-1, *(digit.extent for digit in columns)).permute(0, *lanes, *loops).contiguous()


def dot(x: Tensor, weight: Pieces) -> Tensor:
    """x, as by_columns makes it, times the weight's transpose: [M, N], for few rows, each a sum of its own in one loop."""
    rows = sum(digit.lane for digit in weight.axes[0])
    loops = [sum(not digit.lane for digit in axis) for axis in weight.axes]
    outputs = []
    for row in x.unbind(0):
        terms: dict[tuple[int, ...], list[Tensor]] = {}
        for key, part in weight.parts.items():
            terms.setdefault(key[:rows], []).append(part * row[key[rows:]])
        sums = {key: _tree(products) for key, products in terms.items()}
        if loops[1]:
            sums = {key: total.sum(list(range(loops[0], loops[0] + loops[1]))) for key, total in sums.items()}
        outputs.append(by_digits(sums, weight.axes[0]))
    return torch.stack(outputs)


def by_digits(parts: Mapping[tuple[int, ...], Tensor], digits: Sequence[Digit]) -> Tensor:
    """The elements of one axis, in order."""
    lanes = [i for i, digit in enumerate(digits) if digit.lane]
    loops = [i for i, digit in enumerate(digits) if not digit.lane]
    extents = [digits[i].extent for i in lanes + loops]
    order = [(lanes + loops).index(i) for i in range(len(digits))]
    return torch.stack([parts[key] for key in sorted(parts)]).reshape(extents).permute(order).reshape(-1)


def _tree(terms: list[Tensor]) -> Tensor:
    """Their sum, in pairs."""
    while len(terms) > 1:
        pairs = [a + b for a, b in zip(terms[::2], terms[1::2], strict=False)]
        terms = pairs + terms[2 * len(pairs):]
    return terms[0]
