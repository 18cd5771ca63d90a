"""A second reading of the search over rows of a grid: one super-block, one group and one scale at a time.

Sums of integers are Python's; sums of floats are halves added to halves, as qdsl/encode/grids.py says.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, frexp, log2

import numpy as np
import numpy.typing as npt

F = np.float32
Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]
RATIOS = [F(0.65 * 2.9 ** (i / 6)) for i in range(7)]
FACTORS = F(1.06), F(1), F(0.93)


@dataclass
class Search:
    """A super-block of sub-blocks of `columns` weights, each run of `shared` rows of one of the tables."""

    tables: list[Floats]
    steps: Floats
    columns: int
    shared: int = 1

    def search(self, weight: Floats, importance: Floats | None, signs: Floats | bool | None,
              ) -> tuple[list[int], list[int], list[int], list[int], np.float16]:
        """(rows, tables, signs, scales, super-scale); signs are rows of a table, bits (None), or the grid's own (False)."""
        power = exponent(weight)
        x = np.ldexp(weight, -power)
        counts = self._counts(x, importance)
        chosen: list[int] = []
        if signs is None:
            chosen, x = [int(v < 0) for v in x], np.abs(x)
        elif not isinstance(signs, bool):
            x = self._with_signs(x, counts, signs, chosen)
        subs = [(x[i:i + self.columns], counts[i:i + self.columns]) for i in range(0, len(x), self.columns)]
        wanted = [self._free(*sub) for sub in subs]
        d, scales, most = F(0), [0] * len(subs), F(-np.inf)
        for factor in FACTORS:
            tried = np.ldexp(F(np.float16(np.ldexp(max(wanted) / self.steps[-1], power) * factor)), -power)
            near = [self._nearest(*sub, scale, tried) for sub, scale in zip(subs, wanted, strict=True)]
            gain = halved(np.array([value for _, value in near], F))
            if gain > most:
                d, scales, most = tried, [scale for scale, _ in near], gain
        picked = [self._best(*sub, d * self.steps[scale]) for sub, scale in zip(subs, scales, strict=True)]
        values = np.concatenate([np.concatenate([self.tables[picks[1][i // self.shared]][row] * self.steps[scale]
                                                 for i, row in enumerate(picks[0])])
                                 for picks, scale in zip(picked, scales, strict=True)])
        across, square = halved(counts * values * x), halved(counts * values * values)
        fitted = np.ldexp(across / square if square > 0 else F(0), power)
        return ([row for picks in picked for row in picks[0]], [table for picks in picked for table in picks[1]], chosen, scales,
                np.float16(fitted))

    @staticmethod
    def _counts(x: Floats, importance: Floats | None) -> Floats:
        total = F(0)
        for v in x:
            total = total + v * v
        weights = np.ones_like(x) if importance is None or not importance.any() else np.ldexp(importance, -exponent(importance))
        return np.array([i * np.sqrt(v * v + total / F(len(x))) for v, i in zip(x, weights, strict=True)], F)

    @staticmethod
    def _with_signs(x: Floats, counts: Floats, signs: Floats, chosen: list[int]) -> Floats:
        out = []
        for run in np.split(x * counts, len(x) // signs.shape[1]):
            whole, _ = integers(run, 1)
            scores = signs.astype(np.int64) @ whole
            chosen.append(int(scores.argmax()))
            out.append(signs[chosen[-1]])
        return x * np.concatenate(out)

    def _free(self, x: Floats, counts: Floats) -> np.float32:
        mean = F(np.mean(np.stack(self.tables).astype(np.float64) ** 2))
        total = halved(counts)
        start = np.sqrt(halved(counts * x * x) / total / mean) if total > 0 else F(0)
        gains = [self._best(x, counts, start * ratio)[2] for ratio in RATIOS]
        return start * RATIOS[gains.index(max(gains))]

    def _nearest(self, x: Floats, counts: Floats, wanted: np.float32, d: np.float32) -> tuple[int, np.float32]:
        middles = [(a + b) / 2 for a, b in zip(self.steps[:-1], self.steps[1:], strict=True)]
        middle = sum(wanted / d > m for m in middles) if d > 0 else 0
        tried = [min(max(middle + by, 0), len(middles)) for by in (-1, 0, 1)]
        gains = [self._best(x, counts, self.steps[scale] * d)[2] for scale in tried]
        return tried[gains.index(max(gains))], max(gains)

    def _best(self, x: Floats, counts: Floats, scale: np.float32) -> tuple[list[int], list[int], np.float32]:
        """(rows, tables, gain) for a sub-block at a scale."""
        size = self.tables[0].shape[1]
        unit = next(1 / 2 ** p for p in range(11) if not any((table * F(2 ** p) % 1).any() for table in self.tables))
        rows: list[int] = []
        chosen: list[int] = []
        gains = []
        for start in range(0, len(x), size * self.shared):
            trials = []
            for table in self.tables:
                picked = [self._row(x[i:i + size], counts[i:i + size], table, F(unit), scale)
                          for i in range(start, start + size * self.shared, size)]
                trials.append((halved(np.array([gain for _, gain in picked], F)), [row for row, _ in picked]))
            best = max(gain for gain, _ in trials)
            chosen.append(next(i for i, (gain, _) in enumerate(trials) if gain == best))
            rows += trials[chosen[-1]][1]
            gains.append(best)
        return rows, chosen, halved(np.array(gains, F)) * scale

    def _row(self, x: Floats, counts: Floats, table: Floats, unit: np.float32, scale: np.float32) -> tuple[int, np.float32]:
        whole = (table / unit).astype(np.int64)
        most = max(int(np.abs(levels / unit).max()) for levels in self.tables)
        linear, worth = integers(counts * x, most)
        square, other = integers(counts, most * most)
        marks = (whole @ linear).astype(F) - (whole * whole @ square).astype(F) * (scale * (other / worth * (unit / 2)))
        return int(marks.argmax()), marks.max() * worth


def exponent(values: Floats) -> int:
    """Of the least power of two above all values."""
    return frexp(float(np.abs(values).max()))[1]


def integers(values: Floats, largest: int) -> tuple[Integers, np.float32]:
    """Values in integers whose products with integers up to `largest` stay within 24 bits, and what one of them is worth."""
    bits = 24 - ceil(log2(largest * len(values) + 1))
    power = max(exponent(values), -60)
    return np.rint(np.ldexp(values, bits - power)).astype(np.int64), F(2.0 ** (power - bits))


def halved(values: Floats) -> np.float32:
    """The sum: the first half added to the second, until one value is left."""
    while len(values) > 1:
        values = values[:len(values) // 2] + values[len(values) // 2:]
    return F(values[0])

