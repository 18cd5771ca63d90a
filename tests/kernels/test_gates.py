"""Kernels for matrix units, counted for GPUs that are not there: instructions per weight, and what must not stand in the loop."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tests.kernels.gate_kernels import GATES
from tests.support.paths import ROOT

# Moves between lanes or through shared memory, and conversions of integers, which a quarter of the lanes can do at once.
SLOW = ("SHFL", "STS", "LDS", "LDSM", "I2F")


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_gates(arch: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    made = subprocess.run([sys.executable, "-m", "tests.kernels.gate_kernels", arch], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(ROOT)})
    assert made.returncode == 0, made.stderr[-4000:]
    found = json.loads(made.stdout)
    wanted = [(str(gate), kind) for gate in GATES for kind, _ in gate.limits if arch in gate.archs]
    assert [(each["gate"], each["x"]) for each in found] == wanted
    wrong: list[str] = []
    for each in found:
        what = f"{each['gate']} {each['x']}"
        slow = {op for op in each["opcodes"] if op.split(".")[0] in SLOW}
        if each["picked"] == "tile_gemm":                        # x passes through shared memory, and weights on the way in
            slow = {op for op in slow if op.split(".")[0] not in ("LDS", "LDSM")}
            if not any(op.startswith("HGMMA") for op in each["tensor"]):
                wrong.append(f"{what}: no HGMMA among {each['tensor']}")
        elif not any("128" in op for op in each["loads"]):
            wrong.append(f"{what}: weights are loaded by {each['loads']}")
        if each["hot"] > each["limit"]:
            wrong.append(f"{what}: {each['hot']:.3f} instructions per weight, at most {each['limit']}")
        if each["spills"]:
            wrong.append(f"{what}: {each['spills']} spills")
        if slow:
            wrong.append(f"{what}: {sorted(slow)} in the loop")
        if each["kernel"] != each["picked"]:
            wrong.append(f"{what}: {each['kernel']} was picked")
    assert wrong == []
