"""`qdsl dequantize` of a folder: every producer's becomes plain, with the same numbers, and resumes as conversions do."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner, Result

import qdsl
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.jobs.compress.units import FORMATS
from tests.support import folders, producer_folders
from tests.support.converted_folders import two_files, two_layers
from tests.support.producer_folders import KINDS


def command(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in FORMATS])
def test_every_producers_folder_becomes_plain(tmp_path: Path, kind: str) -> None:
    """The weights have the decoded numbers, and the config has no settings of quantization."""
    decoded = producer_folders.write_folder(tmp_path / "in", kind, "qwen3")
    result = command("dequantize", tmp_path / "in", "--out", tmp_path / "out", "--jobs", "1")
    assert result.exit_code == 0, result.stderr
    with qdsl.open(tmp_path / "out") as plain, qdsl.open(tmp_path / "in") as packed, Folder(tmp_path / "out") as folder:
        assert not plain.layers and "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
        assert packed.layers
        for name in packed.layers:
            weight = folder.tensor(f"{name}.weight")
            assert weight.dtype == torch.float32 and torch.equal(weight, decoded[f"{name}.weight"]), name
        assert {*folder.names()} >= {*decoded}
        assert {name.rpartition(".")[2] for name in folder.names()} <= {"weight", "bias"}


@pytest.mark.parametrize(("dtype", "is_exact"), [("f32", True), ("bf16", False), ("f16", False)])
def test_types(tmp_path: Path, dtype: str, is_exact: bool) -> None:
    path = two_files(tmp_path, two_layers())
    result = command("dequantize", path, "--out", tmp_path / "out", "--dtype", dtype, "--jobs", "1")
    assert result.exit_code == 0 and f"of int_group.gptq_v2 as {dtype}" in result.stdout
    again = command("verify", path, tmp_path / "out", "--decoded")
    assert (again.exit_code == 0) == is_exact


def test_layers_that_are_skipped_stay_quantized(tmp_path: Path) -> None:
    path = two_files(tmp_path, two_layers())
    names = list(two_layers())
    result = command("dequantize", path, "--out", tmp_path / "out", "--skip", names[0], "--jobs", "1")
    assert result.exit_code == 0
    with qdsl.open(tmp_path / "out") as checkpoint:
        assert list(checkpoint.layers) == names[:1]


def test_a_folder_resumes_in_parts(tmp_path: Path) -> None:
    path = two_files(tmp_path, two_layers())
    whole = command("dequantize", path, "--out", tmp_path / "whole", "--jobs", "1")
    for part in ("1/2", "2/2"):
        assert command("dequantize", path, "--out", tmp_path / "out", "--shard", part, "--jobs", "1").exit_code == 0
    merged = command("merge-index", tmp_path / "out")
    assert whole.exit_code == merged.exit_code == 0, merged.stderr
    assert folders.files(tmp_path / "whole") == folders.files(tmp_path / "out")


@pytest.mark.parametrize(("arguments", "code", "message"), [
    (("in", "--dtype", "f64", "--out", "x"), 2, "no 'f64': expected one of f32, bf16, f16"),
    (("in", "--out", "in"), 2, "in"), (("in", "--out", "x.safetensors"), 2, "the output is a folder"),
    (("plain", "--out", "x"), 1, "no quantized layer"), (("a.gguf", "--out", "x", "--skip", "up"), 2, "--skip is for folders"),
    (("lossless", "--out", "x"), 1, "compressed without loss: `qdsl decompress lossless --out x` writes")])
def test_what_cannot_be_dequantized(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: tuple[str, ...], code: int,
                                    message: str) -> None:
    monkeypatch.chdir(tmp_path)
    two_files(tmp_path, two_layers()).rename("in")
    folders.folder(Path("plain"), {"up.weight": torch.ones(64, 64, dtype=torch.bfloat16)}, config={})
    assert command("compress", "plain", "--format", "hlane", "--out", "lossless", "--jobs", "1").exit_code == 0
    Path("a.gguf").write_bytes(b"GGUF")
    result = command("dequantize", *arguments)
    assert result.exit_code == code and message in result.stderr and not Path("x").exists()


@pytest.mark.parametrize("arguments", [["dequantize", "--out"], ["convert", "--to", "gptq_v1", "--out"]], ids=lambda own: own[0])
def test_an_adapter_in_the_folder_is_left_out_whole(tmp_path: Path, arguments: list[str]) -> None:
    """Its config alone would make programs look for its weights; both are named, and the new folder is the base."""
    path = two_files(tmp_path, two_layers())
    (path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    write(path / "adapter_model.safetensors", {"base_model.model.up.lora_A.weight": torch.ones(2, 2, dtype=torch.float32)})
    result = command(arguments[0], path, *arguments[1:], tmp_path / "out")
    assert result.exit_code == 0 and not list((tmp_path / "out").glob("adapter*"))
    assert "adapter_config.json is of an adapter" in result.output and "adapter_model.safetensors holds other" in result.output
