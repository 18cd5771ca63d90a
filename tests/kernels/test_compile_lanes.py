"""Kernels for matrix units of every format, compiled for GPUs that are not there: nothing is moved between lanes in a loop.

But for what scales runs of x (gate_kernels.shuffles).
"""

from __future__ import annotations

import json

import pytest

from qdsl.runtime.gpu import costs
from tests.kernels.compile_lanes import compiled_for
from tests.kernels.test_gates import MATRIX
from tests.support import compiling

# Moves between lanes or through shared memory, and conversions of integers, which a quarter of the lanes can do at once.
SLOW = {"SHFL", "STS", "LDS", "LDSM", "I2F"}
# A kernel of 128 registers or more may be given fewer, and keep what does not change in a loop outside of them.
SPILLS = 16


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_every_format(arch: str) -> None:
    done = compiling.run("tests.kernels.compile_lanes", arch)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert {row["kernel"].split(" ")[0] for row in rows} == {str(case) for case in compiled_for(arch)}
    for row in rows:
        slow = SLOW & set(row["opcodes"])
        if "tile_gemm" in row["kernel"]:                            # on the way in weights and x pass through shared memory
            assert not slow & {"SHFL", "I2F"}, row
        else:
            assert not slow and any("128" in load for load in row["loads"]), row
        assert MATRIX[costs.matrix_unit(row["family"], arch)] in {op.split(".")[0] for op in row["tensor"]}, row
        assert row["spills"] <= SPILLS, row
