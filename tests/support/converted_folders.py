"""Folders of quantized layers, converted to another storage or to other numbers, or refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.generated import int_group
from qdsl.jobs.convert import run, target
from qdsl.jobs.engine import RewriteError
from qdsl.runtime import PackedWeight
from tests.support import folders

TWO = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


def weight(n: int = 16, k: int = 64, storage: str = "gptq_v2", seed: int = 0) -> PackedWeight:
    values = torch.randn(n, k, generator=torch.Generator().manual_seed(seed))
    return int_group.quantize(values, storage, bits=4, group=32)


def two_layers() -> dict[str, PackedWeight]:
    return {"model.up": weight(), "model.down": weight(seed=1)}


def two_files(tmp_path: Path, weights: dict[str, PackedWeight]) -> Path:
    """Two layers; the scales of both, and a tensor that is no weight, in another file."""
    every = folders.named(weights)
    first = {name: tensor for name, tensor in every.items() if "scales" not in name}
    return folders.folder(tmp_path / "in", {**first, "model.norm": torch.arange(5.0)},
                          {**{name: every[name] for name in every if name not in first}, "head": torch.ones(2, 3).bfloat16()})


def convert(path: Path, out: Path, to: str = "awq", **options: Any) -> dict[str, Any]:
    with Folder(path) as folder:
        return run.convert(folder, layers(folder), target.parse_conversion(to), out, **options)


def refused(path: Path, to: str, **options: Any) -> str:
    """The message; and nothing is written."""
    out = path.parent / "refused"
    with pytest.raises(RewriteError) as error:
        convert(path, out, to, **options)
    assert not out.exists()
    return str(error.value)


def group_of(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """What a folder's config says, and its one group of weights."""
    written = json.loads((path / "config.json").read_text())["quantization_config"]
    [group] = written["config_groups"].values()
    return written, group


def requantized(path: Path, out: Path, to: str, params: dict[str, int | str] | None = None, **options: Any) -> dict[str, Any]:
    with Folder(path) as folder:
        return run.convert(folder, layers(folder), target.parse_conversion(to, True, params), out, **options)
