"""Changes the storage of a weight by moving whole words, one cache-sized tile at a time, never one byte per code.

If the bits of a piece are at digits of its coordinates in both storages, the change permutes digits of (word, bit in word).
Digits that stay outside of words are axes of a view, and moving them is a copy.  A digit of 2 that leaves a word swaps places
with one that enters, for pairs of words a and b that differ only in that digit:

    t = ((a >> s) ^ b) & m;  b ^= t;  a ^= t << s

Here s is the bit's step in the word and m the bits at which it is 0.  Two digits that swap places inside of words take the same
with a for b.  So AWQ to GPTQ is three rounds for the digits of 8 rows and 8 columns, then one copy.

Act-order columns are gathered in between, when all digits of k are outside of words.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, product

import torch
from torch import Tensor

from qdsl.core.slices import PlacedPiece
from qdsl.host.progress import advance_units

WORDS = {32: torch.int32, 16: torch.int16, 8: torch.int8}
TILE = 1 << 16                                                   # words per tile: the workspace fits a cache
SHARED = 1 << 17                                                 # the same per thread of several, whose calls cost more
GATHERED = 1 << 21                                               # bits of a tile with gathered columns
LAUNCHED = 1 << 24                                               # words per tile if every step is a launch


@dataclass(frozen=True, slots=True)
class WorkAxis:
    """An axis of the workspace: extent, and its steps in words of the source and of the result.

    A step of None means that the digit is absent: only index 0 is read (the rest is 0), or written.
    """

    extent: int
    source: int | None
    result: int | None


@dataclass(frozen=True, slots=True)
class SwapRound:
    """Swaps the digit of `step` bits in a word with that of `axis`, or with that of `other` bits if axis is None."""

    step: int
    axis: int | None
    other: int = 0


@dataclass(frozen=True, slots=True)
class MovePlan:
    """Words of `bits` bits, and their axes in the order of work.

    first, last: the first word of source and result.  clear: bits that no element has, which become 0.
    """

    bits: int
    axes: tuple[WorkAxis, ...]
    rounds: tuple[SwapRound, ...]
    first: int
    last: int
    clear: int

    @property
    def filled(self) -> int:
        """The number of result bits that are written."""
        return self.bits * math.prod(axis.extent for axis in self.axes if axis.result is not None)


@dataclass(frozen=True, slots=True)
class _MovedDigit:
    """A digit of an element's coordinates or bits, with its steps in bits in both storages; None if absent."""

    extent: int
    source: int | None
    result: int | None


@lru_cache(maxsize=256)
def plan_move(source: PlacedPiece, result: PlacedPiece, width: int) -> MovePlan | None:
    """The plan that moves a piece of `width` bits from one place to the other; None if digits of words cannot do it.

    Prefers words whose bits all belong to the piece, then long words.
    """
    best: MovePlan | None = None
    for bits in WORDS:
        digits = _digits(source, result, width, bits)
        whole = digits is not None and all(digit.source is not None and digit.result is not None for digit in digits)
        if digits is not None and (whole or best is None):
            best = _plan_of_digits(digits, source.start // bits, result.start // bits, bits)
        if whole:
            break
    return best


# -- digits -----------------------------------------------------------------------------------------------------------


def _digits(source: PlacedPiece, result: PlacedPiece, width: int, bits: int) -> list[_MovedDigit] | None:
    """The common digits of both places, those inside of words of `bits` bits split into twos; None if there are none."""
    if width & (width - 1) or width > bits or any(at % bits for at in (source.start, source.size, result.start, result.size)):
        return None
    digits = [_MovedDigit(2, 1 << i, 1 << i) for i in range(width.bit_length() - 1)]
    for before, after in zip(source.coordinates, result.coordinates, strict=True):
        left, right = _split_at_words(before, bits), _split_at_words(after, bits)
        both = _split_digits_alike(left, right) if left is not None and right is not None else None
        if both is None:
            return None
        for digit in both:
            inside = min(digit.source or 0, digit.result or 0) < bits
            if inside and digit.extent & (digit.extent - 1):
                return None
            digits += _by_two(digit) if inside else [digit]
    places = [1 << i for i in range(bits.bit_length() - 1)]
    steps_in_word = [[digit.source for digit in digits if (digit.source or 0) < bits],
             [digit.result for digit in digits if (digit.result or 0) < bits]]
    if any(len(set(steps)) < len(steps) or not set(steps) <= set(places) for steps in steps_in_word):
        return None
    return [*digits, *(_MovedDigit(2, step, None) for step in places if step not in steps_in_word[0]),
            *(_MovedDigit(2, None, step) for step in places if step not in steps_in_word[1])]


def _split_at_words(digits: Sequence[tuple[int, int]], bits: int) -> list[tuple[int, int]] | None:
    """The digits, split so that each is inside or outside of words."""
    placed: list[tuple[int, int]] = []
    for extent, step in digits:
        if step >= bits or extent * step <= bits:
            if step >= bits and step % bits and extent > 1:
                return None
            placed.append((extent, step))
        elif bits % step or extent % (bits // step):
            return None
        else:
            placed += [(bits // step, step), (extent * step // bits, bits)]
    return [(extent, step) for extent, step in placed if extent > 1]


def _split_digits_alike(left: Sequence[tuple[int, int]], right: Sequence[tuple[int, int]]) -> list[_MovedDigit] | None:
    """Two lists of digits of one coordinate, fastest first, split at the same weights."""
    sides = []
    weights = {1}
    for digits in (left, right):
        weight = 1
        for extent, _ in digits:
            weight *= extent
            weights.add(weight)
    cuts = sorted(weights)
    if any(b % a for a, b in pairwise(cuts)):
        return None
    for digits in (left, right):
        steps: list[int] = []
        weight = 1
        for extent, step in digits:
            steps += [step * (cut // weight) for cut in cuts if weight <= cut < weight * extent]
            weight *= extent
        sides.append(steps)
    return [_MovedDigit(b // a, x, y) for (a, b), x, y in zip(pairwise(cuts), *sides, strict=True)]


def _by_two(digit: _MovedDigit) -> list[_MovedDigit]:
    assert digit.source is not None and digit.result is not None
    return [_MovedDigit(2, digit.source << i, digit.result << i) for i in range(digit.extent.bit_length() - 1)]


# -- rounds -----------------------------------------------------------------------------------------------------------


def _plan_of_digits(digits: Sequence[_MovedDigit], first: int, last: int, bits: int) -> MovePlan:
    """The rounds that bring every digit to its place in the word, and the axes in their best order."""
    inside = {digit.source: digit for digit in digits if digit.source is not None and digit.source < bits}
    wanted = {digit.result: digit for digit in digits if digit.result is not None and digit.result < bits}
    clear = 0
    for step, digit in inside.items():
        if digit.result is None and wanted[step].source is None:             # no element has this bit, before and after
            inside[step] = wanted[step]
            clear |= ~zeros(step, bits)
    outside = [digit for digit in digits if digit not in inside.values() and (digit.source is None or digit.source >= bits)]
    slots = list(outside)                                        # the current digit of each axis
    rounds: list[SwapRound] = []
    while open_ := [step for step in inside if inside[step] != wanted[step]]:
        step = next((step for step in open_ if wanted[step] in slots), open_[0])
        if wanted[step] in slots:
            axis = slots.index(wanted[step])
            rounds.append(SwapRound(step, axis))
            slots[axis], inside[step] = inside[step], wanted[step]
        else:
            other = next(place for place in inside if inside[place] == wanted[step])
            rounds.append(SwapRound(min(step, other), None, max(step, other)))
            inside[step], inside[other] = inside[other], inside[step]
    axes = [WorkAxis(before.extent, _words(before.source, bits), _words(after.result, bits))
            for before, after in zip(outside, slots, strict=True)]
    return _sort_axes(MovePlan(bits, tuple(axes), tuple(rounds), first, last, clear & (1 << bits) - 1))


def _sort_axes(plan: MovePlan) -> MovePlan:
    """The axes of rounds first, in the order of the result, then the others in the order of the source."""
    moved = {round.axis for round in plan.rounds}
    far = [(axis.result if i in moved else axis.source) or 0 for i, axis in enumerate(plan.axes)]
    order = sorted(range(len(plan.axes)), key=lambda i: (i not in moved, -far[i]))
    rounds = tuple(replace(round, axis=None if round.axis is None else order.index(round.axis)) for round in plan.rounds)
    return replace(plan, axes=tuple(plan.axes[i] for i in order), rounds=rounds)


def _words(step: int | None, bits: int) -> int | None:
    return None if step is None else step // bits


def zeros(step: int, bits: int) -> int:
    """The bits of a word at which the digit of this step is 0."""
    return sum((1 << step) - 1 << at for at in range(0, bits, 2 * step))


# -- work -------------------------------------------------------------------------------------------------------------


def move_bits(plan: MovePlan, source: Tensor, result: Tensor) -> None:
    """Copy a piece from one contiguous tensor to another, of any dtypes, by a plan."""
    source, result = _flat(source, plan.bits), _flat(result, plan.bits)
    read = _view(source, plan.first, [(1 if axis.source is None else axis.extent, axis.source) for axis in plan.axes])
    written = _view(result, plan.last, [(1 if axis.result is None else axis.extent, axis.result) for axis in plan.axes])
    if not plan.rounds and not plan.clear and read.shape == written.shape:
        written.copy_(read)
        return
    work: dict[tuple[int, ...], Workspace] = {}
    threads = torch.get_num_threads()
    words = LAUNCHED if source.device.type == "cuda" else TILE if threads == 1 else SHARED * threads
    for tile in _work_tiles(plan, words):
        shape = tuple(length for _, length in tile)
        space = work.get(shape) or work.setdefault(shape, Workspace(plan, shape, source))
        space.take(_tile_view(read, tile))
        space.apply_rounds()
        _tile_view(written, tile).copy_(space.words[space.kept])
        advance_units(math.prod(shape) * plan.bits // 8)


def _flat(tensor: Tensor, bits: int) -> Tensor:
    """A tensor as words, copied if it is not aligned to them."""
    if tensor.storage_offset() * tensor.element_size() * 8 % bits:
        tensor = tensor.clone()
    return tensor.view(-1).view(WORDS[bits])


class Workspace:
    """A tile of words, and half as many words for the differences of a round."""

    def __init__(self, plan: MovePlan, shape: tuple[int, ...], like: Tensor) -> None:
        self.words = like.new_zeros(shape)
        self.difference = like.new_empty(math.prod(shape))
        self.read = tuple(slice(None) if axis.source is not None else slice(0, 1) for axis in plan.axes)
        self.kept = tuple(slice(None) if axis.result is not None else slice(0, 1) for axis in plan.axes)
        self.partial = any(axis.source is None for axis in plan.axes)
        self.clear = like.new_tensor(_signed(~plan.clear, plan.bits)) if plan.clear else None
        self.steps: list[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]] = []
        for round in plan.rounds:
            a, b, by, at = self._pair(round, plan.bits)
            self.steps.append((a, b, self.difference[:a.numel()].view(a.shape), like.new_tensor(by),
                               like.new_tensor(_signed(at, plan.bits))))

    def _pair(self, round: SwapRound, bits: int) -> tuple[Tensor, Tensor, int, int]:
        """The parts of a swap: both sets of words, the shift, and the mask of the second ones."""
        if round.axis is None:
            return self.words, self.words, round.other - round.step, ~zeros(round.step, bits) & zeros(round.other, bits)
        return self.words.select(round.axis, 0), self.words.select(round.axis, 1), round.step, zeros(round.step, bits)

    def take(self, source: Tensor) -> None:
        """Copy the bits to move into the words; clear the others."""
        if self.partial:
            self.words.zero_()
        self.words[self.read].copy_(source)
        if self.clear is not None:
            self.words.bitwise_and_(self.clear)

    def apply_rounds(self) -> None:
        """Swap the digits of all rounds, in place."""
        for a, b, difference, by, at in self.steps:
            torch.bitwise_right_shift(a, by, out=difference)
            difference.bitwise_xor_(b).bitwise_and_(at)
            b.bitwise_xor_(difference)
            a.bitwise_xor_(difference.bitwise_left_shift_(by))


def gather_columns(source: PlacedPiece, result: PlacedPiece, width: int, columns: Tensor, stored: Tensor, into: Tensor) -> bool:
    """Move column columns[j], int64 [K], of the source to column j; returns False if moves of words cannot do it.

    The rows must fit a cache; in between, columns are consecutive, with `width` bits of several rows in a word.
    """
    bits = max(WORDS)
    (rows, k) = (math.prod(extent for extent, _ in digits) for digits in source.coordinates)
    least = math.lcm(bits // width, *(rows // placed.coordinates[0][-1][0] for placed in (source, result)))
    step = max(1, GATHERED // max(1, k * width) // least) * least
    for start in range(0, rows, step):
        count = min(step, rows - start)
        if count % least:
            return False
        between = PlacedPiece(0, k * count * width,
                              (((count * width // bits, bits), (bits // width, width)), ((k, count * width),)))
        first, last = plan_move(source.rows(start, count), between, width), plan_move(between, result.rows(start, count), width)
        if first is None or last is None:
            return False
        words = stored.new_empty((k, count * width // bits), dtype=WORDS[bits])
        move_bits(first, stored, words)
        move_bits(last, words.index_select(0, columns), into)
    return True


def _view(words: Tensor, start: int, axes: Sequence[tuple[int, int | None]]) -> Tensor:
    return words.as_strided([extent for extent, _ in axes], [step or 0 for _, step in axes], words.storage_offset() + start)


def _signed(value: int, bits: int) -> int:
    """A word as the signed integer of its bits."""
    return (value + (1 << bits - 1)) % (1 << bits) - (1 << bits - 1)


Tile = tuple[tuple[int, int], ...]                               # first index and length along every axis


def _work_tiles(plan: MovePlan, words: int) -> Iterator[Tile]:
    """Parts of about `words` words; axes with large steps on both sides are divided first, those of rounds never."""
    lengths = [axis.extent for axis in plan.axes]
    moved = {round.axis for round in plan.rounds}
    free = [i for i, axis in enumerate(plan.axes) if i not in moved and axis.source is not None and axis.result is not None]
    apart = [(min(axis.source or 0, axis.result or 0), axis.source or 0) for axis in plan.axes]
    for i in sorted(free, key=apart.__getitem__, reverse=True):
        others = math.prod(lengths) // lengths[i]
        lengths[i] = min(lengths[i], max(1, words // others))
    ranges = [range(0, axis.extent, length) for axis, length in zip(plan.axes, lengths, strict=True)]
    for starts in product(*ranges):
        yield tuple((start, min(length, axis.extent - start))
                    for start, length, axis in zip(starts, lengths, plan.axes, strict=True))



def _tile_view(view: Tensor, tile: Tile) -> Tensor:
    for axis, (start, length) in enumerate(tile):
        if length < view.shape[axis]:
            view = view.narrow(axis, start, length)
    return view
