"""How lane-tile kernels are launched, from the shape and the device alone: nothing is timed on first use."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import torch

from qdsl.runtime.arrays import cdiv
from qdsl.runtime.packed import PackedWeight

MULTIPROCESSORS = 132                                            # of a device that is not there: an H100's
WARPS = 15                                                       # per multiprocessor, to have enough bytes under way (predicted)


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
    return _target(device) if device.type == "cuda" else _assumed


@cache
def _target(device: torch.device) -> Target:
    capability = torch.cuda.get_device_capability(device)[0] if torch.version.cuda else 0
    return Target(capability, torch.cuda.get_device_properties(device).multi_processor_count)


def most_rows(packed: PackedWeight, device: torch.device) -> int:
    """Rows of x up to which a fused kernel is used, beyond which a dequantized tile and the vendor's matmul are (predicted).

    `many` keeps its weights in registers where a warp group can multiply them from there, as Hopper's do.
    """
    found = packed.layout.kernels.lanes
    if found is None or found.many is None or target(device).capability != 9:
        return 16
    return 64 if min(found.sizes(packed.sizes), default=128) >= 128 else 32


def many(m: int, n: int, device: torch.device) -> dict[str, int]:
    """R tiles of 64 rows of w per program, and BM rows of x."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    r = 2 if (4 if bm < 64 else 2) * cdiv(n, 128) >= target(device).multiprocessors else 1
    return {"R": r, "W": 4, "BM": bm, "STAGES": 3}


def lanes(n: int, k: int, device: torch.device) -> dict[str, int]:
    """R tiles of 16 rows per warp, and WK warps that share K, for a weight [n, k].

    Two tiles share what is made of x, so that fewer than two only pay where programs would not fill the device.  Warps share
    K until each multiprocessor has enough of them, evenly if they can.
    """
    places = target(device).multiprocessors
    r = 2 if 4 * cdiv(n, 32) >= 3 * places else 1
    programs = cdiv(n, 16 * r)
    wk = 1
    while wk < 8 and programs * wk < WARPS * places and 512 * wk <= k:
        wk *= 2
    return {"R": r, "WN": 1, "WK": wk, "EVEN": k % (256 * wk) == 0}
