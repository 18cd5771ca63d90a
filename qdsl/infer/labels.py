"""Infers codes from the values of groups: from signs, from order, or from positions on the lattice of a group's values."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import FLOATS, number
from qdsl.infer.tiles import Labels

Values = npt.NDArray[np.float32]
GROUPS = (1 << 14, 4096, 2048, 1024, 512, 256, 128, 96, 64, 48, 32, 16, 8)
TOLERANCE = 1e-5                                                 # relative to a group's largest value: rounding to float32
FEWEST_KNOWN = 0.02                                              # fraction of codes that must be known to find their bits
FEWEST_FLOATS = 0.5                                              # fraction of groups that must be codes of a float type
CHUNK = 1 << 20                                                  # values that are sorted at a time


def labelings(values: Values, most_bits: float) -> Iterator[Labels]:
    """Yields ways to infer codes from values [N, K], the simplest first.  most_bits: stored bits per weight."""
    yield Labels((values >= 0).astype(np.int16), 1, values != 0, top=True)
    for size in group_sizes(values.shape[1]):
        yield label_halves(values, size, oriented=False)
        yield label_halves(values, size, oriented=True)
    for size in group_sizes(values.shape[1]):
        for affine in (False, True):
            labels = label_lattice(values, size, affine, int(most_bits))
            if labels is not None:
                yield labels
    for size in group_sizes(values.shape[1]):
        for name, form in FLOATS.items():
            if form.signed and 2 < form.bits <= min(most_bits, 8):
                labels = label_minifloats(values, size, name)
                if labels is not None:
                    yield labels


def group_sizes(columns: int) -> list[int]:
    """The sizes of groups of columns, the whole row first."""
    return [columns, *(size for size in GROUPS if size < columns and columns % size == 0)]


def label_halves(values: Values, size: int, oriented: bool) -> Labels:
    """The highest bit of codes: the half of its group's range in which a value lies; uncertain near the middle.

    oriented: codes are centred on zero, and the value of largest magnitude has the lowest code.
    """
    n, k = values.shape
    groups = values.reshape(n, -1, size)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    if oriented:
        codes = (groups >= 0) ^ (high > -low)
        return Labels(codes.reshape(n, k).astype(np.int16), 1, values != 0, top=True)
    middle = (low + high) / 2
    certain = np.abs(groups - middle) > (high - low) / 1024
    return Labels((groups > middle).reshape(n, k).astype(np.int16), 1, certain.reshape(n, k), top=True)


def label_lattice(values: Values, size: int, affine: bool, most_bits: int) -> Labels | None:
    """Codes from the steps between a group's values; None if they lie on no lattice of `most_bits` bits.

    affine: a group's lattice may start anywhere, and codes are certain in groups that use the first and the last code.  Otherwise
    the lattice contains zero and codes are centred; only the lowest code reveals that a group's step is negative.
    """
    n, k = values.shape
    steps = np.empty((n, k), np.int32)
    rows = max(1, CHUNK // k)
    for start in range(0, n, rows):
        part = values[start:start + rows].astype(np.float64).reshape(-1, size)
        counted = _lattice_steps(part, affine, most_bits)
        if counted is None:
            return None
        steps[start:start + rows] = counted.reshape(-1, k)
    groups = steps.reshape(n, -1, size)
    low, high = groups.min(2, keepdims=True), groups.max(2, keepdims=True)
    bits = max(1, int((high - low).max()).bit_length())
    if bits > most_bits:
        return None
    if affine:
        certain = np.broadcast_to(high - low == (1 << bits) - 1, groups.shape)
        if certain.mean() < FEWEST_KNOWN:
            return None
        return Labels((groups - low).reshape(n, k).astype(np.int16), bits, certain.reshape(n, k))
    middle = 1 << bits - 1
    if max(int(high.max()), -int(low.min())) > middle:
        return None                                              # codes with a zero point: see `affine`
    flipped = high == middle
    codes = np.where(flipped, -groups, groups) + middle
    certain = np.broadcast_to(flipped | (low == -middle) | ~flipped.any(), groups.shape)
    return Labels(np.clip(codes, 0, 2 * middle - 1).reshape(n, k).astype(np.int16), bits, certain.reshape(n, k))


def label_minifloats(values: Values, size: int, kind: str) -> Labels | None:
    """Codes of a float type, with each group scaled to the type's largest number; None if most groups do not fit."""
    form = number(kind)
    levels = np.array([form.decode(code) for code in range(1 << form.bits)])
    order = np.argsort(levels, kind="stable")[:np.isfinite(levels).sum()]
    ordered = levels[order]

    def codes(groups: Values) -> tuple[npt.NDArray[np.int16], npt.NDArray[np.bool_]]:
        largest = np.abs(groups).max(1, keepdims=True)
        wanted = groups * (form.largest / np.where(largest > 0, largest, 1)).astype(np.float64)
        place = np.searchsorted((ordered[1:] + ordered[:-1]) / 2, wanted)
        exact = np.abs(ordered[place] - wanted) <= 2 * TOLERANCE * form.largest
        return order[place].astype(np.int16), np.broadcast_to(exact.all(1, keepdims=True), exact.shape)

    groups = values.reshape(-1, size)
    if not codes(groups[::max(1, values.size // CHUNK)])[1].mean() >= FEWEST_FLOATS:
        return None
    chosen, certain = (np.concatenate(parts) for parts in zip(*(codes(groups[start:start + max(1, CHUNK // size)]) for start in
                                                                range(0, len(groups), max(1, CHUNK // size))), strict=True))
    return Labels(chosen.reshape(values.shape), form.bits, (certain & (groups != 0)).reshape(values.shape))


def _lattice_steps(groups: npt.NDArray[np.float64], affine: bool, most_bits: int) -> npt.NDArray[np.int32] | None:
    """Values [groups, size] as integer multiples of their group's step, counted from zero or, if affine, from the least value."""
    ordered = np.sort(groups, 1)
    largest = np.abs(ordered[:, [0, -1]]).max(1, keepdims=True)
    gaps = np.diff(ordered, axis=1)
    if not affine:
        gaps = np.concatenate([gaps, np.abs(ordered)], 1)
    gaps[gaps <= largest * TOLERANCE] = np.inf
    least = gaps.min(1, keepdims=True)
    least[~np.isfinite(least)] = 1
    start = ordered[:, :1] if affine else 0.0
    for divisor in (1, 2, 3, 4):                                 # the two nearest values may be further apart than a step
        counts = (ordered - start) / least
        wrong = (np.abs(counts - np.rint(counts)) > 0.02).any(1)
        if not wrong.any():
            break
        least[wrong] *= divisor / (divisor + 1)
    counts = (groups - start) / least
    # A few groups off the lattice are treated as unknown; many of them mean that the group size is wrong.
    if wrong.mean() > 0.02 or np.abs(counts[~wrong]).max(initial=0) >= 1 << most_bits + 1:
        return None
    counts[wrong] = 0
    return np.asarray(np.rint(counts), np.int32)
