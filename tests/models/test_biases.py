"""Biases that a folder has and the model's class does not: of projections, norms, experts, embeddings and heads; refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.cli import app
from qdsl.models.findings import biases_without_place
from qdsl.models.served import Served
from tests.support import tiny_models

pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")


def packed_folder(path: Path, model_type: str) -> Path:
    """A folder of int8 layers of a tiny model, as its class saves it."""
    tiny_models.tiny_model(model_type).save_pretrained(path / "plain")
    done = CliRunner().invoke(app, ["quantize", str(path / "plain"), "--format", "int8_channel", "-o", str(path / "packed")])
    assert done.exit_code == 0, done.output
    return path / "packed"


def add(path: Path, biases: dict[str, float]) -> None:
    """Add biases of one number each to a folder."""
    with Folder(path) as folder:
        tensors = {name: folder.tensor(name).clone() for name in folder.names()}
    more = {name: torch.full((4,), value, dtype=torch.float32) for name, value in biases.items()}
    write(path / "model.safetensors", {**tensors, **more}, {"format": "pt"})


@pytest.mark.parametrize("model_type", ["mixtral", "bloom", "falcon", "phi3", "qwen3_moe"])
def test_biases_without_a_place_are_refused(model_type: str, tmp_path: Path) -> None:
    """By the loader of transformers, and by what the plug-ins of engines read; zeros change nothing."""
    path = packed_folder(tmp_path, model_type)
    with Folder(path) as folder:
        names = {*folder.names()}
        assert biases_without_place(folder) == []
    owners = {name.removesuffix(".weight") for name in names if name.endswith(".weight")}
    added = {f"{owner}.bias" for owner in owners if f"{owner}.bias" not in names}
    assert added and (model_type in ("bloom", "falcon") or any("norm" in name for name in added))
    add(path, dict.fromkeys(added, 0.0))
    refuse_changes(path, Served.of_folder(path).findings, allow_unknown=False)
    plugin.from_pretrained(path, dtype=torch.float32)
    add(path, dict.fromkeys(added, 0.5))
    with pytest.raises(CheckpointError, match=r"bias is F32 \[4\]"):
        refuse_changes(path, Served.of_folder(path).findings, allow_unknown=False)
    with pytest.raises(CheckpointError, match=r"bias is F32 \[4\]"):
        plugin.from_pretrained(path, dtype=torch.float32)
    model = plugin.from_pretrained(path, dtype=torch.float32, quantization_config=plugin.QdslConfig(allow_unknown=True))
    loaded = "\n".join(model.hf_quantizer.report.allowed)
    with Folder(path) as folder:
        served = "\n".join(map(str, biases_without_place(folder)))
    for text in (loaded, served):
        for name in added:
            alike = {other for other in added if pattern(other) == pattern(name)}
            assert any(f"tensor {other} " in text for other in alike), name


def pattern(name: str) -> str:
    """A name without its numbers."""
    return "".join(letter for letter in name if not letter.isdigit())
