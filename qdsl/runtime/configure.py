"""How lane-tile kernels are launched, from the shape and the device alone: nothing is timed on first use."""

from __future__ import annotations

from functools import cache

import torch

from qdsl.runtime.arrays import cdiv
from qdsl.runtime.packed import PackedWeight

MULTIPROCESSORS = 132                                            # of a device that is not there: an H100's
WARPS = 15                                                       # per multiprocessor, to have enough bytes under way (predicted)


@cache
def capability(device: torch.device) -> int:
    """The first digit of the compute capability: 9 on Hopper."""
    return torch.cuda.get_device_capability(device)[0] if device.type == "cuda" and torch.version.cuda else 0


@cache
def multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else MULTIPROCESSORS


def most_rows(packed: PackedWeight, device: torch.device) -> int:
    """Rows of x up to which a fused kernel is used, beyond which a dequantized tile and the vendor's matmul are (predicted).

    `many` keeps its weights in registers where a warp group can multiply them from there, as Hopper's do.
    """
    found = packed.layout.kernels.lanes
    if found is None or found.many is None or capability(device) != 9:
        return 16
    return 64 if min(found.sizes(packed.sizes), default=128) >= 128 else 32


def many(m: int, n: int, device: torch.device) -> dict[str, int]:
    """R tiles of 64 rows of w per program, and BM rows of x."""
    bm = 16 if m <= 16 else 32 if m <= 32 else 64
    r = 2 if 4 * cdiv(n, 128) >= 3 * multiprocessors(device) or (bm < 64 and 2 * cdiv(n, 128) >= multiprocessors(device)) else 1
    return {"R": r, "W": 4, "BM": bm, "STAGES": 3}


@cache
def has_fp8(device: torch.device) -> bool:
    """Whether matrix units take E4M3; of a device that is not there, an H100's do."""
    return device.type != "cuda" or bool(torch.version.cuda and torch.cuda.get_device_capability(device) >= (8, 9))


def narrow(m: int, n: int, wide: bool, device: torch.device) -> tuple[dict[str, int], int]:
    """BN rows of w and BM rows of x per program, and warps; wide: x's codes have 16 bits.

    64 rows of w are the fewest that Hopper's instructions take.  Stages fill what shared memory every device has, 99 KB.
    """
    bm = 16 if m <= 16 else 32 if m <= 32 else 64 if m <= 64 or wide else 128
    if bm < 64 or 4 * cdiv(n, 128) * cdiv(m, bm) < 3 * multiprocessors(device):
        return {"BN": 64, "BM": min(bm, 64), "STAGES": 6 if bm < 64 else 4}, 4
    return {"BN": 128, "BM": bm, "STAGES": 4 if bm == 64 and not wide else 3}, 4 if bm == 64 else 8


def lanes(n: int, k: int, device: torch.device) -> dict[str, int]:
    """R tiles of 16 rows per warp, and WK warps that share K, for a weight [n, k].

    Two tiles share what is made of x, so that fewer than two only pay where programs would not fill the device.  Warps share
    K until each multiprocessor has enough of them, evenly if they can.
    """
    places = multiprocessors(device)
    r = 2 if 4 * cdiv(n, 32) >= 3 * places else 1
    programs = cdiv(n, 16 * r)
    wk = 1
    while wk < 8 and programs * wk < WARPS * places and 512 * wk <= k:
        wk *= 2
    return {"R": r, "WN": 1, "WK": wk, "EVEN": k % (256 * wk) == 0}
