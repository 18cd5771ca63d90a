"""Rotary embeddings of GGUF files for configs of transformers: the base, divisors of frequencies, and the factor of attention.

llama.cpp's kinds of scaling (linear, yarn, tensors of factors) all divide each frequency by a number and multiply attention.
Transformers' `longrope` states just these, so every kind is read as that one.  `window_rope` of the table of keys has, for
architectures whose layers with a window rotate otherwise, the `base` where the file states none, `one_base` for that of the other
layers, and `attention` where the factor counts there, too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qdsl.checkpoint.detect.gguf_keys import is_read, is_usual, table
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.plan import LoadError

FREQUENCIES = "rope_freqs.weight"                                # divisors of frequencies for every length
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
BASE = 10000.0                                                   # llama.cpp's where a file has none
KINDS = ("none", "linear", "yarn", "longrope")
LOCAL = "sliding_attention"
TEMPERATURE = "llama_4_scaling_beta"                             # by which queries grow with their positions
CLOSE = 1e-5                                                     # relative difference of numbers in float32


@dataclass(frozen=True, slots=True)
class Rotary:
    """The rotary embeddings of a file's layers.

    short, long: divisors of the frequencies for texts up to `length` tokens, and for longer ones.  kind: of scaling, as stated.
    scores: by the square of which latent attention multiplies its scores.
    """

    base: float
    short: tuple[float, ...]
    long: tuple[float, ...]
    attention: float
    length: int
    kind: str
    scores: float = 1.0

    @property
    def is_plain(self) -> bool:
        """Whether nothing is scaled."""
        return {*self.short, *self.long, self.attention, self.scores} == {1.0}

    def frequencies(self, is_long: bool) -> Tensor:
        """The frequencies float32 [width / 2] of short or long texts."""
        divisors = torch.tensor(self.long if is_long else self.short, dtype=torch.float32, device="cpu")
        return _plain_frequencies(self.base, 2 * len(divisors)) / divisors

    def parameters(self, usual: Mapping[str, Any]) -> dict[str, Any]:
        """`rope_parameters` of a config, from those of the same model without scaling."""
        result = {**usual, "rope_theta": self.base}
        if self.is_plain:
            return result
        # scores are multiplied by (0.1 * mscale_all_dim * log(factor) + 1) ** 2, and the factor has no other use here
        latent = {"factor": math.exp(10), "mscale_all_dim": self.scores - 1} if self.scores != 1 else {"factor": 1.0}
        return result | {"rope_type": "longrope", "short_factor": list(self.short), "long_factor": list(self.long), **latent,
                         "attention_factor": self.attention, "original_max_position_embeddings": self.length}


def rotary(file: GgufFile, architecture: str, width: int, is_local: bool = False) -> Rotary:
    """The rotary embeddings of a file, for `width` numbers of each head; is_local: those of layers with a window.

    Raises LoadError for kinds and numbers that llama.cpp does not take.
    """
    def number(key: str, usual: float) -> float:
        return float(file.metadata.get(f"{architecture}.rope.{key}", usual))

    base = number("freq_base", BASE)
    length = int(number("scaling.original_context_length", 0) or file.metadata.get(f"{architecture}.context_length", 0))
    ones = (1.0,) * (width // 2)
    attention = number("scaling.attn_factor", 1.0)
    if is_local:
        local = table()["window_rope"].get(architecture, {})
        base = base if local.get("one_base") else number("freq_base_swa", local.get("base", base))
        attention = attention if local.get("attention") else 1.0
        return Rotary(base, ones, ones, attention, length, "none")
    kind = str(file.metadata.get(f"{architecture}.rope.scaling.type", "linear"))
    if kind not in KINDS:
        raise LoadError(f"{file.path}: {architecture}.rope.scaling.type is {kind!r}; there are {', '.join(KINDS)}")
    scale = number("scaling.factor", number("scale_linear", 1.0)) or 1.0
    divisors = [scale if kind != "none" else 1.0] * (width // 2)
    scores = 1.0
    if architecture in table()["latent_scores"]:
        multiplier = log_multiplier(file, architecture)
        attention, scores = _latent_attention(attention, scale if kind != "none" else 1.0, kind, multiplier)
    elif kind == "yarn":
        attention *= _yarn_attention(scale, log_multiplier(file, architecture))
    if kind == "yarn":
        fast, slow = (number(key, usual) if is_read(f"rope.{key}", architecture) else usual
                      for key, usual in (("scaling.yarn_beta_fast", 32.0), ("scaling.yarn_beta_slow", 1.0)))
        divisors = [1 / (mix + (1 - mix) / scale) for mix in _unscaled_shares(width, base, length, fast, slow)]
    tensors = [_factors(file, name, width) for name in (SHORT, LONG)]
    tensors = [_factors(file, FREQUENCIES, width)] * 2 if kind != "longrope" and FREQUENCIES in file.tensors else tensors
    short, long = (tuple(divisor * factor for divisor, factor in zip(divisors, own, strict=True)) for own in tensors)
    return Rotary(base, short, long, attention, length, kind, scores)


def log_multiplier(file: GgufFile, architecture: str) -> float:
    """By how much yarn's factor of attention is divided; 0 for not at all."""
    key = "rope.scaling.yarn_log_multiplier"
    return float(file.metadata.get(f"{architecture}.{key}", 0.0)) if is_read(key, architecture) else 0.0


def _yarn_attention(scale: float, multiplier: float) -> float:
    """yarn's factor of attention."""
    grown, divisor = (1.0 if scale <= 1 else 0.1 * own * math.log(scale) + 1.0 for own in (1.0, multiplier))
    return grown / divisor


def _latent_attention(attention: float, scale: float, kind: str, multiplier: float) -> tuple[float, float]:
    """llama.cpp's factors of rotated numbers and of scores, in architectures with latent keys, which it scales in any case."""
    grown = 1.0 + 0.1 * math.log(scale)
    rotated = attention * grown if kind == "yarn" and not multiplier else attention
    own = attention / grown if kind == "yarn" and multiplier else attention
    return rotated, own * grown * (1.0 + multiplier * math.log(scale))


def _unscaled_shares(width: int, base: float, length: int, fast: float, slow: float) -> list[float]:
    """How much of each frequency yarn leaves as it is, from 0 to 1: high frequencies whole, those of long waves nothing."""
    first, last = (width * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base)) for turns in (fast, slow))
    low, high = max(0, math.floor(first)), min(width - 1, math.ceil(last))
    return [1 - min(1.0, max(0.0, (place - low) / max(0.001, high - low))) for place in range(width // 2)]


def _factors(file: GgufFile, name: str, width: int) -> list[float]:
    """The numbers of a tensor of factors; ones where the file has none.  Raises LoadError for another length."""
    factors: list[float] = file.tensor(name).float().flatten().tolist() if name in file.tensors else [1.0] * (width // 2)
    if len(factors) != width // 2:
        raise LoadError(f"{file.path}: tensor {name!r} has {len(factors)} factors, and heads rotate {width} numbers")
    return factors


# -- configs -----------------------------------------------------------------------------------------------------------------


def set_rotary(config: Any, file: GgufFile, architecture: str) -> None:
    """Set the rotary embeddings of a config that was read from a file.  Raises LoadError as `rotary` does."""
    usual = getattr(config, "rope_parameters", None)
    if not isinstance(usual, dict):
        return
    if any(isinstance(own, dict) for own in usual.values()):
        config.rope_parameters = {kind: _parameters(config, own, file, architecture, kind == LOCAL)
                                  for kind, own in usual.items()}
        return
    config.rope_parameters = _parameters(config, usual, file, architecture)
    if hasattr(config, "layer_rope_theta"):                      # 0 for layers that rotate nothing
        pattern = file.metadata.get(f"{architecture}.attention.rope_pattern", (True,) * config.num_hidden_layers)
        config.layer_rope_theta = [config.rope_parameters["rope_theta"] if own else 0 for own in pattern]
    if hasattr(config, "original_max_position_embeddings"):
        config.original_max_position_embeddings = config.rope_parameters.get(
            "original_max_position_embeddings", config.max_position_embeddings)


def _parameters(config: Any, usual: Mapping[str, Any], file: GgufFile, architecture: str, is_local: bool = False
                ) -> dict[str, Any]:
    """`rope_parameters` of a file, of which the partial width counts where the model's class has one."""
    own = {key: value for key, value in usual.items() if key in ("rope_theta", "partial_rotary_factor")}
    own["rope_type"] = "default"
    width = head_width(config)
    counts = [file.metadata.get(f"{architecture}.{key}") for key in ("rope.dimension_count_swa", "rope.dimension_count")]
    count = counts[0] if is_local and counts[0] is not None else counts[1]
    if count is not None and "partial_rotary_factor" in own:
        own["partial_rotary_factor"] = count / width
    result = rotary(file, architecture, int(width * own.get("partial_rotary_factor", 1.0)), is_local)
    if TEMPERATURE in usual:
        scale = file.metadata.get(f"{architecture}.attention.temperature_scale", 0.0)
        own |= {TEMPERATURE: scale, "original_max_position_embeddings": result.length}
    return result.parameters(own)


def head_width(config: Any) -> int:
    """Numbers of each head's keys."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_contradictions(config: Any, file: GgufFile, architecture: str) -> list[str]:
    """Sentences about rotary embeddings of which a config says something else than a file; none for a file without settings."""
    if not any(key.startswith(f"{architecture}.") for key in file.metadata):
        return []
    parameters = getattr(config, "rope_parameters", None)
    own_keys = {key: value for key in table()["rope"] if (value := file.metadata.get(f"{architecture}.{key}")) is not None}
    unread = [f"{architecture}.{key} is {value}, which may change rotary embeddings: llama.cpp does not read it here"
              for key, value in own_keys.items() if not is_read(key, architecture) and not is_usual(key, value)
              and key != "rope.freq_base_swa"]
    if own_keys.get("rope.scaling.type") == "none" and is_read("rope.freq_base_swa", architecture) and not is_usual(
            "rope.scaling.factor", factor := own_keys.get("rope.scaling.factor", 1)):
        unread.append(f"{architecture}.rope.scaling.factor is {factor}, and scaling of the type 'none' has no factor")
    if not isinstance(parameters, dict) or not parameters:
        return unread + [f"{architecture}.{key} is {value}, and the config has no rotary embeddings"
                         for key, value in own_keys.items() if not is_usual(key, value)]
    layered = {kind: own for kind, own in parameters.items() if isinstance(own, dict)}
    sentences = []
    for kind, own in (layered or {"": parameters}).items():
        sentences += _differences(config, own, kind, file, architecture)
    local = own_keys.get("rope.freq_base_swa")
    if local is not None and not layered and not math.isclose(local, parameters.get("rope_theta", BASE), rel_tol=CLOSE):
        sentences.append(f"{architecture}.rope.freq_base_swa is {local}, and the config has one base for all layers")
    return unread + sentences


def _differences(config: Any, own: Mapping[str, Any], kind: str, file: GgufFile, architecture: str) -> list[str]:
    """`rotary_contradictions` of the layers of one kind, '' for all."""
    where = f"rope_parameters.{kind}" if kind else "rope_parameters"
    theta = own.get("rope_theta", BASE)
    width = int(head_width(config) * (own.get("partial_rotary_factor") or 1.0))
    expected = rotary(file, architecture, width, kind == LOCAL)
    key = "freq_base_swa" if kind == LOCAL else "freq_base"
    if f"{architecture}.rope.{key}" in file.metadata and not math.isclose(theta, expected.base, rel_tol=CLOSE):
        return [f"{architecture}.rope.{key} is {expected.base}, and {where}.rope_theta of the config is {theta}: "
                "it changes rotary embeddings"]
    scaled = own.get("rope_type", "default")
    if scaled == expected.kind == "yarn":
        return [f"{architecture}.rope.scaling.{name} is {value}, and {where}.{entry} of the config is {own[entry]}: "
                "it changes rotary embeddings"
                for name, entry in (("factor", "factor"), ("original_context_length", "original_max_position_embeddings"))
                if (value := file.metadata.get(f"{architecture}.rope.scaling.{name}")) is not None
                and own.get(entry) is not None and not math.isclose(value, own[entry], rel_tol=CLOSE)]
    for is_long in (False, True):
        length = expected.length + is_long
        frequencies, attention = _frequencies(config, own, kind, width, length)
        ours = Rotary(theta, expected.short, expected.long, expected.attention, length, expected.kind).frequencies(is_long)
        if len(frequencies) != len(ours):
            continue
        if not torch.allclose(frequencies, ours, rtol=CLOSE, atol=0) or not math.isclose(attention, expected.attention,
                                                                                         rel_tol=CLOSE):
            return [f"rotary embeddings are scaled as {scaled!r} by {where} of the config, and not so by the file: "
                    f"its kind is {expected.kind!r}, its divisors of frequencies reach from {min(expected.short):.4g} to "
                    f"{max(expected.long):.4g}"]
    return []


def _frequencies(config: Any, own: Mapping[str, Any], kind: str, width: int, length: int) -> tuple[Tensor, float]:
    """The frequencies of a config, and the factor of attention, for texts of a length."""
    scaled = own.get("rope_type", "default")
    if scaled not in ROPE_INIT_FUNCTIONS:
        return _plain_frequencies(own.get("rope_theta", BASE), width), 1.0
    frequencies, attention = ROPE_INIT_FUNCTIONS[scaled](config, torch.device("cpu"), seq_len=length, layer_type=kind or None)
    return frequencies, float(attention)


def _plain_frequencies(base: float, width: int) -> Tensor:
    return base ** -(torch.arange(0, width, 2, dtype=torch.float32, device="cpu") / width)
