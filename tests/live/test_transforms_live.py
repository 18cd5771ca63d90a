"""Transforms of x beside producers' own packages, live: the recorded answers again, and a whole model of compressed-tensors.

`make live` installs the packages; without one its tests do not run.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.producer_transforms import PRODUCERS, Case, recorded

pytestmark = pytest.mark.filterwarnings("default")


@cache
def live(package: str) -> dict[str, Case]:
    return dict(PRODUCERS[package]())


@pytest.mark.parametrize("name", recorded())
def test_recorded_answers_are_those_of_the_package(name: str) -> None:
    case = recorded()[name]
    pytest.importorskip(case.package)
    own = live(case.package)[name]
    assert (own.settings, own.layer, own.packed) == (case.settings, case.layer, case.packed)
    assert own.tensors.keys() == case.tensors.keys()
    assert all(torch.equal(tensor, case.tensors[full]) for full, tensor in own.tensors.items())
    torch.testing.assert_close(own.y, case.y, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(own.y16, case.y16, rtol=2 ** -7, atol=2 ** -7)


@pytest.mark.parametrize("kind", ["hadamard", "random-hadamard"])
@pytest.mark.parametrize("places", [("input",), ("input", "output")])
def test_models_of_compressed_tensors(kind: str, places: tuple[str, ...], tmp_path: Path) -> None:
    """A rotated and quantized Llama that the package saves; logits equal those of the model that it saved."""
    transform = pytest.importorskip("compressed_tensors.transform")
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config
    from transformers import LlamaConfig, LlamaForCausalLM

    from qdsl.models.transformers import from_pretrained

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(LlamaConfig(vocab_size=96, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                              num_attention_heads=4, num_key_value_heads=2)).float().eval()
    inverses = {"input": "weight_input", "output": "weight_output"}
    apply = [transform.TransformArgs(targets=["re:.*down_proj$", "re:.*o_proj$"], location=location, inverse=inverse)
             for place in places for location, inverse in ((place, place == "output"), (inverses[place], place == "input"))]
    transform.apply_transform_config(model, transform.TransformConfig(config_groups={
        "r": transform.TransformScheme(type=kind, head_dim=32, apply=apply)}))
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel"}
    apply_quantization_config(model, QuantizationConfig(config_groups={
        "group_0": {"targets": ["Linear"], "weights": weights}}, ignore=["lm_head"], format="int-quantized",
        quantization_status="frozen"))
    for name, module in model.named_modules():
        if hasattr(module, "weight_scale") and name.endswith("_proj"):
            module.weight_scale.data = (module.weight.abs().amax(1, keepdim=True) / 127.5).to(module.weight_scale.dtype)
    ids = torch.arange(24).view(2, 12) * 7 % 96
    with torch.no_grad():
        reference = model(ids).logits
    compressor = ModelCompressor.from_pretrained_model(model, quantization_format="int-quantized")
    compressor.compress_model(model)
    model.save_pretrained(tmp_path)
    compressor.update_config(tmp_path)
    with torch.no_grad():
        own = from_pretrained(tmp_path, dtype=torch.float32)
        assert (own(ids).logits - reference).norm() / reference.norm() < 1e-5
        dense = own.dequantize()
        assert (dense(ids).logits - reference).norm() / reference.norm() < 1e-5
