"""Where the bits of stored tensors lie, as digits of coordinates, for storage changes (runtime/weight/transpose.py).

The program of a format states it for each tensor.  AWQ's is ("q", 0, [[(2, 16), (4, 4), (0, 1, 1)], 0]): codes q with
coordinates n and k, from bit 0 on.  n has a digit of 2 with a step of 16 bits, one of 4 with a step of 4 bits, and then steps by
one element along axis 1 of the tensor; k is the index along axis 0.  Two more numbers, (..., 2, 1), are for a part of each code:
from bit 2, 1 bit.  The only coordinate of a field [n, k] is its flat position n * K + k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Digits = Sequence[Sequence[Any]] | int                           # (extent, step[, axis]), fastest first; or the axis that it is


def called(function: Callable[..., Any], data: Sequence[Any]) -> Any:
    """What a function returns for the arguments in a program: a tuple, whose last item may have the named ones."""
    return function(*data[:-1], **data[-1]) if isinstance(data[-1], Mapping) else function(*data)


def fill(own: object, **values: object) -> None:
    """Set the attributes of a frozen dataclass that has an __init__ of its own."""
    for name, value in values.items():
        object.__setattr__(own, name, value)


@dataclass(frozen=True, slots=True)
class Digit:
    """A digit of a coordinate: its extent, 0 for the rest, and its step in bits, or in elements along an axis.

    An extent or a step is a number, or an axis as a text.
    """

    extent: int | str
    step: int | str
    axis: int | None = None


@dataclass(frozen=True, slots=True, init=False)
class FieldPiece:
    """Bits [lo, lo + width) of a field's elements, all bits if width is 0; digits: per coordinate, fastest first.

    further: part: (first, whole), for elements from `first` on in each `whole` along the last coordinate.  adds, flips: what is
    added to codes before they are stored, modulo 2^bits, and the bits of them that are flipped.  places: of a base-3 digit in its
    byte, the most significant one is 0: of the first element, and the steps per coordinate.  section: its number along the last
    axis of the tensor; plane: an axis of the tensor, and the index there.  The digits are then those of the section or plane.
    copy: other bits hold the same, and readers take those.
    """

    field: str
    lo: int
    width: int
    start: int
    coordinates: tuple[tuple[Digit, ...], ...]
    further: Mapping[str, Any]

    def __init__(self, field: str, start: int, coordinates: Sequence[Digits], lo: int = 0, width: int = 0,
                 **further: Any) -> None:
        listed = [[(0, 1, digits)] if isinstance(digits, int) else digits for digits in coordinates]
        fill(self, field=field, lo=lo, width=width, start=start, further=further,
             coordinates=tuple(tuple(Digit(*digit) for digit in digits) for digits in listed))

    @property
    def key(self) -> tuple[str, int, int]:
        """A key that is equal for pieces of two storages that hold the same bits."""
        return self.field, self.lo, self.width


@dataclass(frozen=True, slots=True)
class PlacedPiece:
    """A piece in a tensor of `size` bits: its first bit, and per coordinate digits (extent, step in bits), fastest first."""

    start: int
    size: int
    coordinates: tuple[tuple[tuple[int, int], ...], ...]

    def rows(self, start: int, count: int) -> PlacedPiece:
        """The piece for rows [start, start + count), which are multiples of all digits but the slowest."""
        digits = self.coordinates[0]
        run = math.prod(extent for extent, _ in digits[:-1])
        cut = (*digits[:-1], (count // run, digits[-1][1]))
        return PlacedPiece(self.start + start // run * digits[-1][1], self.size, (cut, *self.coordinates[1:]))


def place_piece(piece: FieldPiece, start: int, strides: Sequence[int], size: int, extents: Sequence[int]) -> PlacedPiece | None:
    """A piece placed in a contiguous tensor of `size` bits, for a field of these extents.

    start: the first bit of its section.  strides: bits per step of each axis.  None if the last record along a coordinate is
    partial, and for pieces that are more than strides of bits.
    """
    if piece.further.keys() - {"section"} or len(piece.coordinates) != len(extents):
        return None
    coordinates: list[tuple[tuple[int, int], ...]] = []
    for digits, extent in zip(piece.coordinates, extents, strict=True):
        numbers = [(digit.extent, digit.step * (1 if digit.axis is None else strides[digit.axis])) for digit in digits
                   if isinstance(digit.extent, int) and isinstance(digit.step, int) and digit.step >= 0]
        elements = math.prod(count or 1 for count, _ in numbers)
        if len(numbers) < len(digits) or extent % elements or (extent != elements and all(count for count, _ in numbers)):
            return None
        coordinates.append(tuple((count or extent // elements, step) for count, step in numbers))
    return PlacedPiece(start + piece.start, size, tuple(coordinates))
