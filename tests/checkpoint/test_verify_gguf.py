"""GGUF files beside the models that they were made of."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner, Result

from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.cli import app
from qdsl.jobs.gguf.mixes import Model
from tests.support.models import ToyModel, weights, written

LLAMA = ToyModel(Model("llama", 2, 4, 2), 256, 512)
MATRIX = "blk.1.ffn_down.weight"


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def changed(path: Path, out: str, name: str, start: int, data: bytes) -> str:
    """A copy with other bytes in a tensor."""
    with GgufFile(path) as file:
        place = file.entry(name).start + start
    whole = bytearray(path.read_bytes())
    whole[place:place + len(data)] = data
    Path(out).write_bytes(whole)
    return out


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model in F32 and F16, with weights as trained ones are."""
    monkeypatch.chdir(tmp_path)
    generator = np.random.default_rng(0)
    tensors = {name: generator.normal(0, 0.02, tensor.shape).astype(tensor.dtype) for name, tensor in weights(LLAMA).items()}
    return written(Path("model.gguf"), LLAMA, tensors)


@pytest.mark.parametrize("mix", ["Q8_0", "Q4_K_M", "Q3_K_S", "Q4_0", "BF16", "F16"])
def test_a_quantized_file_is_its_model(model: Path, mix: str) -> None:
    """In either order; errors are those of the types, and plain numbers are rounded once."""
    assert run("quantize", model, "--type", mix, "--out", "out.gguf").exit_code == 0
    for arguments in (("out.gguf", model), ("out.gguf", "model.gguf")):
        result = run("verify", *arguments)
        assert (result.exit_code, result.stdout) == (0, "equal within the errors of types\n"), result.output


def test_what_types_do_not_explain(model: Path) -> None:
    """A row of zeros, scales of another block, a number of a norm, a tensor of another model, one that is missing."""
    assert run("quantize", model, "--type", "Q8_0", "--out", "out.gguf").exit_code == 0
    changes = ((MATRIX, 0, bytes(34 * 200)), (MATRIX, 34 * 40, b"\0\x60"), ("blk.0.attn_norm.weight", 4, b"\1\0\0\x40"))
    for name, start, data in changes:
        result = run("verify", changed(Path("out.gguf"), "wrong.gguf", name, start, data), model, "--json")
        report = json.loads(result.stdout)
        assert result.exit_code == 1 and [difference["tensor"] for difference in report["differences"]] == [name]
        assert report["differences"][0]["error"] > 1.5 * report["differences"][0]["usual_error"]
    text = run("verify", "wrong.gguf", model).stdout
    assert "blk.0.attn_norm.weight: relative error" in text and "F32 has 0 on these weights" in text
    tensors = {name: tensor for name, tensor in weights(LLAMA).items() if name != MATRIX}
    tensors["output_norm.weight"] = np.ones(128, np.float32)
    written(Path("other.gguf"), LLAMA, tensors)
    text = run("verify", "out.gguf", "other.gguf").stdout
    assert f"{MATRIX}: only in A: Q8_0 [256, 512]" in text and "output_norm.weight: shape [256] and [128]" in text


def test_a_model_in_swapped_rows_is_another(model: Path) -> None:
    """As one whose queries were not permuted."""
    tensors = {name: tensor.copy() for name, tensor in weights(LLAMA).items()}
    name = "blk.0.attn_q.weight"
    tensors[name] = tensors[name][::-1].copy()
    original, swapped = written(Path("a.gguf"), LLAMA), written(Path("b.gguf"), LLAMA, tensors)
    assert run("quantize", swapped, "--type", "Q4_K_M", "--out", "out.gguf").exit_code == 0
    result = run("verify", "out.gguf", original, "--json")
    assert [difference["tensor"] for difference in json.loads(result.stdout)["differences"]] == [name]


def test_options_and_files_that_are_wrong(model: Path) -> None:
    assert run("verify", model, model, "--decoded").exit_code == 2
    missing = run("verify", model, "missing.gguf")
    assert missing.exit_code == 1 and "error: " in missing.stderr
