"""Kernels for matrix units of every format, compiled for a GPU that is not there: `python -m tests.compile_lanes sm_90`.

A line of JSON per kernel.  Triton must not be interpreting.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from typing import Any

import torch

from qdsl.analyze import report
from qdsl.analyze.gpus import arch_of
from qdsl.runtime import configure, launch
from tests.support.covering import covering, kernels
from tests.support.formats import Case, cases

SHAPE = (4096, 4096)
TYPES = {"sm_90": torch.bfloat16, "sm_100": torch.float16}


def compiled_for(arch: str) -> list[Case]:
    """Every case for sm_90, which has kernels that no other has, and those that cover all for others."""
    found = [case for case in cases() if kernels(case, "row", "few")]
    return found if arch == "sm_90" else covering(found, lambda case: kernels(case, "row", "few"))


def every(arch: str) -> Iterator[dict[str, Any]]:
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for case in compiled_for(arch):
            packed = case.module.FORMAT.empty(SHAPE, case.storage, "meta", (), **case.choice)
            for rows in (1, 8, 16):
                x, out = (torch.empty(rows, SHAPE[0], dtype=TYPES[arch], device="meta") for _ in range(2))
                if not launch.has_lanes(x, packed) or (rows == 16 and launch.kind(x, packed) != "many"):
                    continue
                made = report(next(iter(launch.linear_calls(x, packed, None, out))), arch)
                yield {"kernel": f"{case} {made.kernel} {rows}", "opcodes": sorted({op.split(".")[0] for op in made.opcodes}),
                       "hot": made.hot, "spills": made.spills, "tensor": sorted(made.tensor), "loads": made.loads}


if __name__ == "__main__":
    for found in every(sys.argv[1]):
        print(json.dumps(found), flush=True)
