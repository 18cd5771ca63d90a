"""Encode schemes for the weights of one block, one number at a time, in float32 scalars of numpy."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from itertools import pairwise
from math import ceil, floor, frexp, ldexp, log2, sqrt
from typing import Any

import numpy as np

from tests.support import searches
from tests.support.slow_numbers import Scalar, magnitudes, nearest, ue4m3, value, whole, width


def _chosen(x: np.float32, kind: str, ties: str, offset: int, zeros: str = "signed") -> int:
    if kind[0] in "ui" and kind[1:].isdigit():
        return whole(kind, x, ties, offset)
    sign = {"signed": x, "negative": np.float32(-0.0), "positive": np.float32(0)}[zeros]
    return nearest(kind, x if x else sign, ties)


def stored_scale(scale: np.float32, kind: str) -> tuple[int, np.float32]:
    """The scale's code, and the float32 that it is read back as."""
    code = nearest(kind, scale)
    return code, np.float32(value(kind, code))


def scale_code(scale: float, kind: str) -> int:
    """The code of a scale that is one of its type's numbers."""
    return 126 + frexp(scale)[1] if kind == "e8m0" else stored_scale(np.float32(scale), kind)[0]


def bits_of(place: int, kind: str) -> int:
    """The bits of a code, given its place among the type's codes: integers rise, floats are in the order of their bits."""
    return place ^ (1 << width(kind) - 1) if kind[0] == "i" and kind[1:].isdigit() else place


def bounds(kind: str) -> tuple[int, int]:
    """The least and the largest value of an integer type; of a float, of no matter."""
    bits = int(kind[1:]) if kind[0] in "ui" and kind[1:].isdigit() else 0
    return (-(1 << bits - 1), (1 << bits - 1) - 1) if kind[0] == "i" else (0, (1 << bits) - 1)


def affine(x: list[np.float32], kinds: Mapping[str, str], steps: int) -> tuple[list[int], int, int]:
    """Codes, the minimum's code and the scale's code for the range of a block in so many steps."""
    low = min(x)
    exact = (max(x) - low) / np.float32(steps)
    inverse = np.float32(1) / exact if exact else np.float32(0)
    codes = [0 if np.isinf(inverse) else whole(kinds["code"], (v - low) * inverse, "up") for v in x]
    return codes, stored_scale(low, kinds["min"])[0], stored_scale(abs(exact), kinds["scale"])[0]


def level(x: list[np.float32], scale: str, levels: list[float], factor: float) -> tuple[list[int], int]:
    """Codes of the nearest levels, of equals the first, and the scale's code."""
    largest, top = max(abs(v) for v in x), max(levels) * factor
    if scale == "e8m0h":
        powers = np.floor(np.float32(np.log2(np.float64(largest)))) - floor(log2(top)) + 128 if largest else 0
        code = int(min(max(powers, 0), 255))
    else:
        code = ue4m3(largest / np.float32(top))
    unit = np.float32(value(scale, code)) * np.float32(factor)
    errors = [[abs(np.float32(level) * unit - v) for level in levels] for v in x]
    return [row.index(min(row)) for row in errors], code


def kmeans(x: list[np.float32], counts: list[float], kinds: Mapping[str, str]) -> tuple[list[int], list[int]]:
    """Codes, and the codes of rising levels: k-means of numbers that count as much each, in float64."""
    entries = bounds(kinds["code"])[1] + 1
    pairs = sorted(((float(v) + 0.0, count) for v, count in zip(x, counts, strict=True)), key=lambda pair: pair[0])
    ordered, sums, totals, gaps = [v for v, _ in pairs], [0.0], [0.0], [0.0]
    for v, count in pairs:
        sums.append(sums[-1] + v * count)
        totals.append(totals[-1] + count)
    for a, b in pairwise(ordered):
        gaps.append(gaps[-1] + sqrt(b - a) * sqrt(sqrt(sqrt(b - a))))
    at = [bisect_left(gaps, (2 * i + 1) * gaps[-1] / (2 * entries)) for i in range(entries)]
    moved = [ordered[min(i, len(ordered) - 1)] for i in at]
    for _ in range(100):
        levels = moved
        ends = [0, *(bisect_right(ordered, (a + b) / 2) for a, b in pairwise(levels)), len(ordered)]
        moved = [(sums[end] - sums[start]) / (totals[end] - totals[start]) if totals[end] > totals[start] else level
                 for (start, end), level in zip(pairwise(ends), levels, strict=True)]
    if len(set(ordered)) <= entries:
        moved = [*sorted(set(ordered)), *[ordered[-1]] * entries][:entries]
    stored = sorted((stored_scale(np.float32(level), kinds["levels"]) for level in moved), key=lambda one: one[1])
    middles = [(float(a) + float(b)) / 2 for (_, a), (_, b) in pairwise(stored)]
    return [bisect_left(middles, float(v)) for v in x], [word for word, _ in stored]


Parts = list[list[np.float32]]
Chosen = tuple[list[list[int]], dict[str, list[int]]]


def super_minmax(x: Parts, by: Parts | None, kinds: Mapping[str, str], arguments: Mapping[str, Any]) -> Chosen:
    trials = float(arguments["first"]), float(arguments["step"]), int(arguments["steps"])
    codes, scales, mins, d, dm = searches.super_minmax(x, by, bounds(kinds["code"])[1], bounds(kinds["scale"])[1], *trials,
                                                       arguments.get("errors") == "magnitudes", float(arguments.get("spread", 1)))
    return codes, {"scale": scales, "min": mins, "super_scale": [stored_scale(d, kinds["super_scale"])[0]],
                   "super_min": [stored_scale(dm, kinds["super_min"])[0]]}


def super_signmax(x: Parts, by: Parts | None, kinds: Mapping[str, str], arguments: Mapping[str, Any], ends: tuple[int, int],
                   steps: tuple[int, ...]) -> Chosen:
    codes, scales, d = searches.super_signmax(x, by, *ends, steps[0], steps[1], arguments.get("by") == "exchange",
                                              float(arguments.get("spread", 0)))
    base, least = bounds(kinds["code"])[0] - ends[0], bounds(kinds["scale"])[0] - steps[0]
    width = (1 << int(kinds["scale"][1:])) - 1
    return ([[c + base for c in part] for part in codes],
            {"scale": [0] * len(x) if scales is None else [step + least & width for step in scales],
             "super_scale": [stored_scale(d, kinds["super_scale"])[0]]})


def progressive(x: Parts, kinds: Mapping[str, str], arguments: Mapping[str, Any]) -> Chosen:
    """Codes, scales and zeros of integers, which are weights in units of the largest magnitude of all parts / divisor."""
    divisor, most = int(arguments["divisor"]), bounds(kinds["code"])[1]
    above, unit = stored_scale(max(abs(v) for part in x for v in part) / np.float32(divisor), kinds["super_scale"])
    if not unit:
        above, unit = stored_scale(np.float32(1), kinds["super_scale"])
    codes, scales, zeros = [], [], []
    for part in x:
        whole = [max(-divisor, min(divisor, round(float(v / unit)))) for v in part]
        low, high = min(0, *whole), max(0, *whole)
        step = np.float32(max(1, min(bounds(kinds["scale"])[1], round(float(np.float32(high - low) / np.float32(most))))))
        point = max(0, min(most, round(float(np.float32(-low) / step))))
        codes.append([max(0, min(most, round(float(np.float32(v) / step + np.float32(point))))) for v in whole])
        scales.append(int(step))
        zeros.append(-point * int(step) & (1 << width(kinds["zero"])) - 1)
    return codes, {"scale": scales, "zero": zeros, "super_scale": [above]}


def leveled(x: Parts, by: Parts | None, kinds: Mapping[str, str], levels: list[np.float32], offset: int) -> Chosen:
    scales = searches.leveled(x, by, levels)
    if "super_scale" not in kinds:
        return [searches.level_codes(x[0], scales[0], levels)], {"scale": [stored_scale(scales[0], kinds["scale"])[0]]}
    least, most = (end - offset for end in bounds(kinds["scale"]))
    d = searches.extreme(scales) / np.float32(least)
    inverse = np.float32(1) / d if d else np.float32(0)
    steps = [searches.between(least, searches.rounded(inverse * scale), most) for scale in scales]
    codes = [searches.level_codes(part, d * np.float32(step), levels) for part, step in zip(x, steps, strict=True)]
    return codes, {"scale": [step + offset for step in steps], "super_scale": [stored_scale(d, kinds["super_scale"])[0]]}


def absmax(x: list[np.float32], kind: str, scale: str, scheme: str, offset: int, arguments: Mapping[str, str | float | bool],
            ) -> tuple[list[int], int, np.float32]:
    """Codes, and the scale's code and exact value, for scale = largest / divisor, where signmax keeps the largest's sign."""
    first = max(x, key=abs)                                      # of equals, the first
    largest = first + np.float32(0) if scheme == "signmax" else abs(first)
    divisor = np.float32(arguments["divisor"] if "divisor" in arguments else magnitudes(kind)[-1][0])
    by, ties = arguments.get("by", "stored"), str(arguments.get("ties", "even"))
    least = np.float32(arguments.get("least", 0))
    exact = max(largest / divisor, least) if least else largest / divisor
    zeros = str(arguments.get("zeros", "signed"))
    if "power" in arguments or scale == "e8m0":
        rule = str(arguments.get("power", "up"))
        step = np.float32(1) / (np.float32(1) / largest * divisor) if by == "inverse" and largest else largest / divisor
        exponent = _exponent(float(largest), step, float(divisor), kind, rule) if largest else -127
        exponent = min(max(exponent, ceil(log2(least)) if least else -127, -127), 127)
        code, used = stored_scale(np.float32(ldexp(1, exponent)), scale)
        return [_chosen(v / used if used else np.float32(0), kind, ties, offset, zeros) for v in x], code, used
    if by == "inverse":
        # Rounded twice: torch divides a number by a tensor so, and transformers with it.
        factor = np.float32(1) / largest * divisor if largest else np.float32(1)
        factor = min(factor, np.float32(1 / least)) if least else factor
        used = np.float32(1) / factor
        code, _ = stored_scale(used, scale)
        scaled = [v * factor for v in x]
    elif by == "ratio":
        factor = divisor / largest
        factor = min(max(factor, np.float32(-1 / least)), np.float32(1 / least)) if least else factor
        used = np.float32(1) / factor if largest else np.float32(0)
        code, _ = stored_scale(used, scale)
        scaled = [np.float32(0) if np.isinf(factor) else v * factor for v in x]
    elif by == "exact":
        used = exact
        code, _ = stored_scale(exact, scale)
        factor = np.float32(1) / exact if exact else np.float32(0)
        overflow = np.float32(0 if arguments.get("lost") == "zero" else -offset)
        scaled = [overflow if np.isinf(factor) else v * factor for v in x]
    else:
        code, used = stored_scale(exact if exact else np.float32(2 ** -23), scale)
        scaled = [v / used for v in x]
    return [_chosen(v, kind, ties, offset, zeros) for v in scaled], code, used


def nested(x: list[list[np.float32]], kinds: Mapping[str, str], divided: bool, arguments: Mapping[str, Any],
            ) -> tuple[list[list[int]], list[int], int]:
    """Codes of all blocks, their scales' codes, and that of the scale of all, by which the others are multiplied or divided."""
    one, divisor, top = np.float32(1), np.float32(arguments["divisor"]), np.float32(448)
    largest = [max(abs(v) for v in block) for block in x]
    whole = np.float32(arguments.get("amax", max(largest)))
    above = one / whole * (divisor * top) if divided else whole / (divisor * top)
    above = above if np.isfinite(above) else one
    codes, scales = [], []
    for block, most in zip(x, largest, strict=True):
        if divided:
            exact = above * (most / divisor)
        else:
            exact = most / divisor / above if arguments.get("by") == "inverse" else most / (divisor * above)
        code, stored = stored_scale(max(np.float32(arguments.get("least", 0)), exact) if most else np.float32(0), kinds["scale"])
        if not stored:
            code, stored = stored_scale(np.float32(arguments["empty"]), kinds["scale"])
        if arguments.get("by") == "inverse":
            factor = (above if divided else one / above) / stored
            scaled = [v * factor if np.isfinite(factor) else np.float32(0) for v in block]
        else:
            unit = stored / above if divided else stored * above
            scaled = [v / unit if unit else np.float32(0) for v in block]
        codes.append([_chosen(v, kinds["code"], str(arguments.get("ties", "even")), 0, str(arguments.get("zeros", "signed")))
                      for v in scaled])
        scales.append(code)
    return codes, scales, stored_scale(above, kinds["super_scale"])[0]


def _exponent(largest: float, exact: np.float32, divisor: float, kind: str, rule: str) -> int:
    """The exponent of a scale that is a power of two."""
    if rule == "up":
        return ceil(np.log2(exact))
    fraction, power = frexp(largest)
    bits = 1 if rule == "half" else int(kind[3])
    carries = {"floor": False, "ceil": fraction > 0.5, "even": fraction >= 1 - 2.0 ** -(bits + 2),
               "half": fraction >= 1 - 2.0 ** -(bits + 2)}[rule]
    return power - frexp(divisor)[1] + carries


def minmax(x: list[np.float32], kind: str, zero: str, scale: str, arguments: Mapping[str, str | float | bool],
            ) -> tuple[list[int], int, int]:
    """Codes, the zero point's code and the scale's code for a range from the least weight to the largest, zero included."""
    symmetric, full = arguments.get("symmetric") in (True, "true"), arguments.get("span") == "full"
    tight = arguments.get("span") == "tight"                     # zero need not be in the range
    low, high = (min(x), max(x)) if tight else (min(np.float32(0), *x), max(np.float32(0), *x))
    signed = arguments.get("span") == "signed"                   # scales may be negative, and none is nearer to 0 than 2^-23
    if symmetric and not tight:
        high = max(high, -low)
        low = -high if full or low < 0 else low
    empty = low == high and not tight
    if empty and not full and not signed:
        low, high = np.float32(-1), np.float32(1)
    bits, zeros = int(kind[1:]), int(zero[1:])
    least = -(1 << bits - 1) if kind[0] == "i" else 0
    middle = (1 << bits - 1) + least
    first = middle if arguments.get("rounds") == "sum" else 0    # where codes are counted from
    exact = np.float32(2 ** -23) if empty and full else (high - low) / np.float32((1 << bits) - 1)
    if tight:
        reach, steps = (max(map(abs, x)), (1 << bits - 1) - 1) if symmetric else (high - low, (1 << bits) - 1)
        exact = max(reach, np.float32(1e-5)) / np.float32(steps)
    if signed:
        reach = -min(x) if -min(x) >= max(x) else -max(x)
        exact = reach / np.float32(1 << bits - 1) if symmetric else (max(0, *x) - min(0, *x)) / np.float32((1 << bits) - 1)
        exact = np.float32(2 ** -23) if abs(exact) < 2 ** -23 else exact
    code, stored = stored_scale(exact, scale)
    used = exact if arguments.get("by") == "exact" else stored
    point = middle - first
    if not symmetric and not (empty and full):
        wanted = round(float(np.float32(least - first) - low / used))
        point = min(max(wanted, least - first), least - first + (1 << bits) - 1)
    if arguments.get("rounds") in ("sum", "code"):
        codes = [round(float(v / used + np.float32(point))) + first for v in x]
    else:
        codes = [round(float(v / used)) + point for v in x]
    return [_clip(c, bits, least) for c in codes], _clip(point + first, zeros, -(1 << zeros - 1) if zero[0] == "i" else 0), code


def unit(x: list[np.float32], levels: list[Scalar]) -> tuple[list[int], int]:
    """Codes of the nearest levels, of two the lower, for the largest magnitude as the scale, and the scale's code."""
    largest = max(map(abs, x))
    inverse = np.float32(1) / largest if largest else np.float32(0)
    order = sorted(range(len(levels)), key=lambda i: float(levels[i]))
    middles = [np.float32((float(levels[a]) + float(levels[b])) / 2) for a, b in pairwise(order)]
    return [order[sum(v * inverse > middle for middle in middles)] for v in x], int(np.float32(largest).view(np.uint32))


def unit_codes(x: list[np.float32], divisor: int) -> list[int]:
    """Codes of weights in units of the largest magnitude / divisor, as two's complement of 8 bits."""
    largest = max(map(abs, x))
    factor = np.float32(1) / largest * np.float32(divisor) if largest else np.float32(0)
    return [min(max(round(float(v * factor)), -divisor), divisor) & 255 for v in x]


def float_zero(x: list[np.float32], kinds: Mapping[str, str]) -> tuple[list[int], int, int]:
    """Codes, the zero's code and the scale's code: codes by the exact zero and the exact inverse of the scale."""
    most = (1 << int(kinds["code"][1:])) - 1
    span = max(x) - min(x)
    # Rounded twice, as torch divides a number by a tensor.
    inverse = min(np.float32(1) / span * np.float32(most) if span > np.float32(1e-4) else np.float32(1), np.float32(2e4))
    zero = -min(x) * inverse
    codes = [min(max(round(float(v * inverse + zero)), 0), most) for v in x]
    return codes, stored_scale(zero, kinds["zero"])[0], stored_scale(np.float32(1) / inverse, kinds["scale"])[0]


def edge_affine(x: list[np.float32], kinds: Mapping[str, str]) -> tuple[list[int], int, int]:
    """Codes, the least value's code and the scale's code: steps from the end of larger magnitude, of which one is 0."""
    most = (1 << int(kinds["code"][1:])) - 1
    step = max((max(x) - min(x)) / np.float32(most), np.float32(1e-7))
    edge, step = (min(x), step) if abs(min(x)) > abs(max(x)) else (max(x), -step)
    count = round(float(edge / step))
    step, least = (edge / np.float32(count), edge) if count else (step, np.float32(0))
    codes = [min(max(round(float((v - least) / step)), 0), most) for v in x]
    return codes, stored_scale(least, kinds["min"])[0], stored_scale(step, kinds["scale"])[0]


def float_middle(x: list[np.float32], kinds: Mapping[str, str], offset: int, negated: bool) -> tuple[list[int], int, int]:
    """Codes, the zero's code and the scale's code: what code `offset` is, and codes by both as they are stored."""
    most = (1 << int(kinds["code"][1:])) - 1
    smallest = np.float32(2.0 ** -14 if kinds["scale"] == "f16" else 2.0 ** -126)
    exact = max((max(x) - min(x)) / np.float32(most), smallest)
    scale_code, scale = stored_scale(exact, kinds["scale"])
    zero_code, zero = stored_scale(min(x) + exact * np.float32(offset), kinds["zero"])
    first = zero - scale * np.float32(offset)
    zero_code = stored_scale(-zero, kinds["zero"])[0] if negated else zero_code
    return [min(max(round(float((v - first) / scale)), 0), most) for v in x], zero_code, scale_code


def _clip(number: int, bits: int, least: int) -> int:
    return min(max(number, least), least + (1 << bits) - 1) & (1 << bits) - 1
