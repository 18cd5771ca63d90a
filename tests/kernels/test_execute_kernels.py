"""Compiled kernels, executed from their PTX with every checker on: right results, no findings; and mutants of them are caught."""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from qdsl.analyze.execute import trial
from tests.kernels.execute_kernels import SUBNORMAL
from tests.support import compiling
from tests.support.ptx_mutants import EQUAL

SHARES = 6


def lines(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module prints as JSON, in a process in which Triton compiles."""
    done = compiling.run(module, *arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("share", range(SHARES))
def test_kernels_are_right_as_compiled(share: int) -> None:
    """Dequantize has the reference's bits; linear is within the bound of float32 sums; the checkers find nothing."""
    executed = lines("tests.kernels.execute_kernels", str(share), str(SHARES))
    assert executed
    assert [line for line in executed if not line["error"] <= 1 or line["findings"]] == []


def test_kernels_that_need_subnormal_numbers() -> None:
    """NVIDIA's matrix units read them; where others do not, these kernels are wrong, and the others right."""
    wrong = {tuple(line["job"]): line["wrong"] for line in lines("tests.kernels.execute_kernels", "flushed")}
    assert wrong == SUBNORMAL


def test_kernels_of_anybody() -> None:
    """Functions, matrix units of all types, b transposed; a sum in parts is a race unless its atomics acquire and release.

    And weights cut along K, which a test in the interpreter cannot compile, and how `dequantize` stores.
    """
    executed = lines("tests.kernels.execute_others")
    executed, columns, stores = executed[:-7], executed[-7:-5], executed[-5:]
    assert all((line["findings"], line["error"], line["bytes_of_sector"]) == ([], 0.0, 32.0) for line in stores), stores
    assert columns == [{"what": f"columns {family}", "findings": [], "error": 0.0} for family in ("dequantize", "gemv")]
    assert len(executed) == 18 + 9 + 2
    for line in executed[:-2]:
        what = line["what"].split()
        assert line["findings"] == (["race"] if "relaxed" in what else []), line
        assert line["error"] <= {"softmax": 1e-7, "split_sum": 2e-5, "product": 0.0}[what[0]], line


    assert executed[-2:] == [
        {"what": "scaled True", "findings": [], "error": 0.0},
        {"what": "scaled False", "error": 0.0, "findings": ["loads byte 0 of 'x' before griddepcontrol.wait",
                                                            "stores to byte 0 of 'out' before griddepcontrol.wait"]}]


@pytest.mark.parametrize(("package", "kernels", "error"), [("gemlite", {"gemv_INT_kernel"}, 0.0), ("inductor", {
    "triton_per_fused__softmax_mul_0", "triton_poi_fused__softmax_add_sum_tanh_1"}, 1e-6)])
def test_kernels_of_other_packages(package: str, kernels: set[str], error: float) -> None:
    """GemLite's product of one row, where it is installed; and what torch.compile makes of a function."""
    if package == "gemlite" and not find_spec("gemlite"):
        pytest.skip("pip install --no-deps gemlite")
    executed = lines("tests.kernels.execute_packages", package)
    assert {name for line in executed for name in line["kernels"]} == kernels
    for line in executed:
        assert line["findings"] == [] and line["error"] <= error, line


def test_the_command_line_executes() -> None:
    words = "analyze q4_0 --execute --arch sm_90 --kernel dequantize --kernel linear --shape 40 256 --json"
    done = compiling.run("qdsl", *words.split())
    assert done.returncode == 0, done.stderr
    dequantize, linear = json.loads(done.stdout)["trials"]
    for result in (dequantize, linear):                          # these kernels have no branches but loops
        assert result["counted"] == pytest.approx(result["issued"], rel=0.02)
        assert result["corrected"] == pytest.approx(result["sass"] * result["issued"] / result["counted"])
    assert dequantize["error"] == 0 and linear["error"] < 4e-3 and linear["findings"] == []
    assert dequantize["memory"]["store bytes"] == 40 * 256 * 2


@pytest.mark.parametrize(("issued", "line"), [(10.1, ""), (12.0, "they differ by +20%: SASS 6.00, corrected")])
def test_counts_that_differ_are_said(issued: float, line: str) -> None:
    result = trial.Trial(kind="linear", title="", arch="sm_90", kernels=("k",), error=0.1, findings=(), ideal=1, memory={},
                         instructions=9.0, issued=issued, counted=10.0, sass=5.0, corrected=issued / 2)
    assert (line in "\n".join(trial.trial_lines(result))) and ("differ" in "\n".join(trial.trial_lines(result))) == bool(line)


def test_mutants_of_kernels_are_caught() -> None:
    """A barrier, wait or fence less, a mask one too wide, a lane or a place in shared memory that is another."""
    mutants = lines("tests.kernels.execute_mutants")
    assert len(mutants) >= 60
    survivors = {line["mutant"] for line in mutants if not line["caught"]}
    assert survivors - EQUAL.keys() == set()
    assert EQUAL.keys() <= {line["mutant"] for line in mutants}, "a mutant that is said to change nothing is gone"
    assert len(EQUAL) <= len(mutants) // 4
