"""Language models from the command line: what they generate, and what quantizing cost them."""

from __future__ import annotations

import json
import math
import string
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner, Result

from qdsl.cli import app
from tests.support import language_models, producer_folders

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")
TEXT = "".join(f"{number} squared is {number * number}. " for number in range(60))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return language_models.add_tokenizer(language_models.write_plain(tmp_path_factory.mktemp("plain") / "model", "qwen3"))


@pytest.fixture(scope="module")
def fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fp8") / "model"
    producer_folders.write_folder(folder, "fp8 block", "qwen3")
    return language_models.add_tokenizer(folder)


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_text(TEXT)
    return path


def run(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, list(map(str, arguments)), catch_exceptions=False)


def expected_tokens(folder: Path, prompt: str, count: int) -> str:
    from qdsl.models.transformers import from_pretrained

    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    inputs = tokenizer(prompt, return_tensors="pt")
    tokens = from_pretrained(folder).generate(**inputs, max_new_tokens=count, do_sample=False)[0]
    return str(tokenizer.decode(tokens[len(prompt):]))


def test_text_is_streamed_and_figures_follow(fp8: Path) -> None:
    result = run("generate", fp8, "12 squared", "--max-new-tokens", 12)
    assert result.exit_code == 0 and result.stdout.rstrip("\n") == expected_tokens(fp8, "12 squared", 12).rstrip("\n")
    assert "MB resident" in result.stderr and "prompt: 10 tokens" in result.stderr and "answer: 12 tokens" in result.stderr


def test_a_prompt_may_be_longer_than_names_of_files(fp8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a model here, and of one that is not there: the two may have changed places."""
    monkeypatch.chdir(fp8.parent)
    prompt = "12 squared " * 30
    result = run("generate", fp8.name, prompt, "-n", 1)
    assert result.exit_code == 0 and f"prompt: {len(prompt)} tokens" in result.stderr
    assert (missing := run("generate", "nowhere", prompt)).exit_code != 0 and "nowhere" in missing.stderr


def test_options_of_generating(plain: Path, tmp_path: Path) -> None:
    """Quantized on the way, sampled the same by the same seed, and with the chat template where there is one."""
    first, again, other = (json.loads(run("generate", plain, "1", "-f", "INT-Group", "--param", "bits=4", "--param", "group=32",
                                          "--temperature", 1.5, "--seed", seed, "-n", 16, "--json").stdout)
                           for seed in (1, 1, 2))
    assert first["text"] == again["text"] != other["text"] and first["tokens"] == 16 and "int_group" in first["model"]
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    language_models.add_tokenizer(tmp_path, chat_template="{% for message in messages %}<{{ message.content }}>{% endfor %}")
    chat, raw = (json.loads(run("generate", tmp_path, "1", "-n", 4, "--json", *more).stdout) for more in ((), ("--raw",)))
    assert (chat["prompt"], raw["prompt"]) == (3, 1)


def test_perplexity_is_that_of_the_second_halves(plain: Path, text: Path) -> None:
    """As llama-perplexity counts: chunks that know nothing of each other, of which the second half is scored."""
    data = json.loads(run("evaluate", plain, "--text", text, "--context", 64, "--dtype", "float32", "--json").stdout)
    model = transformers.AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    tokens = torch.tensor([string.printable.index(c) for c in TEXT])
    losses = []
    for chunk in tokens[:len(tokens) // 64 * 64].view(-1, 64):
        with torch.no_grad():
            logits = model(chunk[None]).logits[0]
        losses += [torch.nn.functional.cross_entropy(logits[place], chunk[place + 1]) for place in range(32, 63)]
    [figures] = data["models"]
    assert figures["tokens"] == len(losses) and figures["divergence"] is None
    assert figures["perplexity"] == pytest.approx(math.exp(torch.stack(losses).double().mean()), rel=1e-5)


def test_divergence_from_a_base(plain: Path, fp8: Path, text: Path, tmp_path: Path) -> None:
    """Formats without loss diverge by nothing; coarser ones by more, with less signal to noise."""
    svg = tmp_path / "kl.svg"
    result = run("evaluate", fp8, "--text", text, "--against", plain, "-f", "hlane", "-f", "Q8_0", "-f", "q4_0", "-c", 64,
                 "--json", "--svg", svg)
    by_name = {row["name"].rpartition(" ")[2]: row for row in json.loads(result.stdout)["models"]}
    lossless, q8, q4, other = (by_name[name] for name in ("hlane", "q8_0", "q4_0", str(fp8)))
    assert (lossless["divergence"], lossless["percentile"], lossless["agreement"]) == (0.0, 0.0, 1.0)
    assert 0 < q8["divergence"] < other["divergence"] < q4["divergence"] < q4["percentile"]
    assert set(lossless["snr"].values()) == {None} and min(q8["snr"].values()) > 40 > 25 > max(q4["snr"].values()) > 15
    assert len(q8["snr"]) == 14 and lossless["bits_per_weight"] > q8["bits_per_weight"] > q4["bits_per_weight"]
    assert svg.read_text().count("<circle") == 4
    result = run("evaluate", "--text", text, "--against", plain, "-c", 64, plain, "nowhere")
    assert result.exit_code == 1 and "nowhere: no such folder" in result.stderr and not result.stdout
    (tmp_path / "empty").mkdir()
    result = run("evaluate", "--text", text, "--against", plain, "-c", 64, plain, tmp_path / "empty")
    assert result.exit_code == 1 and "empty" in result.stderr
    heads, row = result.stdout.splitlines()                      # what is known when a later model fails
    assert row.split()[0] == str(plain) and row[heads.index("same top token"):].split()[0] == "100.00%"
    assert row[heads.index("KL mean"):].split()[:2] == ["0.000000", "0.000000"] and "±" in row[heads.index("perplexity"):]


@pytest.mark.parametrize(("arguments", "code", "message"), [
    ("generate nowhere x", 1, "no such folder"), ("evaluate {plain} --text {text} -f q4_0", 2, "--against"),
    ("evaluate {plain} --text {text} -c 5000", 1, "give more text"), ("generate {plain} x -f q9", 2, "no format 'q9'"),
    ("generate {fp8} x -f q4_0", 1, "contradicts"), ("generate {fp8} x --device cuda:77", 1, "'cuda:77' cannot be used here")])
def test_errors_are_sentences(plain: Path, fp8: Path, text: Path, arguments: str, code: int, message: str) -> None:
    result = run(*arguments.format(plain=plain, fp8=fp8, text=text).split())
    assert result.exit_code == code and message in result.stderr and "Traceback" not in result.stderr


@pytest.mark.parametrize(("arguments", "message"), [
    ("generate {plain} x --device banana", "device 'banana' cannot be used here"),
    ("generate {plain} x --device meta", "'meta' has no numbers"),
    ("generate {plain} x -f q4_0 --param bits=9", "q4_0 has no parameter 'bits'"),
    ("generate {plain} x -f int_group --param bits=99", "bits"),
    ("evaluate {plain} --text {text} --device banana", "device 'banana'"),
    ("evaluate {plain} --text {text} --against {plain} -f nf4,bits=4", "no format"),
    ("imatrix {plain} {text} -o {text}.gguf --device banana", "device 'banana'"),
    ("imatrix {plain} {text}.no -o {text}.gguf", "No such file"),
    ("quantize {plain} -f q4_0 -o {text}.q --calibrate {text} --device banana", "device 'banana'")])
def test_options_are_judged_before_libraries_are_imported(
        plain: Path, text: Path, monkeypatch: pytest.MonkeyPatch, arguments: str, message: str) -> None:
    """transformers takes seconds."""
    monkeypatch.setitem(sys.modules, "qdsl.models.language", None)
    result = run(*arguments.format(plain=plain, text=text).split())
    assert result.exit_code in (1, 2) and message in result.stderr


@pytest.mark.parametrize("command", [("evaluate", "--text", "{text}", "-c", 5000), ("imatrix", "{text}", "-o", "{text}.gguf",
                                                                                    "--length", 5000)])
def test_a_text_is_judged_before_a_model_is_loaded(plain: Path, text: Path, monkeypatch: pytest.MonkeyPatch,
                                                   command: tuple[Any, ...]) -> None:
    monkeypatch.setattr("qdsl.models.language._load_plain", lambda *_: pytest.fail("the model was loaded"))
    result = run(command[0], plain, *(str(word).format(text=text) for word in command[1:]))
    assert result.exit_code == 1 and "give more text" in result.stderr


@pytest.mark.parametrize("defect, message", [("tensor", "no tensor for model.layers.0.mlp.up_proj.weight"),
                                             ("config", "transformers does not load it"),
                                             ("tokenizer", "transformers reads no tokenizer from it"),
                                             ("tokenizers", "has no tokenizer, and its prompt would be lost")])
def test_a_damaged_plain_folder_is_refused(plain: Path, tmp_path: Path, defect: str, message: str) -> None:
    """transformers warns of a missing tensor and runs with random numbers in its place."""
    for path in plain.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    if defect == "tensor":
        tensors = load_file(plain / "model.safetensors")
        del tensors["model.layers.0.mlp.up_proj.weight"]
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    elif defect == "tokenizers":                                 # transformers makes one of a class that a config names
        gemma = transformers.GemmaConfig(**language_models.config("qwen3").to_dict() | {"tie_word_embeddings": False})
        gemma.architectures = ["GemmaForCausalLM"]
        transformers.GemmaForCausalLM(gemma).save_pretrained(tmp_path)
        for path in tmp_path.glob("tokenizer*"):
            path.unlink()
    elif defect == "tokenizer":
        (tmp_path / "tokenizer.json").write_text("{")
    else:
        config = json.loads((plain / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps(config | {"num_hidden_layers": "two"}))
    result = run("generate", tmp_path, "1", "-n", 1)
    assert result.exit_code == 1 and f"{tmp_path}: " in result.stderr and message in result.stderr


@pytest.mark.parametrize(("name", "change", "message"), [
    ("config.json", {"num_hidden_layers": [None]}, "transformers does not load it"),
    ("config.json", {"vocab_size": 300}, "transformers does not load it"),
    ("generation_config.json", {"eos_token_id": math.nan}, "transformers does not generate with it"),
    ("tokenizer_config.json", {"model_max_length": []}, "transformers does not generate with it"),
    ("config.json", {"layer_types": ["y" * 100_000]}, "transformers does not load it")])
def test_a_packed_folder_with_wrong_settings_is_refused(fp8: Path, tmp_path: Path, name: str, change: dict[str, Any],
                                                        message: str) -> None:
    """By errors of many kinds: they are sentences, and no longer than a screen."""
    for path in fp8.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    config = json.loads((tmp_path / name).read_text()) if (tmp_path / name).exists() else {}
    (tmp_path / name).write_text(json.dumps(config | change))
    result = run("generate", tmp_path, "1", "-n", 1)
    assert result.exit_code == 1 and f"error: {tmp_path}: {message}" in result.stderr
    assert max(map(len, result.stderr.splitlines())) < 5000
