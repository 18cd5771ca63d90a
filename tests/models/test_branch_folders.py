"""Checkpoints whose layers have side branches: loaded, run, saved, compared, cut for ranks, converted."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.generated import squeezellm
from qdsl.runtime import PackedWeight
from tests.formats.test_branches import branched
from tests.support.jobs import command
from tests.support.small_models import files, folder

NAMES = ("up", "down")


class Pair(torch.nn.Module):
    """Two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(256, 64, bias=False) for _ in NAMES)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + self.down(x)


def packed() -> dict[str, PackedWeight]:
    """One with outliers, and one without, as SqueezeLLM writes a layer of no outliers."""
    return {"up": branched("outliers"), "down": branched("outliers").base}


def written(path: Path, changes: dict[str, Tensor] | None = None) -> Path:
    tensors = {f"{name}.{key}": tensor.contiguous() for name, weight in packed().items()
               for key, tensor in weight.tensors.items()}
    tensors["up.startrows"] = torch.zeros(8, dtype=torch.int32)  # what its own kernel's threads begin with
    return folder(path, {**tensors, **(changes or {})}, {"model_type": "pair"})


def test_a_model_is_loaded_run_and_saved(tmp_path: Path) -> None:
    source, model = written(tmp_path / "in"), Pair()
    report = qdsl.load_weights_(model, source)
    assert report.packed == dict.fromkeys(NAMES, "squeezellm.squeezellm")
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(0))
    wanted = sum(x @ squeezellm.dequantize(weight, torch.float32).T for weight in packed().values())
    assert torch.allclose(model(x), wanted, rtol=1e-5, atol=1e-5 * float(wanted.abs().max()))
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_a_comparison_of_decoded_weights_sees_branches(tmp_path: Path) -> None:
    one = written(tmp_path / "one")
    value = branched("outliers").tensors["vals"].clone()
    value[3] += 1
    other = written(tmp_path / "other", {"up.vals": value})
    assert command("verify", str(one), str(one), "--decoded").output == "equal\n"
    result = command("verify", str(one), str(other), "--decoded")
    assert result.exit_code == 1 and "up.weight" in result.output


def test_inspection_and_hostile_tensors(tmp_path: Path) -> None:
    source = written(tmp_path / "in")
    with Folder(source) as checkpoint:
        [down, up] = sorted(layers(checkpoint).layers, key=lambda layer: layer.name)
    assert set(up.tensors) - set(down.tensors) == set(branched("outliers").branch_names)
    shown = json.loads(command("inspect", str(source), "--json").output)
    assert len(shown["layers"]) == 2
    bad = branched("outliers").tensors["cols"].clone()
    bad[0] = 256
    with pytest.raises(CheckpointError, match=r"'cols' has columns from \d+ to 256 of 256"):
        qdsl.load_weights_(Pair(), written(tmp_path / "bad", {"up.cols": bad}))


def test_requantizing_a_folder_takes_the_sum(tmp_path: Path) -> None:
    source = written(tmp_path / "in")
    result = command("convert", str(source), "--requantize", "int8_channel", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    model = Pair()
    qdsl.load_weights_(model, tmp_path / "out")
    for name, weight in packed().items():
        wanted = squeezellm.dequantize(weight, torch.float32)
        assert float((model.get_submodule(name).dequantize(torch.float32) - wanted).norm() / wanted.norm()) < 0.02
