"""Folders of bfloat16 models, to be compressed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch

from qdsl.checkpoint.files.safetensors import write
from tests.support import folders
from tests.support.paths import ROOT

DF11 = ROOT / "tests" / "data" / "df11" / "compress_model_dir"
CONFIG = {"model_type": "toy", "tie_word_embeddings": False}
SHAPES = {"q": (48, 64), "up": (96, 60), "down": (64, 96)}


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02).bfloat16()


def model(blocks: int = 2) -> dict[str, torch.Tensor]:
    """Linear layers in blocks, an embedding, and what stays: biases, norms, a matrix of another type, a small one."""
    tensors = {"model.embed_tokens.weight": normal(128, 64, seed=99), "head.weight": normal(8, 4),
               "table.weight": torch.ones(70, 64)}
    for block in range(blocks):
        for number, (name, shape) in enumerate(SHAPES.items()):
            tensors[f"model.layers.{block}.mlp.{name}.weight"] = normal(*shape, seed=10 * block + number)
        tensors |= {f"model.layers.{block}.mlp.up.bias": normal(96), f"model.layers.{block}.norm.weight": normal(64)}
    return tensors


def sharded_model(tmp_path: Path) -> Path:
    """Block 1 lies in both files."""
    every = model()
    late = {name: every.pop(name) for name in ("model.layers.1.mlp.q.weight", "head.weight", "table.weight")}
    return folders.folder(tmp_path / "in", every, late, config=CONFIG)


def without(files: Mapping[str, bytes], *names: str) -> dict[str, bytes]:
    return {name: data for name, data in files.items() if Path(name).name not in names}


def toy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model of which dfloat11's compress_model made the files of tests/data."""
    path = tmp_path_factory.mktemp("toy") / "in"
    path.mkdir()
    bits = np.load(DF11 / "original_bits.npz")
    write(path / "model.safetensors", {name: torch.from_numpy(bits[name].view(np.int16)).view(torch.bfloat16)
                                       for name in bits.files})
    return path
