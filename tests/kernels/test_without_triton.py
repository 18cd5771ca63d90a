"""A machine without Triton: formats and commands work there, and what needs a GPU's kernels says so.

tests/kernels/test_machines.py runs them in a process in which `import triton` fails.
"""

from __future__ import annotations

import runpy
import sys

import pytest
import torch

import bench.gpu.__main__ as bench_gpu
from qdsl.generated import q4_0
from qdsl.runtime.gpu import launch, tune
from qdsl.runtime.libraries.triton import MissingTriton, is_installed, missing, on_device, runs_kernels
from tests.support.covering import quarter_of
from tests.support.formats import ROOT, Case, cases, random_packed, same_bits, smallest
from tests.support.jobs import command

without_triton = pytest.mark.skipif(is_installed, reason="Triton is installed")


@without_triton
@pytest.mark.parametrize("case", quarter_of(cases()), ids=str)
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
def test_what_needs_kernels_says_what_is_missing(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    result = command("analyze", "q4_0")
    assert result.exit_code == 1 and "GPU kernels need Triton, which is not installed: pip install triton" in result.output
    monkeypatch.setattr(sys, "argv", ["bench.gpu"])
    assert bench_gpu.main() == 2 and "bench.gpu: GPU kernels need Triton" in capsys.readouterr().err
    packed = q4_0.quantize(torch.ones(32, 32))
    with pytest.raises(MissingTriton, match="GPU kernels need Triton"):
        tune.tune(packed)
    with pytest.raises(MissingTriton, match="GPU kernels need Triton"):
        launch.dequantize(packed, torch.empty(32, 32))
    monkeypatch.setattr(sys, "platform", "darwin")
    assert str(missing()) == "GPU kernels need Triton, which has no wheel for macOS"
    assert not runs_kernels(torch.device("cuda"))


@pytest.mark.skipif(not is_installed, reason="Triton is not installed")
def test_an_old_triton_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its language lacks what the kernels use: PyTorch 2.9 brings it."""
    path = str(ROOT / "qdsl" / "runtime" / "libraries" / "triton.py")
    assert runpy.run_path(path)["is_installed"]
    monkeypatch.setattr("triton.__version__", "3.5.1")
    names = runpy.run_path(path)
    assert not names["is_installed"]
    with pytest.raises(ImportError, match=r"GPU kernels need Triton 3\.6 or later, and 3\.5\.1 is installed"):
        names["require"]()


@pytest.mark.skipif(not is_installed, reason="Triton is not installed")
def test_kernels_run_where_triton_does(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = ("cpu", "cuda", "xpu", "mps", "meta")
    assert [kind for kind in kinds if runs_kernels(torch.device(kind))] == ["cuda", "xpu"]
    monkeypatch.setattr("qdsl.runtime.libraries.triton.is_installed", False)
    assert not any(runs_kernels(torch.device(kind)) for kind in kinds)
    with on_device(torch.device("mps")):
        pass
