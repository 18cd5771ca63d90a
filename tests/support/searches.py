"""Quantizers that search for a scale, a weight at a time: a second reading of ggml's loops, in float32 scalars of numpy.

Codes are integers as the search has them; `importance` are the counts of squares that a caller made of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

F = np.float32
Floats = Sequence[np.float32]
TINY = F(1e-15)


def rounded(value: np.float32) -> int:
    """The nearest integer by the bits of a sum."""
    return (int((value + F(12582912)).view(np.int32)) & 0x7FFFFF) - 0x400000


def total(values: Floats) -> np.float32:
    partial = F(0)
    for value in values:
        partial = partial + value
    return partial


def between(low: int, value: int, high: int) -> int:
    return max(low, min(high, value))


def extreme(x: Floats) -> np.float32:
    """The first value of largest magnitude."""
    return max(x, key=abs)


def counts(x: Floats, importance: Floats, mean: np.float32 | None) -> list[np.float32]:
    """What squares of errors count."""
    return list(importance) if mean is None else [i * F(np.sqrt(mean + v * v)) for v, i in zip(x, importance, strict=True)]


def trials(x: Floats, weights: Floats, low: int, high: int) -> tuple[np.float32, list[int]]:
    """(scale, codes low to high): where the extreme value lies is tried."""
    top = extreme(x)
    if abs(top) < TINY:
        return F(0), [low] * len(x)

    def fitted(inverse: np.float32) -> tuple[np.float32, np.float32, list[int]]:
        codes = [between(low, rounded(inverse * v), high) for v in x]
        return (total([w * v * F(c) for w, v, c in zip(weights, x, codes, strict=True)]),
                total([w * F(c) * F(c) for w, c in zip(weights, codes, strict=True)]), codes)

    lx, l2, codes = fitted(F(low) / top)
    scale = lx / l2 if l2 else F(0)
    best = scale * lx
    for i in range(-9, 10):
        if i:
            lx, l2, new = fitted(-(F(-low) + F(0.1) * F(i)) / top)
            if l2 > 0 and lx * lx > best * l2:
                scale, codes = lx / l2, new
                best = scale * lx
    return scale, codes


def changed(x: Floats, weights: Floats, codes: list[int], low: int, high: int, positive: bool) -> np.float32:
    """The scale, after codes were changed one by one for as long as that made errors less, five times at most."""
    lx = total([w * v * F(c) for w, v, c in zip(weights, x, codes, strict=True)])
    l2 = total([w * F(c) * F(c) for w, c in zip(weights, codes, strict=True)])
    for _ in range(5):
        before = list(codes)
        for i, (v, w) in enumerate(zip(x, weights, strict=True)):
            rest_lx, rest_l2 = lx - w * v * F(codes[i]), l2 - w * F(codes[i]) * F(codes[i])
            if rest_lx > 0 and (rest_l2 > 0 or not positive):
                new = between(low, rounded(v * rest_l2 / rest_lx), high)
                new_lx, new_l2 = rest_lx + w * v * F(new), rest_l2 + w * F(new) * F(new)
                if new != codes[i] and new_l2 > 0 and new_lx * new_lx * l2 > lx * lx * new_l2:
                    codes[i], lx, l2 = new, new_lx, new_l2
        if codes == before:
            break
    return lx / l2 if l2 > 0 else F(0)


def exchanged(x: Floats, low: int, high: int) -> tuple[np.float32, list[int]]:
    """(scale, codes low to high), squares of errors counting by the weight's square."""
    top = extreme(x)
    if abs(top) < TINY:
        return F(0), [low] * len(x)
    codes = [between(low, rounded(F(low) / top * v), high) for v in x]
    return changed(x, [v * v for v in x], codes, low, high, positive=False), codes


def positive(x: Floats, weights: Floats, high: int) -> tuple[np.float32, list[int]]:
    """(scale, codes 0 to high) of values that are not negative."""
    top = max(F(0), *x)
    if top < TINY:
        return F(0), [0] * len(x)

    def error(inverse: np.float32) -> np.float32:
        differences = [v - F(1) / inverse * F(min(high, rounded(inverse * v))) for v in x]
        return total([w * d * d for w, d in zip(weights, differences, strict=True)])

    inverse = F(high) / top
    best = error(inverse)
    for i in (-4, -3, -2, -1, 1, 2, 3, 4):
        other = (F(0.1) * F(i) + F(high)) / top
        new = error(other)
        if new < best:
            best, inverse = new, other
    codes = [min(high, rounded(inverse * v)) for v in x]
    return changed(x, weights, codes, 0, high, positive=True), codes


def ranged(x: Floats, weights: Floats, high: int, first: float, step: float, steps: int, magnitudes: bool = False,
           ) -> tuple[np.float32, np.float32, list[int]]:
    """(scale, min, codes 0 to high) of scale * code + min: a range of more and more steps is tried, from the best min so far."""
    top, low = max(x), min(x)
    if low > 0:
        low = F(0)
    if top == low:
        return F(0), low, [0] * len(x)
    sum_w, sum_x = weights[0], weights[0] * x[0]
    for v, w in list(zip(x, weights, strict=True))[1:]:
        sum_w, sum_x = sum_w + w, sum_x + w * v

    def error(scale: np.float32, low: np.float32, codes: list[int]) -> np.float32:
        differences = [scale * F(c) + low - v for v, c in zip(x, codes, strict=True)]
        return total([w * (abs(d) if magnitudes else d * d) for w, d in zip(weights, differences, strict=True)])

    def coded(inverse: np.float32) -> list[int]:
        return [between(0, rounded(inverse * (v - low)), high) for v in x]

    scale = F(1) / (F(high) / (top - low))
    codes = coded(F(high) / (top - low))
    best = error(scale, low, codes)
    for i in range(steps + 1):
        new = coded((F(first) + F(step) * F(i) + F(high)) / (top - low))
        products = [w * F(c) for w, c in zip(weights, new, strict=True)]
        sum_l, sum_l2 = total(products), total([p * F(c) for p, c in zip(products, new, strict=True)])
        sum_xl = total([p * v for p, v in zip(products, x, strict=True)])
        d = sum_w * sum_l2 - sum_l * sum_l
        if not d > 0:
            continue
        new_scale, new_low = (sum_w * sum_xl - sum_x * sum_l) / d, (sum_l2 * sum_x - sum_l * sum_xl) / d
        if new_low > 0:
            new_scale, new_low = sum_xl / sum_l2, F(0)
        now = error(new_scale, new_low, new)
        if now < best:
            best, scale, low, codes = now, new_scale, new_low, new
    return scale, low, codes


IMPORTANT = -0.9, 0.05, 36


# -- a super-block ----------------------------------------------------------------------------------------------------


def half(value: np.float32) -> np.float32:
    return F(value.astype(np.float16))


def super_minmax(blocks: list[list[np.float32]], importance: list[list[np.float32]] | None, high: int, highest: int,
                 first: float, step: float, steps: int, magnitudes: bool, spread: float,
                 ) -> tuple[list[list[int]], list[int], list[int], np.float32, np.float32]:
    """(codes, scales, mins, super-scale, super-min) of the weights of sub-blocks."""
    fits, sizes = [], []
    if importance is None:
        for x in blocks:
            mean = F(np.sqrt(total([v * v for v in x]) / F(len(x))))
            fits.append(ranged(x, [abs(v) if magnitudes else mean + abs(v) for v in x], high, first, step, steps, magnitudes))
    else:
        mean = _mean(blocks, spread)
        for x, by in zip(blocks, importance, strict=True):
            weights = counts(x, by, mean)
            sizes.append(total(weights))
            fits.append(ranged(x, weights, high, *IMPORTANT))
    levels = []
    for values in ([max(F(0), scale) for scale, _, _ in fits], [max(F(0), -low) for _, low, _ in fits]):
        if importance is not None:
            exact, chosen = positive(values, sizes, highest)
        else:
            top = max(F(0), *values)
            exact, inverse = top / F(highest), F(highest) / top if top > 0 else F(0)
            chosen = [min(highest, rounded(inverse * v) & 255) for v in values]
        levels.append((half(exact), chosen))
    (d, scales), (dm, mins) = levels
    codes = []
    for x, scale, low, (_, _, kept) in zip(blocks, scales, mins, fits, strict=True):
        unit, less = d * F(scale), dm * F(low)
        codes.append([between(0, rounded((v + less) / unit), high) for v in x] if unit else kept)
    return codes, scales, mins, d, dm


def super_signmax(blocks: list[list[np.float32]], importance: list[list[np.float32]] | None, low: int, high: int, least: int,
                  most: int, exchange: bool, spread: float) -> tuple[list[list[int]], list[int] | None, np.float32]:
    """(codes, scales, super-scale) of the weights of sub-blocks; None for scales that are all stored as 0."""
    fits, sizes = [], []
    for i, x in enumerate(blocks):
        if importance is None:
            fits.append(exchanged(x, low, high) if exchange else trials(x, [v * v for v in x], low, high))
        else:
            weights = counts(x, importance[i], _mean(blocks, spread) if spread else None)
            sizes.append(total(weights))
            fits.append(trials(x, weights, low, high))
    values = [scale for scale, _ in fits]
    top = extreme(values)
    scales: list[int] | None
    if importance is not None and spread:
        exact, scales = trials(values, sizes, least, most)
    elif not top or (abs(top) < TINY and not (exchange and importance is None)):
        return [[low] * len(x) if not exchange else kept for x, (_, kept) in zip(blocks, fits, strict=True)], None, F(0)
    else:
        inverse = F(least) / top
        exact, scales = F(1) / inverse, [between(least, rounded(inverse * v), most) for v in values]
    d = half(exact)
    codes = []
    for x, scale, (_, kept) in zip(blocks, scales, fits, strict=True):
        unit = d * F(scale)
        codes.append([between(low, rounded(v / unit), high) for v in x] if unit else kept)
    return codes, scales, d


def _mean(blocks: list[list[np.float32]], spread: float) -> np.float32:
    every = [v for x in blocks for v in x]
    return F(spread) * total([v * v for v in every]) / F(len(every))


# -- tables of levels --------------------------------------------------------------------------------------------------


def nearest_level(levels: list[np.float32], x: np.float32) -> int:
    """As ggml's best_index_int8, which finds the last level for what is no number."""
    if x <= levels[0]:
        return 0
    above = next((i for i, level in enumerate(levels) if x < level), len(levels) - 1)
    return above - 1 if x < levels[-1] and x - levels[above - 1] < levels[above] - x else above


def level_trials(x: Floats, weights: Floats, levels: list[np.float32]) -> np.float32:
    """The scale: where the extreme value lies among the levels is tried."""
    top = extreme(x)
    if abs(top) < TINY:
        return F(0)

    def fitted(inverse: np.float32) -> tuple[np.float32, np.float32]:
        near = [levels[nearest_level(levels, inverse * v)] for v in x]
        return (total([w * level * v for w, v, level in zip(weights, x, near, strict=True)]),
                total([w * level * level for w, level in zip(weights, near, strict=True)]))

    lx, l2 = fitted(F(1) / (-top / levels[0]))
    scale = lx / l2 if l2 > 0 else F(0)
    best = scale * lx
    for by in range(-7, 8):
        lx, l2 = fitted((F(by) + levels[0]) / top)
        if l2 > 0 and lx * lx > best * l2:
            scale = lx / l2
            best = scale * lx
    return scale


def leveled(blocks: list[list[np.float32]], importance: list[list[np.float32]] | None, levels: list[np.float32],
            ) -> list[np.float32]:
    """The scales of sub-blocks."""
    mean = _mean(blocks, 2)
    return [level_trials(x, [v * v for v in x] if importance is None else counts(x, importance[i], mean), levels)
            for i, x in enumerate(blocks)]


def level_codes(x: Floats, unit: np.float32, levels: list[np.float32]) -> list[int]:
    inverse = F(1) / unit if unit else F(0)
    return [nearest_level(levels, inverse * v) for v in x]
