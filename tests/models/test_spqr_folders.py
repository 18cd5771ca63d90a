"""A folder as SpQR's converter writes it: recognised, loaded, run and saved with the words of 64 bits that it had."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import qdsl
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.checkpoint.report.shards import packed_layers, row_piece
from qdsl.models.shards import Collector
from qdsl.runtime import FormatError
from tests.support.formats import ROOT, is_product
from tests.support.jobs import command
from tests.support.small_models import files, folder

TENSORS = ("dense_weights", "row_offsets", "col_vals", "in_perm")


class Head(torch.nn.Module):
    """A quantized layer, and one that is not."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(64, 32, bias=False)
        self.lm_head = torch.nn.Linear(32, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.lm_head(self.up(x))


def golden() -> dict[str, Tensor]:
    with np.load(ROOT / "tests" / "data" / "sections" / "spqr.npz") as file:
        return {key: torch.from_numpy(file[key].copy()) for key in file.files}


def written(path: Path, changes: dict[str, Tensor] | None = None) -> Path:
    tensors = {f"up.{name}": golden()[name] for name in TENSORS} | {"lm_head.weight": torch.ones(8, 32).half()} | (changes or {})
    shapes = {f"{name}.shape": len(tensor) for name, tensor in tensors.items() if name.startswith("up.")}
    settings = {"quant_method": "spqr", "beta1": 16, "beta2": 16, "bits": 3, "modules_to_not_convert": ["lm_head.weight"],
                "shapes": shapes}
    return folder(path, tensors, {"model_type": "head", "quantization_config": settings})


def test_a_model_is_loaded_run_and_saved(tmp_path: Path) -> None:
    source, model, file = written(tmp_path / "in"), Head(), golden()
    report = qdsl.load_weights_(model, source)
    assert report.packed == {"up": "spqr.spqr"}
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(0))
    columns = torch.from_numpy(file["in_perm"].numpy().view(np.uint16).astype(np.int64))
    weight = model.up.dequantize(torch.float32)[:, columns]      # in the order of the tiles, as the package multiplies x
    assert torch.equal(weight.half(), file["whole"])             # which rounds sums with outliers
    assert is_product(model.up(x), x[:, columns], weight)
    assert qdsl.save_model(model, tmp_path / "out").exact and files(tmp_path / "out") == files(source)


def test_inspection_states_format_and_producer(tmp_path: Path) -> None:
    shown = json.loads(command("inspect", str(written(tmp_path / "in")), "--json").output)
    [layer] = shown["layers"]
    assert (layer["format"], layer["storage"], layer["shape"]) == ("spqr", "spqr", [32, 64])
    assert not shown.get("problems")


def test_other_tiles_and_hostile_outliers(tmp_path: Path) -> None:
    file = golden()
    tiles = {"up.row_offsets": file["ptcsr_row_offsets"], "up.col_vals": file["ptcsr_col_vals"]}
    with pytest.raises(CheckpointError, match=r"'row_offsets' is \[3\], for 32 rows and one more"):
        qdsl.load_weights_(Head(), written(tmp_path / "tiles", tiles))
    beyond = file["col_vals"].clone()
    beyond[0] = beyond[0] & ~0xFFFF | 64
    with pytest.raises(CheckpointError, match=r"'col_vals' has columns from \d+ to 64 of 64"):
        qdsl.load_weights_(Head(), written(tmp_path / "beyond", {"up.col_vals": beyond}))


def test_ranks_share_rows_and_not_columns(tmp_path: Path) -> None:
    with Folder(written(tmp_path / "in")) as checkpoint:
        layer = packed_layers(checkpoint)["up"]
        with pytest.raises((FormatError, CheckpointError), match="side by side"):
            collector = Collector(layer, [row_piece("up", layer, 2, 0)])
            for leaf in collector.storage_names:
                collector.take(leaf, checkpoint.tensor(f"up.{leaf}"))
            collector.parts()


def test_outliers_are_part_of_what_is_quantized_anew(tmp_path: Path) -> None:
    source = written(tmp_path / "in")
    assert command("verify", str(source), str(source), "--decoded").output == "equal\n"
    result = command("convert", str(source), "--requantize", "int8_channel", "--out", str(tmp_path / "out"))
    assert result.exit_code == 0, result.output
    before, after = Head(), Head()
    qdsl.load_weights_(before, source)
    qdsl.load_weights_(after, tmp_path / "out")
    weights = [model.up.dequantize(torch.float32) for model in (before, after)]  # type: ignore[operator]
    assert float((weights[1] - weights[0]).norm() / weights[0].norm()) < 0.02
