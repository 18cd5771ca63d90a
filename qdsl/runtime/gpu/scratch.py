"""Workspace that the programs of one launch share: partial sums of split K, and counters of finished programs.

torch's caching allocator allocates the sums of every launch.  Counters must be zero when a launch begins, and a launch leaves
them zero.  The launches of a stream run in order, so a stream has one set of counters, zeroed once.  A CUDA graph may be replayed
at any time on any stream.  So every captured launch has counters of its own, from a reserve that was zeroed before any capture.
torch.cuda.graph waits for the device first; other captures zero the counters themselves.
"""

from __future__ import annotations

import threading

import torch
from torch import Tensor

from qdsl.runtime.weight.arrays import cdiv

STREAM = 1 << 14                                                 # counters per stream: more than any split launch has tiles
RESERVE = 1 << 20                                                # counters per device, for captured launches
STEP = 4                                                         # counters are taken in multiples of 16 bytes


class Counters:
    """Zeroed counters for the launches of all devices and streams."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._of_stream: dict[tuple[torch.device, int], Tensor] = {}
        self._reserve: dict[torch.device, tuple[Tensor, int]] = {}   # a reserve and how many were taken

    def take(self, count: int, device: torch.device, stream: int | None = None) -> Tensor:
        """At least `count` zeros, int32, for one launch on the current stream of the current device.

        stream: that stream's address, if the caller has it.
        """
        if count > STREAM or device.type == "meta":
            return torch.zeros(count, dtype=torch.int32, device=device)
        if is_captured(device):
            return self._captured(count, device)
        if stream is None:
            stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
        zeros = self._of_stream.get((device, stream))
        if zeros is None:
            zeros = self._of_stream.setdefault((device, stream), torch.zeros(STREAM, dtype=torch.int32, device=device))
            with self._lock:
                self._reserve.setdefault(device, (torch.zeros(RESERVE, dtype=torch.int32, device=device), 0))
        return zeros

    def _captured(self, count: int, device: torch.device) -> Tensor:
        with self._lock:
            zeros, taken = self._reserve.get(device, (None, 0))
            if zeros is not None and taken + count <= RESERVE:
                self._reserve[device] = zeros, cdiv(taken + count, STEP) * STEP
                return zeros[taken:taken + count]
        return torch.zeros(count, dtype=torch.int32, device=device)


counters = Counters()


def is_captured(device: torch.device) -> bool:
    """Whether launches on the current stream are captured into a CUDA graph instead of running."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def scratch_of(tiles: int, size: int, device: torch.device, stream: int | None = None) -> tuple[Tensor, Tensor]:
    """Workspace that the programs of a launch share: float32 [tiles * size], uninitialized, and counters, int32 zeros."""
    return torch.empty(tiles * size, dtype=torch.float32, device=device), counters.take(tiles, device, stream)
