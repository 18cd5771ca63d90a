"""The questions for fifteen minutes on a GPU, asked of a CPU: each writes its answer, and none is asked twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from bench.gpu import measure, questions
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(os.name == "nt", reason="a shell script")


CUDA = 190                                                       # the machine of an ELF file for NVIDIA's GPUs


def ask(folder: Path, *options: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHON": sys.executable}
    environment.pop("TRITON_INTERPRET", None)
    return subprocess.run([ROOT / "bench" / "gpu" / "measure.sh", folder, "--stand-in", *options], env=environment, text=True,
                          capture_output=True, check=False)


def test_questions_are_answered_once(tmp_path: Path) -> None:
    only = ("--only", "compile", "--only", "moe")
    first = ask(tmp_path, *only)
    assert first.returncode == 0, first.stdout
    answer: dict[str, Any] = json.loads((tmp_path / "moe.json").read_text())
    assert answer["complete"] and answer["measured_on"] == "a stand-in" and answer["rows"][0]["off"] < 1e-2
    assert json.loads((tmp_path / measure.STATE).read_text()).keys() == {"compile", "moe"}
    [loaded] = json.loads((tmp_path / "compile.json").read_text())["rows"]
    assert not loaded["error"] and loaded["launched"] == loaded["compiled"] > 0
    assert loaded["machines"] == dict.fromkeys(loaded["kernels"], CUDA)
    (tmp_path / "moe.json").unlink()
    again = ask(tmp_path, *only)
    assert again.returncode == 0 and again.stdout.count("answered before") == 2 and not (tmp_path / "moe.json").exists()


def test_no_time_is_an_end_and_all_fits_into_fifteen_minutes(tmp_path: Path) -> None:
    late = ask(tmp_path, "--minutes", "0.1", "--only", "pdl")
    assert late.returncode == 1 and "pdl: no time" in late.stdout and not (tmp_path / measure.STATE).exists()
    assert measure.SECONDS.keys() - {"compile", "model"} == questions.QUESTIONS.keys()
    assert sum(measure.SECONDS.values()) + 12 * len(measure.SECONDS) < 15 * 60     # 12 s for a process to start and end


def test_without_a_gpu_it_says_so(tmp_path: Path) -> None:
    run = subprocess.run([sys.executable, "-m", "bench.gpu.measure", "--out", tmp_path], cwd=ROOT, capture_output=True, text=True,
                         env={**os.environ, "CUDA_VISIBLE_DEVICES": ""}, check=False)
    assert run.returncode == 2 and "--stand-in" in run.stderr


def test_jobs_are_launches(tmp_path: Path) -> None:
    jobs = questions.jobs()
    first, last = (list(job.calls()) for job in (jobs[0], jobs[-1]))
    assert first and {call.options.get("num_stages") for call in last if call.family == "gemv"} == set(questions.STAGES)
