"""A folder as VPTQ writes it, columns permuted: recognised, cut for ranks, loaded, and saved as it was."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.report.shards import packed_layers, row_piece
from qdsl.models.shards import Collector
from tests.support.formats import ROOT, same_bits
from tests.support.small_models import files, folder

FORMATS = {"up": "vptq", "down": "vptq_residual"}


class Pair(torch.nn.Module):
    """Two layers of one input."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (torch.nn.Linear(80, 24, bias=False) for _ in FORMATS)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) + self.down(x)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    tensors: dict[str, Tensor] = {}
    for name, form in FORMATS.items():
        with np.load(ROOT / "tests" / "data" / "sections" / f"{form}.npz") as file:
            for key in set(file.files) - {"expected"}:
                dotted = f"{name}.{key}.weight" if "centroids" in key else f"{name}.{key}"
                tensors[dotted] = torch.from_numpy(file[key].copy())
    settings = {name: {"enable_perm": True, "enable_norm": True, "vector_lens": [-1, 8]} for name in FORMATS}
    return folder(tmp_path / "in", tensors, {"quantization_config": {"quant_method": "vptq", "config_for_layers": settings}})


def expected(form: str) -> Tensor:
    with np.load(ROOT / "tests" / "data" / "sections" / f"{form}.npz") as file:
        return torch.from_numpy(file["expected"].copy())


def test_a_model_is_loaded_run_and_saved(source: Path, tmp_path: Path) -> None:
    model = Pair()
    report = qdsl.load_weights_(model, source)
    assert report.packed == {name: f"{form}.vptq" for name, form in FORMATS.items()}
    x = torch.randn(3, 80, generator=torch.Generator().manual_seed(0))
    wanted = sum(x @ expected(form).T for form in FORMATS.values())
    torch.testing.assert_close(model(x), wanted)
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_ranks_get_their_columns(source: Path) -> None:
    with Folder(source) as checkpoint:
        layers = packed_layers(checkpoint)
        assert {name: layer.format for name, layer in layers.items()} == FORMATS
        for name, layer in layers.items():
            assert layer.act_order
            for rank in range(2):
                piece = row_piece(name, layer, 2, rank)
                collector = Collector(layer, [piece])
                for leaf in collector.storage_names:
                    collector.take(leaf, checkpoint.tensor(f"{name}.{leaf}"))
                [part] = collector.parts()
                assert same_bits(part.dequantize(torch.float32), expected(layer.format)[:, 40 * rank:40 * rank + 40])
