"""Where the bits of a stored tensor lie, as data that core/slices.py takes: ("q", 0, [[(2, 16), (4, 4), (0, 1, 1)], ...])."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

from qdsl.compiler.emit.axes import axis_text
from qdsl.compiler.ir.index import Index, product_of
from qdsl.compiler.ir.program import Placement, Program, Tensor
from qdsl.core.layout import FieldSlice, Layout

Step = tuple[int | str, ...]                                     # bits; or elements, and their axis


def stored_arguments(program: Program, tensors: Sequence[Tensor]) -> dict[str, Any]:
    """The arguments of `Stored` for the bits of a tensor, or of its sections: `field` if it is one, in order, else `slices`."""
    pieces = tuple(piece for number, tensor in enumerate(tensors) for piece in _pieces(program, tensor, number))
    plain = [*range(len(tensors[0].axes))]
    change = tensors[0].stored
    is_code = program.row_codes is not None and any(piece[0] == program.row_codes.code for piece in pieces)
    if len(pieces) == 1 and pieces[0][1:] == (0, plain) and not is_code:
        return {"field": pieces[0][0]}
    flips = change.amount if change is not None and change.field is None and change.op == "^" else 0
    return {"words": _separate_words_axis(tensors[0]), "flips": flips, "row_codes" if is_code else "slices": pieces}


def _separate_words_axis(tensor: Tensor) -> tuple[int, int] | tuple[()]:
    """The axis of words that are no neighbours, where a record begins later than in the first word or elements cross words.

    With the number of words per record; () if there is no such axis.
    """
    places, size = [place for place, axis in enumerate(tensor.axes) if "" in axis.digits], tensor.element.bits
    if tensor.words == 1 or tensor.axes[-1].digits[-1:] == ("",):
        return ()
    parts = [part for placement in tensor.placements for part in placement.slices]
    crosses = any(part.offset >= size or part.bit(index) % size + part.width > size
                  for part in parts for index in product(*map(range, part.extents)))
    return (places[0], tensor.words) if crosses else ()


def _pieces(program: Program, tensor: Tensor, number: int) -> Iterator[tuple[Any, ...]]:
    """The pieces of one tensor, or of a section, which has this number."""
    section, start = tensor.section, 0
    shared: dict[str, Any] = {}
    if section is not None and section.by_rows and section.first.is_const and section.length.is_const \
            and len(tensor.axes) == 2 and not section.is_plane:
        start = section.first.const * tensor.element.bits
    elif section is not None:
        shared = {"plane": (int(section.by_rows), number)} if section.is_plane else {"section": number}
    for placement in tensor.placements:
        change, further = tensor.stored, dict(shared)
        if change is not None and change.field == placement.field:
            further["adds" if change.op == "+" else "flips"] = change.amount
        for part in (*placement.slices, *placement.copies):
            whole = part.lo == 0 and part.width == program.field(placement.field).bits
            yield (placement.field, start + part.offset, _coordinates(tensor, placement, part),
                   *(() if whole else (part.lo, part.width)),
                   *_piece_options(placement, part, {**further, **({"copy": True} if part in placement.copies else {})}))


def _piece_options(placement: Placement, part: FieldSlice, further: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """What a piece has beside its digits: a range of elements, places of base-3 digits, and `further`."""
    options = dict(further)
    if placement.ranges > 1:
        options["part"] = (part.start, placement.extents[-1])
    if part.places:
        options["places"] = (sum(layout.offset for layout in part.places), [list(layout.modes) for layout in part.places])
    return (options,) if options else ()


def _coordinates(tensor: Tensor, placement: Placement, part: FieldSlice) -> list[int | list[tuple[Any, ...]]]:
    """The digits of every coordinate, fastest first, or the axis whose index it is."""
    coordinates: list[int | list[tuple[Any, ...]]] = []
    for names, layout in zip(placement.digits, part.dims, strict=True):
        digits: list[tuple[Any, ...]] = []
        slowest = next((name for name in names if name), "")     # its extent follows from those of the others
        for name in reversed(names):
            if not name:
                digits += _digits_in_record(tensor, layout)
            else:
                digits.append((0 if name == slowest else _extent(tensor.var(name).extent), *_digit_step(tensor, name)))
        coordinates.append(digits[0][2] if [digit[:2] for digit in digits] == [(0, 1)] else digits)
    return coordinates


def _extent(extent: Index) -> int | str:
    return extent.const if extent.is_const else axis_text(extent)


def _digits_in_record(tensor: Tensor, layout: Layout) -> list[tuple[Any, ...]]:
    """The digits within a record: those across elements have steps along the axis of words, if they are whole elements."""
    size, in_record = tensor.element.bits, tensor.axes[-1].digits[-1:] == ("",)
    digits: list[tuple[Any, ...]] = []
    for extent, stride in layout.modes:
        is_whole = stride > 0 and stride % size == 0
        inside = 1 if is_whole else min(extent, size // stride) if stride > 0 else extent
        if _separate_words_axis(tensor) or stride <= 0 or (in_record and not is_whole and (
                inside * stride > size or (size % stride and inside < extent) or extent % inside)):
            digits.append((extent, stride))                      # positions that cross elements, or fall
            continue
        digits += [(inside, stride)] if inside > 1 else []
        digits += [(extent // inside, *_digit_step(tensor, "", max(1, stride // size)))] if inside < extent else []
    return digits


def _digit_step(tensor: Tensor, digit: str, times: int = 1) -> Step:
    """The step of a variable, or of the word '', along its axis."""
    place, axis = next((place, axis) for place, axis in enumerate(tensor.axes) if digit in axis.digits)
    apart = _separate_words_axis(tensor)
    faster = [Index(tensor.words) if not name else tensor.var(name).extent for name in axis.digits[axis.digits.index(digit) + 1:]
              if name or place not in apart[:1]]
    step = product_of([Index(times), *faster])
    return (step.const if step.is_const else axis_text(step)), place
