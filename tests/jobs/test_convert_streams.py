"""Folders whose layers become entropy codes: the same numbers, the same bytes however the work is cut, and exactly back again."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open

import qdsl
from qdsl.checkpoint.detect.layer_weights import weights as weights_of
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.generated import fp8_channel
from qdsl.jobs.convert import encoded, run, target
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.work import batches
from qdsl.runtime import PackedWeight
from tests.support import folders
from tests.support.formats import same_bits

WEIGHTS = {"num_bits": 8, "type": "float", "strategy": "channel", "symmetric": True, "dynamic": False}
CONFIG = {"model_type": "toy", "quantization_config": {
    "quant_method": "compressed-tensors", "format": "float-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": WEIGHTS}}}}
NAMES = ("model.up", "model.gate", "model.down")


def weight(seed: int, shape: tuple[int, int] = (40, 130)) -> PackedWeight:
    return fp8_channel.quantize(torch.randn(*shape, generator=torch.Generator().manual_seed(seed)), "safetensors")


@pytest.fixture
def fp8(tmp_path: Path) -> Path:
    """Two layers in a file, a layer and a tensor that is no weight in another."""
    up, gate, down = ({name: weight(seed)} for seed, name in enumerate(NAMES))
    return folders.folder(tmp_path / "in", folders.named(up | gate), {**folders.named(down), "model.norm": torch.arange(5.0)},
                          config=CONFIG)


def convert(path: Path, out: Path, to: str = "fp8_lane", **options: Any) -> dict[str, Any]:
    with Folder(path) as folder:
        return run.convert(folder, layers(folder), target.parse_conversion(to), out, **options)


def tensor_files(path: Path) -> dict[str, bytes]:
    return {name: data for name, data in folders.files(path).items() if name.endswith(".safetensors")}


def test_layers_become_entropy_codes_and_the_same_bytes_again(fp8: Path, tmp_path: Path) -> None:
    report = convert(fp8, tmp_path / "lane")
    assert report["layers"] == [{"from": "fp8_channel.safetensors", "to": "fp8_channel.fp8_lane", "count": 3}]
    with Folder(tmp_path / "lane") as folder:
        streamed = layers(folder).layers
        assert {(layer.name, layer.storage, layer.problems) for layer in streamed} == {(name, "fp8_lane", ()) for name in NAMES}
        for layer in streamed:
            [packed] = weights_of(folder, layer)
            wanted = fp8_channel.convert(weight(NAMES.index(layer.name)), "fp8_lane")
            assert all(same_bits(packed.tensors[name], tensor) for name, tensor in wanted.tensors.items())
    for path in (tmp_path / "lane").glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.keys()
    assert report["nbytes"] == sum(map(len, tensor_files(tmp_path / "lane").values()))
    assert not (tmp_path / "lane" / stage.STAGE).exists()
    convert(tmp_path / "lane", tmp_path / "back", "safetensors")
    assert tensor_files(tmp_path / "back") == tensor_files(fp8)


def test_bytes_do_not_depend_on_processes_or_parts(fp8: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A part encodes its layers; files are written with the last of them, because where tensors lie depends on all."""
    monkeypatch.setattr(encoded, "batches", lambda steps: batches(steps, 1))
    convert(fp8, tmp_path / "one")
    convert(fp8, tmp_path / "jobs", jobs=2)
    out = tmp_path / "parts"
    convert(fp8, out, part=(2, 3))
    with pytest.raises(RewriteError, match=r"2 of 3 pieces are not there, or not of the input as it is now"):
        run.merge(out)
    assert not list(out.glob("*.safetensors"))
    convert(fp8, out, part=(1, 3))
    convert(fp8, out, part=(3, 3))
    pieces = {path: path.stat().st_mtime_ns for path in sorted((out / stage.STAGE / encoded.FOLDER).iterdir())}
    convert(fp8, out, part=(1, 1))                               # nothing is encoded again
    assert pieces == {path: path.stat().st_mtime_ns for path in sorted((out / stage.STAGE / encoded.FOLDER).iterdir())}
    run.merge(out)
    assert len(pieces) == 3 and folders.files(tmp_path / "one") == folders.files(tmp_path / "jobs") == folders.files(out)


def test_what_is_old_is_encoded_again(fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(fp8, out, part=(1, 1))
    other = {**folders.named({"model.down": weight(7)}), "model.norm": torch.arange(5.0)}
    write(fp8 / "model-00002-of-00002.safetensors", other, {"format": "pt"})
    with pytest.raises(RewriteError, match="1 of 2 pieces are not there"):
        run.merge(out)
    convert(fp8, out)
    with Folder(out) as folder:
        decoded = {layer.name: weights_of(folder, layer)[0] for layer in layers(folder).layers}
    assert same_bits(fp8_channel.dequantize(decoded["model.down"]), fp8_channel.dequantize(weight(7)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_killed_at_any_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No reader takes what is left for a checkpoint, and the next process makes the same bytes of it."""
    monkeypatch.setattr(os, "fsync", lambda file: None)          # the machine goes on
    path = folders.folder(tmp_path / "in", folders.named({"w": weight(0, (8, 40))}), {"norm": torch.ones(3)}, config=CONFIG)
    reports = list(folders.killed_everywhere(lambda out: convert(path, out), tmp_path))
    sizes = {report["nbytes"] for report in reports}
    assert sizes == {sum(map(len, tensor_files(tmp_path / "whole").values()))} and len(reports) > 25 // folders.KILLED


def test_a_piece_of_a_stranger_is_encoded_again(fp8: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    convert(fp8, out, part=(1, 1))
    first, second = sorted((out / stage.STAGE / encoded.FOLDER).iterdir())
    first.write_bytes(b"half")
    second.write_bytes(second.read_bytes().replace(b'"costs":"{}"', b'"costs":"[]"'))
    convert(fp8, out)
    convert(fp8, tmp_path / "one")
    assert folders.files(out) == folders.files(tmp_path / "one")


def test_plain_layers_are_quantized_into_an_entropy_code(tmp_path: Path) -> None:
    """With the codes, and at the cost, of the format's other storages."""
    tensors = {f"model.{name}.weight": torch.randn(64, 128, generator=torch.Generator().manual_seed(i)).bfloat16()
               for i, name in enumerate(("up", "down"))}
    path = folders.folder(tmp_path / "in", tensors, config={"model_type": "toy"})
    reports = {storage: run.quantize(path, target.parse_conversion(f"fp8_channel.{storage}", True, {}, ()), tmp_path / storage)
               for storage in ("fp8_lane", "safetensors")}
    assert reports["fp8_lane"]["requantized"] == reports["safetensors"]["requantized"] != {}
    convert(tmp_path / "fp8_lane", tmp_path / "back", "safetensors")
    assert tensor_files(tmp_path / "back") == tensor_files(tmp_path / "safetensors")
    model = torch.nn.Module()
    model.model = torch.nn.ModuleDict({name: torch.nn.Linear(128, 64, bias=False) for name in ("up", "down")})
    assert len(qdsl.load_weights_(model, tmp_path / "fp8_lane").packed) == 2


def test_experts_in_one_tensor_are_refused_or_left(tmp_path: Path) -> None:
    packed = [weight(seed) for seed in range(2)]
    experts = {"model.experts.up_proj": torch.stack([expert.tensors["weight"] for expert in packed]),
               "model.experts.up_proj_scale": torch.stack([expert.tensors["weight_scale"] for expert in packed])}
    path = folders.folder(tmp_path / "in", {**experts, **folders.named({"model.up": weight(2)})}, config=CONFIG)
    with pytest.raises(RewriteError, match="an entropy code holds one matrix, and these are experts in one"):
        convert(path, tmp_path / "out")
    with Folder(path) as folder:
        run.convert(folder, layers(folder), target.parse_conversion("fp8_lane", keep_misfits=True), tmp_path / "out")
    with Folder(tmp_path / "out") as folder:
        assert {layer.name: layer.storage for layer in layers(folder).layers} == {
            "model.experts.up_proj": "safetensors", "model.up": "fp8_lane"}
