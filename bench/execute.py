"""Times the executor of compiled kernels on one CPU core, without compilation.

Thread-instructions are instructions times the threads that execute them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates
from bench.timing import Side, calls
from qdsl.analyze.compile import compile_with_triton
from qdsl.analyze.execute import Execution, Options, execute_ptx
from qdsl.analyze.execute.run_launch import flat_arguments
from qdsl.analyze.gpus import arch_of
from qdsl.runtime.gpu import configure, launch

UNCHECKED: dict[str, Any] = {"races": False, "written": False, "asynchronous": False}
WARP_GROUPS: dict[str, Any] = {"name": "q4_0", "planar": True, "rows": 33, "shape": (128, 512), "arch": "sm_90"}
GRID: dict[str, Any] = {"name": "q4_0", "planar": False, "rows": 0, "shape": (512, 1024), "arch": "sm_80"}
ONE: dict[str, Any] = {"name": "q4_0", "planar": True, "rows": 1, "shape": (8, 8192), "arch": "sm_80"}


def figures(rounds: int) -> Iterator[Figure]:
    """A kernel with products of warp groups, by seconds; others by what they execute in a second."""
    sides = [Side(executed, {**WARP_GROUPS, "options": options}) for options in (UNCHECKED, {})]
    for seconds, goal, what in zip(calls(sides, rounds), (0.2, 0.6), ("unchecked", "every check"), strict=True):
        yield Figure(f"wgmma kernel, 128 x 512 weights, 33 rows, {what}", "s", seconds, goal, more=False)
    for launched, goal, what in ((GRID, 50, "a grid of 8192 threads and more"), (ONE, 5, "one program")):
        count = execution(**launched, options=UNCHECKED)()[0].instructions
        for options, aim, checks in ((UNCHECKED, goal, "unchecked"), ({}, None, "every check")):
            [seconds] = calls([Side(executed, {**launched, "options": options})], rounds)
            yield Figure(f"thread-instructions, {what}, {checks}", "M/s", rates(count / 1e6, seconds), aim)


def executed(**launched: Any) -> Callable[[], Tensor]:
    """Executes a launch and returns what it stored."""
    run = execution(**launched)
    return lambda: run()[1]


def execution(name: str, planar: bool, rows: int, shape: tuple[int, int], arch: str, options: dict[str, Any],
              ) -> Callable[[], tuple[Execution, Tensor]]:
    """A launch on a random weight, dequantize with no rows, else linear; and what it stored."""
    format = importlib.import_module(f"qdsl.generated.{name}")
    packed = format.quantize(torch.randn(shape, generator=torch.Generator().manual_seed(0)))
    packed = format.planar(packed) if planar else packed
    n, k = shape
    x, out = torch.ones(rows, k, dtype=torch.bfloat16), torch.zeros((rows, n) if rows else (n, k), dtype=torch.bfloat16)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        [call] = launch.linear_calls(x, packed, None, out) if rows else launch.dequantize_calls(packed, out)
    compiled, arguments = compile_with_triton(call, arch_of(arch)), flat_arguments(call)
    return lambda: (execute_ptx(compiled.asm["ptx"], arguments, call.grid, compiled.metadata.num_warps, compiled.metadata.shared,
                                outputs=(out,), options=Options(**options)), out)
