"""How a kernel iterates over the weight, from the bit layouts.

Does: takes an element (a word) of the tensor with most bits per weight as the unit of work.  Splits the digits of n and k into
those that move inside a word (lanes, unrolled) and those that move from word to word (the unit).  If elements straddle words, the
unit is a whole record.  If a block of rows shares codes, the unit is those rows in one column, whose code is loaded once.
Does not: choose tile sizes.  It leaves `units` None for other layouts (flat positions, ranges of elements, rows inside a record);
kernels then work weight by weight.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.program import IterationUnits, Placement, Program, Tensor, UnrolledDigit
from qdsl.compiler.spec.source import Problems
from qdsl.core.layout import FieldSlice, refine, split_at_words

MAX_WORDS = 8
ROWS = 8                                                         # rows per unit: each has its own sum
_LANE_NAMES = "hijabcefuvwxyz"


@dataclass(frozen=True, slots=True)
class _RecordDigit:
    """A digit of a coordinate inside a record; inside, outside: whether it moves within a word, and between words."""

    axis: str
    weight: int
    extent: int
    inside: bool
    outside: bool = False


def choose_units(program: Program, problems: Problems) -> Program:
    """The program with units; never adds problems, because kernels can serve any layout weight by weight.

    A unit is a word, and its lanes are the weights that it holds:

    >>> shown(record="d; l<16: q[l] q[l + 16]")
    units of blocks: t, i < 16 (k + 1 i); contiguous along k
    lanes h < 2 (k + 16 h)
    >>> shown(record="d; l<32: q[l]")
    units of blocks: t, i < 16 (k + 2 i); contiguous along k
    lanes h < 2 (k + 1 h)
    """
    return replace(program, units=_units_of_words(program) or _units_of_rows(program))


def full_placements(program: Program) -> list[tuple[Tensor, Placement]]:
    """The placements of fields that have a value per weight."""
    every = (ix.name("n"), ix.name("k"))
    return [(tensor, placement) for tensor in program.tensors for placement in tensor.placements
            if program.field(placement.field).index == every]


def _units_of_rows(program: Program) -> IterationUnits | None:
    """A unit of ROWS rows of a column that share a code, if codes are [n // size, k]; else None."""
    single = {field.index for field in program.fields if field.number is not None and len(field.index) == 2
              and field.index[1] == ix.name("k")}
    atom = next(iter(single))[0].terms[0][0] if len(single) == 1 else None
    if atom is None or atom.op != "div" or not atom.args[1].is_const or atom.args[1].const % ROWS:
        return None
    return IterationUnits("", "k", {"n": ROWS, "k": 1}, (("k", 1, None),), (UnrolledDigit(_LANE_NAMES[0], "n", 1, ROWS),), False)


def _units_of_words(program: Program) -> IterationUnits | None:
    full = full_placements(program)
    tiles = {placement.extents for _, placement in full}
    if not full or len(tiles) > 1 or any(placement.flat or not placement.plain or placement.ranges > 1 for _, placement in full):
        return None
    tensor, first = max(full, key=lambda pair: sum(part.width for part in pair[1].slices))
    cut = [split_at_words(part, owner.element.bits) for owner, placement in full for part in placement.slices]
    whole = None in cut
    if whole and any(owner.words > MAX_WORDS or owner.element.bits != 32 or placement.extents[0] > 1
                     for owner, placement in full):
        return None
    places = [(replace(part, dims=part.places),) * 2 for _, placement in full for part in placement.slices if part.places]
    digits = [] if whole else _record_digits(first, [*(pair for pair in cut if pair is not None), *places])
    if whole:
        digits = [_RecordDigit(axis, 1, extent, True) for axis, extent in zip("nk", first.extents, strict=True) if extent > 1]
    if digits is None or any(digit.axis == "n" and not digit.inside for digit in digits):
        return None
    variables = {axis: name for axis, (name, _) in zip("nk", first.tiles, strict=True)}
    if "" in variables.values():
        return None
    names = iter(letter for letter in _LANE_NAMES if letter not in variables.values())
    # Lanes that choose a word are the outer loops, so that a word is loaded once and cut in the inner loops.
    inside = sorted((d for d in digits if d.inside), key=lambda d: (d.axis == "k", not d.outside, -d.weight))
    lanes = tuple(UnrolledDigit(next(names), d.axis, d.weight, d.extent) for d in inside)
    steps = sorted(((d.weight, d.extent) for d in digits if not d.inside), reverse=True)
    outer = (variables["k"], first.extents[1], None)
    unit = (outer, *((next(names), weight, extent) for weight, extent in steps))
    axis = _contiguous_axis(tensor, variables, len(steps) > 0)
    return IterationUnits(tensor.name, axis, dict(zip("nk", first.extents, strict=True)), unit, lanes, whole)


def _record_digits(placement: Placement, cut: list[tuple[FieldSlice, FieldSlice]]) -> list[_RecordDigit] | None:
    """Digits of n and k inside a record, split at every border of slices; None if the borders do not nest."""
    digits: list[_RecordDigit] = []
    for axis, letter in enumerate("nk"):
        size = placement.extents[axis]
        cuts = sorted({prod(e for e, _ in shift.dims[axis].modes[:i]) for shift, _ in cut
                       for i in range(1 + len(shift.dims[axis].modes))} | {1, size})
        if any(b % a for a, b in pairwise(cuts)):
            return None
        shifts = [refine(shift.dims[axis], cuts) for shift, _ in cut]
        steps = [refine(words.dims[axis], cuts) for _, words in cut]
        if None in shifts or None in steps:
            return None
        for i, (weight, above) in enumerate(pairwise(cuts)):
            inside, outside = (any(layout is not None and layout.modes[i][1] for layout in strides)
                               for strides in (shifts, steps))
            digits.append(_RecordDigit(letter, weight, above // weight, inside, outside))
    return _merge_digits(digits)


def _merge_digits(digits: list[_RecordDigit]) -> list[_RecordDigit]:
    """Adjacent digits of a unit merged if their words are consecutive in memory."""
    merged: list[_RecordDigit] = []
    for digit in digits:
        last = merged[-1] if merged else None
        if last and not last.inside and not digit.inside and last.axis == digit.axis \
                and last.weight * last.extent == digit.weight:
            merged[-1] = replace(last, extent=last.extent * digit.extent)
        else:
            merged.append(digit)
    return merged


def _contiguous_axis(tensor: Tensor, variables: dict[str, str], steps: bool) -> str:
    """The axis that is contiguous in memory: that of the last digit of the tensor's last axis."""
    digits = tensor.axes[-1].digits
    if digits[-1] == "" and (steps or len(digits) == 1):
        return "k"
    last = digits[-1] if digits[-1] else digits[-2]
    return "n" if last == variables["n"] else "k"
