"""Layers whose tensors do not say N and K, in folders whose config names the class of their model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM
from typer.testing import CliRunner

import qdsl
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.detect.shaped import shaped_layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.cli import app
from qdsl.cli.model_class import layer_shapes
from qdsl.generated import quanto
from qdsl.runtime import PackedWeight
from tests.support.formats import same_bits
from tests.support.small_models import folder

SMALL = LlamaConfig(vocab_size=32, hidden_size=128, intermediate_size=256, num_hidden_layers=1, num_attention_heads=2,
                    num_key_value_heads=1, architectures=["LlamaForCausalLM"])
NAMES = {"data": "weight._data._data", "scale": "weight._scale", "shift": "weight._shift"}


def random_weight(n: int, k: int) -> PackedWeight:
    fields = {"q": torch.randint(16, (n, k), dtype=torch.uint8), "s": torch.rand(n, k // 128) + 0.1, "z": torch.rand(n, k // 128)}
    return quanto.pack(fields, bits=4, group=128)


def small_model() -> tuple[LlamaForCausalLM, dict[str, PackedWeight], dict[str, Tensor]]:
    """A model, its linear layers but the head in optimum-quanto's qint4, and the tensors of its file."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(SMALL)
    packed, tensors = {}, {}
    for name, parameter in model.state_dict().items():
        if name.endswith("proj.weight"):
            packed[name.removesuffix(".weight")] = weight = random_weight(*parameter.shape)
            tensors |= {name.removesuffix("weight") + NAMES[own]: tensor.view(-1, 128 if own == "data" else 1)
                        for own, tensor in weight.tensors.items()}
        else:
            tensors[name] = parameter.clone()
    return model, packed, tensors


def run(*arguments: str | Path) -> dict[str, Any]:
    result = CliRunner().invoke(app, [*map(str, arguments), "--json"])
    assert result.exit_code in (0, 1), result.output
    report: dict[str, Any] = json.loads(result.stdout)
    return report


def test_the_class_of_the_config_says_shapes(tmp_path: Path) -> None:
    """inspect, convert in parts, and layers; without a class nothing says them, and a model that is filled says its own."""
    model, packed, tensors = small_model()
    with_class = folder(tmp_path / "known", tensors, {**SMALL.to_dict(), "architectures": ["LlamaForCausalLM"]})
    bare = folder(tmp_path / "bare", tensors, {"model_type": "toy"})
    with Folder(with_class) as source:
        assert all(layer.lacks_shape for layer in layers(source).layers)
        unpacked = {layer.name: weights(source, layer)[0] for layer in shaped_layers(source, layer_shapes).layers}
    assert {name: weight.shape for name, weight in unpacked.items()} == {name: weight.shape for name, weight in packed.items()}
    assert all(same_bits(quanto.dequantize(unpacked[name]), quanto.dequantize(weight)) for name, weight in packed.items())
    assert ["give shape=(N, K)" in json.dumps(run("inspect", path)) for path in (with_class, bare)] == [False, True]
    assert "give shape=(N, K)" in run("convert", bare, "--requantize", "q8_0", "--out", tmp_path / "none")["error"]
    options = ("--requantize", "int_group.gptq_v2", "--param", "group=128", "--out")
    run("convert", with_class, *options, tmp_path / "gptq", "--shard", "1/1")
    assert run("merge-index", tmp_path / "gptq")["layers"] == [{"from": "quanto.quanto", "to": "int_group.gptq_v2", "count": 7}]

    report = qdsl.load_weights_(model, bare)
    assert len(report.packed) == 7
    for name, weight in packed.items():
        assert same_bits(model.get_submodule(name).dequantize(torch.float32), quanto.dequantize(weight, torch.float32))
