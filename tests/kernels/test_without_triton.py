"""A machine without Triton: formats and commands work there, and what needs a GPU's kernels says so.

The first test runs the others in a process in which `import triton` fails.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qdsl.generated import q4_0
from qdsl.runtime.gpu import launch, tune
from qdsl.runtime.gpu.triton import MissingTriton, is_installed, missing, on_device, runs_kernels
from tests.support.formats import ROOT, Case, cases, random_packed, same_bits, smallest
from tests.support.jobs import JOBS, command, job_inputs, succeed

without_triton = pytest.mark.skipif(is_installed, reason="Triton is installed")


@pytest.mark.skipif(not is_installed, reason="Triton is not installed")
def test_a_process_without_triton() -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests" / "no_triton", ROOT)))}
    done = subprocess.run([sys.executable, "-m", "pytest", __file__, "tests/kernels/test_any_device.py", "-n", "0",
                           "-p", "no:cacheprovider"],
                          cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-6000:]


@without_triton
@pytest.mark.parametrize("case", cases(), ids=str)
def test_a_format(case: Case) -> None:
    packed, format = random_packed(case, smallest(case)), case.module.FORMAT
    again = format.pack(format.unpack(packed), storage=case.storage, **case.choice)
    weight = format.dequantize(packed, torch.float32)
    assert same_bits(format.dequantize(again, torch.float32), weight)
    x = torch.ones(2, packed.shape[1])
    assert format.linear(x, packed).shape == (2, packed.shape[0])
    if format.variant(case.choice).encode is not None and not format.variant(case.choice).storages[case.storage].streams:
        n, k = packed.shape
        quantized = format.quantize(torch.linspace(-1, 1, n * k).view(n, k), case.storage, **case.choice)
        assert format.dequantize(quantized, torch.float32).isfinite().all()


@without_triton
def test_commands(tmp_path: Path) -> None:
    inputs = job_inputs(tmp_path / "inputs")
    for name, (text, out) in JOBS.items():
        if name != "merge-index":
            succeed(*text.replace("{}", str(inputs)).split(), "-o", tmp_path / name / out)
    succeed("inspect", tmp_path / "requantize" / "out")
    succeed("verify", inputs / "hlane", inputs / "plain", "--decoded")
    for arguments in (("list",), ("show", "q4_0"), ("check", ROOT / "specs" / "q4_0.yaml")):
        succeed(*arguments)


@without_triton
def test_what_needs_kernels_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    result = command("analyze", "q4_0")
    assert result.exit_code == 1 and "GPU kernels need Triton, which is not installed: pip install triton" in result.output
    packed = q4_0.quantize(torch.ones(32, 32))
    with pytest.raises(MissingTriton, match="GPU kernels need Triton"):
        tune.tune(packed)
    with pytest.raises(MissingTriton, match="GPU kernels need Triton"):
        launch.dequantize(packed, torch.empty(32, 32))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(missing()) == "GPU kernels need Triton, which has no wheel for macOS"
    assert not runs_kernels(torch.device("cuda"))


@pytest.mark.skipif(not is_installed, reason="Triton is not installed")
def test_kernels_run_where_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("cpu", "cuda", "xpu", "mps", "meta")
    assert [kind for kind in kinds if runs_kernels(torch.device(kind))] == ["cuda", "xpu"]
    monkeypatch.setattr("qdsl.runtime.gpu.triton.is_installed", False)
    assert not any(runs_kernels(torch.device(kind)) for kind in kinds)
    with on_device(torch.device("mps")):
        pass
