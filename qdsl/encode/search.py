"""Searches for the scale of least error, in float32 and in ggml's order of operations, so that their bytes are ggml's.

Arrays are [elements, blocks]: an element of all blocks lies in a row, so an operation runs along the blocks, and a sum over a
block adds whole rows one after the other, as ggml's loops do.  Numpy's operations are rounded one by one; torch's kernels sum
in another order and may fuse a product with a sum.  Derived from ggml-quants.c: see NOTICE.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from qdsl.encode import native

Floats = NDArray[np.float32]
Flags = NDArray[np.bool_]

IMPORTANT = -0.9, 0.05, 36                                       # the trials of fit_counts with an importance
TINY = np.float32(1e-15)                                         # a block whose largest magnitude is below has a scale of 0
ZERO, ONE = np.float32(0), np.float32(1)
_ROUND = np.float32(12582912)                                    # 1.5 * 2^23: added, it leaves an integer in the low bits
_MOST = np.float32(4194303)                                      # up to here those bits are the nearest integer


def sum_blocks(values: Floats, first: float | None = 0.0) -> Floats:
    """The sum of every block, one element after the other; from the first element where `first` is None."""
    if values.shape[1] > 1 and values.flags.c_contiguous:
        total: Floats = np.add.reduce(values, axis=0, initial=None if first is None else np.float32(first))
        return total
    # Numpy sums what lies side by side in pairs, and a column alone does.
    totals: Floats = np.add.accumulate(values, axis=0)[-1]
    return totals if first is None else totals + np.float32(first)


def nearest(values: Floats) -> Floats:
    """Nearest integers, ties to even, in place; beyond 2^22 what ggml's bits come to."""
    if values.size and not (values.max() <= _MOST and values.min() >= -_MOST):
        return nearest_wrapped(values)
    return np.rint(values, out=values)


def nearest_wrapped(values: Floats) -> Floats:
    """`nearest` of any numbers: the low 23 bits of a sum, in place."""
    bits = (values + _ROUND).view(np.int32)
    values[...] = (bits & 0x7FFFFF) - 0x400000
    return values


def clip(values: Floats, low: float, high: float) -> Floats:
    """The values cut to [low, high], in place."""
    return np.clip(values, np.float32(low), np.float32(high), out=values)


def divide(value: float | np.float32, below: Floats) -> Floats:
    """A number / below."""
    quotients: Floats = np.divide(np.float32(value), below)
    return quotients


def quotient(above: Floats, below: Floats) -> Floats:
    """above / below, and 0 where below is 0."""
    quotients: Floats = np.divide(above, below, out=np.zeros_like(above), where=below != 0)
    return quotients


def reciprocal(values: Floats) -> Floats:
    """1 / values, and 0 for 0."""
    return np.divide(ONE, values, out=np.zeros_like(values), where=values != 0)


def signed_extremes(x: Floats) -> Floats:
    """The value of largest magnitude of every block, sign and all; of equals, the first."""
    low, high = x.min(axis=0), x.max(axis=0)
    largest: Floats = np.where(-low > high, low, high)
    tied = np.flatnonzero((-low == high) & (high != 0))
    if tied.size:
        largest[tied] = x[np.abs(x[:, tied]).argmax(axis=0), tied]
    return largest


def least(x: Floats) -> Floats:
    """The least value of every block; of zeros, the first."""
    minimum: Floats = x.min(axis=0)
    zero = np.flatnonzero(minimum == 0)
    if zero.size:
        minimum[zero] = x[(x[:, zero] == 0).argmax(axis=0), zero]
    return minimum


def magnitudes(x: Floats, plain: bool) -> Floats:
    """Magnitudes; unless plain, plus the root of the block's mean square."""
    size: Floats = np.abs(x)
    return size if plain else np.add(size, np.sqrt(sum_blocks(x * x) / np.float32(len(x))), out=size)


# -- w = scale * code + min -------------------------------------------------------------------------------------------


def counts(x: Floats, low: Floats, inverse: Floats, high: int, out: Floats | None = None) -> Floats:
    """Codes 0 to high of (x - low) * inverse."""
    out = np.subtract(x, low, out=out)
    return clip(nearest(np.multiply(out, inverse, out=out)), 0, high)


def fit_counts(x: Floats, weights: Floats, high: int, first: float, step: float, steps: int, magnitudes: bool = False,
               ) -> tuple[Floats, ...]:
    """(scale, min, low, inverse) of least weighted error for codes 0 to high: the codes are counts(x, low, inverse).

    The range of a block, 0 included, is cut into high + first + step * i steps for i from 0 to `steps`, and for each the scale
    and the min of least squares are found.  Errors are squares, or magnitudes.  A trial begins at the best min so far, as
    ggml's does.
    """
    tops = [np.float32(first) + np.float32(step) * np.float32(i) + np.float32(high) for i in range(steps + 1)]
    fits = native.fit_counts(x, weights, high, tops, magnitudes)
    return _fit_counts(x, weights, high, tops, magnitudes) if fits is None else fits


def _fit_counts(x: Floats, weights: Floats, high: int, tops: Sequence[np.float32], magnitudes: bool) -> tuple[Floats, ...]:
    top, low = x.max(axis=0), least(x)
    sum_w, sum_x = sum_blocks(weights, None), sum_blocks(weights * x, None)
    low[low > 0] = 0
    flat = top == low
    span = np.where(flat, ONE, top - low)
    inverse = divide(high, span)
    scale: Floats = divide(1, inverse)
    shift = low.copy()
    codes, products, work = np.empty_like(x), np.empty_like(x), np.empty_like(x)

    def error(scale: Floats, low: Floats) -> Floats:
        np.add(np.multiply(codes, scale, out=work), low, out=work)
        np.subtract(work, x, out=work)
        if magnitudes:
            np.abs(work, out=work)
        else:
            np.multiply(work, work, out=work)
        return sum_blocks(np.multiply(weights, work, out=work))

    counts(x, low, inverse, high, codes)
    best = error(scale, low)
    for steps in tops:
        trial = divide(steps, span)
        counts(x, low, trial, high, codes)
        sum_l = sum_blocks(np.multiply(weights, codes, out=products))
        sum_l2 = sum_blocks(np.multiply(products, codes, out=work))
        sum_xl = sum_blocks(np.multiply(products, x, out=work))
        d = sum_w * sum_l2 - sum_l * sum_l
        new_low: Floats = np.divide(sum_l2 * sum_x - sum_l * sum_xl, d)
        new_scale: Floats = np.where(new_low > 0, sum_xl / sum_l2, (sum_w * sum_xl - sum_x * sum_l) / d)
        new_low[new_low > 0] = 0
        errors = error(new_scale, new_low)
        better = (d > 0) & (errors < best) & ~flat
        for old, new in ((inverse, trial), (shift, low), (best, errors), (scale, new_scale), (low, new_low)):
            np.copyto(old, new, where=better)
        np.subtract(top, low, out=span, where=better)
    scale[flat] = inverse[flat] = 0
    return scale, low, shift, inverse


# -- w = scale * code, codes of both signs ----------------------------------------------------------------------------


def signed(x: Floats, inverse: Floats, low: int, high: int, out: Floats | None = None) -> Floats:
    """Codes low to high of x * inverse."""
    return clip(nearest(np.multiply(x, inverse, out=out)), low, high)


def signed_or_least(x: Floats, inverse: Floats, low: int, high: int) -> Floats:
    """`signed`, with the least code in blocks whose inverse is 0."""
    codes = signed(x, inverse, low, high)
    codes[:, inverse == 0] = low
    return codes


def fit_signed(x: Floats, weights: Floats, low: int, high: int) -> tuple[Floats, ...]:
    """(scale, inverse) of least weighted squares for codes low to high: the codes are signed(x, inverse).

    Where the extreme value lies, from low - 0.9 to low + 0.9, is tried in steps of 0.1.  A tiny block has 0 for both.
    """
    ends = [np.float32(low), *(-(np.float32(-low) + np.float32(0.1) * np.float32(i)) for i in range(-9, 10) if i)]
    fits = native.fit_signed(x, weights, low, high, ends)
    return _fit_signed(x, weights, low, high, ends) if fits is None else fits


def _fit_signed(x: Floats, weights: Floats, low: int, high: int, ends: Sequence[np.float32]) -> tuple[Floats, ...]:
    extreme = signed_extremes(x)
    tiny = np.abs(extreme) < TINY
    extreme[tiny] = 1
    weighted = weights * x
    codes, work = np.empty_like(x), np.empty_like(x)

    def fitted(inverse: Floats) -> tuple[Floats, Floats]:
        signed(x, inverse, low, high, codes)
        sum_lx = sum_blocks(np.multiply(weighted, codes, out=work))
        np.multiply(weights, codes, out=work)
        return sum_lx, sum_blocks(np.multiply(work, codes, out=work))

    inverse = divide(ends[0], extreme)
    sum_lx, sum_l2 = fitted(inverse)
    scale = quotient(sum_lx, sum_l2)
    best = scale * sum_lx
    for end in ends[1:]:
        trial = divide(end, extreme)
        sum_lx, sum_l2 = fitted(trial)
        better = (sum_l2 > 0) & (sum_lx * sum_lx > best * sum_l2)
        new = quotient(sum_lx, sum_l2)
        for old, candidate in ((inverse, trial), (scale, new), (best, new * sum_lx)):
            np.copyto(old, candidate, where=better)
    scale[tiny] = inverse[tiny] = 0
    return scale, inverse


def exchange(x: Floats, weights: Floats, codes: Floats, cut: Callable[[Floats], Floats], positive: bool = False) -> Floats:
    """The scale of least weighted squares for codes that are changed, in place, one by one while that lessens the error.

    cut: what codes are cut to.  positive: a code is left alone where the others' weighted squares are not above 0.
    """
    weighted = weights * x
    sum_lx, sum_l2 = sum_blocks(weighted * codes), sum_blocks(weights * codes * codes)
    for _ in range(5):
        is_changed = False
        for value, weight, product, code in zip(x, weights, weighted, codes, strict=True):
            rest_lx, rest_l2 = sum_lx - product * code, sum_l2 - weight * code * code
            new = cut(nearest(value * rest_l2 / rest_lx))
            new_lx, new_l2 = rest_lx + product * new, rest_l2 + weight * new * new
            better = (rest_lx > 0) & (new != code) & (new_l2 > 0) & (new_lx * new_lx * sum_l2 > sum_lx * sum_lx * new_l2)
            if positive:
                better &= rest_l2 > 0
            if better.any():
                is_changed = True
                for old, changed in ((code, new), (sum_lx, new_lx), (sum_l2, new_l2)):
                    np.copyto(old, changed, where=better)
        if not is_changed:
            break
    return np.where(sum_l2 <= 0, ZERO, quotient(sum_lx, sum_l2))


def fit_exchange(x: Floats, low: int, high: int) -> tuple[Floats, Floats]:
    """(scale, codes) of least squares, weighted by squares, by `exchange`.  A tiny block has a scale of 0 and the least code."""
    extreme = signed_extremes(x)
    tiny = np.abs(extreme) < TINY
    codes = signed(x, divide(low, np.where(tiny, ONE, extreme)), low, high)
    scale = exchange(x, x * x, codes, lambda new: clip(new, low, high))
    scale[tiny] = 0
    codes[:, tiny] = low
    return scale, codes


def fit_positive(x: Floats, weights: Floats, high: int) -> tuple[Floats, Floats]:
    """(scale, codes 0 to high) of least weighted squares, for values that are not negative."""
    largest = np.maximum(x.max(axis=0), ZERO)
    tiny = largest < TINY
    largest[tiny] = 1

    def fitted(inverse: Floats) -> Floats:
        difference = x - divide(1, inverse) * np.minimum(nearest(inverse * x), np.float32(high))
        return sum_blocks(weights * difference * difference)

    inverse = divide(high, largest)
    best = fitted(inverse)
    for i in (-4, -3, -2, -1, 1, 2, 3, 4):
        trial = divide(np.float32(0.1) * np.float32(i) + np.float32(high), largest)
        errors = fitted(trial)
        better = errors < best
        np.copyto(best, errors, where=better)
        np.copyto(inverse, trial, where=better)
    codes = np.minimum(nearest(inverse * x), np.float32(high))
    scale = exchange(x, weights, codes, lambda new: np.minimum(new, np.float32(high)), positive=True)
    scale[tiny] = 0
    codes[:, tiny] = 0
    return scale, codes
