"""Where the bits of a stored tensor lie, as data that core/slices.py takes: ("q", 0, [[(2, 16), (4, 4), (0, 1, 1)], ...])."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qdsl.compiler.ir.program import Placement, Program, Tensor
from qdsl.core.layout import Slice

Step = tuple[int, ...]                                           # bits; or elements, and their axis; () if there is none


def slices_of(program: Program, tensors: Sequence[Tensor]) -> tuple[Any, ...]:
    """The pieces of a tensor, or of its sections, if all their bits are at digits of subscripts; else none."""
    pieces = [_slices(program, tensor) for tensor in tensors]
    return tuple(piece for inside in pieces for piece in inside) if all(pieces) else ()


def _slices(program: Program, tensor: Tensor) -> list[tuple[Any, ...]]:
    """The pieces of one tensor, or of a section of a row with a constant number of elements."""
    if tensor.stored is not None and (tensor.stored.field is not None or tensor.stored.op == "^"):
        return []
    section = tensor.section
    if section is not None and not (section.by_rows and section.first.is_const and section.length.is_const
                                    and len(tensor.axes) == 2 and not section.is_plane):
        return []
    if program.row_codes and any(placement.field == program.row_codes.code for placement in tensor.placements):
        return []                                                # no other storage has it
    if any(placement.flat or placement.ranges > 1 or placement.copies for placement in tensor.placements):
        return []
    apart = tensor.words > 1 and tensor.axes[-1].digits[-1:] != ("",)
    if apart and any(len(placement.slices) > 1 for placement in tensor.placements):
        return []                                                # planes of one field in words that are apart
    pieces = [_piece(program, tensor, placement, part) for placement in tensor.placements for part in placement.slices]
    return [piece for piece in pieces if piece] if all(pieces) else []


def _piece(program: Program, tensor: Tensor, placement: Placement, part: Slice) -> tuple[Any, ...]:
    """A slice as digits of its coordinates, fastest first; () if it crosses words that are apart."""
    size = tensor.element.bits
    in_one = part.offset % size + part.width <= size
    if part.places or (not in_one and tensor.axes[-1].digits[-1:] != ("",)):
        return ()
    coordinates: list[list[tuple[int, ...]]] = []
    for names, layout in zip(placement.digits, part.dims, strict=True):
        inside = [cut for extent, stride in layout.modes for cut in _mode(tensor, extent, stride)]
        digits = [digit for name in reversed(names) for digit in ([(0, _step(tensor, name))] if name else inside)]
        if len([name for name in names if name]) > 1 or any(not step for _, step in digits):
            return ()
        coordinates.append([(extent, *step) for extent, step in digits])
    start = part.offset + (tensor.section.first.const * size if tensor.section is not None else 0)
    whole = part.lo == 0 and part.width == program.field(placement.field).bits
    return placement.field, start, coordinates, *(() if whole else (part.lo, part.width))


def _mode(tensor: Tensor, extent: int, stride: int) -> list[tuple[int, Step]]:
    """A digit within an element, across elements of the record, or both in turn; without a step if neither."""
    size = tensor.element.bits
    if stride <= 0:
        return [(extent, ())]
    if stride % size == 0:
        return [(extent, _step(tensor, "", stride // size))]
    inside = min(extent, size // stride)
    if inside * stride > size or (size % stride and inside < extent) or extent % inside:
        return [(extent, ())]
    return [(inside, (stride,)), *([(extent // inside, _step(tensor, ""))] if inside < extent else [])]


def _step(tensor: Tensor, digit: str, times: int = 1) -> Step:
    """The step of a variable, or of the word '', along its axis; () if an axis has words that are apart."""
    for place, axis in enumerate(tensor.axes):
        if digit in axis.digits:
            if axis.digits[-1] == digit:
                return times, place
            return (tensor.words * times, place) if axis.digits == (digit, "") else ()
    return ()
