"""`quantize --calibrate` and `imatrix`: less error of logits than rounding, resuming, and the command line's answers."""

from __future__ import annotations

import shutil
import struct
from pathlib import Path

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import qdsl.models.transformers as plugin
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import write
from qdsl.cli import app
from qdsl.encode.calibrated import store
from qdsl.jobs.gguf.imatrix import read
from qdsl.models import calibrate as calibrating
from qdsl.models import gguf_vocabulary
from qdsl.models.language import load_language_model
from tests.support import language_models
from tests.support.covering import quarter_of

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
CALIBRATED = ("--calibrate", "text.txt", "--samples", "6", "--length", "48")
FOLDER = ("--format", "int_group", "--param", "bits=3", "--param", "group=64")


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture(autouse=True)
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `model` and a text, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda tokenizer, folder: "gpt-2")
    language_models.add_byte_tokenizer(language_models.write_plain(Path("model"), "qwen3"), [TEXT])
    Path("text.txt").write_text(TEXT)


@torch.no_grad()
def logits(path: str) -> Tensor:
    """Of a sentence of the text, in float32."""
    result: Tensor = load_language_model(path, dtype="float32").model(tokens()).logits
    return result


def tokens() -> Tensor:
    """Of the beginning of the text."""
    ids: Tensor = plugin.tokenizer("model")(TEXT[:60], return_tensors="pt")["input_ids"]
    return ids % language_models.VOCABULARY


@pytest.mark.parametrize("target", [FOLDER, ("--type", "Q3_K_S")], ids=["folder", "gguf"])
def test_logits_are_nearer_than_by_rounding(target: tuple[str, ...]) -> None:
    suffix = ".gguf" if target[0] == "--type" else ""
    errors = {}
    for name, options in {"rounded": (), "once": (*CALIBRATED, "--one-shot"), "calibrated": CALIBRATED}.items():
        result = run("quantize", "model", *target, *options, "--out", f"{name}{suffix}")
        assert result.exit_code == 0, result.output
        errors[name] = float((logits(f"{name}{suffix}") - logits("model")).square().mean())
    assert errors["once"] < 0.8 * errors["rounded"] and errors["calibrated"] < 0.8 * errors["rounded"]
    assert not list(Path().glob("*.moments"))


@torch.no_grad()
@pytest.mark.parametrize(("source", "target"), quarter_of([
    ("moe", FOLDER), ("mixtral", FOLDER), ("gpt_oss", ("--format", "fp8_block")), ("mixtral", ("--type", "Q4_0"))]),
    ids=lambda value: value if isinstance(value, str) else value[1])
def test_experts_are_quantized_by_their_own_tokens(source: str, target: tuple[str, ...]) -> None:
    """Whether the folder has them one by one, in stacks, or by other names than the model."""
    shutil.rmtree("model")
    language_models.add_byte_tokenizer(language_models.write_plain(Path("model"), source), [TEXT])
    suffix = ".gguf" if target[0] == "--type" else ""
    for name, options in {"rounded": (), "calibrated": CALIBRATED}.items():
        result = run("quantize", "model", *target, *options, "--out", f"{name}{suffix}")
        assert result.exit_code == 0, result.output
    plain = load_language_model("model", dtype="float32").model
    with calibrating.collect_moments("", plain) as moments:
        plain(plugin.tokenizer("model")(TEXT, return_tensors="pt")["input_ids"])
    losses = {}
    for name in ("rounded", "calibrated"):
        model = load_language_model(f"{name}{suffix}", dtype="float32").model.dequantize()
        weights = calibrating.weights_of(model, "")
        losses[name] = {key: moments[key].loss(weights[key] - own) for key, own in calibrating.weights_of(plain, "").items()
                        if ".experts." in key and key in moments}
    assert len(losses["rounded"]) > 4
    assert all(losses["calibrated"][key] < 0.9 * loss for key, loss in losses["rounded"].items()), losses


def test_layers_are_found_by_the_names_of_the_folder() -> None:
    """As in folders of a model without a head, whose names lack its first part."""
    shutil.rmtree("model")
    language_models.add_byte_tokenizer(language_models.write_plain(Path("model"), "tied"), [TEXT])
    with Folder(Path("model")) as folder:
        tensors = {name.removeprefix("model."): folder.tensor(name).clone() for name in folder.names()}
    write(Path("model/model.safetensors"), tensors, {"format": "pt"})
    errors = {}
    for name, options in {"rounded": (), "calibrated": CALIBRATED}.items():
        result = run("quantize", "model", *FOLDER, *options, "--out", name)
        assert result.exit_code == 0, result.output
        errors[name] = float((logits(name) - logits("model")).square().mean())
    assert errors["calibrated"] < 0.8 * errors["rounded"]


def test_types_that_need_importances_take_those_of_the_text() -> None:
    mix = ("--type", "Q8_0", "--tensor-type", "ffn_up=IQ2_XS")
    assert "without an importance matrix" in run("quantize", "model", *mix, "--out", "a.gguf").stderr
    for jobs in ("1", "2"):
        result = run("quantize", "model", *mix, *CALIBRATED, "--jobs", jobs, "--out", f"{jobs}.gguf")
        assert result.exit_code == 0, result.output
    assert Path("1.gguf").read_bytes() == Path("2.gguf").read_bytes()


def test_importances_of_the_text_count_to_a_power() -> None:
    for power in ((), ("--imatrix-power", "1"), ("--imatrix-power", "0")):
        options = (*CALIBRATED, "--one-shot", "--method", "importance", *power)
        assert run("quantize", "model", "--type", "Q4_0", *options, "--out", f"{''.join(power[1:])}.gguf").exit_code == 0
    plain, one, none = (Path(f"{power}.gguf").read_bytes() for power in ("", "1", "0"))
    assert plain == one != none


def test_a_broken_run_continues_with_the_blocks_that_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    assert run("quantize", "model", *FOLDER, *CALIBRATED, "--out", "whole").exit_code == 0
    saved: list[str] = []
    save = store.save

    def broken(folder: Path, block: str, hessians: object) -> None:
        if saved:
            raise KeyboardInterrupt
        saved.append(block)
        save(folder, block, hessians)                            # type: ignore[arg-type]

    monkeypatch.setattr(store, "save", broken)
    assert run("quantize", "model", *FOLDER, *CALIBRATED, "--out", "out").exit_code != 0
    assert saved == ["model.layers.0"] and not list(Path("out").glob("*.safetensors"))
    monkeypatch.setattr(store, "save", lambda folder, block, hessians: (saved.append(block), save(folder, block, hessians)))
    result = run("quantize", "model", *FOLDER, *CALIBRATED, "--out", "out")
    assert result.exit_code == 0, result.output
    assert saved == ["model.layers.0", "model.layers.1"]
    assert Path("out/model.safetensors").read_bytes() == Path("whole/model.safetensors").read_bytes()


@pytest.mark.parametrize("source", ["qwen3", "tied"])
def test_an_importance_matrix_is_read_by_quantize(source: str) -> None:
    language_models.write_plain(Path("model"), source)
    result = run("imatrix", "model", "text.txt", "--out", "im.gguf", "--length", "48")
    assert result.exit_code == 0, result.output
    matrix = read("im.gguf")
    layers = [f"blk.{block}.{name}.weight" for block in (0, 1) for name in (
        "attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")]
    assert sorted(matrix.entries) == sorted(layers) and matrix.datasets == ("text.txt",)
    assert run("quantize", "model", "--type", "IQ2_XS", "--imatrix", "im.gguf", "--out", "out.gguf").exit_code == 0


def test_an_importance_matrix_has_the_experts_of_a_stack() -> None:
    shutil.rmtree("model")
    language_models.add_byte_tokenizer(language_models.write_plain(Path("model"), "mixtral"), [TEXT])
    result = run("imatrix", "model", "text.txt", "--out", "im.gguf", "--length", "48")
    assert result.exit_code == 0, result.output
    matrix = read("im.gguf")
    for name, columns in (("ffn_gate_exps", 256), ("ffn_up_exps", 256), ("ffn_down_exps", 256)):
        entry = matrix.entries[f"blk.1.{name}.weight"]
        counts = struct.unpack("<4f", entry.counts or b"")
        assert entry.sums.nbytes == 4 * 4 * columns and sum(counts) == 2 * 48 * matrix.chunks
    assert run("quantize", "model", "--type", "IQ2_XS", "--imatrix", "im.gguf", "--out", "out.gguf").exit_code == 0


@pytest.mark.parametrize(("options", "sentence"), [
    (("--samples", "3"), "--samples is for --calibrate"),
    (("--calibrate", "none.txt"), "none.txt: no such file of text"),
    ((*CALIBRATED, "--method", "awq"), "--method is gptq or importance, not awq"),
    ((*CALIBRATED, "--shard", "1/2"), "--calibrate runs the whole model: quantize it without --shard"),
])
def test_options_that_do_not_fit(options: tuple[str, ...], sentence: str) -> None:
    result = run("quantize", "model", *FOLDER, *options, "--out", "out")
    assert result.exit_code == 2 and sentence in result.stderr
    assert not Path("out").exists()


def test_a_text_that_is_too_short_is_refused() -> None:
    Path("text.txt").write_text("short")
    result = run("quantize", "model", *FOLDER, *CALIBRATED, "--out", "out")
    assert result.exit_code == 1 and "a chunk takes 48" in result.stderr
