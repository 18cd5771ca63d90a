"""The inner loops of searches, in C, compiled once by this machine's compiler; without one numpy finds the same numbers."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from qdsl.host import library

Floats = NDArray[np.float32]
LANES = 16
SOURCE = Path(__file__).with_name("search.c")
ELEMENTS = 64                                                    # of a block, at most


def best_rows(linear: Floats, square: Floats, factor: Floats) -> tuple[NDArray[np.int64], Floats] | None:
    """(first column of the largest number, that number) of each row of linear - factor * square, rounded after each operation.

    linear, square: [groups, columns]; factor [groups].  None where numpy is to do it: without a compiler, for other numbers of
    columns, and where a number is NaN.
    """
    function = None if library.setting() == "never" else _grid_search()
    groups, columns = linear.shape
    if function is None or columns % LANES:
        return None
    assert linear.flags.c_contiguous and square.flags.c_contiguous and factor.flags.c_contiguous
    chosen, gain = np.empty(groups, np.int64), np.empty(groups, np.float32)
    places = [array.ctypes.data for array in (linear, square, factor)]
    return (chosen, gain) if function(*places, groups, columns, chosen.ctypes.data, gain.ctypes.data) else None


def fit_counts(x: Floats, weights: Floats, high: int, tops: Sequence[np.float32], magnitudes: bool) -> tuple[Floats, ...] | None:
    """(scale, min, low, inverse) of blocks, as search.fit_counts finds them; None where numpy is to do it.

    tops: the ranges that are tried, in steps.
    """
    return _fits("fit_counts", x, weights, (float(high),), tops, (int(magnitudes),), 4)


def fit_signed(x: Floats, weights: Floats, low: int, high: int, ends: Sequence[np.float32]) -> tuple[Floats, ...] | None:
    """(scale, inverse) of blocks, as search.fit_signed finds them; None where numpy is to do it.

    ends: where the extreme value of a block is tried, in steps.
    """
    return _fits("fit_signed", x, weights, (float(low), float(high)), ends, (), 2)


def _fits(name: str, x: Floats, weights: Floats, ends: tuple[float, ...], tried: Sequence[np.float32], flags: tuple[int, ...],
          results: int) -> tuple[Floats, ...] | None:
    """What a search finds for blocks [elements, blocks] and the weights of their errors; None where numpy is to do it."""
    functions = None if library.setting() == "never" else _compiled()
    if functions is None or not 0 < len(x) <= ELEMENTS:
        return None
    function, size = getattr(functions, name), ctypes.c_int64
    function.restype = None
    arrays = [np.ascontiguousarray(array, np.float32) for array in (x, weights, tried)]
    values, counts, trials = (ctypes.c_void_p(array.ctypes.data) for array in arrays)
    fits = [np.empty(x.shape[1], np.float32) for _ in range(results)]
    function(values, counts, *map(size, x.shape), *map(ctypes.c_float, ends), trials, size(len(tried)), *flags,
             *(ctypes.c_void_p(array.ctypes.data) for array in fits))
    return tuple(fits)


@cache
def _grid_search() -> Any:
    """The C function of `best_rows`; None where there is no compiler."""
    functions = _compiled()
    if functions is None:
        return None
    function, address, size = functions.best_rows, ctypes.c_void_p, ctypes.c_int64
    function.restype, function.argtypes = ctypes.c_int, [address, address, address, size, size, address, address]
    return function


@cache
def _compiled() -> Any:
    """The functions of search.c; None where there is no compiler."""
    try:
        return library.load(SOURCE.read_text(encoding="utf-8"), library.machine_options(torch.backends.cpu.get_cpu_capability()))
    except (library.NoCompiler, library.UnsafeCache, OSError):
        return None
