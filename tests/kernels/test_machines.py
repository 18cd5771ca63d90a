"""Machines that lack what this one has: `pytest --lacks NAME` runs any test on one, and this file a quick part for each.

The tests of machines run in processes of their own, in which the libraries cannot have been imported before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.host import system
from tests.support.jobs import JOBS, job_inputs, succeed
from tests.support.paths import ROOT

LACKS = frozenset(filter(None, os.environ.get("QDSL_TEST_LACKS", "").split(",")))
FILES = ("tests/unit/test_files.py", "tests/checkpoint/test_folder.py", "tests/unit/test_progress.py")
MACHINES = {"triton": ("tests/kernels/test_without_triton.py", "tests/kernels/test_any_device.py"), "unix": FILES,
            "size": FILES[:1]}


@pytest.mark.skipif(bool(LACKS), reason="in a process of such a machine")
@pytest.mark.parametrize("lacks", MACHINES)
def test_a_machine(lacks: str) -> None:
    done = subprocess.run([sys.executable, "-m", "pytest", "--lacks", lacks, __file__, *MACHINES[lacks], "-n", "0",
                           "-p", "no:cacheprovider"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


@pytest.mark.skipif(not LACKS & {"triton", "size"}, reason="a machine that lacks something")
def test_commands(tmp_path: Path) -> None:
    inputs = job_inputs(tmp_path / "inputs")
    for name, (text, out) in JOBS.items():
        if name != "merge-index":
            words = text if "triton" in LACKS else text.removesuffix(" -j 1")      # as many processes as the machine has room for
            succeed(*words.replace("{}", str(inputs)).split(), "-o", tmp_path / name / out)
    succeed("inspect", tmp_path / "requantize" / "out")
    succeed("verify", inputs / "hlane", inputs / "plain", "--decoded")
    for arguments in (("list",), ("show", "q4_0"), ("check", ROOT / "specs" / "q4_0.yaml")):
        succeed(*arguments)


@pytest.mark.skipif("unix" not in LACKS, reason="a machine that lacks something")
def test_work_in_processes(tmp_path: Path) -> None:
    """Two processes start, lock, write and end, and the bytes are those of one."""
    inputs = job_inputs(tmp_path / "inputs")
    for jobs in (1, 2):
        succeed("convert", inputs / "fp8", "--requantize", "q8_0", "-j", str(jobs), "-o", tmp_path / str(jobs))
    name = "model-00001-of-00002.safetensors"
    assert (tmp_path / "1" / name).read_bytes() == (tmp_path / "2" / name).read_bytes()


@pytest.mark.skipif("size" not in LACKS, reason="a small machine")
def test_a_small_machine() -> None:
    """What limits it is what jobs see; the cache is a temporary folder, with a warning."""
    assert system.processors() == 1 and system.free_memory() <= 4 << 30
    with pytest.warns(UserWarning, match=r"cannot be written; .* Set QDSL_CACHE"):
        module = qdsl.load(ROOT / "tests" / "specs" / "flat_nibbles.yaml")
    packed = module.quantize(torch.ones(32, 32))
    assert torch.equal(module.linear(torch.ones(1, 32), packed), torch.full((1, 32), 32.0))
