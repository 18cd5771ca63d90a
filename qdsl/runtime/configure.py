"""How lane-tile kernels are launched: from the shape and the device alone, or as `qdsl.tune` once found to be faster there.

Nothing is timed on first use.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from qdsl.files import cache_folder
from qdsl.runtime.arrays import cdiv

if TYPE_CHECKING:
    from qdsl.runtime.packed import PackedWeight

MULTIPROCESSORS = 132                                            # of a device that is not there: an H100's
TRIP = 256                                                       # columns of w that a warp takes in a trip of the loop of `few`
WARPS = 15                                                       # per multiprocessor, to have enough bytes under way (predicted)


@dataclass(frozen=True, slots=True)
class Tall:
    """R tiles of 16 * W rows of w that meet 128 rows of x, for codes of 4 bits and groups of 128 columns and more.

    unroll: chunks in a trip.  whole: for shapes that fill all tiles.  count: instructions of a thread per weight in the loop,
    on sm_90; what it says of time is predicted.
    """

    R: int
    W: int
    unroll: int
    whole: bool
    count: float


TALL = (Tall(2, 8, 1, True, 3.1), Tall(2, 4, 1, True, 3.3), Tall(1, 4, 2, True, 3.5), Tall(1, 4, 2, False, 3.7))


@dataclass(frozen=True, slots=True)
class Target:
    """What a launch depends on: the first digit of the compute capability (9: Hopper), 0 elsewhere, and multiprocessors."""

    capability: int
    multiprocessors: int


_assumed = Target(0, MULTIPROCESSORS)


@contextmanager
def assumed(capability: int, multiprocessors: int) -> Iterator[None]:
    """Launches with tensors that are on no GPU are those of such a device, for those who look at kernels without one."""
    global _assumed
    before, _assumed = _assumed, Target(capability, multiprocessors)
    try:
        yield
    finally:
        _assumed = before


def target(device: torch.device) -> Target:
    return _target(device) if device.type in ("cuda", "xpu") else _assumed


@cache
def _target(device: torch.device) -> Target:
    if device.type == "xpu":
        return Target(0, torch.xpu.get_device_properties(device).max_compute_units)
    capability = torch.cuda.get_device_capability(device)[0] if torch.version.cuda else 0
    return Target(capability, torch.cuda.get_device_properties(device).multi_processor_count)


def has_many(packed: PackedWeight, dtype: torch.dtype, device: torch.device) -> bool:
    """Whether kernel `many` is used: it keeps its weights in registers, from where a warp group of Hopper multiplies them."""
    found = packed.layout.kernels.lanes
    return found is not None and found.many is not None and target(device).capability == 9 and not (
        found.double and dtype == torch.bfloat16)


def most_rows(packed: PackedWeight, dtype: torch.dtype, device: torch.device) -> int:
    """Rows of x up to which a fused kernel is used, beyond which a dequantized tile and the vendor's matmul are (predicted)."""
    found = packed.layout.kernels.lanes
    if found is None or not has_many(packed, dtype, device):
        return 16
    return 128 if _is_tall(packed) else 64 if min(found.sizes(packed.sizes), default=128) >= 128 else 32


def chosen(kind: str, packed: PackedWeight, m: int, x: torch.Tensor) -> dict[str, int]:
    """How kernel `kind` ('row', 'few', 'many') is launched for x [m, K]: as it was tuned for on this device, else by rule."""
    if not x.is_meta:
        found = tuned(tuned_file(x.device)).get(key(kind, packed, x.dtype))
        if found is not None and found in candidates(kind, packed, m):
            return found
    return candidates(kind, packed, m, x.device)[0]


def candidates(kind: str, packed: PackedWeight, m: int, device: torch.device | None = None) -> list[dict[str, int]]:
    """Configurations worth timing, the one by rule first."""
    n, k = packed.shape
    device = device or packed.device
    if kind == "many" and m > 64 and _is_tall(packed):
        rule, *others = _tall(m, n, k, device)
    elif kind == "many":
        rule = _many(m, n, device)
        others = [{**rule, "R": r, "STAGES": stages} for r in (1, 2) for stages in (2, 3, 4)]
        others += [{**rule, "STAGES": 2, "UNROLL": 2}] if _is_tall(packed) else []
    else:
        found = packed.layout.kernels.lanes
        trip = found.trip(packed.sizes) if found is not None and kind == "row" else TRIP
        rule = lanes(n, k, device, trip)
        others = [_split(r, wk, k, trip) for r in (2, 1) for wk in (8, 4, 2, 1) if trip * wk <= k]
    return [rule, *(other for other in others if other != rule)]


def key(kind: str, packed: PackedWeight, dtype: torch.dtype) -> str:
    """What a tuned configuration is kept under."""
    n, k = packed.shape
    return " ".join((kind, f"{packed.format.name}.{packed.storage}", packed.params_text, f"{n}x{k}", str(dtype)[6:]))


@cache
def tuned_file(device: torch.device) -> Path:
    """Where tuned configurations of a device are kept: in $QDSL_CACHE, or qdsl below the user's cache folder."""
    name = re.sub(r"[^A-Za-z0-9]+", "-", torch.cuda.get_device_name(device) if device.type == "cuda" else device.type)
    return cache_folder() / f"tuned-{name.lower()}.json"


@cache
def tuned(path: Path) -> dict[str, dict[str, int]]:
    """What a file of tuned configurations holds; nothing where it is missing or is no such file."""
    try:
        found = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def forget() -> None:
    """Read the files of tuned configurations anew."""
    tuned.cache_clear()
    tuned_file.cache_clear()


def _many(m: int, n: int, device: torch.device) -> dict[str, int]:
    """R tiles of 64 rows of w per program, and BM rows of x."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    r = 2 if (4 if bm < 64 else 2) * cdiv(n, 128) >= target(device).multiprocessors else 1
    return {"R": r, "W": 4, "BM": bm, "STAGES": 3, "UNROLL": 1, "WHOLE": 0}


def _is_tall(packed: PackedWeight) -> bool:
    """Whether a program of kernel `many` may take 128 rows of x."""
    found = packed.layout.kernels.lanes
    return found is not None and found.tall and min(found.sizes(packed.sizes), default=128) >= 128


def _tall(m: int, n: int, k: int, device: torch.device) -> list[dict[str, int]]:
    """Tiles for more than 64 rows of x, by the instructions of the multiprocessor that has most to do."""
    def cost(tile: Tall) -> float:
        rows = 16 * tile.R * tile.W
        return cdiv(cdiv(n, rows) * cdiv(m, 128), target(device).multiprocessors) * rows * tile.count

    fit = [tile for tile in TALL if not tile.whole or (m % 128 == 0 and n % (16 * tile.R * tile.W) == 0)]
    return [{"R": tile.R, "W": tile.W, "BM": 128, "STAGES": 2, "UNROLL": tile.unroll, "WHOLE": k if tile.whole else 0}
            for tile in sorted(fit, key=cost)]


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether matrix units take E4M3; of a device that is not there, an H100's do."""
    return device.type != "cuda" or bool(torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9))


def narrow(m: int, n: int, wide: bool, device: torch.device) -> tuple[dict[str, int], int]:
    """BN rows of w and BM rows of x per program, and warps; wide: x's codes have 16 bits.

    64 rows of w are the fewest that Hopper's instructions take.  Stages fill what shared memory every device has, 99 KB.
    """
    bm = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 or wide else 128
    if bm < 64 or 4 * cdiv(n, 128) * cdiv(m, bm) < 3 * target(device).multiprocessors:
        return {"BN": 64, "BM": min(bm, 64), "STAGES": 6 if bm < 64 else 4}, 4
    return {"BN": 128, "BM": bm, "STAGES": 4 if bm == 64 and not wide else 3}, 4 if bm == 64 else 8


def lanes(n: int, k: int, device: torch.device, trip: int = TRIP) -> dict[str, int]:
    """R tiles of 16 rows per warp, and WK warps that share K, for a weight [n, k].

    Two tiles share what is made of x, so that fewer than two only pay where programs would not fill the device.  Warps share
    K until each multiprocessor has enough of them, evenly if they can; a warp takes `trip` columns at a time.
    """
    places = target(device).multiprocessors
    r = 2 if 4 * cdiv(n, 32) >= 3 * places else 1
    wk = 1
    while wk < 8 and cdiv(n, 16 * r) * wk < WARPS * places and 2 * trip * wk <= k:
        wk *= 2
    return _split(r, wk, k, trip)


def _split(r: int, wk: int, k: int, trip: int) -> dict[str, int]:
    return {"R": r, "WN": 1, "WK": wk, "EVEN": k % (trip * wk) == 0}
