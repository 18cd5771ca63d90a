"""Rotary embeddings of GGUF files for configs of transformers: the base, divisors of frequencies, and the factor of attention.

llama.cpp's kinds of scaling (linear, yarn, tensors of factors) all divide each frequency by a number and multiply attention.
Transformers' `longrope` states just these, so every kind is read as that one.  `window_rope` of the table of keys has, for
architectures whose layers with a window rotate otherwise, the `base` where the file states none, `one_base` for that of the other
layers, `attention` where the factor counts there, too, and `scaled` where all scaling does.

Where a class rotates whole heads only, and a file says fewer numbers, the frequencies of the other numbers are next to nothing.
`neighbours` of the table has the classes whose pairs are neighbours; of those of `halves` the rows of queries and keys are then
taken in another order (`rotated_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from qdsl.checkpoint.detect.gguf_keys import is_read, table
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.models.plan import LoadError
from qdsl.models.transformers.gguf_additions import WINDOWED, added, additions

FREQUENCIES = "rope_freqs.weight"                                # divisors of frequencies for every length
SHORT, LONG = "rope_factors_short.weight", "rope_factors_long.weight"
BASE = 10000.0                                                   # llama.cpp's where a file has none
YARN = (("factor", "factor"), ("original_context_length", "original_max_position_embeddings"),         # keys and entries
        ("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow"))
KINDS = ("none", "linear", "yarn", "longrope")
LOCAL = "sliding_attention"
TEMPERATURE = "llama_4_scaling_beta"                             # by which queries grow with their positions
CLOSE = 1e-5                                                     # relative difference of numbers in float32
STILL = 1e30                                                     # divides the frequencies of numbers that do not rotate
SECTIONS, SWITCH = "rope.dimension_sections", "rope.scaling.finetuned"
COUNT, WINDOW_COUNT, WINDOW_BASE = "rope.dimension_count", "rope.dimension_count_swa", "rope.freq_base_swa"


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

    def widened(self, width: int) -> Rotary:
        """These for `width` numbers of each head, of which the others do not rotate."""
        own, still = len(self.short), (STILL,) * (width // 2 - len(self.short))
        grown = (_plain_frequencies(self.base, width)[:own].double() / _plain_frequencies(self.base, 2 * own)).tolist()
        short, long = (tuple(a * b for a, b in zip(divisors, grown, strict=True)) + still for divisors in (self.short, self.long))
        return replace(self, short=short, long=long)

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

    base, scale = number("freq_base", BASE), number("scaling.factor", number("scale_linear", 1.0)) or 1.0
    if architecture in table()["alpha"] and (alpha := number("scaling.alpha", 0.0)) > 0:
        base *= alpha ** (width / (width - 2))
    length = int(number("scaling.original_context_length", 0) or file.metadata.get(f"{architecture}.context_length", 0))
    ones = (1.0,) * (width // 2)
    if architecture in table()["switched"] and not number("scaling.finetuned", 1):
        return Rotary(base, (STILL,) * len(ones), (STILL,) * len(ones), 1.0, length, "none")
    attention = number("scaling.attn_factor", 1.0)
    kind = str(file.metadata.get(f"{architecture}.rope.scaling.type", "linear"))
    if is_local:
        local = table()["window_rope"].get(architecture, {"one_base": True})
        base = base if local.get("one_base") else number("freq_base_swa", local.get("base", base))
        if not local.get("scaled"):                              # yarn's factor of a file is divided by that of the other layers
            own = attention * _yarn_attention(scale, 0.0) / _grown(scale) if kind == "yarn" else attention
            return Rotary(base, ones, ones, own if local.get("attention") else 1.0, length, "none")
        kind = "linear" if kind == "none" else kind              # which llama.cpp does not look at here
    if kind not in KINDS:
        raise LoadError(f"{file.path}: {architecture}.rope.scaling.type is {kind!r}; there are {', '.join(KINDS)}")
    _check_base(file, base, kind)
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


def _check_base(file: GgufFile, base: float, kind: str) -> None:
    """Raises LoadError for a base without frequencies."""
    if not base > 0:                                             # NaN, too
        raise LoadError(f"{file.path}: the base of rotary embeddings is {base}, by which none are computed")


def log_multiplier(file: GgufFile, architecture: str) -> float:
    """By how much yarn's factor of attention is divided; 0 for not at all."""
    key = "rope.scaling.yarn_log_multiplier"
    return float(file.metadata.get(f"{architecture}.{key}", 0.0)) if is_read(key, architecture) else 0.0


def _yarn_attention(scale: float, multiplier: float) -> float:
    """yarn's factor of attention."""
    grown, divisor = (1.0 if scale <= 1 else 0.1 * own * math.log(scale) + 1.0 for own in (1.0, multiplier))
    return grown / divisor


def _grown(scale: float) -> float:
    return 1.0 + 0.1 * math.log(scale)


def _latent_attention(attention: float, scale: float, kind: str, multiplier: float) -> tuple[float, float]:
    """llama.cpp's factors of rotated numbers and of scores, in architectures with latent keys, which it scales in any case."""
    rotated = attention * _yarn_attention(scale, 0.0) if kind == "yarn" and not multiplier else attention
    own = rotated if kind == "yarn" else attention * _grown(scale)
    return rotated, own * (1.0 + multiplier * math.log(scale))


def _unscaled_shares(width: int, base: float, length: int, fast: float, slow: float) -> list[float]:
    """How much of each frequency yarn leaves as it is, from 0 to 1: high frequencies whole, those of long waves nothing."""
    waves, grown = [width * math.log(length / (turns * 2 * math.pi)) for turns in (fast, slow)], 2 * math.log(base)
    first, last = (own / grown if grown else math.copysign(math.inf, own) for own in waves)
    low = max(0, first if math.isinf(first) else math.floor(first))
    high = min(width - 1, last if math.isinf(last) else math.ceil(last))
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
    sections = file.metadata.get(f"{architecture}.{SECTIONS}")
    if architecture in table()["sectioned"] and sections is not None and any(sections) and not any(sections[3:]):
        additions(config)[SECTIONS] = [int(count) for count in sections]
    if any(isinstance(own, dict) for own in usual.values()):
        config.rope_parameters = {kind: _parameters(config, own, file, architecture, kind == LOCAL)
                                  for kind, own in usual.items()}
        return
    config.rope_parameters = _parameters(config, usual, file, architecture)
    if table()["window_rope"].get(architecture, {}).get("scaled") and not {*config.layer_types}.isdisjoint(WINDOWED):
        local = _parameters(config, usual, file, architecture, is_local=True)
        if local != config.rope_parameters:
            additions(config)[WINDOW_BASE] = local
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
    width, count = head_width(config), _rotated(config, file, architecture, is_local)
    is_partial = "partial_rotary_factor" in own or config.model_type in table()["partial"]
    if count is not None and is_partial:
        own["partial_rotary_factor"] = count / width
    are_neighbours = config.model_type in table()["neighbours"]
    if not is_partial and count is not None and count < width and (are_neighbours or config.model_type in table()["halves"]):
        additions(config)[COUNT] = [count, are_neighbours]
        return rotary(file, architecture, count, is_local).widened(width).parameters(own)
    result = rotary(file, architecture, int(width * own.get("partial_rotary_factor", 1.0)), is_local)
    if TEMPERATURE in usual:
        scale = file.metadata.get(f"{architecture}.attention.temperature_scale", 0.0)
        own |= {TEMPERATURE: scale, "original_max_position_embeddings": result.length}
    return result.parameters(own)


def _rotated(config: Any, file: GgufFile, architecture: str, is_local: bool) -> int | None:
    """How many numbers of a head rotate; None where the file does not say.  llama.cpp takes the first layer's for all, except
    in layers with a window of architectures that have another width there."""
    count = file.metadata.get(f"{architecture}.{COUNT}", head_width(config))
    begins_local = (getattr(config, "layer_types", None) or [""])[0] in WINDOWED
    if begins_local or (is_local and table()["window_rope"].get(architecture, {}).get("width")):
        count = file.metadata.get(f"{architecture}.{WINDOW_COUNT}", count)
    return None if count is None else int(count)


def computed_widths(config: Any, file: GgufFile, architecture: str) -> set[str]:
    """The keys of rotary widths that a config of the file says, or that llama.cpp does not use."""
    if not getattr(config, "rope_parameters", None) or getattr(config, "position_embedding_type", "rope") != "rope":
        return {COUNT, WINDOW_COUNT}
    count, width, tables = _rotated(config, file, architecture, is_local=False), head_width(config), table()
    is_any = config.model_type in (*tables["partial"], *tables["neighbours"], *tables["halves"])
    if is_any and (count is None or count <= width):
        return {COUNT, WINDOW_COUNT}
    begins_local = (getattr(config, "layer_types", None) or [""])[0] in WINDOWED
    return set() if begins_local or tables["window_rope"].get(architecture, {}).get("width") else {WINDOW_COUNT}


def rotated_rows(config: Any, is_permuted: bool = False) -> str:
    """The order of each head's rows, as a rule of maps, where a class pairs other numbers than llama.cpp; '' for as it is.

    is_permuted: the converter pairs numbers of the whole head, and the class those of a part.
    """
    own = added(config)
    if not is_permuted and own.keys().isdisjoint((COUNT, SECTIONS)):
        return ""
    width = head_width(config)
    rotated = int(width * config.rope_parameters.get("partial_rotary_factor", 1.0))
    others = [f"{rotated}:{width}"] if rotated < width else []
    if is_permuted:
        return " ".join([f"each {width}:", f"0:{rotated}:2", f"1:{rotated}:2", *others])
    if SECTIONS in own:                                        # pairs are neighbours, but for files with sections
        pairs = [f"{place}:{place + 1}" for pair in range(rotated // 2) for place in (pair, pair + rotated // 2)]
        return " ".join([f"each {width}:", *pairs, *others])
    count, are_neighbours = own[COUNT]
    if are_neighbours:
        return ""
    half = count // 2
    middle = count + (width - count) // 2
    return f"each {width}: 0:{half} {count}:{middle} {half}:{count} {middle}:{width}"


def head_width(config: Any) -> int:
    """Numbers of each head's keys."""
    return int(getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads)


def rotary_contradictions(config: Any, file: GgufFile, architecture: str) -> list[str]:
    """Sentences about rotary embeddings of which a base's config says something else than a file with settings."""
    if not any(key.startswith(f"{architecture}.") for key in file.metadata):
        return []
    parameters = getattr(config, "rope_parameters", None)
    if not isinstance(parameters, dict) or not parameters:
        return []                                                # nothing rotates
    if architecture in table()["switched"]:
        is_on, has_rope = (bool(own) for own in (file.metadata.get(f"{architecture}.{SWITCH}", True),
                                                  getattr(config, "position_embedding_type", "rope") == "rope"))
        if is_on != has_rope:
            return [f"{architecture}.{SWITCH} is {is_on}, and the config's model {'rotates' if has_rope else 'does not rotate'}"]
    layered = {kind: own for kind, own in parameters.items() if isinstance(own, dict)}
    sentences = []
    for kind, own in (layered or {"": parameters}).items():
        sentences += _differences(config, own, kind, file, architecture)
    local = file.metadata.get(f"{architecture}.{WINDOW_BASE}")
    is_used = table()["window_rope"].get(architecture, {}).get("scaled") and WINDOW_BASE not in added(config)
    theta = parameters.get("rope_theta", BASE)
    if local is not None and is_used and not layered and not math.isclose(local, theta, rel_tol=CLOSE):
        sentences.append(f"{architecture}.{WINDOW_BASE} is {local}, and the config has one base for all layers")
    return sentences


def _differences(config: Any, own: Mapping[str, Any], kind: str, file: GgufFile, architecture: str) -> list[str]:
    """`rotary_contradictions` of the layers of one kind, '' for all."""
    where = f"rope_parameters.{kind}" if kind else "rope_parameters"
    theta = own.get("rope_theta", BASE)
    width = int(head_width(config) * (own.get("partial_rotary_factor") or 1.0))
    expected = rotary(file, architecture, width, kind == LOCAL)
    key = f"{architecture}.{WINDOW_BASE if kind == LOCAL else 'rope.freq_base'}"
    if (base := file.metadata.get(key)) is not None and not math.isclose(theta, base, rel_tol=CLOSE):
        return [f"{key} is {base}, and {where}.rope_theta of the config is {theta}: it changes rotary embeddings"]
    if {*expected.short} == {STILL}:                             # nothing rotates, as the config says, too
        return []
    scaled = own.get("rope_type", "default")
    if scaled == expected.kind == "yarn":
        return [f"{architecture}.rope.scaling.{name} is {value}, and {where}.{entry} of the config is {own[entry]}: "
                "it changes rotary embeddings"
                for name, entry in YARN
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
