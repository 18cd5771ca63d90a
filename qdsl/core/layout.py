"""Layouts: maps from elements to bit positions.

A `Layout` sends a mixed-radix index to a bit position: `(32,2,4):(8,4,256)@128` puts element i at bit
128 + 8*(i % 32) + 4*(i // 32 % 2) + 256*(i // 64).  Extents and strides are written fastest first, positions count bits
from the least significant bit of byte 0.  A record (the author's nested loops in storage order) is walked into placed
pieces, the pieces of a field are gathered into `FieldSlice`s, and from there on every width, shift, proof and picture is
arithmetic on layouts.  Up to five base-3 digits may share a byte; such a piece has a place in its byte instead of bits.
Each operation states its post-condition (`@post`), which tests/unit/test_layout.py checks by brute force.

This module uses the standard library only and knows nothing of formats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product
from math import gcd, prod

BYTE = 8
BASE, PLACES, DIGIT_BITS = 3, 5, 2                               # 3^5 values fit a byte; a digit alone takes two bits


@dataclass(frozen=True, slots=True)
class Layout:
    """A strided map from [0, size) to positions: modes are (extent, stride), fastest first."""

    modes: tuple[tuple[int, int], ...] = ()
    offset: int = 0

    def __post_init__(self) -> None:
        if any(extent < 1 for extent, _ in self.modes):
            raise ValueError(f"extents are at least 1: {self}")

    @property
    def size(self) -> int:
        """How many indices the layout maps."""
        return prod(extent for extent, _ in self.modes)

    @property
    def first(self) -> int:
        """The smallest position.   @post first == min(self(i) for i in range(size))"""
        return self.offset + sum((extent - 1) * stride for extent, stride in self.modes if stride < 0)

    @property
    def last(self) -> int:
        """The largest position.   @post last == max(self(i) for i in range(size))"""
        return self.offset + sum((extent - 1) * stride for extent, stride in self.modes if stride > 0)

    def __call__(self, index: int) -> int:
        position = self.offset
        for extent, stride in self.modes:
            index, digit = divmod(index, extent)
            position += digit * stride
        return position

    def __str__(self) -> str:
        extents = ",".join(str(extent) for extent, _ in self.modes) or "1"
        strides = ",".join(str(stride) for _, stride in self.modes) or "0"
        return f"({extents}):({strides})@{self.offset}"


def coalesce(layout: Layout) -> Layout:
    """The same map with the fewest modes.

    @post coalesce(L)(i) == L(i) for all i, and no mode has extent 1 or continues the one before it
    """
    modes: list[tuple[int, int]] = []
    for extent, stride in layout.modes:
        if extent == 1:
            continue
        if modes and stride == modes[-1][0] * modes[-1][1]:
            modes[-1] = (modes[-1][0] * extent, modes[-1][1])
        else:
            modes.append((extent, stride))
    return Layout(tuple(modes), layout.offset)


def strided_layout(positions: Sequence[int]) -> Layout | None:
    """The coalesced layout through these positions, or None where they are not strided.

    @post strided_layout(P) is None or all(strided_layout(P)(i) == P[i] for i in range(len(P)))
    @post strided_layout([L(i) for i in range(L.size)]) is not None
    """
    modes: list[tuple[int, int]] = []
    remaining = list(positions)
    while len(remaining) > 1:
        stride = remaining[1] - remaining[0]
        extent = next((i for i, p in enumerate(remaining) if p != remaining[0] + i * stride), len(remaining))
        while extent > 1 and not _repeats(remaining, extent, stride):
            extent -= 1
        if extent == 1:
            return None
        modes.append((extent, stride))
        remaining = remaining[::extent]
    return coalesce(Layout(tuple(modes), remaining[0])) if remaining else None


def _repeats(positions: Sequence[int], extent: int, stride: int) -> bool:
    """Whether the positions are whole runs of `extent` elements, `stride` apart."""
    return len(positions) % extent == 0 and all(
        positions[i] == positions[i - i % extent] + i % extent * stride for i in range(len(positions)))


def refine(layout: Layout, cuts: Iterable[int]) -> Layout | None:
    """The same map with a mode boundary at every index weight in `cuts`; None if a mode cannot be split there.

    @post refine(L, C)(i) == L(i) for all i @post every c in C with c < size is the product of the extents of the first modes
    """
    wanted = sorted({cut for cut in cuts if 1 < cut < layout.size})
    modes: list[tuple[int, int]] = []
    weight = 1
    for extent, stride in layout.modes:
        if extent == 1:
            continue
        end = weight * extent
        begin = weight
        for cut in [c for c in wanted if weight < c < end] + [end]:
            if cut % begin:
                return None
            modes.append((cut // begin, stride * (begin // weight)))
            begin = cut
        weight = end
    return Layout(tuple(modes), layout.offset)



@dataclass(frozen=True, slots=True)
class FieldSlice:
    """`width` bits of a field, from its bit `lo`: one layout per coordinate of the field, sharing an offset.

    The slice of element (i, j) lies at bits [at, at + width) of the record, at = offset + dims[0](i) + dims[1](j).
    start: the slice holds a range of elements, of which the first has this last coordinate; indices count from there.
    places: where not empty, the element is a base-3 digit of the byte at `at`, the more significant the smaller its place,
    places[0](i) + places[1](j).
    """

    lo: int
    width: int
    offset: int
    dims: tuple[Layout, ...]
    start: int = 0
    places: tuple[Layout, ...] = ()

    def bit(self, index: Sequence[int]) -> int:
        """The bit of the record at which the slice of an element begins."""
        position = self.offset
        for layout, i in zip(self.dims, index, strict=True):
            position += layout(i)
        return position

    def place(self, index: Sequence[int]) -> int:
        """The place of an element's base-3 digit in its byte."""
        return sum(layout(i) for layout, i in zip(self.places, index, strict=True))

    @property
    def extents(self) -> tuple[int, ...]:
        """How many elements each coordinate has."""
        return tuple(layout.size for layout in self.dims)

    @property
    def room(self) -> int:
        """Bits of the record that an element needs: its own, or the byte of a digit."""
        return BYTE if self.places else self.width

    @property
    def filled(self) -> int:
        """Bits of the record that all elements take."""
        return self.width * prod(self.extents) if not self.places else BYTE * len(self.bytes)

    @property
    def bytes(self) -> frozenset[int]:
        """The bits at which its bytes of digits begin."""
        return frozenset(self.bit(index) for index in product(*map(range, self.extents)) if self.places)

    def __str__(self) -> str:
        since = f"from {self.start}: " if self.start else ""
        return since + _layout_text(self.dims, self.offset) + (f" digit {_layout_text(self.places, None)}" if self.places else "")


def _layout_text(dims: Sequence[Layout], offset: int | None) -> str:
    """Text of the layouts with more than one element; an offset None means the layouts' own, and 0 is not shown."""
    shown = [layout for layout in dims if layout.size > 1] or [Layout()]
    texts = [str(Layout(layout.modes)).removesuffix("@0") for layout in shown]
    start = sum(layout.offset for layout in dims) if offset is None else offset
    return " x ".join(texts) + (f"@{start}" if offset is not None or start else "")


@dataclass(frozen=True, slots=True)
class Affine:
    """const + sum of coefficient * variable, with integer coefficients: what a record's subscript may be."""

    const: int = 0
    terms: tuple[tuple[str, int], ...] = ()

    def __call__(self, values: Mapping[str, int]) -> int:
        total = self.const
        for name, coefficient in self.terms:
            total += coefficient * values[name]
        return total

    def coefficient(self, name: str) -> int:
        """The coefficient of a variable; 0 if it occurs in no term."""
        return dict(self.terms).get(name, 0)


@dataclass(frozen=True, slots=True)
class RecordItem:
    """One item of a record line: `width` bits of an element from its bit `lo`; `field` None is padding.

    place: the element is the base-3 digit at this place of a byte.  Digits of a byte are consecutive items from place 0 on; after
    the one marked `last` the next byte begins.  again: a copy of bits that another item stores.
    """

    field: str | None
    index: tuple[Affine, ...]
    lo: Affine
    width: int
    place: int | None = None
    last: bool = True
    again: bool = False

    @property
    def step(self) -> int:
        """Bits of the record from this item to the next."""
        return self.width if self.place is None else BYTE if self.last else 0


@dataclass(frozen=True, slots=True)
class RecordLine:
    """Nested loops, rightmost fastest, around items written one after the other."""

    loops: tuple[tuple[str, int], ...]
    items: tuple[RecordItem, ...]


@dataclass(frozen=True, slots=True)
class RecordPiece:
    """Bits [lo, lo + width) of element `index` of a field, at bit `at` of its record.  `field` None is padding or a copy.

    place: the element is the base-3 digit at this place of the byte at `at`.  again: the field of a copy, that is written only.
    """

    field: str | None
    index: tuple[int, ...]
    lo: int
    width: int
    at: int
    line: int
    item: int
    place: int | None = None
    again: str | None = None


@lru_cache(maxsize=256)                                          # every pass walks the records of a program again
def record_pieces(lines: tuple[RecordLine, ...]) -> tuple[RecordPiece, ...]:
    """The pieces of a record in storage order; a variable that no loop binds (a tile) counts from 0.

    @post pieces are adjacent: the first is at bit 0, each next one where the last ended; digits of a byte are at one bit
    """
    at = 0
    pieces: list[RecordPiece] = []
    for number, line in enumerate(lines):
        free = {name for item in line.items for form in (*item.index, item.lo) for name, _ in form.terms}
        values = dict.fromkeys(free, 0)
        names = [name for name, _ in line.loops]
        for counters in product(*(range(extent) for _, extent in line.loops)):
            values.update(zip(names, counters, strict=True))
            for position, item in enumerate(line.items):
                index = tuple(form(values) for form in item.index)
                field, copied = (None, item.field) if item.again else (item.field, None)
                pieces.append(RecordPiece(field, index, item.lo(values), item.width, at, number, position, item.place, copied))
                at += item.step
    return tuple(pieces)


@dataclass(frozen=True, slots=True)
class CoverageClash:
    """A bit of an element that is stored by no piece (`pieces` empty) or by several."""

    index: tuple[int, ...]
    bit: int
    pieces: tuple[RecordPiece, ...]


def find_clash(pieces: Iterable[RecordPiece], extents: Sequence[int], bits: Iterable[int]) -> CoverageClash | None:
    """The first (element, bit) of a field's tile that is not stored exactly once, in index order, or None.

    @post None iff each of `bits` of every element of the box `extents` is stored once, and nothing else is
    """
    stored_by: dict[tuple[tuple[int, ...], int], list[RecordPiece]] = {}
    for piece in pieces:
        for bit in range(piece.lo, piece.lo + piece.width):
            stored_by.setdefault((piece.index, bit), []).append(piece)
    wanted = sorted(bits)
    # A complete box has as many elements as pieces, so the search ends early.
    for index in product(*(range(min(extent, len(stored_by) + 1)) for extent in extents)):
        for bit in wanted:
            owners = stored_by.pop((index, bit), [])
            if len(owners) != 1:
                return CoverageClash(index, bit, tuple(owners))
    for (index, bit), owners in sorted(stored_by.items()):
        return CoverageClash(index, bit, tuple(owners))
    return None


def merge_pieces(pieces: Sequence[RecordPiece]) -> tuple[FieldSlice, ...] | None:
    """The slices of one field from its pieces in one record, lowest bits first; None where they are not strided.

    Bits of an element that lie together in every element share a slice, so a field stored whole has one slice and a
    field cut in two (Q4_K's scales) has two.  Every element must have the same bits in the record (see `find_clash`).
    Where elements do not lie at the strides of one layout, those that the same lines store have slices of their own, in
    ranges along the last coordinate, all cut at the same bits.

    @post for every piece and every t < width: one slice s has s.lo <= piece.lo + t < s.lo + s.width and index =
          piece.index, less s.start at the last coordinate, inside of s.extents; and for that
          s.bit(index) + piece.lo + t - s.lo == piece.at + t, or, of a digit, s.bit(index) == piece.at and
          s.place(index) == piece.place
    """
    where = {(piece.index, piece.lo + t): (piece.at + t, piece.place) for piece in pieces for t in range(piece.width)}
    indices = sorted({index for index, _ in where})
    bits = sorted({bit for _, bit in where})
    cuts: list[tuple[int, int]] = []
    while bits:
        lo = bits.pop(0)
        width = 1
        while bits and bits[0] == lo + width and all(
                where[i, bits[0]] == (where[i, lo][0] + width, where[i, lo][1]) for i in indices):
            bits.pop(0)
            width += 1
        cuts.append((lo, width))
    for starts in dict.fromkeys(((0,), _ranges(pieces))):
        candidates: list[FieldSlice | None] = []
        for first, end in pairwise([*starts, 1 + max((index[-1] for index in indices if index), default=0)]):
            inside = [index for index in indices if not index or first <= index[-1] < end]
            local = {index: (*index[:-1], index[-1] - first) if index else () for index in inside}
            candidates += [_strided_slice(lo, width, first, {local[i]: where[i, lo] for i in inside}) for lo, width in cuts]
        slices = tuple(part for part in candidates if part is not None)
        if len(slices) == len(candidates):
            return slices
    return None


def _ranges(pieces: Sequence[RecordPiece]) -> tuple[int, ...]:
    """The last coordinates at which other lines begin to store elements."""
    lines: dict[int, set[int]] = {}
    for piece in pieces:
        lines.setdefault(piece.index[-1] if piece.index else 0, set()).add(piece.line)
    return (0, *(after for before, after in pairwise(sorted(lines)) if lines[before] != lines[after]))


def _strided_slice(lo: int, width: int, start: int, where: Mapping[tuple[int, ...], tuple[int, int | None]]) -> FieldSlice | None:
    """The slice through (position, place) of the elements of a box, where its axes add up; else None."""
    origin = min(where)
    extents = [1 + max(index[axis] for index in where) for axis in range(len(origin))]
    lines = [[(*origin[:axis], i, *origin[axis + 1:]) for i in range(extent)] for axis, extent in enumerate(extents)]
    if any(origin) or len(where) != prod(extents) or len({place is None for _, place in where.values()}) > 1:
        return None
    offset, first = where[origin]
    dims = [strided_layout([where[index][0] - offset for index in line]) for line in lines]
    places = [] if first is None else [strided_layout([(where[index][1] or 0) - first for index in line]) for line in lines]
    if None in dims or None in places:
        return None
    layouts = [layout for layout in places if layout is not None]
    if first:
        layouts[-1] = replace(layouts[-1], offset=first)
    candidate = FieldSlice(lo, width, offset, tuple(d for d in dims if d is not None), start, tuple(layouts))
    exact = all(candidate.bit(index) == at and (place is None or candidate.place(index) == place)
                for index, (at, place) in where.items())
    return candidate if exact else None


@dataclass(frozen=True, slots=True)
class RecordBit:
    """The content of a record's bit: a bit of an element, or of a byte with the base-3 `digits` `elements`."""

    field: str
    elements: tuple[tuple[int, ...], ...]
    bit: int
    digits: bool = False


def record_bits(slices: Mapping[str, Sequence[FieldSlice]], bits: int) -> list[RecordBit | None]:
    """What lies at each bit of a record, None for padding.  The way back.

    @post spread(gather(record_pieces(lines)))[piece.at + t] is bit piece.lo + t of piece.index for every piece of bits, and bit t
          of a byte whose elements have piece.index at piece.place for every digit, t < 8
    """
    record: list[RecordBit | None] = [None] * bits
    for field, parts in slices.items():
        for part in parts:
            digits: dict[int, dict[int, tuple[int, ...]]] = {}
            for index in product(*(range(extent) for extent in part.extents)):
                at = part.bit(index)
                element = (*index[:-1], index[-1] + part.start) if index else ()
                if part.places:
                    digits.setdefault(at, {})[part.place(index)] = element
                for t in range(0 if part.places else part.width):
                    record[at + t] = RecordBit(field, (element,), part.lo + t)
            for at, by_place in digits.items():
                for t in range(BYTE):
                    record[at + t] = RecordBit(field, tuple(by_place[place] for place in sorted(by_place)), t, True)
    return record


def split_at_words(part: FieldSlice, word: int) -> tuple[FieldSlice, FieldSlice] | None:
    """Cut a slice at words of `word` bits: (its bits inside a word, which word); None where an element straddles.

    A digit may move both: Q4_K's second half of mins lies four bytes and four bits after the first.

    @post None, or for every element, with (inside, words) as returned:
          part.bit(i) == word * words.bit(i) + inside.bit(i), and 0 <= inside.bit(i) <= word - part.room
    """
    inner: list[Layout] = []
    outer: list[Layout] = []
    for layout in part.dims:
        inside: list[tuple[int, int]] = []
        outside: list[tuple[int, int]] = []
        for extent, stride in layout.modes:
            period = min(extent, word // gcd(stride, word))      # after so many steps the digit is at a word again
            if extent % period:
                return None
            whole = stride // word if abs(stride) >= word else 0
            inside += [(period, stride - whole * word), (extent // period, 0)]
            outside += [(period, whole), (extent // period, stride * period // word)]
        inner.append(Layout(tuple(mode for mode in inside if mode[0] > 1)))
        outer.append(Layout(tuple(mode for mode in outside if mode[0] > 1)))
    start = part.offset % word
    if start + sum(layout.first for layout in inner) < 0 or start + sum(layout.last for layout in inner) + part.room > word:
        return None
    return replace(part, offset=start, dims=tuple(inner)), replace(part, offset=part.offset // word, dims=tuple(outer))


def vector_width(part: FieldSlice, record: int, limit: int = 128) -> int | None:
    """The widest load, a power of two of bits up to `limit`, that serves this slice of a record of `record` bits.

    @post the width divides `record`, so that loads stay aligned from record to record, and `split_at_words` cuts the slice there
    @post no wider power of two up to `limit` does; None where none does (an element that straddles every word)
    """
    width = limit
    while width and (record % width or split_at_words(part, width) is None):
        width //= 2
    return width or None
