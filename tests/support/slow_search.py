"""Searches for scales of least squares over any table of values, one number at a time, in Python's floats."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from math import frexp, inf

import numpy as np

from tests.support.slow_numbers import nearest, value

Rounded = Callable[[float], float]


def rounded(kind: str) -> Rounded:
    """How scales of a type are rounded: to nearest, or up to a power of two."""
    if kind == "e8m0":
        return lambda scale: 2.0 ** min(max(frexp(scale)[1] - (frexp(scale)[0] == 0.5), -127), 127) if scale > 0 else 2.0 ** -127

    def to_nearest(scale: float) -> float:
        with np.errstate(over="ignore"):
            return float(value(kind, nearest(kind, np.float32(scale))))
    return to_nearest


class Block:
    """Weights that share a scale, and what their squares of errors count."""

    def __init__(self, x: Sequence[float], by: Sequence[float]) -> None:
        self.x, self.by = x, by

    def places(self, table: Sequence[float], scale: float) -> list[int]:
        """Places of the nearest values among rising ones, of two the lower."""
        middles = [(a + b) / 2 for a, b in pairwise(table)]
        return [bisect_left(middles, x / scale if scale else 0.0) for x in self.x]

    def error(self, table: Sequence[float], scale: float) -> float:
        """The sum of squared errors, in order."""
        total = 0.0
        for x, by, place in zip(self.x, self.by, self.places(table, scale), strict=True):
            total += by * (x - scale * table[place]) ** 2
        return total

    def ends(self, table: Sequence[float], is_signed: bool) -> Iterator[float]:
        """The least scale of each sign with which no weight is beyond the values; of one sign where the values are symmetric."""
        is_symmetric = list(table) == [-v for v in reversed(table)]
        for sign in (1, -1) if is_signed and not is_symmetric else (1,):
            needed = [0.0, *(sign * x / end for x in self.x for end in (table[0], table[-1]) if end and sign * x / end > 0 and
                             (end > 0) == (end == table[-1]))]
            yield sign * max(needed)

    def best(self, table: Sequence[float], stored: Rounded, is_signed: bool) -> tuple[float, float]:
        """(scale, error) of the trials, of equals the first."""
        scale, error = stored(next(self.ends(table, is_signed))), inf
        for trial in [stored(end * (i / 32)) for end in self.ends(table, is_signed) for i in range(36, 15, -1)]:
            if (new := self.error(table, trial)) < error:
                scale, error = trial, new
        for _ in range(2):
            trial = stored(fit([(self.x, self.by, [table[place] for place in self.places(table, scale)])]))
            if (new := self.error(table, trial)) < error:
                scale, error = trial, new
        return scale, error


class EvenBlock(Block):
    """As Block; `codes` are those of values, and four weights after another have an even count of ones in theirs."""

    def __init__(self, x: Sequence[float], by: Sequence[float], codes: Mapping[float, int]) -> None:
        super().__init__(x, by)
        self.codes = codes

    def places(self, table: Sequence[float], scale: float) -> list[int]:
        """Places of the nearest values; where the count is odd the cheapest weight takes the nearest value that changes it."""
        chosen: list[int] = []
        for start in range(0, len(self.x), 4):
            best = []
            for x, by in zip(self.x[start:start + 4], self.by[start:start + 4], strict=True):
                unit, pairs = x / scale if scale else 0.0, []
                for parity in (0, 1):
                    own = [place for place, value in enumerate(table) if self.codes[value].bit_count() % 2 == parity]
                    middles = [(table[a] + table[b]) / 2 for a, b in pairwise(own)]
                    place = own[bisect_left(middles, unit)]
                    pairs.append((by * (unit - table[place]) ** 2, parity, place))
                best.append(sorted(pairs))
            if sum(pairs[0][1] for pairs in best) % 2:
                growth = [pairs[1][0] - pairs[0][0] for pairs in best]
                best[growth.index(min(growth))].reverse()
            chosen += [pairs[0][2] for pairs in best]
        return chosen


def fit(parts: Sequence[tuple[Sequence[float], Sequence[float], Sequence[float]]]) -> float:
    """The scale of least squares of weights, what they count, and values, in order; 0 where all values are."""
    across = square = 0.0
    for x, by, values in parts:
        for weight, count, one in zip(x, by, values, strict=True):
            across += count * one * weight
            square += count * one * one
    return across / square if square > 0 else 0.0


def alone(block: Block, tables: Sequence[Sequence[float]], stored: Rounded, is_signed: bool) -> tuple[float, int]:
    """(scale, choice) of a block by itself; of choices with equal errors the first."""
    trials = [block.best(table, stored, is_signed) for table in tables]
    choice = min(range(len(tables)), key=lambda i: trials[i][1])
    return trials[choice][0], choice


def nested(blocks: Sequence[Block], tables: Sequence[Sequence[float]], steps: Sequence[float], stored: Rounded,
           ) -> tuple[float, list[int], list[int]]:
    """(super-scale, steps, choices) of a super-block."""
    scales = [alone(block, tables, lambda scale: scale, True)[0] for block in blocks]
    largest = max(scales, key=abs)
    order = sorted(range(len(steps)), key=lambda i: steps[i])
    rising = [steps[i] for i in order]
    above, best, picked = stored(largest / max(map(abs, steps))), inf, [(0, 0)] * len(blocks)
    for end in (rising[-1], rising[0]):
        trial = stored(largest / end) if end else above
        pairs = []
        for block, scale in zip(blocks, scales, strict=True):
            near = bisect_left(rising, scale / trial if trial else 0.0)
            options = [(order[min(max(near + by, 0), len(order) - 1)], choice) for choice in range(len(tables)) for by in (-1, 0)]
            errors = [block.error(tables[choice], trial * steps[step]) for step, choice in options]
            least = errors.index(min(errors))
            pairs.append((errors[least], options[least]))
        total = 0.0
        for error, _ in pairs:
            total += error
        if total < best:
            above, best, picked = trial, total, [option for _, option in pairs]
    for _ in range(2):
        parts = [(block.x, block.by, [steps[step] * tables[choice][place] for place in
                                      block.places(tables[choice], above * steps[step])])
                 for block, (step, choice) in zip(blocks, picked, strict=True)]
        trial, total = stored(fit(parts)), 0.0
        for block, (step, choice) in zip(blocks, picked, strict=True):
            total += block.error(tables[choice], trial * steps[step])
        if total < best:
            above, best = trial, total
    return above, [step for step, _ in picked], [choice for _, choice in picked]


def chosen(parts: Sequence[Sequence[tuple[float, float]]], tables: Sequence[Sequence[float]], steps: Sequence[float], kind: str,
           is_even: bool = False) -> tuple[float, list[tuple[int, int, list[int]]]]:
    """The scale of blocks of pairs of a weight and what it counts, and for each (step, choice, codes); one step for one level."""
    rising = [sorted(set(table)) for table in tables]
    codes = {value: code for table in tables for code, value in enumerate(table)}
    blocks = [EvenBlock(*zip(*part, strict=True), codes) if is_even else Block(*zip(*part, strict=True)) for part in parts]
    if len(steps) > 1:
        scale, picked, choices = nested(blocks, rising, steps, rounded(kind))
    else:
        [block], picked = blocks, [0]
        scale, choice = alone(block, rising, rounded(kind), kind != "e8m0")
        choices = [choice]
    return scale, [(step, choice, [tables[choice].index(rising[choice][at]) for at in
                                   block.places(rising[choice], scale * steps[step])])
                   for block, step, choice in zip(blocks, picked, choices, strict=True)]
