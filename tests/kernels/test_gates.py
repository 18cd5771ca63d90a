"""Kernels for matrix units, counted for GPUs that are not there: instructions per weight, and what must not stand in the loop."""

from __future__ import annotations

import json

import pytest

from qdsl.runtime.gpu import costs
from tests.kernels.gate_kernels import gates_of
from tests.support import compiling

# Moves between lanes or through shared memory, and conversions of integers, which a quarter of the lanes can do at once.
SLOW = ("SHFL", "STS", "LDS", "LDSM", "I2F")
MATRIX = {"mma": "HMMA", "wgmma": "HGMMA", "tcgen05": "UTCHMMA"}   # opcodes by the unit of costs.matrix_unit


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100"])
def test_gates(arch: str) -> None:
    done = compiling.run("tests.kernels.gate_kernels", arch)
    assert done.returncode == 0, done.stderr[-4000:]
    rows = json.loads(done.stdout)
    wanted = [(str(gate), kind) for gate in gates_of(arch) for kind, _ in gate.limits_on(arch)]
    assert [(row["gate"], row["x"]) for row in rows] == wanted
    wrong: list[str] = []
    for row in rows:
        what = f"{row['gate']} {row['x']}"
        slow = {op for op, count in row["opcodes"].items() if op.split(".")[0] in SLOW
                and (op, count) != ("SHFL.BFLY", row["shuffles"])}
        if row["picked"] == "tile_gemm":                         # x passes through shared memory, and weights on the way in
            slow = {op for op in slow if op.split(".")[0] not in ("LDS", "LDSM")}
        elif not any("128" in op for op in row["loads"]):
            wrong.append(f"{what}: weights are loaded by {row['loads']}")
        if {op.split(".")[0] for op in row["tensor"]} != {MATRIX[costs.matrix_unit(row["picked"], arch)]}:
            wrong.append(f"{what}: other matrix instructions than the counts assume: {row['tensor']}")
        if row["hot"] > row["limit"]:
            wrong.append(f"{what}: {row['hot']:.3f} instructions per weight, at most {row['limit']}")
        if row["spills"]:
            wrong.append(f"{what}: {row['spills']} spills")
        if slow:
            wrong.append(f"{what}: {sorted(slow)} in the loop")
        if row["kernel"] != row["picked"]:
            wrong.append(f"{what}: {row['kernel']} was picked")
    assert wrong == []
