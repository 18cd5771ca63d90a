"""Kernels for AMD's GPUs counted, and `gemm` executed from its PTX, as JSON: `python -m tests.kernels.gemm_kernels counts`.

Neither needs a GPU.  Triton must not be interpreting.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

import qdsl
from qdsl.analyze import launches
from qdsl.analyze.counts import report
from qdsl.analyze.execute.run_launch import Options, execute
from qdsl.analyze.gpus import GPUS
from qdsl.runtime.gpu import configure, launch, plan
from tests.kernels.test_gemm import BUDGETS, EXECUTED, expected, gemm
from tests.support.formats import cases, random_packed


def counted() -> Iterator[dict[str, Any]]:
    """Of BUDGETS, on a large layer."""
    for gpu_name, name, storage, rows, kind, limit in BUDGETS:
        gpu = GPUS[gpu_name]
        packed = launches.meta_weight(qdsl.load(name), (4096, 4096), storage, {})
        x, out = (torch.empty(rows, size, dtype=launches.TYPES[kind], device="meta") for size in reversed(packed.shape))
        with configure.assumed(0, gpu.multiprocessors, gpu):
            candidate = plan.any_product(packed, 1) if rows == 1 else gemm(x, packed, 1)
            [call] = launch.linear_calls(x, packed, None, out, candidate=candidate)
        counts = report(call, gpu.arch)
        yield {"what": f"{gpu_name} {name}.{storage} {rows} {kind}", "kernel": counts.kernel, "vector": counts.hot_pipes["alu"],
               "limit": limit, "spills": counts.spills, "stack": counts.stack, "registers": counts.registers,
               "shared": counts.shared_bytes, "tensor": sorted(counts.tensor)}


def executed() -> Iterator[dict[str, Any]]:
    """Of EXECUTED: the largest error as a share of what is allowed, and what the checkers say."""
    for arch, name, rows, dtype, split in EXECUTED:
        case = next(case for case in cases() if str(case).startswith(name))
        packed = random_packed(case, (24, 512))
        x = (torch.randn(rows, 512, generator=torch.Generator().manual_seed(0)) / 64).to(dtype)
        out = torch.full((rows, 24), torch.nan, dtype=dtype)
        [call] = launch.linear_calls(x, packed, None, out, candidate=gemm(x, packed, split))
        findings = execute(call, arch, outputs=(out,), options=Options()).findings
        exact, bound = expected(packed, x, None)
        error = float(((out.double() - exact).abs() / bound).max())
        yield {"what": f"{arch} {name} {rows}", "kernel": call.family, "error": error,
               "findings": [str(finding) for finding in findings]}


if __name__ == "__main__":
    for line in counted() if sys.argv[1] == "counts" else executed():
        print(json.dumps(line))
