"""`quantize --target-bits`: types by what they cost within a number of bytes, and the command that writes the file."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner, Result

import qdsl.models.transformers as plugin
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.cli import app
from qdsl.jobs import type_costs
from qdsl.jobs.gguf import QuantizeError
from qdsl.jobs.gguf.budget import Choice, choose
from qdsl.models import gguf_vocabulary
from qdsl.models.language import load_language_model
from tests.support import language_models

TEXT = "The quick brown fox jumps over the lazy dog, and the dog sleeps on. " * 40
COMMAND = ("quantize", "model", "--calibrate", "text.txt", "--samples", "6", "--length", "48", "--json", "--method", "importance")

tensors = st.lists(st.lists(st.tuples(st.integers(1, 9), st.integers(0, 99)), min_size=1, max_size=4), min_size=1, max_size=4)


@given(tensors, st.integers(0, 40))
def test_no_other_types_cost_less_by_more_than_a_step(sizes: list[list[tuple[int, int]]], more: int) -> None:
    """Brute force finds none; a whole step is what the last bytes can be worth."""
    choices = {str(number): [Choice(f"{nbytes}:{cost}", nbytes, cost) for nbytes, cost in some]
               for number, some in enumerate(sizes)}
    nbytes = sum(min(choice.nbytes for choice in some) for some in choices.values()) + more
    chosen = choose(choices, nbytes)
    sums = [tuple(map(int, chosen[name].split(":"))) for name in choices]
    assert sum(size for size, _ in sums) <= nbytes
    best = min(sum(choice.cost for choice in some) for some in product(*choices.values())
               if sum(choice.nbytes for choice in some) <= nbytes)
    step = max(choice.cost for some in choices.values() for choice in some)
    assert sum(cost for _, cost in sums) <= best + step
    if more >= 40:                                               # all fit
        assert sum(cost for _, cost in sums) == best


def test_types_that_do_not_fit_are_refused() -> None:
    with pytest.raises(QuantizeError, match="the smallest types of 1 tensors take 5 bytes, of 4 that"):
        choose({"a": [Choice("Q2_K", 5, 1.0)]}, 4)


def run(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


@pytest.fixture
def model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder `model` and a text, in the current folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(gguf_vocabulary, "pre_tokenizer", lambda tokenizer, folder: "gpt-2")
    language_models.add_byte_tokenizer(language_models.write_plain(Path("model"), "qwen3"), [TEXT])
    Path("text.txt").write_text(TEXT)


def types(path: str) -> dict[str, str]:
    with GgufFile(Path(path)) as file:
        return {name: file.entry(name).type.name for name in file.tensors}


def test_a_file_has_at_most_so_many_bits(model: None) -> None:
    """And predictions are the nearer, the more it has."""
    divergences = []
    for bits in (6.0, 8.0):
        result = run(*COMMAND, "--target-bits", str(bits), "--types", "q4_0,q5_0,q8_0", "--out", f"{bits}.gguf")
        assert result.exit_code == 0, result.output
        assert bits - 0.4 < json.loads(result.stdout)["bits_per_weight"] <= bits
        divergences.append(divergence(f"{bits}.gguf"))
    assert divergences == sorted(divergences, reverse=True)
    assert len({*types("6.0.gguf").values()} - {"F32"}) > 1
    assert not list(Path().glob("*.moments"))


@torch.no_grad()
def divergence(path: str) -> float:
    """From the model, of predictions for the text."""
    ids = plugin.tokenizer("model")(TEXT[:400], return_tensors="pt")["input_ids"]
    own, plain = (load_language_model(name, dtype="float32").model(ids).logits.double().log_softmax(-1)
                  for name in (path, "model"))
    return float((plain.exp() * (plain - own)).sum(-1).mean())


def test_a_broken_run_measures_no_layer_twice(model: None, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[str] = []
    row_cost = type_costs._row_cost

    def counted(*arguments: object) -> float:
        if len(measured) == 9:
            measured.append("broken")
            raise KeyboardInterrupt
        measured.append(str(arguments[2]))
        return row_cost(*arguments)                              # type: ignore[arg-type]

    options = (*COMMAND, "--target-bits", "6", "--types", "q4_0,q5_0,q8_0")
    assert run(*options, "--out", "whole.gguf").exit_code == 0
    monkeypatch.setattr(type_costs, "_row_cost", counted)
    assert run(*options, "--out", "out.gguf").exit_code != 0
    result = run(*options, "--out", "out.gguf")
    assert result.exit_code == 0, result.output
    assert len(measured) - 1 == 3 * 16                           # types of 14 layers, an embedding and a head
    assert Path("out.gguf").read_bytes() == Path("whole.gguf").read_bytes()


def test_types_that_a_user_gives_stay(model: None) -> None:
    result = run(*COMMAND, "--target-bits", "6", "--tensor-type", "attn_v=q8_0", "--output-tensor-type", "q6_k", "--types",
                 "q3_k,q4_k", "--method", "gptq", "--dry-run", "--out", "out.gguf")
    assert result.exit_code == 0, result.output
    chosen = {row["name"]: row["type"] for row in json.loads(result.stdout)["tensors"]}
    assert chosen["blk.0.attn_v.weight"] == "Q8_0" and chosen["output.weight"] == "Q6_K"
    assert {type for name, type in chosen.items() if "ffn" in name and "norm" not in name} <= {"Q3_K", "Q4_K"}


@pytest.mark.parametrize(("options", "message"), [
    (("--target-bits", "4", "--type", "Q4_K_M"), "leave out --type"), (("--target-bits", "4", "--format", "nf4"), "leave out"),
    (("--type", "Q4_K_M", "--types", "Q4_K"), "--types is for --target-bits"),
    (("--target-bits", "4", "--types", "Q4_KM"), "no type 'Q4_KM'"),
    (("--target-bits", "1.5", "--types", "q4_0"), "--target-bits leaves for them")])
def test_options_that_do_not_fit_are_refused(model: None, options: tuple[str, ...], message: str) -> None:
    result = run(*COMMAND, *options, "--out", "out.gguf")
    assert result.exit_code and message in " ".join(result.output.split()), result.output


def test_a_text_is_needed(model: None) -> None:
    result = run("quantize", "model", "--target-bits", "4", "--out", "out.gguf")
    assert result.exit_code == 2 and "--target-bits is for --calibrate" in result.stderr
