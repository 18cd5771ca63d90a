"""Models with match_dense have the logits and tokens of their dequantized models, which transformers loads as plain ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import qdsl
from qdsl.cli import app
from qdsl.models.fused import FusedLinear
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.torch.layers import QuantizedLinear
from tests.support import gguf_models, language_models
from tests.support.formats import same_bits
from tests.support.packed_layers import sample

transformers = pytest.importorskip("transformers")
plugin = pytest.importorskip("qdsl.models.transformers")
pytestmark = pytest.mark.filterwarnings("default")


@torch.no_grad()
def logits(model: Any) -> list[torch.Tensor]:
    """For one token and for two prompts."""
    return [model(language_models.IDS[:1, 1:2]).logits, language_models.logits(model)]


@pytest.fixture
def compiled() -> Iterator[None]:
    """Products by compiled loops, which multiply unrounded weights."""
    cpu.compile_products()
    yield
    cpu.compile_products(False)


@pytest.mark.usefixtures("compiled")
def test_the_default_has_other_logits(tmp_path: Path) -> None:
    """Of one token with INT8 weights; the mode can be changed at any time."""
    language_models.write_plain(tmp_path, "qwen3")
    model = plugin.from_pretrained(tmp_path, quantization_config=plugin.QdslConfig("int8_channel"), dtype=torch.bfloat16).eval()
    default = logits(model)[0]
    qdsl.match_dense_(model)
    matching = logits(model)[0]
    assert not torch.equal(default, matching) and same_bits(matching, logits(model.dequantize())[0])


@pytest.mark.parametrize(("model", "format", "params"), [
    ("qwen3", "int8_channel", {}), ("tied", "q6_k", {}), ("moe", "int_group", {"bits": 4, "group": 64}), ("gpt_oss", "nf4", {})])
def test_logits_and_tokens_are_those_of_the_saved_dense_model(model: str, format: str, params: dict[str, Any], tmp_path: Path,
                                                              ) -> None:
    language_models.write_plain(tmp_path / "plain", model)
    config = plugin.QdslConfig(format, match_dense=True, **params)
    packed = plugin.from_pretrained(tmp_path / "plain", quantization_config=config, dtype=torch.bfloat16).eval()
    assert all(layer.match_dense for layer in packed.modules() if isinstance(layer, QuantizedLinear))
    own, tokens = logits(packed), language_models.greedy(packed, 16)
    packed.dequantize().save_pretrained(tmp_path / "dense")
    dense = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "dense", dtype=torch.bfloat16).eval()
    wanted = logits(dense)
    assert all(map(same_bits, own, wanted)) and torch.equal(tokens, language_models.greedy(dense, 16))


def test_a_filled_model(tmp_path: Path) -> None:
    """By load_weights_, which then leaves weights in the storage of the file."""
    model = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)).bfloat16()
    qdsl.quantize_(model, "int_group", bits=4, group=32, storage="gptq_v2")
    qdsl.save_model(model, tmp_path / "packed", {})
    filled = nn.Sequential(nn.Linear(128, 64), nn.Linear(64, 32)).bfloat16()
    qdsl.load_weights_(filled, tmp_path / "packed", match_dense=True)
    x = sample(3, 128).bfloat16()
    dense = nn.Sequential(*(layer.dense() for layer in model))
    assert same_bits(filled(x), dense(x)) and not any(isinstance(layer, FusedLinear) for layer in filled)


def test_the_commands_pass_it_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = gguf_models.written(tmp_path, "llama", type="Q8_0", has_settings=True, has_vocabulary=True, vocab_size=288)
    (tmp_path / "text").write_text("one two three " * 8)
    modes: list[bool] = []
    run = QuantizedLinear.forward
    monkeypatch.setattr(QuantizedLinear, "forward", lambda self, x: (modes.append(self.match_dense), run(self, x))[1])
    scored = ["evaluate", str(path), "--text", str(tmp_path / "text"), "-c", "4"]
    for command in (["generate", str(path), "one", "-n", "1"], scored):
        for option in ([], ["--match-dense"]):
            result = CliRunner().invoke(app, [*command, *option], catch_exceptions=False)
            assert result.exit_code == 0 and set(modes) == {bool(option)}, result.output
            modes.clear()
