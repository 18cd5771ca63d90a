"""The inner loops of searches, in C, compiled once by this machine's compiler; without one numpy finds the same numbers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.host import library
from qdsl.host.c_functions import CFunctions

Floats = NDArray[np.float32]
LANES = 16
SOURCE = Path(__file__).with_name("search.c")
ELEMENTS = 64                                                    # of a block, at most
COLUMNS = 128                                                    # that are chosen in one call, at most


def best_rows(linear: Floats, square: Floats, factor: Floats) -> tuple[NDArray[np.int64], Floats] | None:
    """(first column of the largest number, that number) of each row of linear - factor * square, rounded after each operation.

    linear, square: [groups, columns]; factor [groups].  None where numpy is to do it: without a compiler, for other numbers of
    columns, and where a number is NaN.
    """
    functions, (groups, columns) = _functions(), linear.shape
    if functions is None or columns % LANES:
        return None
    chosen, gain = np.empty(groups, np.int64), np.empty(groups, np.float32)
    return (chosen, gain) if functions.best_rows(linear, square, factor, groups, columns, chosen, gain) else None


def fit_counts(x: Floats, weights: Floats, high: int, tops: Sequence[np.float32], magnitudes: bool) -> tuple[Floats, ...] | None:
    """(scale, min, low, inverse) of blocks, as search.fit_counts finds them; None where numpy is to do it.

    tops: the ranges that are tried, in steps.
    """
    return _fit_in_c("fit_counts", x, weights, (float(high),), tops, (int(magnitudes),), 4)


def fit_signed(x: Floats, weights: Floats, low: int, high: int, ends: Sequence[np.float32]) -> tuple[Floats, ...] | None:
    """(scale, inverse) of blocks, as search.fit_signed finds them; None where numpy is to do it.

    ends: where the extreme value of a block is tried, in steps.
    """
    return _fit_in_c("fit_signed", x, weights, (float(low), float(high)), ends, (), 2)


def scaled_codes(values: Tensor, columns: int, divisor: float, with_sign: bool, offset: int, ends: tuple[int, int], ties: str,
                 lost: int) -> tuple[Tensor, Tensor] | None:
    """(codes uint8, scales float32 [values / columns]) of blocks of neighbours, as absmax and signmax by 'exact' find them.

    values: float32.  ends: the least and the largest code.  lost: value where 1 / scale overflows.  None where torch is to do it:
    without a compiler, for other numbers of columns, and on other devices.
    """
    functions = None if values.device.type != "cpu" or type(values) is not Tensor or columns % LANES else _functions()
    if functions is None or ties == "even":
        return None
    values, blocks = values.detach().contiguous(), values.numel() // columns
    scales = torch.empty(blocks, dtype=torch.float32, device="cpu")
    codes = torch.empty(values.shape, dtype=torch.uint8, device="cpu")
    functions.scaled_codes(values, blocks, columns, divisor, with_sign, offset, *ends, ties == "up", lost, scales, codes)
    return codes, scales


def choose_columns(old: Tensor, slopes: Tensor, inner: Tensor, first: Tensor, factor: Tensor, borders: Tensor, values: Tensor,
                   places: Tensor, changes: Tensor) -> bool:
    """Choose the places of columns [columns, rows] in order, as calibrated/affine.py does; False where torch is to do it."""
    functions, (columns, rows) = _functions(), slopes.shape
    if functions is None or columns > COLUMNS or slopes.device.type != "cpu":
        return False
    functions.choose_columns(old, slopes, inner, first, factor, borders, values, columns, rows, len(values), places, changes)
    return True


def nearest_vectors(x: Tensor, count: Tensor, table: Tensor) -> Tensor | None:
    """The entry [vectors] of a table for each vector of x with the least sum of count * (x - entry)^2; all float64, 2-D.

    None where torch is to do it: without a compiler, for few entries, and on other devices.
    """
    functions = None if x.device.type != "cpu" or type(x) is not Tensor or len(table) % LANES else _functions()
    if functions is None:
        return None
    codes = torch.empty(len(x), dtype=torch.int64, device="cpu")
    functions.nearest_vectors(x.contiguous(), count.contiguous(), table.T.contiguous(), *x.shape, len(table), codes)
    return codes


def _fit_in_c(name: str, x: Floats, weights: Floats, ends: tuple[float, ...], tried: Sequence[np.float32], flags: tuple[int, ...],
              results: int) -> tuple[Floats, ...] | None:
    """What a search finds for blocks [elements, blocks] and the weights of their errors; None where numpy is to do it."""
    functions = _functions()
    if functions is None or not 0 < len(x) <= ELEMENTS:
        return None
    values, counts, trials = (np.ascontiguousarray(array, np.float32) for array in (x, weights, tried))
    fits = [np.empty(x.shape[1], np.float32) for _ in range(results)]
    getattr(functions, name)(values, counts, *x.shape, *ends, trials, len(tried), *flags, *fits)
    return tuple(fits)


def _functions() -> CFunctions | None:
    """The functions of search.c; None without a compiler, or if QDSL_CPU_COMPILE forbids it."""
    return None if library.setting() == "never" else _compile()


@cache
def _compile() -> CFunctions | None:
    source = SOURCE.read_text(encoding="utf-8")
    try:
        return CFunctions(library.load(source, library.machine_options(torch.backends.cpu.get_cpu_capability())), source)
    except (library.NoCompiler, OSError):
        return None
