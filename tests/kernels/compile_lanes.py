"""Kernels for matrix units of every format, compiled for a GPU that is not there: `python -m tests.kernels.compile_lanes sm_90`.

A line of JSON per kernel.  Triton must not be interpreting.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from bench.gpu import regimes
from qdsl.analyze import report
from qdsl.analyze.gpus import arch_of
from qdsl.runtime.gpu import configure, launch, plan
from tests.kernels.gate_kernels import shuffles
from tests.support.covering import ALL, covering, kernels, quarter_of
from tests.support.formats import Case, cases

SHAPE = (4096, 4096)
# Groups of 9 columns are none that these kernels serve.
CASES = [case for case in cases() if kernels(case, "gemv", "skinny") and str(case) != "same_names.planar-group9"]
COVERING = covering(CASES, lambda case: kernels(case, "gemv", "skinny", "tile_gemm"))
TYPES = {"sm_90": torch.bfloat16, "sm_100": torch.float16}


def compiled_for(arch: str) -> list[Case]:
    """Half of the cases that cover all lines, each for one GPU; in `make test-all` every case for sm_90, with own kernels."""
    if ALL:
        return CASES if arch == "sm_90" else COVERING
    return quarter_of(COVERING[list(TYPES).index(arch)::len(TYPES)])


def every(arch: str) -> Iterator[dict[str, Any]]:
    """Of the cases that cover all the kernels for 1, 8 and 16 rows of x, of each other case one of them in turn."""
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for i, case in enumerate(compiled_for(arch)):
            packed = case.module.FORMAT.empty(SHAPE, case.storage, "meta", (), **case.choice)
            served = [x for x in (torch.empty(rows, SHAPE[1], dtype=TYPES[arch], device="meta") for rows in (1, 8, 16))
                      if plan.kinds(packed, len(x), x.dtype, x.device)
                      and (len(x) < 16 or regimes.candidate(x, packed).kind == "tile_gemm")]
            for x in served if case in COVERING else served[i % len(served):][:1]:
                [call] = launch.linear_calls(x, packed, None, torch.empty_like(x), candidate=regimes.candidate(x, packed))
                row = report(call, arch)
                opcodes = {op.split(".")[0] for op, count in row.opcodes.items() if (op, count) != ("SHFL.BFLY", shuffles(call))}
                yield {"kernel": f"{case} {row.kernel} {len(x)}", "family": call.family, "opcodes": sorted(opcodes),
                       "hot": row.hot, "spills": row.spills, "tensor": sorted(row.tensor), "loads": row.loads}


if __name__ == "__main__":
    for line in every(sys.argv[1]):
        print(json.dumps(line), flush=True)
