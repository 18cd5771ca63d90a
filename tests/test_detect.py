"""What checkpoints' configs say of formats, and of which format they are."""

from __future__ import annotations

from typing import Any

import pytest

from qdsl.checkpoint.detect import params_of, settings
from tests.support.formats import SHIPPED, module

MODULES = {path.stem: module(path) for path in SHIPPED}
CONFIGS: dict[str, tuple[dict[str, Any], str, dict[str, int | str]]] = {
    "DeepSeek-V3": ({"quantization_config": {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8",
                                             "weight_block_size": [128, 128]}}, "fp8_block", {"bn": 128, "bk": 128}),
    "FP8 per tensor": ({"quantization_config": {"quant_method": "fp8", "activation_scheme": "static"}}, "fp8_tensor", {}),
    "GPTQ": ({"quantization_config": {"bits": 4, "group_size": 128, "desc_act": True, "quant_method": "gptq", "sym": True}},
             "int_group", {"bits": 4, "group": 128}),
    "GPTQ, one group": ({"quantization_config": {"bits": 8, "group_size": -1, "quant_method": "gptq"}},
                        "int_group", {"bits": 8, "group": -1}),
    "AWQ": ({"quantization_config": {"bits": 4, "group_size": 64, "quant_method": "awq", "version": "gemm", "zero_point": True}},
            "int_group", {"bits": 4, "group": 64}),
    "compressed-tensors INT8": ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": True}}}}},
        "int8_channel", {}),
    "compressed-tensors FP8": ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}}, "fp8_channel", {}),
}


def found(config: dict[str, Any]) -> dict[str, dict[str, int | str]]:
    """The formats that a config is of, with their parameters."""
    answers = {name: params_of(m.SPEC.detect, m.SPEC.params, config) for name, m in MODULES.items()}
    return {name: params for name, params in answers.items() if params is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_of_one_format_and_gives_its_parameters(name: str) -> None:
    config, format, params = CONFIGS[name]
    assert found(config) == {format: params}


@pytest.mark.parametrize("config", [
    {}, {"quantization_config": None}, {"quantization_config": []}, {"quantization_config": {}},
    {"quantization_config": {"quant_method": "gptq", "bits": 5, "group_size": 128}},
    {"quantization_config": {"quant_method": "gptq", "bits": [4], "group_size": {"a": 1}}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128, 128]}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 3}},
], ids=str)
def test_what_is_of_no_format_is_of_none(config: dict[str, Any]) -> None:
    assert found(config) == {}


def test_booleans_are_compared_as_such() -> None:
    rules = {"config": {"symmetric": True, "bits": "bits"}}
    config = {"quantization_config": {"symmetric": True, "bits": 4}}
    assert params_of(rules, {"bits": (4, 8)}, config) == {"bits": 4}
    assert params_of(rules, {"bits": (4, 8)}, {"quantization_config": {"symmetric": False, "bits": 4}}) is None


def test_several_groups_are_not_one() -> None:
    """compressed-tensors may quantize layers differently; no one of its groups speaks for all."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    config = {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {
        "a": {"weights": weights}, "b": {"weights": {**weights, "num_bits": 4}}}}}
    assert "num_bits" not in settings(config) and found(config) == {}
