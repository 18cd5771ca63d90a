"""What llama.cpp computes from a GGUF file and the class of a model has no entry of its config for, added to the model.

The config's entry `llama_cpp` names it by keys of files, so that a saved folder has it, too:
`biases`: names of Linear layers that have one.  `rotated_layers`: which layers rotate queries and keys.
`rope.dimension_count`: how many numbers of each head rotate, and whether pairs are neighbours; `rope.dimension_sections`: that
they are not.
`rope.freq_base_swa`: `rope_parameters` of the layers with a window.  `attention.sliding_window`: of all layers of attention.
`attention.layer_norm_rms_epsilon` and `attention.layer_norm_epsilon`: of norms to which the class gives its own.
`expert_weights_scale`: of weights of experts.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import create_recurrent_attention_mask, create_sliding_window_causal_mask

from qdsl.checkpoint.detect.gguf_keys import LLAMA_CPP

SAVES = ("computes what llama.cpp does with {}, which a plain model of its class has no place for: "
         "save the packed model, or load the GGUF file elsewhere")
ORDERED = ("rope.dimension_count", "rope.dimension_sections")    # additions that order rows
WINDOWED = ("sliding_attention", "chunked_attention")           # kinds of layers with a window


def additions(config: Any) -> dict[str, Any]:
    """A config's entry, made if it has none."""
    if not added(config):
        setattr(config, LLAMA_CPP, {})
    own: dict[str, Any] = getattr(config, LLAMA_CPP)
    return own


def added(config: Any) -> Mapping[str, Any]:
    """A config's entry; {} where it has none."""
    return getattr(config, LLAMA_CPP, None) or {}


def add_to_model(model: Any) -> None:
    """Add what the config's entry names to a model whose weights are not loaded yet."""
    for key, value in added(model.config).items():
        ADD[key](model, value)


def refuse_plain_save(model: Any) -> None:
    """Let `save_pretrained` raise ValueError, for a model that is plain and whose class lacks an addition."""
    if names := [name for name in added(model.config) if _is_module_changed(model, name)]:
        def refuse(*args: Any, **kwargs: Any) -> None:
            raise ValueError(f"save_pretrained: {type(model).__name__} " + SAVES.format(", ".join(names)))
        model.save_pretrained = refuse


def _is_module_changed(model: Any, name: str) -> bool:
    """Whether an addition changes modules, and not only their weights."""
    return name not in ORDERED or (name == "rope.dimension_count" and _attention_factor(model) != 1)


def _add_biases(model: Any, names: list[str]) -> None:
    for name in names:
        prefix = f"{model.base_model_prefix}."                   # which a model without a head lacks
        layer = model.get_submodule(name if hasattr(model, model.base_model_prefix) else name.removeprefix(prefix))
        layer.bias = nn.Parameter(torch.empty(layer.out_features, dtype=layer.weight.dtype, device=layer.weight.device))


def _set_epsilon(model: Any, epsilon: float) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = epsilon
        elif hasattr(module, "normalized_shape") and not hasattr(module, "eps"):
            module.forward = partial(nn.functional.layer_norm, normalized_shape=module.normalized_shape, eps=epsilon)


def _scale_experts(model: Any, scale: float) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("TopKRouter"):
            module.register_forward_hook(partial(_scaled, scale))


def _scaled(scale: float, module: nn.Module, args: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    logits, scores, *chosen = output
    return logits, scores * scale, *chosen


def _set_rotated_layers(model: Any, rotates: list[bool]) -> None:
    for layer, own in zip(_decoder(model).layers, rotates, strict=True):
        layer.self_attn.is_local_attention = own


def _decoder(model: Any) -> Any:
    """The module that has the layers."""
    return next(module for module in model.modules() if hasattr(module, "layers") and hasattr(module, "rotary_emb"))


# -- rotary embeddings ---------------------------------------------------------------------------------------------------


class RotaryPair(nn.Module):
    """Two rotary embeddings, of which each layer takes the output of its own."""

    def __init__(self, whole: nn.Module, windowed: nn.Module) -> None:
        super().__init__()
        self.whole, self.windowed = whole, windowed

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Any, Any]:
        """The outputs of both."""
        return self.whole(*args, **kwargs), self.windowed(*args, **kwargs)


def _add_window_rotary(model: Any, parameters: Mapping[str, Any]) -> None:
    decoder, config = _decoder(model), copy.deepcopy(model.config)
    config.rope_parameters = dict(parameters)
    decoder.rotary_emb = RotaryPair(decoder.rotary_emb, type(decoder.rotary_emb)(config))
    for layer, kind in zip(decoder.layers, config.layer_types, strict=True):
        layer.register_forward_pre_hook(partial(_choose, kind in WINDOWED), with_kwargs=True)


def _choose(is_windowed: bool, layer: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    return args, {**kwargs, "position_embeddings": kwargs["position_embeddings"][is_windowed]}


def _keep_unrotated(model: Any, rotated: tuple[int, bool]) -> None:
    """Divide cosines by the factor of attention where nothing rotates: llama.cpp does not multiply these numbers."""
    if (factor := _attention_factor(model)) != 1:
        rotary = next(module for module in model.modules() if type(module).__name__.endswith("RotaryEmbedding"))
        rotary.register_forward_hook(partial(_unscaled, *rotated, factor))


def _attention_factor(model: Any) -> float:
    parameters = model.config.rope_parameters
    own = next((value for value in parameters.values() if isinstance(value, dict)), parameters)
    return float(own.get("attention_factor", 1.0))


def _unscaled(count: int, are_neighbours: bool, factor: float, module: nn.Module, args: Any,
              output: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    cos, sin = output
    width = cos.shape[-1]
    place = torch.arange(width, device=cos.device)
    pair = place // 2 if are_neighbours else place % (width // 2)
    return torch.where(pair < count // 2, cos, cos / factor), sin


# -- windows of classes without any --------------------------------------------------------------------------------------


def _add_window(model: Any, window: int) -> None:
    model.config.sliding_window = window
    _decoder(model).register_forward_pre_hook(_with_window, with_kwargs=True)


def _with_window(decoder: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Arguments of a decoder's `forward`, whose mask of attention has the config's window."""
    mask, past, positions = (kwargs.get(name) for name in ("attention_mask", "past_key_values", "position_ids"))
    if isinstance(mask, dict):
        return args, kwargs
    embeddings = kwargs.get("inputs_embeds")
    if embeddings is None:
        embeddings = decoder.embed_tokens(args[0] if args else kwargs["input_ids"])
    if positions is None:
        start = past.get_seq_length() if past is not None else 0
        positions = torch.arange(start, start + embeddings.shape[1], device=embeddings.device).unsqueeze(0)
    options = {"config": decoder.config, "inputs_embeds": embeddings, "attention_mask": mask, "past_key_values": past,
               "position_ids": positions}
    masks = {"full_attention": create_sliding_window_causal_mask(**options), "conv": create_recurrent_attention_mask(**options)}
    return args, {**kwargs, "attention_mask": masks}


ADD: Mapping[str, Callable[[Any, Any], None]] = {
    "biases": _add_biases, "rotated_layers": _set_rotated_layers, "expert_weights_scale": _scale_experts,
    "rope.dimension_count": _keep_unrotated, "rope.freq_base_swa": _add_window_rotary, "attention.sliding_window": _add_window,
    "rope.dimension_sections": lambda model, sections: None,     # which only orders rows
    "attention.layer_norm_rms_epsilon": _set_epsilon, "attention.layer_norm_epsilon": _set_epsilon}
