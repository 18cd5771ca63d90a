"""Layouts, records and slices counted bit by bit, and hypothesis strategies that draw them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise, product
from math import prod

from hypothesis import assume
from hypothesis import strategies as st

from qdsl.core.layout import (
    Affine,
    FieldSlice,
    Layout,
    RecordItem,
    RecordLine,
    RecordPiece,
    record_pieces,
)

STRIDES = st.one_of(st.integers(-12, 12), st.sampled_from((0, 1, 4, 8, 16, 32)))


# -- plain counterparts --------------------------------------------------------------------------------------------------


def positions(layout: Layout) -> list[int]:
    """Every position in index order, from nested loops over the modes."""
    digits = product(*(range(extent) for extent, _ in reversed(layout.modes)))
    strides = [stride for _, stride in reversed(layout.modes)]
    return [layout.offset + sum(d * s for d, s in zip(values, strides, strict=True)) for values in digits]


def factorizations(size: int) -> Iterator[tuple[int, ...]]:
    """Every ordered way to write a size as a product of extents above 1."""
    if size == 1:
        yield ()
    for extent in range(2, size + 1):
        if size % extent == 0:
            yield from ((extent, *factors) for factors in factorizations(size // extent))


def layouts_through(wanted: Sequence[int]) -> Iterator[Layout]:
    """Every layout without modes of extent 1 that has these positions."""
    for extents in factorizations(len(wanted)):
        weights = [prod(extents[:i]) for i in range(len(extents))]
        layout = Layout(tuple((e, wanted[w] - wanted[0]) for e, w in zip(extents, weights, strict=True)), wanted[0])
        if positions(layout) == list(wanted):
            yield layout


def boundaries(layout: Layout) -> set[int]:
    return {prod(extent for extent, _ in layout.modes[:i]) for i in range(len(layout.modes) + 1)}


def bits_of(pieces: Sequence[RecordPiece]) -> list[tuple[tuple[int, ...], int]]:
    return [(piece.index, bit) for piece in pieces for bit in range(piece.lo, piece.lo + piece.width)]


def straddles(part: FieldSlice, word: int) -> bool:
    """Whether some element lies in two words."""
    starts = [part.bit(index) for index in product(*map(range, part.extents))]
    return any(at // word != (at + part.width - 1) // word for at in starts)


# -- strategies ----------------------------------------------------------------------------------------------------------


@st.composite
def layouts(draw: st.DrawFn, largest: int = 400) -> Layout:
    """Any layout; strides are often such that a mode continues the one before it."""
    modes: list[tuple[int, int]] = []
    for extent in draw(st.lists(st.integers(1, 6), max_size=5)):
        stride = draw(STRIDES)
        if modes and draw(st.booleans()):
            stride = modes[-1][0] * modes[-1][1]
        if prod(e for e, _ in modes) * extent <= largest:
            modes.append((extent, stride))
    return Layout(tuple(modes), draw(st.integers(-20, 200)))



@st.composite
def almost(draw: st.DrawFn) -> list[int]:
    """Positions of a small layout, in most cases with one of them moved, two exchanged or the end cut off."""
    places = positions(draw(layouts(largest=24)))
    change = draw(st.sampled_from(("none", "move", "exchange", "cut")))
    i, j = (draw(st.integers(0, len(places) - 1)) for _ in range(2))
    if change == "move":
        places[i] += draw(st.integers(-3, 3))
    elif change == "exchange":
        places[i], places[j] = places[j], places[i]
    elif change == "cut":
        places = places[: i + 1]
    return places


class Record:
    """A record that stores every bit of its fields once, and the box of elements and number of bits of each field."""

    def __init__(self) -> None:
        self.lines: list[RecordLine] = []
        self.fields: dict[str, tuple[tuple[int, ...], int]] = {}

    def pieces(self, field: str) -> list[RecordPiece]:
        return [piece for piece in record_pieces(tuple(self.lines)) if piece.field == field]


@st.composite
def records(draw: st.DrawFn) -> Record:
    """Nested loops in any order over fields whose bits are cut anywhere, with loops written out and padding between."""
    record = Record()
    for shared in range(draw(st.integers(1, 2))):
        digits = draw(st.lists(st.lists(st.integers(1, 4), min_size=1, max_size=2), max_size=2))
        loops = [(f"i{axis}{d}", extent) for axis, extents in enumerate(digits) for d, extent in enumerate(extents)]
        index = tuple(draw(_subscript(axis, extents)) for axis, extents in enumerate(digits))
        items: list[tuple[RecordItem, tuple[str, int] | None]] = []
        for number in range(draw(st.integers(1, 2))):
            field, bits = f"f{shared}{number}", draw(st.integers(1, 9))
            record.fields[field] = tuple(prod(extents) for extents in digits), bits
            cuts = sorted({0, bits, *draw(st.lists(st.integers(0, bits), max_size=2))})
            items += [draw(_part(field, index, lo, hi)) for lo, hi in pairwise(cuts)]
        items = draw(st.permutations(items))
        while items:
            taken = draw(st.integers(1, len(items)))
            record.lines.append(draw(_line(loops, items[:taken])))
            items = items[taken:]
    record.lines = draw(st.permutations(record.lines))
    return record


@st.composite
def _subscript(draw: st.DrawFn, axis: int, extents: Sequence[int]) -> Affine:
    """A number written with loop variables as its digits, counting up or down, and with a tile that no loop binds."""
    const, terms = 0, [("tile", draw(st.integers(1, 64)))]
    for digit, extent in enumerate(extents):
        weight = prod(extents[:digit])
        if draw(st.booleans()):
            terms.append((f"i{axis}{digit}", weight))
        else:
            const += weight * (extent - 1)
            terms.append((f"i{axis}{digit}", -weight))
    return Affine(const, tuple(terms))


@st.composite
def _part(draw: st.DrawFn, field: str, index: tuple[Affine, ...], lo: int, hi: int) -> tuple[RecordItem, tuple[str, int] | None]:
    """Bits [lo, hi) of an element as one item, or in equal steps of a loop of its own."""
    width = draw(st.sampled_from([w for w in range(1, hi - lo + 1) if (hi - lo) % w == 0]))
    if width == hi - lo:
        return RecordItem(field, index, Affine(lo), width), None
    loop = f"{field}_{lo}"
    return RecordItem(field, index, Affine(lo, ((loop, width),)), width), (loop, (hi - lo) // width)


@st.composite
def _line(draw: st.DrawFn, loops: Sequence[tuple[str, int]],
          parts: Sequence[tuple[RecordItem, tuple[str, int] | None]]) -> RecordLine:
    """Items under the loops of their subscripts; loops over bits are written out where another item does not have them."""
    items: list[RecordItem] = []
    own = [loop for _, loop in parts if loop is not None]
    for item, loop in parts:
        if loop is None or len(parts) == 1:
            items.append(item)
        else:
            items += [RecordItem(item.field, item.index, Affine(item.lo.const + i * item.width), item.width)
                      for i in range(loop[1])]
    order = draw(st.permutations([*loops, *(own if len(parts) == 1 else [])]))
    if draw(st.booleans()):
        items.insert(draw(st.integers(0, len(items))), RecordItem(None, (), Affine(), draw(st.integers(1, 8))))
    if order and draw(st.booleans()):
        name, extent = order[-1]
        items = [_bound(item, name, value) for value in range(extent) for item in items]
        order = order[:-1]
    return RecordLine(tuple(order), tuple(items))


def _bound(item: RecordItem, name: str, value: int) -> RecordItem:
    """The item with a loop variable replaced by its value."""
    def form(old: Affine) -> Affine:
        const = old.const + value * old.coefficient(name)
        return Affine(const, tuple(term for term in old.terms if term[0] != name))
    return RecordItem(item.field, tuple(map(form, item.index)), form(item.lo), item.width)


@st.composite
def slices(draw: st.DrawFn) -> FieldSlice:
    """A slice of up to two coordinates, wherever its elements lie."""
    dims = tuple(Layout(draw(layouts(largest=16)).modes) for _ in range(draw(st.integers(0, 2))))
    return FieldSlice(draw(st.integers(0, 4)), draw(st.integers(1, 17)), draw(st.integers(0, 300)), dims)


@st.composite
def words_of_slices(draw: st.DrawFn) -> tuple[FieldSlice, int]:
    """A slice whose elements are laid into words digit by digit, so that it can be cut at these words."""
    word, width = draw(st.sampled_from((6, 8, 16, 32, 64))), draw(st.integers(1, 8))
    assume(width <= word)
    start = draw(st.integers(0, word - width))
    low, high, dims = start, start, []
    for _ in range(draw(st.integers(1, 2))):
        modes: list[tuple[int, int]] = []
        for extent in draw(st.lists(st.integers(2, 5), max_size=3)):
            room = (word - width - high) // (extent - 1)
            inside = draw(st.integers(0, room))
            outside = draw(st.integers(0, 9))
            if not outside and low >= extent - 1 and draw(st.booleans()):
                inside = -draw(st.integers(1, low // (extent - 1)))      # the first element in the high bits
            low, high = low + min(0, (extent - 1) * inside), high + max(0, (extent - 1) * inside)
            modes.append((extent, inside + word * outside))
        dims.append(Layout(tuple(modes)))
    return FieldSlice(0, width, start + word * draw(st.integers(0, 9)), tuple(dims)), word
