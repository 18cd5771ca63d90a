"""Where the bits of stored tensors lie, as digits of coordinates, for storage changes (runtime/weight/transpose.py).

The program of a format states it for each tensor that allows it.  AWQ's is ("q", 0, [[(2, 16), (4, 4), (0, 1, 1)], [(0, 1, 0)]]):
codes q with coordinates n and k, from bit 0 on.  n has a digit of 2 with a step of 16 bits, one of 4 with a step of 4 bits, and
the rest steps by one element along axis 1 of the tensor; k steps along axis 0.  Two more numbers, (..., 2, 1), are for a part of
each code: from bit 2, 1 bit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Digits = Sequence[Sequence[int]]                                 # of a coordinate, fastest first: (extent, step[, axis])


@dataclass(frozen=True, slots=True)
class Digit:
    """A digit of a coordinate: its extent, 0 for the rest, and its step in bits, or in elements along an axis."""

    extent: int
    step: int
    axis: int | None = None


@dataclass(frozen=True, slots=True, init=False)
class Piece:
    """Bits [lo, lo + width) of a field's elements, all bits if width is 0; digits: per coordinate, fastest first."""

    field: str
    lo: int
    width: int
    start: int
    coordinates: tuple[tuple[Digit, ...], ...]

    def __init__(self, field: str, start: int, coordinates: Sequence[Digits], lo: int = 0, width: int = 0) -> None:
        object.__setattr__(self, "field", field)
        object.__setattr__(self, "lo", lo)
        object.__setattr__(self, "width", width)
        object.__setattr__(self, "start", start)
        object.__setattr__(self, "coordinates", tuple(tuple(Digit(*digit) for digit in digits) for digits in coordinates))

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
