"""The tiles that programs of kernels take of a weight: rows and units of K, or rows of 16 for each warp."""

from __future__ import annotations

import math

import torch

from qdsl.core.shapes import axis
from qdsl.runtime.gpu.configure import target
from qdsl.runtime.weight.arrays import cdiv, power
from qdsl.runtime.weight.layout import Kernels
from qdsl.runtime.weight.packed import PackedWeight

MOST_PARTS = 8                                                   # the most programs that share K
SPLIT_PROGRAMS = 4                                               # programs share K only up to so many programs per SM
TRIP = 256                                                       # columns of w per warp and iteration, unless blocks need others
AXES = 8                                                         # most axes of a `dequantize` tile: rows, unit digits, lanes
WIDE = 64                                                        # the fewest columns of w in a row of a `dequantize` tile
WEIGHTS = 4096                                                   # the most weights per program of `dequantize`, 32 a thread
UNITS = 1024                                                     # units per program and iteration: eight for each of 128 threads
WARPS = 15                                                       # per SM, to keep enough bytes in flight (predicted)


def unit_tile(last: str, rows: int, units: int, size: int) -> tuple[int, int]:
    """The rows and units of a tile of `size` units, powers of two; the contiguous axis is the long one."""
    along = units if last == "k" else rows
    across = rows if last == "k" else units
    long = min(256 if last == "k" else 128, power(along), size)
    short = min(size // long, power(across))
    return (short, long) if last == "k" else (long, short)


def dequantize_tile(kernels: Kernels, rows: int, units: int) -> tuple[int, int]:
    """The rows and units of a `dequantize` tile.  If rows are contiguous in memory, it still stores WIDE columns of w."""
    if not kernels.order:
        return unit_tile(kernels.last, rows, units, max(128, UNITS // kernels.sums))
    weights = math.prod(kernels.lanes)
    size = max(128, min(UNITS, WEIGHTS // weights))
    if kernels.last == "k":
        return unit_tile("k", rows, units, size)
    across = min(power(units), max(1, WIDE * kernels.sums // weights))
    return min(power(rows), size // across), across


def columns_in_order(kernels: Kernels, bn: int, bk: int) -> dict[str, tuple[int, ...] | None]:
    """Constants of `dequantize` that permute a tile of BN rows and BK units into the order of w."""
    records = bk // math.prod(kernels.digits)
    if not kernels.order or not records or len(kernels.order) > AXES:
        return {"DIGITS": None, "ORDER": None}
    shape, inside = (bn, records, *kernels.digits, *kernels.lanes), 2 + len(kernels.digits)
    axes = list(range(len(shape)))
    if kernels.last == "n":                                      # the rows are the tile's second axis, before the lanes
        axes = [*axes[1:inside], 0, *axes[inside:]]
    more = range(len(shape), AXES)
    return {"DIGITS": (*(shape[axis] for axis in axes), *(1 for _ in more)), "ORDER": (*map(axes.index, kernels.order), *more)}


def is_even(packed: PackedWeight, bn: int, bk: int) -> bool:
    """Whether tiles of BN rows and BK units cover the weight exactly; rows past the end may be clamped."""
    rows, units = grid_axes(packed)
    return units % bk == 0 and (packed.layout.kernels.last == "k" or rows % bn == 0)


def grid_axes(packed: PackedWeight) -> tuple[int, int]:
    """The rows of tiles and the units along K of a weight, over which the grids of these kernels go."""
    kernels = packed.layout.kernels
    rows, units = (axis(text).extent(*packed.shape, packed.sizes) for text in (kernels.rows, kernels.units))
    assert rows is not None and units is not None
    return rows, units


def lane_tiles(n: int, k: int, device: torch.device, trip: int = TRIP) -> dict[str, int]:
    """The default tile of a weight [n, k] for kernels of few rows of x: R tiles of 16 rows per warp, WK warps that share K.

    Two tiles of a warp share the operands of x, so R = 1 only pays if programs would not fill the device.  WK grows until every
    SM has enough warps; a warp takes `trip` columns per iteration.
    """
    multiprocessors = target(device).multiprocessors
    r = 2 if 4 * cdiv(n, 32) >= 3 * multiprocessors else 1
    wk = 1
    while wk < 8 and cdiv(n, 16 * r) * wk < WARPS * multiprocessors and 2 * trip * wk <= k:
        wk *= 2
    return lane_tile(r, wk, k, trip)


def lane_tile(r: int, wk: int, k: int, trip: int) -> dict[str, int]:
    """Such a tile: R tiles of 16 rows, and WK warps that share K, `trip` columns each per iteration."""
    return {"R": r, "WN": 1, "WK": wk, "EVEN": k % (trip * wk) == 0}
