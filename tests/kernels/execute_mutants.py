"""Mutants of compiled kernels on the PTX machine: `python -m tests.kernels.execute_mutants`.  A line of JSON per mutant.

A mutant is caught by an error, by a finding, or by a result outside of the bound.  Triton must not be interpreting.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu import regimes
from qdsl.analyze.compile import compile_with_triton
from qdsl.analyze.execute import ExecutionError, Options, execute_ptx
from qdsl.analyze.execute.run_launch import flat_arguments
from qdsl.analyze.gpus import arch_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.libraries.call import Call
from tests.support.only_ptx import stop_at_ptx
from tests.support.ptx_mutants import mutants

N, K = 41, 768                                                  # six chunks: copies in flight at the end fill the first stage
# Format, planar or not, rows of x, architecture: every family of kernels, with copies, warp groups, and shared memory.
LAUNCHES = (("q4_0", True, 1, "sm_80"), ("q4_k", True, 5, "sm_80"), ("q4_0", True, 33, "sm_90"),
            ("fp8_block", True, 33, "sm_90"), ("q6_k", False, 1, "sm_90"), ("fp8_channel", False, 0, "sm_90"),
            ("nf4", True, 5, "sm_100"), ("mxfp4", True, 1, "sm_90"))
MOST = 3                                                         # of a kind and a kernel


def call_of(packed: PackedWeight, rows: int, arch: str) -> tuple[Call, torch.Tensor, torch.Tensor]:
    """The launch, what it writes, and x."""
    x = torch.randn(rows, K, generator=torch.Generator().manual_seed(rows)).to(torch.bfloat16)
    out = torch.zeros((rows, N) if rows else (N, K), dtype=torch.bfloat16)
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        calls = list(launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed)) if rows else
                     launch.dequantize_calls(packed, out))
    assert len(calls) == 1
    return calls[0], out, x


class Launch:
    """A compiled launch on a random weight, and its product in float64."""

    def __init__(self, name: str, planar: bool, rows: int, arch: str) -> None:
        format = importlib.import_module(f"qdsl.generated.{name}")
        packed = format.quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(0)))
        self.call, self.out, x = call_of(format.planar(packed) if planar else packed, rows, arch)
        weight = format.dequantize(packed, torch.float32).double()
        self.exact = x.double() @ weight.t() if rows else weight
        self.allowed = 4e-3 * (x.double().abs() @ weight.abs().t()) if rows else weight.abs() * 2.0 ** -8
        self.compiled = compile_with_triton(self.call, arch_of(arch))
        self.arguments = flat_arguments(self.call)

    def run(self, ptx: str) -> tuple[str, set[int]]:
        """What is wrong with a text, and the lines that threads executed."""
        self.out.fill_(torch.nan)
        try:
            execution = execute_ptx(ptx, self.arguments, self.call.grid, self.compiled.metadata.num_warps,
                                    self.compiled.metadata.shared, outputs=(self.out,), options=Options(steps=200_000))
        except ExecutionError as error:
            return str(error), set()
        wrong = not bool(((self.out.double() - self.exact).abs() <= self.allowed).all())
        executed = {line for line, count in execution.lines.items() if count}
        return str(execution.findings[0]) if execution.findings else "the result is wrong" * wrong, executed


def every() -> Iterator[dict[str, Any]]:
    for name, planar, rows, arch in LAUNCHES:
        subject = Launch(name, planar, rows, arch)
        text = subject.compiled.asm["ptx"]
        why, executed = subject.run(text)
        assert not why, why
        for mutant, changed, probe in mutants(text, executed, MOST):
            if not probe or subject.run(probe)[0]:
                why, _ = subject.run(changed)
                yield {"mutant": f"{name} {rows} {mutant}", "caught": bool(why), "why": why}


if __name__ == "__main__":
    stop_at_ptx()
    for line in every():
        print(json.dumps(line), flush=True)
