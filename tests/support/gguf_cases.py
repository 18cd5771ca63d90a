"""Changes of what tiny GGUF language models say: a key that llama.cpp reads with another value, or an optional tensor.

tests/data/gguf_keys has the metadata of llama.cpp's converter, and llama.cpp's logits of each case; tests/record_gguf_keys.py
records both.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.models.gguf_maps import FOLDER as MAPS
from qdsl.models.gguf_maps import GgufMap
from tests.support.gguf_models import file_tensors, write_file
from tests.support.paths import ROOT
from tests.support.tiny_models import tiny_model, unusual

FOLDER = ROOT / "tests/data/gguf_keys"
LOUD = 6.0                                                       # times the usual weights, so that every key shows in logits
UNCHANGED = ("norm", "conv", "ssm", "gate_inp")                  # in names of tensors that stay in float32
QUIET = ("falcon_mamba", "mamba")                                # with usual weights: their states amplify roundings
TOKENS = [int(token) for token in torch.randint(3, 90, (40,), generator=torch.Generator().manual_seed(5))]
TOKEN_IDS = {"bos": 1, "eos": 2, "padding": 0}
PLACES, STEP = (9, 20, 39), 11                                   # of the logits that are recorded: of these tokens, every so many
# Keys and other values, for every architecture.
VALUES: Mapping[str, Mapping[str, Any]] = {
    "the old name of linear scaling": {"rope.scale_linear": 4.0},
    "a factor without a type": {"rope.scaling.factor": 4.0},
    "linear": {"rope.scaling.type": "linear", "rope.scaling.factor": 2.0},
    "none": {"rope.scaling.type": "none", "rope.scaling.factor": 2.0},
    "yarn": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 32},
    "yarn and attention": {"rope.scaling.type": "yarn", "rope.scaling.factor": 8.0, "rope.scaling.original_context_length": 16,
                           "rope.scaling.attn_factor": 1.3},
    "yarn of other speeds": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_fast": 4.0,
                             "rope.scaling.original_context_length": 32},
    "yarn of slower waves": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_beta_slow": 4.0,
                             "rope.scaling.original_context_length": 32},
    "yarn and a multiplier": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.yarn_log_multiplier": 0.05,
                              "rope.scaling.original_context_length": 32},
    "longrope": {"rope.scaling.type": "longrope", "rope.scaling.attn_factor": 1.2},
    "longrope of long texts": {"rope.scaling.type": "longrope", "rope.scaling.original_context_length": 16},
    "alpha": {"rope.scaling.alpha": 8.0},
    "a partial width of windows": {"rope.dimension_count_swa": 8},
    "sections": {"rope.dimension_sections": [4, 2, 2, 0]},
    "layers that do not rotate": {"attention.rope_pattern": [True, False, True, False]},
    "hotter with length": {"attention.temperature_scale": 0.5, "rope.scaling.original_context_length": 8},
    "attention": {"rope.scaling.attn_factor": 1.5},
    "another base": {"rope.freq_base": 300.0},
    "another base of windows": {"rope.freq_base_swa": 30.0},
    "a partial width": {"rope.dimension_count": 8},
    "a window": {"attention.sliding_window": 4},
    "some layers a window": {"attention.sliding_window": 4, "attention.sliding_window_pattern": [True, False, False, True]},
    "every layer a window": {"attention.sliding_window": 4, "attention.sliding_window_pattern": 0},
    "every other layer a window": {"attention.sliding_window": 4, "attention.sliding_window_pattern": 2},
    "scaled logits": {"logit_scale": 0.25},
    "logits by 0": {"logit_scale": 0.0},
    "scaled attention": {"attention.scale": 0.5},
    "scaled residuals": {"residual_scale": 0.5},
    "scaled embeddings": {"embedding_scale": 3.0},
    "clamped": {"attention.clamp_kqv": 0.1},
    "capped attention": {"attn_logit_softcapping": 0.5},
    "capped logits": {"final_logit_softcapping": 0.5}, "uncapped logits": {"final_logit_softcapping": 0.0},
    "both ways": {"attention.causal": False},
    "another epsilon": {"attention.layer_norm_rms_epsilon": 0.3},
    "another epsilon of means": {"attention.layer_norm_epsilon": 0.3},
    "one expert": {"expert_used_count": 1},
    "scaled experts": {"expert_weights_scale": 2.5},
    "normed experts": {"expert_weights_norm": True},
    "experts not normed": {"expert_weights_norm": False},
    "gated by sigmoids": {"expert_gating_func": 2},
    "gated by the chosen": {"expert_gating_func": 3}, "gated by all": {"expert_gating_func": 1},
    "sigmoids, not normed": {"expert_gating_func": 2, "expert_weights_norm": False, "expert_weights_scale": 0.5},
    "pooled": {"pooling_type": 3},
    "normed steps": {"ssm.dt_b_c_rms": True},
    "fewer heads of keys": {"attention.head_count_kv": 1},
    "parallel": {"use_parallel_residual": True},
    "no rotation": {"rope.scaling.finetuned": False}, "rotation": {"rope.scaling.finetuned": True},
    "a partial width and yarn": {"rope.dimension_count": 8, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                 "rope.scaling.original_context_length": 32},
    "a partial width and attention": {"rope.dimension_count": 8, "rope.scaling.attn_factor": 1.5},
    "another base of windows and yarn": {"rope.freq_base_swa": 30.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                         "rope.scaling.original_context_length": 32},
    "windows first, a partial width": {"rope.dimension_count_swa": 8, "attention.sliding_window": 4,
                                       "attention.sliding_window_pattern": [True, True, False, True]},
    "full layers first, a partial width": {"rope.dimension_count_swa": 8, "attention.sliding_window": 4,
                                           "attention.sliding_window_pattern": [False, True, False, True]},
    "no windows": {"attention.sliding_window": 0}, "a window of all": {"attention.sliding_window": 1000},
    "no layer a window": {"attention.sliding_window": 4, "attention.sliding_window_pattern": [False] * 4},
    "labels of classes": {"classifier.output_labels": ["no", "yes"]},
    "an epsilon of 0": {"attention.layer_norm_rms_epsilon": 0.0},
    "an epsilon of means of 0": {"attention.layer_norm_epsilon": 0.0},
    "an epsilon below 0": {"attention.layer_norm_rms_epsilon": -0.001},
    "an epsilon of means below 0": {"attention.layer_norm_epsilon": -0.001},
    "experts by 0": {"expert_weights_scale": 0.0}, "experts below 0": {"expert_weights_scale": -0.5},
    "logits below 0": {"logit_scale": -0.5},
    "attention by 0": {"attention.scale": 0.0}, "attention below 0": {"attention.scale": -0.3},
    "residuals by 0": {"residual_scale": 0.0}, "embeddings by 0": {"embedding_scale": 0.0},
    "residuals below 0": {"residual_scale": -0.4}, "embeddings below 0": {"embedding_scale": -2.0},
    "clamped below 0": {"attention.clamp_kqv": -0.1}, "clamped by 0": {"attention.clamp_kqv": 0.0},
    "capped below 0": {"final_logit_softcapping": -0.5},
    "attention capped below 0": {"attn_logit_softcapping": -0.5},
    "a factor of 0": {"rope.scaling.factor": 0.0}, "a factor below 1": {"rope.scaling.factor": 0.5},
    "yarn below 1": {"rope.scaling.type": "yarn", "rope.scaling.factor": 0.5, "rope.scaling.original_context_length": 32},
    "yarn without a length": {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    "attention factor of 0": {"rope.scaling.attn_factor": 0.0},
    "one group": {"expert_group_count": 1, "expert_group_used_count": 1},
    "gated by roots": {"expert_gating_func": 4}, "gated by another": {"expert_gating_func": 9},
    "a base of 1 and yarn": {"rope.freq_base": 1.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                             "rope.scaling.original_context_length": 32},
    "a base of 1 and yarn of long texts": {"rope.freq_base": 1.0, "rope.scaling.type": "yarn", "rope.scaling.factor": 4.0,
                                           "rope.scaling.original_context_length": 4096},
    "a new key": {"attention.of_next_year": 2.0},
}
# By what model types of one architecture are told apart, beside their numbers.
MARKS = {"glm4_moe_lite": {"tokenizer.ggml.pre": "glm4"}, "mistral": {"general.name": "Mistral"}}
# Keys of which a file may have a number for each layer.
ARRAYS = ("feed_forward_length", "attention.head_count", "attention.head_count_kv", "expert_used_count")
# The same of six experts in groups.
GROUPS: Mapping[str, Mapping[str, Any]] = {
    "groups of experts": {}, "groups, gated by all, normed": {"expert_gating_func": 1, "expert_weights_norm": True},
    "groups, gated by the chosen, scaled": {"expert_gating_func": 3, "expert_weights_scale": 2.5}}
SIX = {"expert_count": 6, "expert_group_count": 2, "expert_group_used_count": 1}
BIASES = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "attn_qkv")
# Optional tensors of each layer by the tensors whose rows they are as long as.
TENSORS: Mapping[str, tuple[str, ...]] = {
    "biases": BIASES, "biases of experts": ("ffn_gate_inp", "ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"),
    "biases of attention": BIASES[:4], "biases of queries, keys and values": BIASES[:3],
    "biases of layers": BIASES[4:7], "a bias of one layer": ("attn_v",),
}
SCALED = (*BIASES, "attn_gate", "ffn_gate_shexp", "ffn_up_shexp", "ffn_down_shexp", "ssm_in", "ssm_out")
HALVED = 1                                                       # the layer with a part of these tensors' rows or columns
UNEVEN = {"widths of each layer": ("ffn_up", "ffn_gate", "ffn_down"),
          "heads of each layer": ("attn_q", "attn_output", "attn_gate", "attn_sinks"),
          "heads of keys of each layer": ("attn_k", "attn_v")}
COUNTED = {"ffn_up": "feed_forward_length", "attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}
# Types of small tensors, by parts of their names; llama.cpp adds and multiplies by F32 alone.
TYPED = {"routers in F16": {"gate_inp.weight": "F16"}}
JOINED = {"ffn_gate_up_exps.weight": ("ffn_gate_exps.weight", "ffn_up_exps.weight"),
          **{f"attn_qkv.{leaf}": tuple(f"attn_{kind}.{leaf}" for kind in "qkv") for leaf in ("weight", "bias")}}
DIVISORS = ("rope_freqs.weight", "rope_factors_short.weight", "rope_factors_long.weight")
OTHERS: Mapping[str, Mapping[str, tuple[str, float]]] = {
    "norms of queries and keys": {"attn_q_norm.weight": ("head_dim", 1), "attn_k_norm.weight": ("head_dim", 1)},
    "biases of norms": {"attn_norm.bias": ("hidden_size", 0), "ffn_norm.bias": ("hidden_size", 0)},
    "norms of attention": {"attn_sub_norm.weight": ("hidden_size", 1)},
    "norms of means": {"ffn_sub_norm.weight": ("intermediate_size", 1)},
    "sinks": {"attn_sinks.weight": ("num_attention_heads", 0)},
    "chosen by a bias": {"exp_probs_b.bias": ("experts", 0)},
    "scales of experts": {f"ffn_{name}_exps.scale": ("experts", 0.6 + number / 4)
                          for number, name in enumerate(("gate", "up", "down"))},
    "a scale of gates": {"ffn_gate_exps.scale": ("experts", 1.2)}, "a scale of values": {"ffn_up_exps.scale": ("experts", 0.7)},
    "scales of weights": {f"{name}.scale": ("", 0.5 + number / 4) for number, name in enumerate(SCALED)},
}


@dataclass(frozen=True)
class Case:
    """A change: keys without their architecture, and biases of these tensors.

    arrays: keys that have the number that they had, for each layer.  frequencies: tensors of divisors of frequencies.
    others: further tensors of each layer, of a shape and a number around which theirs lie; a shape's name is the config's.
    joined: the tensor, of each layer, in which others are joined: queries, keys and values, or the gates and values of experts.
    halved: tensors of which one layer has half.  types: of tensors, by parts of their names.  is_dense: shared experts alone are
    left, as layers without experts.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    biases: tuple[str, ...] = ()
    arrays: tuple[str, ...] = ()
    frequencies: tuple[str, ...] = ()
    others: Mapping[str, tuple[str, float]] = field(default_factory=dict)
    joined: str = ""
    halved: tuple[str, ...] = ()
    types: Mapping[str, str] = field(default_factory=dict)
    is_dense: bool = False


@cache
def cases() -> Mapping[str, Case]:
    """All changes by name."""
    return {"unchanged": Case(), **{name: Case(keys) for name, keys in VALUES.items()},
            **{name: Case(biases=own) for name, own in TENSORS.items()}, "frequencies": Case(frequencies=DIVISORS[:1]),
            "numbers of each layer": Case(arrays=ARRAYS), "frequencies and yarn": Case(VALUES["yarn"], frequencies=DIVISORS[:1]),
            "frequencies by length": Case(frequencies=DIVISORS[1:]),
            "frequencies by length, longrope": Case(VALUES["longrope"], frequencies=DIVISORS[1:]),
            "frequencies by length, long": Case(VALUES["longrope of long texts"], frequencies=DIVISORS[1:]),
            **{name: Case(others=own) for name, own in OTHERS.items()},
            **{name: Case({**SIX, **own}) for name, own in GROUPS.items()},
            "joined queries": Case(joined="attn_qkv"), "joined queries and biases": Case(biases=BIASES[:3], joined="attn_qkv"),
            "joined gates": Case(joined="ffn_gate_up_exps"),
            **{name: Case(halved=own) for name, own in UNEVEN.items()},
            **{name: Case(types=own) for name, own in TYPED.items()}, "no experts": Case(is_dense=True)}


@cache
def metadata() -> Mapping[str, Mapping[str, tuple[str, Any]]]:
    """What llama.cpp's converter writes for unusual tiny models: types and values of keys, by model type."""
    return {name: {key: (type, value) for key, (type, value) in own.items()}
            for name, own in json.loads((FOLDER / "metadata.json").read_text()).items()}


@dataclass(frozen=True)
class Tiny:
    """A tiny model with loud weights, and the tensors and metadata of its file."""

    recorded: GgufMap
    config: Any
    tensors: Mapping[str, Tensor]
    settings: Mapping[str, Value]

    def numbers(self, key: str) -> list[int]:
        """The numbers of a file's layers; zeros where it has none."""
        value = self.settings.get(f"{self.recorded.architecture}.{key}", Value.of("u32", 0)).decoded()
        return value if isinstance(value, list) else [int(value)] * self.config.num_hidden_layers


def tiny(model_type: str) -> Tiny:
    """The tiny model of a type."""
    recorded, model = GgufMap.read(MAPS / f"{model_type}.json"), tiny_model(model_type, 1, **unusual(model_type))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1 and model_type not in QUIET:
                parameter.mul_(LOUD)
    settings = {key: Value.of(type, value) for key, (type, value) in metadata()[model_type].items()
                if key != "general.architecture"}
    settings |= {f"tokenizer.ggml.{name}_token_id": Value.of("u32", token) for name, token in TOKEN_IDS.items()}
    # llama.cpp chooses frequencies by the length of its context, 256 tokens at least, and transformers by that of the text
    settings |= {f"{recorded.architecture}.context_length": Value.of("u32", getattr(model.config, "n_positions", 256))}
    settings |= {key: Value.of("string", text) for key, text in MARKS.get(model_type, {}).items()}
    settings |= {"tokenizer.ggml.model": Value.of("string", "none"),
                 f"{recorded.architecture}.vocab_size": Value.of("u32", model.config.vocab_size)}
    tensors = file_tensors(model, recorded)
    groups = settings.get(f"{recorded.architecture}.ssm.group_count") if any(name.endswith("ssm_d") for name in tensors) else None
    tensors = {name: _written(name, tensor, groups.decoded() if groups else 0) for name, tensor in tensors.items()}
    shared = f"{recorded.architecture}.expert_shared_feed_forward_length"
    if shared in settings and (weight := tensors.get("blk.1.ffn_gate_shexp.weight")) is not None:
        settings[shared] = Value.of("u32", weight.shape[0])      # the converter writes other numbers for some model types
    return Tiny(recorded, model.config, tensors, settings)


def _written(name: str, tensor: Tensor, groups: int) -> Tensor:
    """A tensor in the shape in which the converter writes it.  groups: of state spaces that have heads, else 0."""
    if name.endswith(("ssm_conv1d.weight", "shortconv.conv.weight")):
        return tensor.squeeze(1)
    if groups and name.endswith(("ssm_a", "ssm_d")) and tensor.dim() == 1:
        return tensor.unsqueeze(1)
    return tensor.view(groups, -1) if groups and name.endswith("ssm_norm.weight") else tensor


def _changed(own: Tiny, case: Case) -> dict[str, Tensor]:
    """The tensors of a tiny model with a change."""
    tensors, draw = dict(own.tensors), torch.Generator().manual_seed(3)
    layers = own.config.num_hidden_layers
    for name in case.biases:
        for layer in range(1 if len(case.biases) == 1 else layers):
            if (weight := tensors.get(f"blk.{layer}.{name}.weight")) is not None and weight.dim() > 1:
                bias = torch.randn(weight.shape[:-1], generator=draw) * 0.5
                tensors[f"blk.{layer}.{name}.bias"] = bias
    width = getattr(own.config, "head_dim", None) or own.config.hidden_size // (
        getattr(own.config, "num_attention_heads", 0) or 1)
    for name in tensors if "expert_count" in case.keys else ():  # one more
        if "_exps." in name or "exp_probs_b" in name or "ffn_gate_inp.w" in name:
            tensors[name] = torch.cat([tensors[name], tensors[name][:1].flip(-1) * 0.7])
    for place, name in enumerate(case.frequencies):
        tensors[name] = torch.linspace(1, 4 - place, width // 2)
    tensors |= _further(own, case, width, draw)
    tensors = _joined(tensors, case.joined, layers) if case.joined else tensors
    if case.is_dense:
        return {name.replace("_shexp", ""): tensor for name, tensor in tensors.items() if not re.search("_exps|gate_inp", name)}
    parts = {name: (*name.split("."), "", "") for name in tensors}
    return tensors | {name: _halved(name, tensors[name], own.numbers(COUNTED[case.halved[0]])[HALVED])
                      for name, (_, layer, stem, *_) in parts.items() if stem in case.halved and int(layer) == HALVED}


def _halved(name: str, tensor: Tensor, count: int) -> Tensor:
    """The first half, rounded down, of `count` parts of a tensor's rows, or of the columns of one whose rows are the model's."""
    if count < 2 or name.endswith(("ffn_down.bias", "attn_output.bias")):
        return tensor
    axis = int(name.endswith(("ffn_down.weight", "attn_output.weight")))
    return tensor.narrow(axis, 0, tensor.shape[axis] // count * (count // 2)).contiguous()


def _further(own: Tiny, case: Case, width: int, draw: torch.Generator) -> dict[str, Tensor]:
    """Further tensors.  width: of heads."""
    tensors: dict[str, Tensor] = {}
    experts = own.tensors.get("blk.1.ffn_gate_inp.weight", torch.empty(1, 1)).shape[0]
    for name, (size, middle) in case.others.items():
        numbers = {"": 1, "head_dim": width, "experts": experts}
        count = numbers.get(size) or getattr(own.config, size, None) or 1
        for layer in range(own.config.num_hidden_layers):
            if not name.endswith(".scale") or f"blk.{layer}.{name.removesuffix('scale')}weight" in own.tensors:
                tensors[f"blk.{layer}.{name}"] = middle + torch.randn(count, generator=draw) * 0.3
    return tensors


def _joined(tensors: dict[str, Tensor], stem: str, layers: int) -> dict[str, Tensor]:
    """Tensors of which some are joined in one of each layer."""
    for layer in range(layers):
        for whole, parts in JOINED.items():
            names = [f"blk.{layer}.{part}" for part in parts]
            if whole.startswith(stem) and all(name in tensors for name in names) and f"blk.{layer}.{whole}" not in tensors:
                axis = max(tensors[names[0]].dim() - 2, 0)
                tensors[f"blk.{layer}.{whole}"] = torch.cat([tensors.pop(name) for name in names], axis)
    return tensors


def write_case(path: Path, own: Tiny, case: Case, type: str = "F32") -> Path:
    """The file of a tiny model with a change.  type: of matrices."""
    tensors, layers = _changed(own, case), own.config.num_hidden_layers
    changes = {f"{own.recorded.architecture}.{key}": Value.of(_type(value), value) for key, value in case.keys.items()}
    for key in case.arrays:
        name = f"{own.recorded.architecture}.{key}"
        if name in own.settings and not isinstance(number := own.settings[name].decoded(), list):
            changes[name] = Value.of("u32[]", [number] * layers)
    for key in [COUNTED[stem] for stem in case.halved[:1]]:
        if max(numbers := own.numbers(key)) > 1:
            numbers = [number // 2 if layer == HALVED and number > 1 else number for layer, number in enumerate(numbers)]
            changes[f"{own.recorded.architecture}.{key}"] = Value.of("u32[]", numbers)
    types = {name: type if tensor.dim() > 1 and not any(part in name for part in UNCHANGED) and tensor.shape[-1] % 32 == 0
             else "F32" for name, tensor in tensors.items()}
    types |= {name: own_type for part, own_type in case.types.items() for name in tensors if part in name}
    settings = {key: value for key, value in own.settings.items() if not (case.is_dense and ".expert_" in key)}
    if case.is_dense and (weight := tensors.get("blk.1.ffn_up.weight")) is not None:
        changes[f"{own.recorded.architecture}.feed_forward_length"] = Value.of("u32", weight.shape[0])
    return write_file(path, own.recorded.architecture, tensors, types, {**settings, **changes})


def _type(value: Any) -> str:
    if isinstance(value, list):
        return _type(value[0]).replace("u", "i") + "[]"
    return {bool: "bool", int: "u32", float: "f32", str: "string"}[type(value)]


def sample(logits: Tensor) -> Tensor:
    """The logits that are recorded, of all [tokens, vocabulary]."""
    return logits[list(PLACES), ::STEP].flatten()
