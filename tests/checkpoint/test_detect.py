"""What checkpoints' configs say of formats, and of which format they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from qdsl.checkpoint.detect.descriptions import descriptions
from qdsl.checkpoint.detect.quantization import quantization
from qdsl.checkpoint.detect.rules import readings

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
    "AQLM": ({"quantization_config": {"quant_method": "aqlm", "num_codebooks": 1, "nbits_per_codebook": 16, "in_group_size": 8,
                                      "out_group_size": 1}}, "aqlm_1x16", {}),
    "compressed-tensors FP8": ({"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": {
        "targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}}}}}, "fp8_channel", {}),
}


def params_of(rules: Mapping[str, Any], params: Mapping[str, Sequence[int | str]], settings: Mapping[str, Any]) -> object:
    """The parameters that the first rule gives whose values the format has."""
    for reading in readings(rules.get("config"), list(params), settings):
        values = reading.values.items()
        if all(any(value == allowed and type(value) is type(allowed) for allowed in params[name]) for name, value in values):
            return reading.values
    return None


# Formats that a config also allows: the shape of the scale tells a scale per row from one of the whole weight.
SHAPES_TELL: dict[str, dict[str, dict[str, object]]] = {"FP8 per tensor": {"fp8_channel": {}}}


def settings(config: dict[str, Any]) -> dict[str, Any]:
    """What a config says of some layer."""
    own = config.get("quantization_config")
    if not isinstance(own, dict):
        return {}
    return dict(quantization(own, "config.json", "").scheme("model.layers.0.mlp.up_proj").settings or {})


def formats_of(config: dict[str, Any]) -> dict[str, object]:
    """The formats that a config is of, with their parameters."""
    layer_settings = settings(config)
    answers = {format.name: params_of(format.detect, format.params, layer_settings) for format in descriptions()}
    return {name: params for name, params in answers.items() if params is not None}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_config_is_of_one_format_and_gives_its_parameters(name: str) -> None:
    config, format, params = CONFIGS[name]
    assert formats_of(config) == {format: params, **SHAPES_TELL.get(name, {})}


@pytest.mark.parametrize("config", [
    {}, {"quantization_config": None}, {"quantization_config": []}, {"quantization_config": {}},
    {"quantization_config": {"quant_method": "gptq", "bits": 9, "group_size": 128}},
    {"quantization_config": {"quant_method": "gptq", "bits": [4], "group_size": {"a": 1}}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128]}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128, 128]}},
    {"quantization_config": {"quant_method": "fp8", "weight_block_size": "128"}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": {"group_0": None}}},
    {"quantization_config": {"quant_method": "compressed-tensors", "config_groups": 3}},
], ids=str)
def test_what_is_of_no_format_is_of_none(config: dict[str, Any]) -> None:
    assert formats_of(config) == {}


def test_booleans_are_compared_as_such() -> None:
    rules = {"config": {"symmetric": True, "bits": "bits"}}
    assert params_of(rules, {"bits": (4, 8)}, {"symmetric": True, "bits": 4}) == {"bits": 4}
    assert params_of(rules, {"bits": (4, 8)}, {"symmetric": False, "bits": 4}) is None
    assert params_of(rules, {"bits": (1, 8)}, {"symmetric": True, "bits": True}) is None


def test_groups_have_their_own_settings() -> None:
    """compressed-tensors may quantize layers differently: the group that names a layer speaks for it."""
    weights = {"num_bits": 8, "type": "int", "strategy": "channel"}
    groups = {"a": {"weights": weights, "targets": ["re:.*up_proj", "model.head"]},
              "b": {"weights": {**weights, "num_bits": 4}, "targets": ["Linear"], "format": "y"}}
    parsed = quantization({"quant_method": "compressed-tensors", "format": "x", "config_groups": groups}, "", "")
    schemes = {}
    for name in ("mlp.up_proj", "model.head", "mlp.down_proj"):
        scheme = parsed.scheme(name)
        assert scheme.settings is not None
        schemes[name] = (scheme.by, scheme.settings["num_bits"], scheme.settings["format"])
    assert schemes == {"mlp.up_proj": ("a", 8, "x"), "model.head": ("a", 8, "x"), "mlp.down_proj": ("b", 4, "y")}


def test_a_word_that_is_a_parameters_name_is_still_a_word() -> None:
    rules = {"config": [{"strategy": "group", "size": "group", "storage": "packed"}, {"strategy": "channel"}]}
    assert params_of(rules, {"group": (32, 64)}, {"strategy": "group", "size": 64}) == {"group": 64}
    assert params_of(rules, {"group": (32, 64)}, {"strategy": "channel"}) == {}
    assert params_of(rules, {"group": (32, 64)}, {"strategy": "group"}) is None
