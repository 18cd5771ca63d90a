"""Launch configurations for a weight's kernels, from its shape and the device.

runtime/gpu/plan.py chooses among them.  Nothing is timed on first use; `qdsl.tune` keeps the fastest in a file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qdsl.core.shapes import axis
from qdsl.host.files import cache_folder
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu, of_arch, of_device
from qdsl.runtime.libraries.triton import runs_kernels
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.layout import Kernels
from qdsl.runtime.weight.packed import FormatError, PackedWeight

MULTIPROCESSORS = 132                                            # assumed without a GPU: an H100's
TRIP = 256                                                       # columns of w per warp and iteration, unless blocks need others
MOST_PARTS = 8                                                   # the most programs that share K
SPLIT_PROGRAMS = 4                                               # programs share K only up to so many programs per SM
AXES = 8                                                         # most axes of a `dequantize` tile: rows, unit digits, lanes
WIDE = 64                                                        # the fewest columns of w in a row of a `dequantize` tile
WEIGHTS = 4096                                                   # the most weights per program of `dequantize`, 32 a thread
UNITS = 1024                                                     # units per program and iteration: eight for each of 128 threads
OVERLAP, OVERLAPS = "QDSL_PDL", ("never", "auto")               # the setting of overlaps(), its values, the default first
WARPS = 15                                                       # per SM, to keep enough bytes in flight (predicted)


@dataclass(frozen=True, slots=True)
class Target:
    """What a launch depends on: the major compute capability (9: Hopper; 0 elsewhere) and the number of multiprocessors."""

    capability: int
    multiprocessors: int


_assumed = Target(0, MULTIPROCESSORS)
_assumed_gpu = GPUS["h100"]


@contextmanager
def assumed(capability: int, multiprocessors: int, gpu: Gpu | None = None) -> Iterator[None]:
    """Choose launches for this device while tensors are on no GPU, to inspect kernels without one.

    gpu: the GPU to model costs for; by default the first of that capability with so many multiprocessors.
    """
    global _assumed, _assumed_gpu
    before, before_gpu = _assumed, _assumed_gpu
    _assumed = Target(capability, multiprocessors)
    _assumed_gpu = gpu or of_device("", (capability or 9, 0), multiprocessors)
    try:
        yield
    finally:
        _assumed, _assumed_gpu = before, before_gpu


def target(device: torch.device) -> Target:
    """The Target of a device; without a GPU the one that `assumed` set."""
    return _target(device) if device.type in ("cuda", "xpu") else _assumed


@cache
def _target(device: torch.device) -> Target:
    if device.type == "xpu":
        return Target(0, torch.xpu.get_device_properties(device).max_compute_units)
    capability = torch.cuda.get_device_capability(device)[0] if torch.version.cuda else 0
    return Target(capability, torch.cuda.get_device_properties(device).multi_processor_count)


def has_mma(device: torch.device) -> bool:
    """Whether a device runs the kernels for NVIDIA's matrix units: NVIDIA GPUs from Ampere on."""
    return target(device).capability >= 8 if runs_kernels(device) else ARCHS[_assumed_gpu.arch].capability >= 80


def has_gemm(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `gemm` takes x of a dtype: 16-bit floats, but not before Ampere, for which Triton emits no MMA."""
    return dtype in (torch.float16, torch.bfloat16) and (has_mma(device) or device.type == "xpu" or not gpu(device).is_nvidia)


def has_skinny_streams(x: torch.Tensor, packed: PackedWeight) -> bool:
    """Whether kernels decode the weight's streams in registers and multiply x [M, K], on the device of x."""
    return has_mma(x.device) and stream_kernels.has_skinny(x, packed)


def gpu(device: torch.device) -> Gpu:
    """The data sheet that costs are modelled from: the device's, or the assumed GPU's without a GPU."""
    return _gpu(device) if device.type == "cuda" else _assumed_gpu


@cache
def _gpu(device: torch.device) -> Gpu:
    properties = torch.cuda.get_device_properties(device)
    if not torch.version.cuda:
        return of_arch(properties.gcnArchName.partition(":")[0], properties.multi_processor_count)
    return of_device(properties.name, torch.cuda.get_device_capability(device), properties.multi_processor_count)


def overlaps(device: torch.device) -> bool:
    """Whether a launch may begin before the previous one ends: if QDSL_PDL=auto, on NVIDIA GPUs from Hopper on.

    Raises FormatError for an unknown QDSL_PDL.
    """
    setting = os.environ.get(OVERLAP, OVERLAPS[0])
    if setting not in OVERLAPS:
        raise FormatError(f"{OVERLAP} is {' or '.join(OVERLAPS)}, not {setting!r}")
    return setting == "auto" and target(device).capability >= 9


def key(packed: PackedWeight, m: int, dtype: torch.dtype) -> str:
    """The key under which the fastest candidate for x [m, K] is kept: one each for 1 row, up to 8, 16, 32 and so on."""
    n, k = packed.shape
    rows = 1 if m == 1 else max(8, power(m))
    return " ".join((f"{packed.format.name}.{packed.storage}", packed.params_text, f"{n}x{k}", f"M={rows}", str(dtype)[6:]))


@cache
def tuned_file(device: torch.device) -> Path:
    """The path of a device's tuned candidates: in $QDSL_CACHE, or in qdsl below the user's cache folder."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    return cache_folder() / f"tuned-{name.lower()}.json"


@cache
def tuned(path: Path) -> dict[str, Any]:
    """The tuned candidates in a file; empty if it is missing or invalid."""
    try:
        choices = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return choices if isinstance(choices, dict) else {}


def forget() -> None:
    """Forget the files of tuned candidates, so that the next launch reads them again."""
    tuned.cache_clear()
    tuned_file.cache_clear()


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether matrix units take E4M3; without a GPU, as on an H100."""
    return device.type != "cuda" or bool(torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9))


def converts_fp8(device: torch.device) -> bool:
    """Whether an instruction converts E4M3: from compute capability 8.9 on, or 9 if assumed."""
    if device.type != "cuda":
        return _assumed.capability >= 9
    return bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (8, 9)


def tile(last: str, rows: int, units: int, size: int) -> tuple[int, int]:
    """The rows and units of a tile of `size` units, powers of two; the contiguous axis is the long one."""
    along = units if last == "k" else rows
    across = rows if last == "k" else units
    long = min(256 if last == "k" else 128, power(along), size)
    short = min(size // long, power(across))
    return (short, long) if last == "k" else (long, short)


def dequantize_tile(kernels: Kernels, rows: int, units: int) -> tuple[int, int]:
    """The rows and units of a `dequantize` tile.  If rows are contiguous in memory, it still stores WIDE columns of w."""
    if not kernels.order:
        return tile(kernels.last, rows, units, max(128, UNITS // kernels.sums))
    weights = math.prod(kernels.lanes)
    size = max(128, min(UNITS, WEIGHTS // weights))
    if kernels.last == "k":
        return tile("k", rows, units, size)
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


def power(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (max(1, value) - 1).bit_length()


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


def distinct(configs: Sequence[dict[str, int]]) -> list[dict[str, int]]:
    """The configurations without repetitions, in order."""
    return [config for place, config in enumerate(configs) if config not in configs[:place]]
