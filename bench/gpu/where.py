"""Where questions are measured: a GPU, or a CPU with Triton's interpreter as a stand-in that tries every line of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from bench.gpu import clock
from bench.gpu.device import H200, DeviceInfo, device_info

T = TypeVar("T")
Calls = Sequence[Callable[[], Any]]
ROUNDS = 5


@dataclass(frozen=True)
class Where:
    """The device, and how small weights are: a stand-in measures nothing of interest."""

    device: torch.device
    info: DeviceInfo
    is_stand_in: bool

    @classmethod
    def of(cls, is_stand_in: bool) -> Where:
        """This machine's GPU, or the stand-in."""
        return cls(torch.device("cpu"), H200, True) if is_stand_in else cls(torch.device("cuda"), device_info(), False)

    @property
    def x(self) -> torch.dtype:
        """The dtype of x: Triton's interpreter does not round to bfloat16."""
        return torch.float16 if self.is_stand_in else torch.bfloat16

    def shape(self, n: int, k: int) -> tuple[int, int]:
        """A weight's shape, cut for a stand-in."""
        return (128, 128) if self.is_stand_in else (n, k)

    def some(self, values: Sequence[T]) -> Sequence[T]:
        """All of them, or on a stand-in the first one."""
        return values[:1] if self.is_stand_in else values

    def copies(self, nbytes: int) -> int:
        """How many copies of a weight are timed in turn, so that none is in the L2 cache."""
        return 2 if self.is_stand_in else clock.copies(nbytes, self.info.l2)

    def wait(self) -> None:
        """Wait for the device; raises what a launch did wrong."""
        if not self.is_stand_in:
            torch.cuda.synchronize()

    def seconds(self, calls: Calls, rounds: int = ROUNDS) -> float:
        """The median time of a call, all captured in one CUDA graph; on a stand-in of one run."""
        if not self.is_stand_in:
            return clock.seconds(calls, rounds)
        begun = time.perf_counter()
        calls[0]()
        return time.perf_counter() - begun

    def eager_seconds(self, call: Callable[[], Any], rounds: int = ROUNDS) -> float:
        """The median time of a call without a graph, waited for."""
        samples = []
        for _ in range(1 if self.is_stand_in else rounds):
            self.wait()
            begun = time.perf_counter()
            call()
            self.wait()
            samples.append(time.perf_counter() - begun)
        return sorted(samples)[len(samples) // 2]
