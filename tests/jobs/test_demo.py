"""The demo: what it writes is a checkpoint, and what it says of the formats is so."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qdsl.checkpoint.files import safetensors
from qdsl.cli import app
from qdsl.jobs import demo
from tests.support.formats import SHIPPED


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict, list[str]]:  # type: ignore[type-arg]
    """Of 128 x 256 weights of the widest matrix in the repository's weights, and of a bias."""
    folder = tmp_path_factory.mktemp("demo")
    matrices, others = demo.read(None, lambda line: None)
    name = max(matrices, key=lambda name: matrices[name].shape[1])
    safetensors.write(folder / "own.safetensors", {name: matrices[name][:128, :256].clone(), **others})
    lines: list[str] = []
    return folder / "fp8", demo.run(folder / "own.safetensors", folder / "fp8", lines.append), lines


@pytest.mark.xdist_group("demo")
def test_the_checkpoint_is_as_vendors_ship_it(result: tuple[Path, dict, list[str]]) -> None:  # type: ignore[type-arg]
    """Read by the safetensors library: codes, scales and what was not quantized."""
    from safetensors.torch import load_file

    out, report, _ = result
    tensors = load_file(out / "model.safetensors")
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["quant_method"] == "fp8" and config["weight_block_size"] == [128, 128]
    for name, (n, k) in report["weights"].items():
        assert tensors[name].dtype == torch.float8_e4m3fn and tensors[name].shape == (n, k)
        scale = tensors[f"{name}_scale_inv"]
        assert scale.dtype == torch.float32 and scale.shape == (-(-n // 128), -(-k // 128))
    assert tensors["encoder.layer.0.attention.self.query.bias"].dtype == torch.bfloat16
    assert report["checkpoint"]["params"] == {"bn": 128, "bk": 128, "scale_type": "f32"}
    assert report["checkpoint"]["linear_error"].keys() == report["weights"].keys()
    assert all(0 < error < 0.05 for error in report["checkpoint"]["linear_error"].values())


@pytest.mark.xdist_group("demo")
def test_the_table_has_every_format(result: tuple[Path, dict, list[str]]) -> None:  # type: ignore[type-arg]
    _, report, _ = result
    rows = {(row["format"], row["storage"], *row["params"].values()): row for row in report["formats"]}
    assert {key[0] for key in rows} == {path.stem for path in SHIPPED}
    assert len(rows) == len(report["formats"])
    without = [row["format"] for row in rows.values() if not row["weights"]]
    assert without == ["any_precision", "fp8_ds_mla"]            # which take 1024 columns, and 512 alone
    for row in filter(lambda row: row["weights"], rows.values()):
        assert row["pack_unpack_exact"] and 0 < row["linear_error"] < 1e-6
        assert row["bytes"] * 8 / row["weights"] == row["bits_per_weight"]
    assert rows["bf16", "plain"]["snr_db"] == math.inf
    snr = [rows["int_group", "gptq_v2", bits]["snr_db"] for bits in (2, 3, 4, 8)]
    assert snr == sorted(snr)
    assert rows["q8_0", "gguf"]["snr_db"] > rows["fp8_block", "safetensors"]["snr_db"] > rows["q4_0", "gguf"]["snr_db"] > 20


@pytest.mark.filterwarnings("default")
def test_a_model_answers_in_three_formats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the package of a trained model a random one does; hlane keeps what Q4_1 decodes to, in more bytes."""
    pytest.importorskip("transformers")
    monkeypatch.setattr(demo, "installed", lambda: None)
    lines: list[str] = []
    lossy, lossless, fp8 = demo.ask_models(lines.append)
    assert len(lines) == 1 and "random model" in lines[0] and demo.QUESTION in lines[0]
    assert [row["format"] for row in (lossy, lossless, fp8)] == ["q4_1", "hlane", "fp8_channel"]
    assert lossy["text"] == lossless["text"] and lossy["bytes"] < fp8["bytes"] < lossless["bytes"]
    assert demo.answer_cells(fp8)[0] == "fp8_channel" and fp8["text"]


def test_weights_of_ones_own(tmp_path: Path) -> None:
    """A file in which some tensors are no weights, and a shape that not every format can hold."""
    own = tmp_path / "own.safetensors"
    safetensors.write(own, {"a.weight": torch.randn(40, 96, dtype=torch.float16), "a.bias": torch.zeros(40),
                            "norm.weight": torch.ones(96), "ids": torch.arange(9)})
    done = CliRunner().invoke(app, ["demo", "--weights", str(own), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 0
    assert "own.safetensors: 1 matrices, 3,840 weights" in done.stdout
    lines = {line.split("  ")[0]: line for line in done.stdout.splitlines()}
    assert "left out  [40, 96]: q4_k.gguf: " in done.stdout and "no matrix fits" in lines["q4_k.gguf"]
    assert "exact" in lines["q4_0.gguf"]


@pytest.mark.parametrize(("content", "message"), [
    (None, "No such file"), (b"", "error: "), (b"\0" * 100, "error: "), ({"a": torch.ones(3)}, "no float matrix called"),
], ids=["missing", "empty", "zeros", "vector"])
def test_weights_that_are_none(tmp_path: Path, content: object, message: str) -> None:
    own = tmp_path / "own.safetensors"
    if isinstance(content, dict):
        safetensors.write(own, content)
    elif isinstance(content, bytes):
        own.write_bytes(content)
    done = CliRunner().invoke(app, ["demo", "--weights", str(own), "--out", str(tmp_path / "out")], catch_exceptions=False)
    assert done.exit_code == 1 and done.stderr.startswith("error: ") and message in done.stderr
    assert not (tmp_path / "out").exists()
