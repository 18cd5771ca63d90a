"""Times the host's part of a product: `linear`, `Linear` and the registered operation, with a launcher that launches nothing.

Kernels are compiled for a GPU that need not be present.  Tensors are on the CPU, and a stub of Triton's driver takes their
launches, so that only Python and torch are timed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget

from bench.figure import Figure
from bench.timing import Side, calls
from bench.weights import format_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure
from qdsl.runtime.torch import ops

COUNT = 2000                                                     # calls that are timed together
GOALS = {"linear": 5.0, "Linear": 6.0, "operation": 10.0}        # microseconds


class StubDriver:
    """Triton's driver of one GPU with capability 9.0, whose launches are kept in `launched` if it is a list."""

    def __init__(self, launched: list[tuple[Any, ...]] | None = None) -> None:
        self.launched = launched
        self.stream = 0
        self.functions = 0
        self.utils = self

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return self.stream

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_device_properties(self, device: int) -> dict[str, int]:
        return {"max_shared_mem": 227 << 10, "multiprocessor_count": 132, "warpSize": 32}

    def load_binary(self, *arguments: Any) -> tuple[int, int, int, int, int]:
        """Module, function, registers, spills and threads; a function is a number that no other has."""
        self.functions += 1
        return 1, self.functions, 32, 0, 1024

    def launcher_cls(self, source: Any, metadata: Any) -> Callable[..., None]:
        kept = self.launched
        return (lambda *arguments: None) if kept is None else lambda *arguments: kept.append(arguments)


def stubbed(launched: list[tuple[Any, ...]] | None = None) -> ExitStack:
    """Tensors on the CPU meet kernels of an H100, and the launches are kept in a list, if one is passed."""
    triton.runtime.driver.set_active(StubDriver(launched))
    stack = ExitStack()
    stack.enter_context(configure.assumed(9, 132))
    stack.enter_context(patch.object(PackedWeight, "runs_kernels", True))
    return stack


def side(what: str) -> Callable[[], Any]:
    """The calls that are timed: COUNT of one product, M = 1, 4096 x 4096."""
    stubbed()
    form = format_of("q4_0")
    packed = form.empty((4096, 4096), "planar", "cpu")
    x = torch.zeros(1, 4096, dtype=torch.bfloat16)
    layer = form.Linear(packed)
    tensors, key = ops.operation_arguments(packed)
    operation = torch.ops.qdsl.linear.default
    one: dict[str, Callable[[], Any]] = {
        "linear": lambda: form.linear(x, packed), "Linear": lambda: layer(x),
        "operation": lambda: operation(x, tensors, None, key, "")}
    product = one[what]

    def run() -> torch.Tensor:
        with torch.no_grad():
            for _ in range(COUNT):
                product()
        return torch.zeros(1)

    product()
    return run


def figures(rounds: int) -> Iterator[Figure]:
    """Microseconds of a call."""
    samples = calls([Side(side, {"what": what}) for what in GOALS], rounds)
    for (what, goal), seconds in zip(GOALS.items(), samples, strict=True):
        microseconds = [sample / COUNT * 1e6 for sample in seconds]
        yield Figure(f"host time of {what}, launcher stubbed", "us", microseconds, goal, more=False,
                     note="q4_0 planar, M = 1, 4096 x 4096")
