"""The inner loop of searches in grids, in C, compiled once by this machine's compiler; without one numpy finds the same rows."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qdsl.host import library

Floats = NDArray[np.float32]
SOURCE = """
#include <stdint.h>
#include <string.h>
#define LANES 16

typedef float vf __attribute__((vector_size(4 * LANES)));
typedef int32_t vi __attribute__((vector_size(4 * LANES)));

static vf load(const float *p) { vf value; memcpy(&value, p, sizeof value); return value; }

/* For each group the first column of the largest linear - factor * square, and that number; false where one is NaN. */
int best_rows(const float *linear, const float *square, const float *factor, int64_t groups, int64_t columns, int64_t *chosen,
              float *gain) {
    vi wrong = {0};
    for (int64_t g = 0; g < groups; g++, linear += columns, square += columns) {
        vf by = factor[g] - (vf){0}, best = -__builtin_inff() - (vf){0};
        vi at = {0}, place = {0};
        for (int64_t c = 0; c < columns; c += LANES, place += LANES) {
            vf value = load(linear + c) - load(square + c) * by;
            vi more = value > best;
            best = (vf)((vi)value & more | (vi)best & ~more);
            at = place & more | at & ~more;
            wrong |= value != value;
        }
        int first = 0;
        for (int i = 1; i < LANES; i++)
            if (best[i] > best[first] || (best[i] == best[first] && at[i] + i < at[first] + first)) first = i;
        chosen[g] = at[first] + first;
        gain[g] = linear[chosen[g]] - square[chosen[g]] * factor[g];
    }
    for (int i = 0; i < LANES; i++) if (wrong[i]) return 0;
    return 1;
}
"""
LANES = 16


def best_rows(linear: Floats, square: Floats, factor: Floats) -> tuple[NDArray[np.int64], Floats] | None:
    """(first column of the largest number, that number) of each row of linear - factor * square, rounded after each operation.

    linear, square: [groups, columns]; factor [groups].  None where numpy is to do it: without a compiler, for other numbers of
    columns, and where a number is NaN.
    """
    function = None if library.setting() == "never" else _compiled()
    groups, columns = linear.shape
    if function is None or columns % LANES:
        return None
    assert linear.flags.c_contiguous and square.flags.c_contiguous and factor.flags.c_contiguous
    chosen, gain = np.empty(groups, np.int64), np.empty(groups, np.float32)
    places = [array.ctypes.data for array in (linear, square, factor)]
    return (chosen, gain) if function(*places, groups, columns, chosen.ctypes.data, gain.ctypes.data) else None


@cache
def _compiled() -> Any:
    """The C function; None where there is no compiler."""
    try:
        options = library.machine_options(torch.backends.cpu.get_cpu_capability())
        function = library.load(SOURCE, options).best_rows
    except (library.NoCompiler, library.UnsafeCache, OSError):
        return None
    address, size = ctypes.c_void_p, ctypes.c_int64
    function.restype, function.argtypes = ctypes.c_int, [address, address, address, size, size, address, address]
    return function
