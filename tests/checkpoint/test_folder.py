"""Checkpoint folders: one set of tensors out of many files, and nothing believed that the files do not bear out."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.files import folder as module
from qdsl.checkpoint.files import safetensors
from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, TensorFile, write
from qdsl.checkpoint.report.contents import contents
from qdsl.cli import app

UP = "model.layers.0.mlp.up_proj"


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A weight in one shard, its scale in the other, and a config."""
    weight = torch.zeros(4, 4).to(torch.float8_e4m3fn)
    write(tmp_path / "model-1.safetensors", {f"{UP}.weight": weight, "norm": torch.ones(4)})
    write(tmp_path / "model-2.safetensors", {f"{UP}.weight_scale_inv": torch.full((1, 1), 2.0)})
    indexed(tmp_path, {f"{UP}.weight": "model-1.safetensors", "norm": "model-1.safetensors",
                       f"{UP}.weight_scale_inv": "model-2.safetensors"})
    (tmp_path / "config.json").write_text('{"quantization_config": {"weight_block_size": [128, 128]}}')
    return tmp_path


def indexed(path: Path, weight_map: object) -> None:
    (path / INDEX).write_text(json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map}))


def test_one_set_of_tensors(sharded: Path) -> None:
    with Folder(sharded) as folder:
        assert [shard.name for shard in folder.shards] == ["model-1.safetensors", "model-2.safetensors"]
        assert folder.names() == ["norm", f"{UP}.weight", f"{UP}.weight_scale_inv"]
        assert folder.entry(f"{UP}.weight").dtype == "F8_E4M3"
        assert folder.file("norm").path.name == "model-1.safetensors"
        assert folder.tensor(f"{UP}.weight").shape == (4, 4)
        assert folder.config["quantization_config"]["weight_block_size"] == [128, 128]
        scale = folder.tensor(f"{UP}.weight_scale_inv")
    assert scale.item() == 2.0                                   # valid after the folder is closed


def test_layers(sharded: Path) -> None:
    with Folder(sharded) as folder:
        assert folder.layers() == {"": {"norm": "norm"},
                                   UP: {"weight": f"{UP}.weight", "weight_scale_inv": f"{UP}.weight_scale_inv"}}


def test_without_an_index_all_files_are_read(sharded: Path) -> None:
    (sharded / INDEX).unlink()
    (sharded / "._model-1.safetensors").write_bytes(b"what a Mac leaves on other people's disks")
    (sharded / "notes.txt").write_text("not a tensor")
    with Folder(sharded) as folder:
        assert folder.names() == ["norm", f"{UP}.weight", f"{UP}.weight_scale_inv"]


def test_files_that_the_index_does_not_name_are_not_read(sharded: Path) -> None:
    write(sharded / "consolidated.safetensors", {"norm": torch.zeros(1)})
    with Folder(sharded) as folder:
        assert folder.tensor("norm").tolist() == [1, 1, 1, 1]


@pytest.mark.parametrize("name", ["model.safetensors", "diffusion_pytorch_model.safetensors"])
def test_a_whole_model_is_read_without_what_lies_next_to_it(tmp_path: Path, name: str) -> None:
    """As libraries load it: its authors' own file has the same weights, and an adapter's are none of the model."""
    write(tmp_path / name, {"up.weight": torch.ones(2, 2)})
    for other in ("adapter_model.safetensors", "consolidated.safetensors"):
        write(tmp_path / other, {"up.weight": torch.zeros(2, 2), "lora_A.weight": torch.zeros(1, 2)})
    with Folder(tmp_path) as folder:
        assert folder.names() == ["up.weight"] and folder.tensor("up.weight").sum() == 4
        assert folder.unread == ["adapter_model.safetensors", "consolidated.safetensors"]
    shown = contents(tmp_path)
    assert shown["notes"] == [f"{other} holds other weights, which are no part of the model" for other in folder.unread]
    assert shown["total"]["weights"] == 4
    report = qdsl.load_weights_(torch.nn.ModuleDict({"up": torch.nn.Linear(2, 2, bias=False)}), tmp_path)
    assert report.unread == folder.unread and f"not read, as no part of the model: {folder.unread[0]}" in str(report)
    with Folder(tmp_path / name) as folder:
        assert folder.unread == []


def test_a_single_file(sharded: Path) -> None:
    with Folder(sharded / "model-2.safetensors") as folder:
        assert folder.names() == [f"{UP}.weight_scale_inv"]
        assert "quantization_config" in folder.config
    (sharded / "config.json").unlink()
    assert Folder(str(sharded)).config == {}


def test_links_are_followed(sharded: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    snapshot = tmp_path_factory.mktemp("snapshot")               # a download cache keeps its files elsewhere
    for path in sharded.iterdir():
        (snapshot / path.name).symlink_to(path)
    with Folder(snapshot) as folder:
        assert len(folder.names()) == 3


def test_unknown_names_are_refused(sharded: Path) -> None:
    with Folder(sharded) as folder:
        for ask in (folder.entry, folder.tensor, folder.file):
            with pytest.raises(CheckpointError, match="no tensor 'bias'"):
                ask("bias")


@pytest.mark.parametrize(("weight_map", "reason"), [
    (None, "weight_map must map"),
    ([], "weight_map must map"),
    ({}, "weight_map must map"),
    ({"norm": 1}, "'norm': '1' is not the name"),
    ({"norm": "../model-1.safetensors"}, "is not the name of a safetensors file in this folder"),
    ({"norm": "/model-1.safetensors"}, "is not the name"),
    ({"norm": "sub/model-1.safetensors"}, "is not the name"),
    ({"norm": "sub\\model-1.safetensors"}, "is not the name"),
    ({"norm": "model-1.safetensors\n"}, "is not the name"),
    ({"norm": "model-1.safetensors\0"}, "is not the name"),
    ({"norm": "m\u00f6del.safetensors"}, "is not the name"),
    ({"norm": ".safetensors"}, "is not the name"),
    ({"norm": "pytorch_model.bin"}, "is not the name"),
    ({"norm": "model-3.safetensors"}, "'norm': model-3.safetensors is missing"),
    ({"norm": "model-2.safetensors"}, "model-2.safetensors does not have tensor 'norm'"),
    ({"bias": "model-2.safetensors", f"{UP}.weight": "model-1.safetensors"}, "model-2.safetensors does not have tensor 'bias'"),
])
def test_a_wrong_index_is_refused(sharded: Path, weight_map: object, reason: str) -> None:
    indexed(sharded, weight_map)
    with pytest.raises(CheckpointError, match=rf"index\.json: .*{reason}"):
        Folder(sharded)


def test_a_whole_model_beside_an_index_of_others_is_refused(sharded: Path) -> None:
    """transformers reads the file, vLLM and MLX those of the index: which one is meant nobody can tell."""
    write(sharded / "model.safetensors", {"norm": torch.zeros(4)})
    with pytest.raises(CheckpointError, match=r"names other files than model\.safetensors, which is there, too"):
        Folder(sharded)
    for files in (["model.safetensors"], ["model-1.safetensors", "model-2.safetensors"]):          # which a loader has chosen
        with Folder(sharded, files=files) as folder:
            assert [shard.name for shard in folder.shards] == files
    indexed(sharded, {"norm": "model.safetensors"})
    with Folder(sharded) as folder:
        assert folder.names() == ["norm"]


@pytest.mark.parametrize(("text", "reason"), [
    (b"", "not JSON at character 0"),
    (b"[]", "not a JSON object"),
    (b'{"weight_map": {"a": "b", "a": "c"}}', "key 'a' occurs twice"),
    (b'{"weight_map": NaN}', "NaN is not JSON"),
    (b'{"a": ' + b"[" * 1_000_000, "nested deeper than 64"),
    (b"\xff", "not UTF-8 at byte 0"),
    (b'{"\\ud800": 0}', "half of a surrogate pair"),
])
def test_an_index_is_strict_json(sharded: Path, text: bytes, reason: str) -> None:
    (sharded / INDEX).write_bytes(text)
    with pytest.raises(CheckpointError, match=rf"index\.json: {reason}"):
        Folder(sharded)


@pytest.mark.parametrize(("text", "reason"), [
    (b"[]", "not a JSON object"),
    (b'{"a": 1, "a": 2}', "key 'a' occurs twice"),
    (b'{"a": 1e999}', "number '1e999' out of range"),
    (b'{"a": ' + b"9" * 100 + b"}", "a number of 100 digits"),
    (b'{"a": ' + b"[" * 64 + b"]" * 64 + b"}", "nested deeper than 64"),
])
def test_a_config_is_strict_json(sharded: Path, text: bytes, reason: str) -> None:
    (sharded / "config.json").write_bytes(text)
    with Folder(sharded) as folder, pytest.raises(CheckpointError, match=rf"config\.json: {reason}"):
        _ = folder.config


def test_a_config_may_hold_an_infinity(sharded: Path) -> None:
    text = '{"time_step_limit": [0.0, Infinity], "eps": 1e-6, "model_max_length": 1000000000000000019884624838656}'
    (sharded / "config.json").write_text(text)
    with Folder(sharded) as folder:
        assert folder.config == {"time_step_limit": [0.0, math.inf], "eps": 1e-6, "model_max_length": int(1e30)}


def test_sizes_are_bounded(sharded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CONFIG_LIMIT", 10)
    with Folder(sharded) as folder, pytest.raises(CheckpointError, match=r"config\.json: over the limit of 10"):
        _ = folder.config
    monkeypatch.setattr(module, "INDEX_LIMIT", 20)
    with pytest.raises(CheckpointError, match=r"index\.json: over the limit of 20 bytes"):
        Folder(sharded)


def test_a_tensor_in_another_file_than_the_index_says_is_found(sharded: Path) -> None:
    """As by loaders, which read all tensors of all files of the index."""
    indexed(sharded, {"norm": "model-2.safetensors", f"{UP}.weight": "model-1.safetensors"})
    with Folder(sharded) as folder:
        assert folder.tensor("norm").tolist() == [1, 1, 1, 1]
        assert folder.notes == [f"{INDEX} says that 'norm' lies in model-2.safetensors; it is read from model-1.safetensors"]
    assert CliRunner().invoke(app, ["inspect", str(sharded)]).stdout.count("it is read from model-1.safetensors") == 1


@pytest.mark.parametrize("other", [torch.ones(4), torch.zeros(4), torch.ones(2, 2), torch.ones(4, dtype=torch.int32)], ids=str)
@pytest.mark.parametrize("named", ["", "model-1.safetensors", "model-2.safetensors"])
def test_a_tensor_in_two_files(sharded: Path, other: torch.Tensor, named: str) -> None:
    """With the same bytes in both, or of the last where the index names that: so all loaders read it."""
    write(sharded / "model-2.safetensors", {"norm": other, f"{UP}.weight_scale_inv": torch.ones(1)})
    if named:
        indexed(sharded, {"norm": named, f"{UP}.weight": "model-1.safetensors", f"{UP}.weight_scale_inv": "model-2.safetensors"})
    else:
        (sharded / INDEX).unlink()
    is_same = other.dtype == torch.float32 and other.equal(torch.ones(4))
    if not is_same and named != "model-2.safetensors":
        with pytest.raises(CheckpointError, match=r"model-2\.safetensors: tensor 'norm' occurs in model-1\.safetensors too, with "
                                                  "other numbers"):
            Folder(sharded)
        return
    with Folder(sharded) as folder:
        assert folder.tensor("norm").equal(other) and folder.names().count("norm") == 1
        assert bool(folder.notes) == (not is_same)
    if not is_same:
        assert f"model-1.safetensors has other numbers of 'norm' than model-2.safetensors, which {INDEX} names" in folder.notes[0]


def test_long_tensors_in_two_files_are_compared_whole(tmp_path: Path) -> None:
    long = torch.zeros(3 * safetensors.COMPARED // 4 + 5, dtype=torch.int32)
    for number, last in enumerate((0, 0, 1)):
        long[-1] = last
        write(tmp_path / f"{number}.safetensors", {"long": long})
    one, same, other = (TensorFile(tmp_path / f"{number}.safetensors") for number in range(3))
    assert one.has_same("long", same) and not one.has_same("long", other)


def test_a_broken_shard_is_refused(sharded: Path) -> None:
    (sharded / "model-2.safetensors").write_bytes(b"\0")
    with pytest.raises(CheckpointError, match=r"model-2\.safetensors: 1 bytes"):
        Folder(sharded)


def test_what_is_not_a_checkpoint_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no \.safetensors file in this folder"):
        Folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    with pytest.raises(CheckpointError, match=r"pytorch_model\.bin: neither a folder nor a \.safetensors file"):
        Folder(tmp_path / "pytorch_model.bin")
    for name in ("absent", "absent.safetensors"):
        with pytest.raises(FileNotFoundError, match=f"No such file or directory: .*{name}"):
            Folder(tmp_path / name)
