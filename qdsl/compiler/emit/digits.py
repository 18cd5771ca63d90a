"""Divides a slice of a field over the bytes of its record: digits that move by whole bytes, and lanes for the rest.

The torch reference moves whole bytes by views and extracts the rest with shifts.  A lane is one value of the digits whose stride
is not a whole number of bytes: it lies `shift` bits above byte `skip` of a container.  A container is one byte if no lane
straddles bytes (nibbles; Q4_K's mins, whose second half is four bytes and four bits away).  Else it is the few bytes after which
the digits reach a byte border again (three for 3-bit codes).  Base-3 digits of a byte are lanes with places instead of shifts.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd, prod

from qdsl.core.layout import FieldSlice, refine

CONTAINER = 64                                                   # the most bits


@dataclass(frozen=True, slots=True)
class Digit:
    """A digit of coordinate `axis`; weight: its step there, stride: its step in bits of the record.

    is_reversed: its bytes are in falling order, `stride` bits apart.
    """

    axis: int
    weight: int
    extent: int
    stride: int
    is_reversed: bool = False


@dataclass(frozen=True, slots=True)
class Lane:
    """The value of every bit digit, and the place of its elements: `shift` bits above byte `skip` of the container.

    place: for base-3 digits, the place in that byte.
    """

    values: tuple[int, ...]
    skip: int
    shift: int
    place: int = 0


@dataclass(frozen=True, slots=True)
class SliceCut:
    """One slice, divided: byte digits with the largest stride first, bit digits in the order of the coordinates.

    first: the byte of the record at which the first container begins.
    """

    part: FieldSlice
    bytes_: tuple[Digit, ...]
    bits: tuple[Digit, ...]
    container: int
    lanes: tuple[Lane, ...]
    first: int

    @property
    def whole(self) -> bool:
        """Whether an element fills its container."""
        return not self.bits and self.part.width == 8 * self.container and self.part.offset % 8 == 0

    @property
    def skips(self) -> list[int]:
        """The different byte offsets of lanes."""
        return sorted({lane.skip for lane in self.lanes})

    @property
    def spread_arguments(self) -> str:
        """What `spread` and `joined` take besides a tensor, where adjacent lanes fill a byte: their width and order; else ''."""
        shifts, width = [lane.shift for lane in self.lanes], self.part.width
        if self.container != 1 or self.part.places or len(self.bits) != 1 or len(self.skips) != 1:
            return ""
        ordered = len(shifts) > 1 and shifts == list(range(0, 8, width))
        return str(width) if ordered else "4, high_first=True" if (width, shifts) == (4, [4, 0]) else ""

    @property
    def shift(self) -> str:
        """The shift of lane i, if lanes are the values of one digit."""
        first, step = self.lanes[0].shift, self.bits[0].stride
        times = f"{abs(step)} * i" if abs(step) != 1 or not first else "i"
        return f"{first} {'-' if step < 0 else '+'} {times}" if first else times


def cut(part: FieldSlice) -> SliceCut | None:
    """The slice divided over bytes; None if byte digits and containers of up to eight bytes cannot represent it."""
    return _cut_base3_slice(part) if part.places else _cut_bit_slice(part, False) or _cut_bit_slice(part, True)


def _cut_bit_slice(part: FieldSlice, is_whole: bool) -> SliceCut | None:
    """The same for bits.  is_whole: digits inside one container are lanes, because containers of their parts would overlap."""
    bytes_: list[Digit] = []
    bits: list[Digit] = []
    for axis, layout in enumerate(part.dims):
        weight = 1
        for extent, stride in layout.modes:
            period = 8 // gcd(stride, 8)                         # after so many steps the digit is at a byte border
            inside = min(extent, period)
            if extent % inside or (is_whole and abs(stride) * extent <= CONTAINER):
                inside = extent                                  # ten 3-bit codes in a word: all of them are lanes
            if inside > 1:
                bits.append(Digit(axis, weight, inside, stride))
            if extent > inside:
                bytes_.append(Digit(axis, weight * inside, extent // inside, abs(stride) * inside, stride < 0))
            weight *= extent
    offset = part.offset - sum((digit.extent - 1) * digit.stride for digit in bytes_ if digit.is_reversed)
    bits.sort(key=lambda d: (d.axis, -d.weight))
    low = offset + sum((d.extent - 1) * d.stride for d in bits if d.stride < 0)
    at = {values: offset - low // 8 * 8 + sum(v * d.stride for v, d in zip(values, bits, strict=True))
          for values in product(*(range(d.extent) for d in bits))}
    one = all(bit % 8 + part.width <= 8 for bit in at.values())
    container = 1 if one else -(-(max(at.values()) + part.width) // 8)
    lanes = tuple(Lane(values, bit // 8 if one else 0, bit % 8 if one else bit) for values, bit in at.items())
    if min(at.values()) < 0 or 8 * container > CONTAINER or any(d.stride < 8 * container for d in bytes_):
        return None
    return SliceCut(part, tuple(sorted(bytes_, key=lambda d: -d.stride)), tuple(bits), container, lanes, low // 8)


def _cut_base3_slice(part: FieldSlice) -> SliceCut | None:
    """Divides a slice of base-3 digits: digits that change the place in a byte are lanes, whether or not they change the byte."""
    bytes_: list[Digit] = []
    bits: list[Digit] = []
    moves: dict[Digit, int] = {}
    for axis, pair in enumerate(zip(part.dims, part.places, strict=True)):
        cuts = [prod(extent for extent, _ in layout.modes[:i]) for layout in pair for i in range(len(layout.modes))]
        layouts = [refine(layout, cuts) for layout in pair]
        if layouts[0] is None or layouts[1] is None:
            return None
        weight = 1
        for (extent, stride), (_, step) in zip(layouts[0].modes, layouts[1].modes, strict=True):
            digit = Digit(axis, weight, extent, stride)
            (bits if step else bytes_).append(digit)
            moves[digit] = step
            weight *= extent
    bits.sort(key=lambda d: (d.axis, -d.weight))
    first = part.place((0,) * len(part.dims))
    lanes = tuple(Lane(values, sum(v * d.stride for v, d in zip(values, bits, strict=True)) // 8, 0,
                       first + sum(v * moves[d] for v, d in zip(values, bits, strict=True)))
                  for values in product(*(range(d.extent) for d in bits)))
    if min(lane.skip for lane in lanes) < 0 or any(d.stride < 8 for d in bytes_):
        return None
    return SliceCut(part, tuple(sorted(bytes_, key=lambda d: -d.stride)), tuple(bits), 1, lanes, part.offset // 8)
