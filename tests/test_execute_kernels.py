"""Compiled kernels, executed from their PTX with every checker on: right results, no findings; and mutants of them are caught."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

from tests.support.formats import ROOT
from tests.support.ptx_mutants import EQUAL

SHARES = 6


def lines(module: str, *arguments: str) -> list[dict[str, Any]]:
    """What a module prints as JSON, in a process in which Triton compiles."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    done = subprocess.run([sys.executable, "-m", module, *arguments], cwd=ROOT, capture_output=True, text=True,
                          env={**environment, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("share", range(SHARES))
def test_kernels_are_right_as_compiled(share: int) -> None:
    """Dequantize has the reference's bits; linear is within the bound of float32 sums; the checkers find nothing."""
    executed = lines("tests.execute_kernels", str(share), str(SHARES))
    assert executed
    assert [line for line in executed if not line["error"] <= 1 or line["findings"]] == []


def test_mutants_of_kernels_are_caught() -> None:
    """A barrier, wait or fence less, a mask one too wide, a lane or a place in shared memory that is another."""
    mutants = lines("tests.execute_mutants")
    assert len(mutants) >= 60
    survivors = {line["mutant"] for line in mutants if not line["caught"]}
    assert survivors - EQUAL.keys() == set()
    assert EQUAL.keys() <= {line["mutant"] for line in mutants}, "a mutant that is said to change nothing is gone"
    assert len(EQUAL) <= len(mutants) // 4
