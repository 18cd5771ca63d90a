"""The dialects of lists of layers that are left alone: one word means other layers in each."""

from __future__ import annotations

from typing import Any

import pytest

from qdsl.checkpoint.detect.ignored import Rule, expression, rules
from qdsl.checkpoint.detect.quantization import Scheme, quantization
from qdsl.checkpoint.files.safetensors import CheckpointError

Q, MLP, HEAD = "model.layers.1.self_attn.q_proj", "model.layers.11.mlp.up_proj", "lm_head"
NAMES = (Q, MLP, HEAD, "model.mlm_head.lm_head")
# Which of NAMES a pattern names in each dialect: as re.match, str.endswith, `in` and fnmatch.fnmatchcase have it.
MEANS: list[tuple[str, str, set[str]]] = [
    ("exact", "lm_head", {HEAD}), ("exact", "q_proj", set()), ("exact", Q, {Q}),
    ("substring", "lm_head", {HEAD, "model.mlm_head.lm_head"}), ("substring", "layers.1", {Q, MLP}), ("substring", "q.*", set()),
    ("transformers", "lm_head", {HEAD, "model.mlm_head.lm_head"}), ("transformers", "model.layers.1", {Q}),
    ("transformers", "model.layers.1.", {Q, MLP}),              # the dot is any character there
    ("transformers", "model.layers.11|model.layers.1", {Q, MLP}), ("transformers", "model.layers.1.self", set()),
    ("transformers", "model", {Q, MLP, "model.mlm_head.lm_head"}), ("transformers", "lm", set()),
    ("transformers", "q_proj", {Q}), ("transformers", "self_attn", set()), ("transformers", "model.*proj", {Q, MLP}),
    ("regex", "lm_head", {HEAD}), ("regex", "model.layers.1", set()), ("regex", r"re:.*layers\.1\.", {Q}),
    ("regex", "re:lm_head", {HEAD}), ("regex", "re:q_proj", set()), ("regex", "Linear", set()),
    ("glob", "lm_head", {HEAD}), ("glob", "*lm_head", {HEAD, "model.mlm_head.lm_head"}), ("glob", "model.layers.1*", {Q, MLP}),
    ("glob", "model.layers.?.*", {Q}), ("glob", "model.layers.[0-9][0-9].*", {MLP}),
    ("dynamic", r".*\.11\..*", {MLP}), ("dynamic", "q_proj", set()),
    ("suffix", "self_attn.q_proj", {Q}), ("suffix", "head", set()), ("suffix", "lm_head", {HEAD, "model.mlm_head.lm_head"}),
    ("tag", "self_attn.q_proj", {Q}), ("tag", "q_proj", set()), ("tag", Q, set()), ("tag", "lm_head", {HEAD}),
    ("tag", "mlm_head.lm_head", {"model.mlm_head.lm_head"}),
]


@pytest.mark.parametrize(("dialect", "pattern", "named"), MEANS)
def test_what_a_pattern_names(dialect: str, pattern: str, named: set[str]) -> None:
    rule = Rule(dialect, pattern)
    assert {name for name in NAMES if rule.matches(name)} == named
    parsed = rules(dialect, [pattern])
    assert parsed.problems == [] and {name for name in NAMES if parsed.first(name) == rule} == named


@pytest.mark.parametrize("pattern", [r"(.*)*x", r"(a|a)*b", r"(a?){40}", r".*.*.*.*.*.*.*.*.*x", r"(x+x+)+y", r"(.)\1",
                                     "a" * 1001, "(ab|cd|ef|gh|ij|kl)?" * 12])
def test_expressions_that_take_long_are_not_used(pattern: str) -> None:
    with pytest.raises(CheckpointError, match="may take too long"):
        expression(pattern)


@pytest.mark.parametrize("pattern", ["(", "*", "[", "(?P<n", "a{2,1}"])
def test_what_is_no_expression_is_said(pattern: str) -> None:
    parsed = rules("regex", [f"re:{pattern}", "re:.*up_proj"])
    assert len(parsed.problems) == 1 and "is not a regular expression" in parsed.problems[0]
    assert parsed.first(MLP) == Rule("regex", "re:.*up_proj") and parsed.first(Q) is None


def decisions(settings: dict[str, Any], *names: str) -> list[tuple[bool, str]]:
    """Whether each module is quantized, and by which rule."""
    parsed = quantization(settings, "config.json", "")
    schemes: list[Scheme] = [parsed.scheme(name) for name in names]
    return [(scheme.settings is not None, scheme.by) for scheme in schemes]


def test_each_producers_list() -> None:
    """The same word, left alone by one and quantized by the next."""
    word = ["layers.1"]
    assert decisions({"quant_method": "fp8", "ignored_layers": word}, Q) == [(True, "")]           # exact for one reader only
    assert decisions({"quant_method": "modelopt", "exclude_modules": ["*layers.1.*"]}, Q, MLP) == [
        (False, "*layers.1.* (glob)"), (True, "")]
    assert decisions({"quant_method": "modelopt", "ignore": ["*layers.1.*"]}, Q) == [(False, "*layers.1.* (glob)")]
    assert decisions({"quant_method": "compressed-tensors", "ignore": ["re:.*q_proj$", HEAD]}, Q, MLP, HEAD) == [
        (False, "re:.*q_proj$ (regex)"), (True, ""), (False, "lm_head (regex)")]
    assert decisions({"load_in_4bit": True, "llm_int8_skip_modules": [HEAD]}, Q, HEAD) == [
        (True, ""), (False, "lm_head (transformers)")]
    assert decisions({"quant_method": "awq", "modules_to_not_convert": ["q_proj"]}, Q, MLP) == [
        (False, "q_proj (transformers)"), (True, "")]


def test_readers_that_differ() -> None:
    """vLLM takes awq's list for parts of names, transformers for beginnings and ends."""
    parsed = quantization({"quant_method": "awq", "modules_to_not_convert": ["self_attn"]}, "config.json", "")
    assert parsed.scheme(Q).settings is not None and parsed.maybe(Q) == Rule("substring", "self_attn")
    assert parsed.maybe(MLP) is None


def test_a_part_of_a_name_ends_at_a_dot() -> None:
    """For transformers; a reader that looks for words anywhere in names would leave these alone, too."""
    for skip, name in (("model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj"), ("model.layers.1", MLP)):
        assert decisions({"load_in_8bit": True, "llm_int8_skip_modules": [skip]}, skip, name) == [
            (False, f"{skip} (transformers)"), (True, "")]
        parsed = quantization({"quant_method": "fp8", "modules_to_not_convert": [skip]}, "config.json", "")
        assert parsed.scheme(name).settings is not None and parsed.maybe(name) == Rule("substring", skip)


def test_gptq_says_more() -> None:
    settings = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {
        r"-:.*\.q_proj$": {}, r"+:.*\.11\.": {"bits": 8}, r".*up_proj": {"group_size": 32}}}
    parsed = quantization(settings, "config.json", "")
    schemes = {name: parsed.scheme(name).settings for name in (Q, MLP, "model.layers.2.mlp.up_proj", HEAD)}
    assert schemes[Q] is None
    assert [(own["bits"], own["group_size"]) for own in list(schemes.values())[1:] if own] == [(8, 128), (4, 32), (4, 128)]
    inside = {"quant_method": "gptq", "bits": 4, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["self_attn.o_proj"]]}
    assert decisions(inside, Q, MLP) == [(True, ""), (False, "not in modules_in_block_to_quantize (suffix)")]


def test_layers_with_settings_of_their_own() -> None:
    mixed = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": {Q: {"quant_algo": "FP8"}}}
    parsed = quantization(mixed, "config.json", "")
    assert (parsed.scheme(Q).settings or {})["quant_algo"] == "FP8" and parsed.scheme(MLP).settings is None
    extra = {"quant_method": "auto-round", "bits": 4, "extra_config": {Q: {"bits": 8}}}
    parsed = quantization(extra, "config.json", "")
    assert [(parsed.scheme(name).settings or {})["bits"] for name in (Q, MLP)] == [8, 4]


def test_a_word_by_itself_is_a_list_of_one() -> None:
    groups = {"a": {"targets": "Linear", "weights": {"num_bits": 4}}}
    assert decisions({"quant_method": "compressed-tensors", "config_groups": groups}, Q, HEAD) == [(True, "a"), (True, "a")]
    groups["a"]["targets"] = "re:.*q_proj"
    assert decisions({"config_groups": groups}, Q, MLP) == [(True, "a"), (False, "in no group")]
    assert decisions({"quant_method": "compressed-tensors", "ignore": HEAD}, Q, HEAD) == [(True, ""), (False, "lm_head (regex)")]
    for inside in ("self_attn.q_proj", ["self_attn.q_proj"], [["self_attn.q_proj"], "o_proj"]):
        assert decisions({"quant_method": "gptq", "modules_in_block_to_quantize": inside}, Q, MLP) == [
            (True, ""), (False, "not in modules_in_block_to_quantize (suffix)")]


HOSTILE: list[Any] = [5, True, 1.5, "Linear", "", "(", None, [], [5], [None], [[5]], [{}], {}, {"a": 5}, {"a": None}, {"a": [1]},
                      {"a": {"targets": 5, "weights": {"num_bits": 8}}}, {"a": {"targets": {"b": 5}, "weights": 5}}]
LISTED = ("ignore", "exclude_modules", "modules_to_not_convert", "llm_int8_skip_modules", "modules_in_block_to_quantize")
MAPPED = ("config_groups", "dynamic", "quantized_layers", "extra_config")


@pytest.mark.parametrize("value", HOSTILE, ids=repr)
def test_settings_of_layers_may_be_anything(value: object) -> None:
    for key in (*LISTED, *MAPPED):
        for method in ("gptq", "compressed-tensors", "modelopt", 5):
            parsed = quantization({"quant_method": method, key: value}, "config.json", "")
            parsed.scheme(Q)
            parsed.maybe(Q)


@pytest.mark.parametrize(("settings", "wrong"), [
    *(({key: 5}, "'5' stands for the name of a layer, and is none") for key in LISTED),
    *(({key: [HEAD, True]}, "'True' stands for the name of a layer, and is none") for key in LISTED),
    *(({key: [5]}, f"{key} is '[5]', no object") for key in MAPPED),
    *(({key: {"a": 5}}, f"{key}: 'a' is '5', no object of settings") for key in MAPPED),
    ({"config_groups": {"a": {"targets": True, "weights": {"num_bits": 8}}}},
     "'True' stands for the name of a layer, and is none"),
])
def test_settings_of_layers_that_are_none_are_said(settings: dict[str, Any], wrong: str) -> None:
    parsed = quantization({"quant_method": "gptq", **settings}, "config.json: x", "")
    assert parsed.problems == [f"config.json: x: {wrong}"]
