"""Lists of layers that stay plain may be a single name, and an entry that names no layer is said wherever lists are read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.detect.producers import producers
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.cli import app
from qdsl.models.engine import EngineConfig
from tests.support.checkpoints import folder
from tests.support.layer_configs import DOWN, UP, fp8

HEAD = "model.head"
LISTS = [(producer.name, key) for producer in producers().every for key in producer.skipped]


@pytest.mark.parametrize(("method", "key"), LISTS)
def test_a_single_name_is_a_list_of_one(method: str, key: str) -> None:
    settings = {"quant_method": method, key: HEAD}
    one, several = quantization(settings, "config.json", ""), quantization({**settings, key: [HEAD]}, "config.json", "")
    assert one.problems == several.problems == []
    for module in (HEAD, UP, "model.h", "m"):
        assert one.scheme(module).by == several.scheme(module).by
    assert one.scheme(HEAD).settings is None
    assert one.unmatched({UP, "model"}) == [HEAD] and one.unmatched({HEAD}) == []


def test_an_engine_takes_a_single_pattern() -> None:
    assert EngineConfig({"quant_method": "qdsl", "skip": "lm_head"}).skip == ("lm_head",)


def quantized(path: Path, **settings: object) -> Path:
    """A folder of two layers, one of them plain."""
    codes = {"weight": torch.zeros(128, 128, dtype=torch.float8_e4m3fn), "weight_scale_inv": torch.ones(1, 1)}
    return folder(path, {DOWN: codes, UP: {"weight": torch.zeros(128, 128)}}, fp8(weight_block_size=[128, 128], **settings))


def test_inspect_and_convert_note_entries_that_name_nothing(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    path = quantized(tmp_path / "a", ignored_layers=[UP, "modle.layers.0"], modules_to_not_convert="lm_head")
    notes = json.loads(CliRunner().invoke(app, ["inspect", str(path), "--json"]).stdout)["notes"]
    assert notes == ["'modle.layers.0' in the lists of config.json: quantization_config names no layer"]
    result = CliRunner().invoke(app, ["convert", str(path), "--requantize", "int_group", "--skip", "up_porj", "--out",
                                      str(tmp_path / "out"), "--json"])
    assert {"the pattern 'up_porj' names no layer", *notes} <= {*json.loads(result.stdout)["notes"]}


def test_quantize_notes_patterns_that_name_nothing(tmp_path: Path) -> None:
    (tmp_path / "plain").mkdir()
    path = folder(tmp_path / "plain", {DOWN: {"weight": torch.ones(128, 128)}, UP: {"weight": torch.ones(128, 128)}}, {})
    result = CliRunner().invoke(app, ["quantize", str(path), "--format", "fp8_block", "--skip", "up_proj", "--skip", "gaet",
                                      "--skip", "down_porj",
                                      "--out", str(tmp_path / "out"), "--json"])
    notes = json.loads(result.stdout)["notes"]
    assert "the pattern 'down_porj' names no layer; did you mean 'down_proj'?" in notes
    assert "the pattern 'gaet' names no layer" in notes and not any("up_proj" in note for note in notes)
