"""Where the bits of stored tensors lie, as digits of coordinates, for storage changes (runtime/weight/transpose.py).

A generated module states it for each tensor that allows it.  `q[2:16 4:4 1@1, 1@0]` is AWQ's: codes q with coordinates n and k.
n has a digit of 2 with a step of 16 bits, one of 4 with a step of 4 bits, and the rest steps by one element along axis 1 of the
tensor; k steps along axis 0.  `q.at(2):1[...]` is bit 2 of each code, and `d+128[...]` begins 128 bits into a record.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

PIECE = re.compile(r"(?P<field>\w+)(?:\.at\((?P<lo>\d+)\):(?P<width>\d+))?(?:\+(?P<start>\d+))?\[(?P<coordinates>[^]]*)\]")
DIGIT = re.compile(r"(?:(?P<extent>\d+):)?(?P<step>\d+)(?:@(?P<axis>\d+))?")


@dataclass(frozen=True, slots=True)
class Digit:
    """A digit of a coordinate: its extent, 0 for the rest, and its step in bits, or in elements along an axis."""

    extent: int
    step: int
    axis: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """Bits [lo, lo + width) of a field's elements, all bits if width is 0; digits: per coordinate, fastest first."""

    field: str
    lo: int
    width: int
    start: int
    coordinates: tuple[tuple[Digit, ...], ...]

    @property
    def key(self) -> tuple[str, int, int]:
        """A key that is equal for pieces of two storages that hold the same bits."""
        return self.field, self.lo, self.width


@dataclass(frozen=True, slots=True)
class Placed:
    """A piece in a tensor of `size` bits: its first bit, and per coordinate digits (extent, step in bits), fastest first."""

    start: int
    size: int
    coordinates: tuple[tuple[tuple[int, int], ...], ...]

    def rows(self, start: int, count: int) -> Placed:
        """The piece for rows [start, start + count), which are multiples of all digits but the slowest."""
        digits = self.coordinates[0]
        run = math.prod(extent for extent, _ in digits[:-1])
        cut = (*digits[:-1], (count // run, digits[-1][1]))
        return Placed(self.start + start // run * digits[-1][1], self.size, (cut, *self.coordinates[1:]))


@cache
def pieces(texts: tuple[str, ...]) -> tuple[Piece, ...]:
    """Parses the texts of Stored.bits."""
    parsed: list[Piece] = []
    for part in texts:
        match = PIECE.fullmatch(part)
        assert match is not None, part
        coordinates = match["coordinates"].split(", ") if match["coordinates"] else []
        parsed.append(Piece(match["field"], int(match["lo"] or 0), int(match["width"] or 0), int(match["start"] or 0),
                           tuple(tuple(map(_digit, digits.split())) for digits in coordinates)))
    return tuple(parsed)


def _digit(text: str) -> Digit:
    match = DIGIT.fullmatch(text)
    assert match is not None, text
    return Digit(int(match["extent"] or 0), int(match["step"]), int(match["axis"]) if match["axis"] else None)


def place(piece: Piece, shape: Sequence[int], bits: int, extents: Sequence[int]) -> Placed | None:
    """A piece placed in a contiguous tensor of this shape with `bits` per element, for a field of these extents.

    None if the last record along a coordinate is partial.
    """
    strides = [bits * math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    coordinates: list[tuple[tuple[int, int], ...]] = []
    for digits, extent in zip(piece.coordinates, extents, strict=True):
        elements = math.prod(digit.extent or 1 for digit in digits)
        if extent % elements or (extent != elements and all(digit.extent for digit in digits)):
            return None
        steps = [digit.step * (1 if digit.axis is None else strides[digit.axis]) for digit in digits]
        coordinates.append(tuple((digit.extent or extent // elements, step) for digit, step in zip(digits, steps, strict=True)))
    return Placed(piece.start, bits * math.prod(shape), tuple(coordinates))
