"""Launch configurations for a weight's kernels, from its shape and the device.

runtime/gpu/plan.py chooses among them.  Nothing is timed on first use; `qdsl.tune` keeps the fastest in a file.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qdsl.core.shapes import axis
from qdsl.host.files import cache_folder
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu, of_arch, of_device
from qdsl.runtime.libraries.triton import release, runs_kernels
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.layout import Kernels
from qdsl.runtime.weight.matrix_unit import W8A8
from qdsl.runtime.weight.packed import FormatError, PackedWeight

MULTIPROCESSORS = 132                                            # assumed without a GPU: an H100's
TRIP = 256                                                       # columns of w per warp and iteration of `skinny`
MOST_PARTS = 8                                                   # the most programs that share K
SPLIT_PROGRAMS = 4                                               # programs share K only up to so many programs per SM
GEMM_PARTS = (1, 2, 4, 8, 16)                                    # numbers of `gemm` programs that share K
GEMM = {16: (64, 128), 64: (128, 64), 32: (32, 64)}              # by rows of x per program of `gemm`: its tile of w, N x K
SMALL, SMALL_STEP = 32, 8192                                     # rows of x where kernels would spill with 64; most weights
TENSOR_SUMS = 8                                                  # sums of 64 x 128 that an SM's tensor memory holds on Blackwell
AXES = 8                                                         # most axes of a `dequantize` tile: rows, unit digits, lanes
WIDE = 64                                                        # the fewest columns of w in a row of a `dequantize` tile
WEIGHTS = 4096                                                   # the most weights per program of `dequantize`, 32 a thread
UNITS = 1024                                                     # units per program and iteration: eight for each of 128 threads
PROGRAMS = 256                                                   # programs that fill a GPU: the goal where tiles may be smaller
OVERLAP, OVERLAPS = "QDSL_PDL", ("never", "auto")               # the setting of overlaps(), its values, the default first
WARPS = 15                                                       # per SM, to keep enough bytes in flight (predicted)


@dataclass(frozen=True, slots=True)
class Tall:
    """A `tile_gemm` tile of R * 16 * W rows of w and 128 rows of x, for 4-bit codes in groups of 128 columns or more.

    unroll: chunks per iteration.  whole: only for shapes without partial tiles.  count: thread instructions per weight in the
    loop on sm_90; times that follow from it are predicted.
    """

    R: int
    W: int
    unroll: int
    whole: bool
    count: float


TALL = (Tall(2, 8, 1, True, 3.1), Tall(2, 4, 1, True, 3.3), Tall(1, 4, 2, True, 3.5), Tall(1, 4, 2, False, 3.7))


# Tiles of `tile_gemm` for scaled weights by compute capability: R and rows of x, as counts and modelled times chose them.
SCALED = {8: ((2, 32), (2, 64)), 9: ((1, 64), (2, 64), (1, 128)), 10: ((2, 64), (1, 128)), 12: ((2, 32),)}


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


def has_tile_gemm(packed: PackedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether `tile_gemm` runs: on NVIDIA GPUs from Ampere on."""
    kernels = packed.layout.kernels.matrix_unit
    return kernels is not None and kernels.tile_gemm is not None and target(device).capability >= 8


def overlaps(device: torch.device) -> bool:
    """Whether a launch may begin before the previous one ends: if QDSL_PDL=auto, on NVIDIA GPUs from Hopper on.

    Raises FormatError for an unknown QDSL_PDL.
    """
    setting = os.environ.get(OVERLAP, OVERLAPS[0])
    if setting not in OVERLAPS:
        raise FormatError(f"{OVERLAP} is {' or '.join(OVERLAPS)}, not {setting!r}")
    return setting == "auto" and target(device).capability >= 9


def candidates(kind: str, packed: PackedWeight, m: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Configurations of a kernel for x [m, K]: the default one first, those that split K last."""
    n, k = packed.shape
    device = device or packed.device
    if kind == "gemm":
        rule, *others = (config for bm in (0, *GEMM) for split in GEMM_PARTS if (config := gemm(packed, m, split, device, bm)))
    elif kind == "tile_gemm" and m > 64 and is_tall(packed) and target(device).capability == 9:
        rule, *others = _tall(m, n, k, device)
    elif kind == "tile_gemm":
        rule = _many(min(m, most_columns(packed)), n, device)
        # 2 and 4 stages would save 5 % at most by counts; 2 took longer than modelled on an H100.
        fewer = () if target(device).capability == 9 else (16,)  # there warps repeat their loads of x for each other
        others = [{**rule, "R": r, "BM": bm} for bm in dict.fromkeys((rule["BM"], min(32, rule["BM"]), *fewer)) for r in (1, 2)]
    else:
        kernels = packed.layout.kernels.matrix_unit
        trip = kernels.trip(packed.sizes) if kernels is not None and kind == "gemv" else TRIP
        rule = lane_tiles(n, k, device, trip)
        shared = (8, 4, 1) if kind == "gemv" else (8, 4, 2, 1)   # by counts, two warps are never the fastest `gemv`
        others = [lane_tile(r, wk, k, trip) for r in (2, 1) for wk in shared if trip * wk <= k]
        if kind == "skinny" and m > 8:
            others += [{**config, "BM": 16} for config in (rule, *others)]
    configs = [rule, *(other for i, other in enumerate(others) if other != rule and other not in others[:i])]
    if kind != "tile_gemm":
        return configs
    configs += scaled_tiles(packed, m, device)
    return [{**config, "SPLIT": split} for split in range(1, MOST_PARTS + 1) for config in configs
            if split == 1 or _may_split(config, split, m, n, k, device)]


def scaled_tiles(packed: PackedWeight, m: int, device: torch.device) -> list[dict[str, int]]:
    """`tile_gemm` tiles for scaled weights, if groups have sums of their own: else nothing is scaled before the last sum."""
    kernels = packed.layout.kernels.matrix_unit
    if kernels is None or kernels.sums.scale is None:
        return []
    return [{"R": r, "W": 4, "BM": bm, "STAGES": 3, "UNROLL": 1, "WHOLE": 0, "SCALED": 1}
            for r, bm in SCALED.get(target(device).capability, ()) if bm < 2 * m]


def _may_split(config: dict[str, int], split: int, m: int, n: int, k: int, device: torch.device) -> bool:
    """Whether `split` programs may share K: all fit on the SMs at once, and each has a chunk of K."""
    tiles, chunks = cdiv(n, 16 * config["R"] * config["W"]) * cdiv(m, config["BM"]), k // 128
    return tiles * split <= SPLIT_PROGRAMS * target(device).multiprocessors and (split - 1) * cdiv(chunks, split) < chunks


def gemm(packed: PackedWeight, m: int, split: int, device: torch.device, bm: int = 0) -> dict[str, int] | None:
    """The configuration of `gemm`: BN rows of tiles, BK units of K and BM rows of x per program and iteration; `split` share K.

    bm: 0 for the default.  None if some program would have no part of K, or if there were too many programs.
    """
    rows, units = grid_axes(packed)
    has_many_sums = target(device).capability == 10 and packed.shape[1] > TENSOR_SUMS * units     # one per weight of a unit
    # Triton 3.6's compiler crashes on a warp group's MMA with the rows of units side by side.
    compiler_crashes = packed.layout.kernels.sums > 1 and release < (3, 7) and target(device).capability == 9
    bm = bm or (16 if m <= 16 or has_many_sums else SMALL if compiler_crashes else 64)
    if compiler_crashes and bm == 64:
        return None
    tall, columns = GEMM[bm]
    bk = min(128, max(16, power(columns * units // max(1, packed.shape[1]))))
    tall = min(tall, SMALL_STEP * units // max(1, bk * packed.shape[1])) if bm == SMALL else tall
    bn = max(1, tall // packed.layout.kernels.sums)
    programs, steps = cdiv(rows, bn) * cdiv(m, bm) * split, cdiv(units, bk)
    exceeds_sms = programs > SPLIT_PROGRAMS * target(device).multiprocessors
    if split > 1 and (exceeds_sms or (split - 1) * cdiv(steps, split) >= steps):
        return None
    return {"BN": bn, "BK": bk, "BM": bm, "SPLIT": split, "EVEN": is_even(packed, bn, bk)}


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


def _many(m: int, n: int, device: torch.device) -> dict[str, int]:
    """The default `tile_gemm` tile: R tiles of 64 rows of w and BM rows of x per program."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    r = 2 if (4 if bm < 64 else 2) * cdiv(n, 128) >= target(device).multiprocessors else 1
    return {"R": r, "W": 4, "BM": bm, "STAGES": 3, "UNROLL": 1, "WHOLE": 0}


def most_columns(packed: PackedWeight) -> int:
    """The most rows of x per program of `tile_gemm`."""
    return 128 if is_tall(packed) else 64


def has_short_groups(packed: PackedWeight) -> bool:
    """Whether groups have fewer columns than a chunk: their sums take more registers."""
    kernels = packed.layout.kernels.matrix_unit
    return kernels is not None and min(kernels.sizes(packed.sizes), default=128) < 128


def is_tall(packed: PackedWeight) -> bool:
    """Whether a program of `tile_gemm` may take 128 rows of x."""
    kernels = packed.layout.kernels.matrix_unit
    return kernels is not None and kernels.tile_gemm is not None and kernels.tile_gemm.tall and not has_short_groups(packed)


def _tall(m: int, n: int, k: int, device: torch.device) -> list[dict[str, int]]:
    """`tile_gemm` configurations for more than 64 rows of x, by the instructions of the busiest multiprocessor."""
    def cost(tile: Tall) -> float:
        rows = 16 * tile.R * tile.W
        return cdiv(cdiv(n, rows) * cdiv(m, 128), target(device).multiprocessors) * rows * tile.count

    fit = [tile for tile in TALL if not tile.whole or (m % 128 == 0 and n % (16 * tile.R * tile.W) == 0)]
    return [{"R": tile.R, "W": tile.W, "BM": 128, "STAGES": 2, "UNROLL": tile.unroll, "WHOLE": k if tile.whole else 0}
            for tile in sorted(fit, key=cost)]


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether matrix units take E4M3; without a GPU, as on an H100."""
    return device.type != "cuda" or bool(torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9))


def converts_fp8(device: torch.device) -> bool:
    """Whether an instruction converts E4M3: from compute capability 8.9 on, or 9 if assumed."""
    if device.type != "cuda":
        return _assumed.capability >= 9
    return bool(torch.version.cuda) and torch.cuda.get_device_capability(device) >= (8, 9)


def w8a8(m: int, n: int, k: int, kernel: W8A8, wide: bool, device: torch.device) -> tuple[dict[str, int], int]:
    """The configuration of `w8a8`, BN rows of w and BM rows of x per program, and its warps.  wide: x has 16-bit codes.

    TOKENS: from 64 rows of x on they are the rows of the MMA, so that a thread needs the scales of 2 of them, not 32.  Hopper's
    MMAs take at least 64 rows.  Stages fill 99 KB of shared memory, which every device has.  Iterations of two chunks fill up to
    200 of 227 KB: their program has the SM to itself.
    """
    bm, sms = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 or wide else 128, target(device).multiprocessors
    pairs = not wide and k % 256 == 0 and _takes_pairs(kernel, device)
    if bm < 64 or 4 * cdiv(n, 128) * cdiv(m, bm) < 3 * sms:
        bm = min(bm, 64)
        pairs = pairs and bm == 64 and cdiv(n, 64) * cdiv(m, 64) <= 2 * sms
        return {"BN": 64, "BM": bm, "STAGES": 6 if bm < 64 else 3 if pairs else 4, "TOKENS": int(bm == 64 and not wide),
                "UNROLL": 1 + pairs}, 4
    stages = 4 if bm == 64 and not wide else 3
    return {"BN": 128, "BM": bm, "STAGES": stages, "TOKENS": int(not wide), "UNROLL": 1 + (pairs and bm == 128)}, bm // 16


def _takes_pairs(kernel: W8A8, device: torch.device) -> bool:
    """Whether two chunks per iteration save more than they cost, by counts on sm_90 and sm_100.

    int8 without scales along K is summed in place, so that two programs fit on a Hopper SM.  On Blackwell int8 is multiplied
    outside of the matrix units: a second chunk would spill, and without scales along K it saves nothing.
    """
    capability = target(device).capability
    return (capability == 9 and (kernel.groups or kernel.type != "i8")) or (
        capability == 10 and kernel.groups and kernel.type != "i8")


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


def product_tile(last: str, rows: int, units: int, sums: int) -> tuple[int, int]:
    """The rows and units of a `matvec` tile.

    If rows are contiguous: at least a memory sector along N, so that programs fill the GPU, then long along K for few iterations.
    """
    if last == "k":
        return tile(last, rows, units, max(128, UNITS // sums))
    long = min(128, power(rows), max(8, power(rows // PROGRAMS)))
    return long, min(UNITS // long, power(units))


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
    """The default `gemv` and `skinny` tile of a weight [n, k]: R tiles of 16 rows per warp, WK warps that share K.

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
    """A tile of `gemv` or `skinny`: R tiles of 16 rows, and WK warps that share K, `trip` columns each per iteration."""
    return {"R": r, "WN": 1, "WK": wk, "EVEN": k % (trip * wk) == 0}
