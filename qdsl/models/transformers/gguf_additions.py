"""What llama.cpp computes from a GGUF file and the class of a model has no entry of its config for, added to the model.

The config's entry `llama_cpp` names it by keys of files, so that a saved folder has it, too:
`biases`: names of Linear layers that have one.  `rotated_layers`: which layers rotate queries and keys.
`rope.dimension_count`: how many numbers of each head rotate, and whether pairs are neighbours; `rope.dimension_sections`: that
they are not.
`rope.freq_base_swa`: `rope_parameters` of the layers with a window.  `attention.sliding_window`: of all layers of attention.
`attention.layer_norm_rms_epsilon` and `attention.layer_norm_epsilon`: of norms to which the class gives its own.
`attention.causal`: false where tokens see those behind them, too.  `attention.scale`: below 0, where torch's attention is NaN.
`expert_gating_func`: how experts are chosen and weighed.  `scales`: of Linear layers, by which their products are multiplied.
`expert_scales`: the same of experts, with a number for each, of the products of `gate`, `up` and `down`.
`attention.head_count` and `attention.head_count_kv`: of each layer, where they differ.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from transformers.masking_utils import (
    create_bidirectional_mask,
    create_bidirectional_sliding_window_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)

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


def _layer(model: Any, name: str) -> Any:
    """A Linear layer of a model, which may be without the head that its config's names begin at."""
    prefix = f"{model.base_model_prefix}."
    return model.get_submodule(name if hasattr(model, model.base_model_prefix) else name.removeprefix(prefix))


def _add_biases(model: Any, names: list[str]) -> None:
    for layer in (_layer(model, name) for name in names):
        layer.bias = nn.Parameter(torch.empty(layer.out_features, dtype=layer.weight.dtype, device=layer.weight.device))


def _add_scales(model: Any, scales: Mapping[str, float]) -> None:
    for name, scale in scales.items():                           # before the bias is added
        _layer(model, name).register_forward_pre_hook(partial(_times, scale))


def _times(scale: float, module: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return args[0] * scale, *args[1:]


def _set_epsilon(model: Any, epsilon: float) -> None:
    for module in model.modules():
        if hasattr(module, "variance_epsilon"):
            module.variance_epsilon = epsilon
        elif hasattr(module, "normalized_shape") and not hasattr(module, "eps"):
            module.forward = partial(nn.functional.layer_norm, normalized_shape=module.normalized_shape, eps=epsilon)
        elif type(module).__name__.endswith("GatedDeltaNet"):
            module.forward = MethodType(_with_delta_rule_epsilon(type(module).forward, epsilon), module)


# -- experts ---------------------------------------------------------------------------------------------------------------

# llama.cpp's functions of the logits of a router, by their numbers in files; the third comes after the choice.
GATES: Mapping[int, Callable[[Tensor], Tensor]] = {
    1: partial(torch.softmax, dim=-1), 2: torch.sigmoid, 3: torch.Tensor.clone,
    4: lambda logits: nn.functional.softplus(logits).sqrt()}
CHOSEN, LEAST = 3, 2.0 ** -14                                    # the least sum of weights, llama.cpp's


def _route(model: Any, rule: Mapping[str, Any]) -> None:
    for module in model.modules():
        if type(module).__name__.endswith(("Router", "Gate")):
            module.register_forward_hook(partial(_reroute, rule), with_kwargs=True)


def _reroute(rule: Mapping[str, Any], module: Any, args: Any, kwargs: Any, output: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """The output of a router (logits, weights and numbers of the chosen experts) with llama.cpp's choice and weights."""
    if len(output) == 2:                                         # weights of all experts, and logits, by which they are chosen
        weights, logits = output
        chosen = _choose_experts(rule, logits, module.top_k)
        return torch.zeros_like(weights).scatter_(-1, chosen, logits.gather(-1, chosen).sigmoid().to(weights.dtype)), logits
    logits, weights, chosen = output
    scores = GATES[rule["gate"]](logits.float())
    biases = (*args[1:], *kwargs.values(), getattr(module, "e_score_correction_bias", None))
    choice = scores + next((bias for bias in biases if isinstance(bias, Tensor)), 0.0)
    chosen = _choose_experts(rule, choice, chosen.shape[-1])
    own = scores.gather(-1, chosen)
    own = own.softmax(-1) if rule["gate"] == CHOSEN else own
    own = own / own.sum(-1, keepdim=True).clamp(min=LEAST) if rule["normed"] else own
    return logits, (own * rule["scale"]).to(weights.dtype), chosen


def _choose_experts(rule: Mapping[str, Any], choice: Tensor, count: int) -> Tensor:
    """The numbers of the experts with the best numbers, in the groups whose two best have the best sum."""
    if rule["groups"] > 1:
        groups = choice.view(*choice.shape[:-1], rule["groups"], -1)
        best = groups.topk(2).values.sum(-1).topk(rule["chosen_groups"]).indices
        is_out = torch.ones_like(groups[..., 0], dtype=torch.bool).scatter_(-1, best, False)
        choice = groups.masked_fill(is_out.unsqueeze(-1), -torch.inf).flatten(-2)
    return choice.topk(count).indices


class ScaledGate(nn.Module):
    """The activation of gates that are multiplied by a number first."""

    def __init__(self, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.activation, self.scale = activation, 1.0

    def forward(self, gate: Tensor) -> Tensor:
        """The activation of scaled gates."""
        return self.activation(gate * self.scale)


def _scale_experts(model: Any, scales: Mapping[str, Mapping[str, list[float]]]) -> None:
    for name, own in scales.items():
        experts = _layer(model, name)
        experts.act_fn = ScaledGate(experts.act_fn)
        experts.forward = partial(_scaled_experts, experts, own, experts.forward)


def _scaled_experts(experts: Any, scales: Mapping[str, list[float]], forward: Callable[..., Tensor], hidden: Tensor,
                    index: Tensor, weights: Tensor) -> Tensor:
    """The sum of experts' outputs, one expert after another; scales of values pass through the last product."""
    result = torch.zeros_like(hidden)
    for expert in sorted({*index.flatten().tolist()}):
        gate, up, down = (scales[kind][expert] if kind in scales else 1.0 for kind in ("gate", "up", "down"))
        tokens, places = torch.where(index == expert)
        experts.act_fn.scale = gate
        own = forward(hidden[tokens], index[tokens, places, None], weights[tokens, places, None] * (up * down))
        result.index_add_(0, tokens, own)
    return result


# -- linear attention ------------------------------------------------------------------------------------------------------


def _with_delta_rule_epsilon(forward: Any, epsilon: float) -> Any:
    """The `forward` of a class whose rules of deltas, functions of its file, normalize queries and keys by an epsilon."""
    own = inspect.unwrap(forward)
    rules = {name: partial(_normalized, rule, epsilon) for name, rule in own.__globals__.items()
             if name.endswith("gated_delta_rule") and name in own.__code__.co_names}
    return FunctionType(own.__code__, {**own.__globals__, **rules}, own.__name__, own.__defaults__, own.__closure__)


def _normalized(rule: Callable[..., Any], epsilon: float, query: Tensor, key: Tensor, *args: Any, **kwargs: Any) -> Any:
    query, key = (own * torch.rsqrt(own.float().square().sum(-1, keepdim=True) + epsilon).to(own.dtype) for own in (query, key))
    return rule(query, key, *args, **{**kwargs, "use_qk_l2norm_in_kernel": False})


def _set_heads(rows: tuple[str, ...], columns: tuple[str, ...], model: Any, heads: list[int]) -> None:
    """Give layers of attention so many heads.  rows, columns: the Linear layers whose rows, or columns, are those of heads."""
    for layer, count in zip(_decoder(model).layers, heads, strict=True):
        if (attention := getattr(layer, "self_attn", None)) is not None and count:
            width = count * attention.head_dim
            for name in [name for name in (*rows, *columns) if hasattr(attention, name)]:
                own = getattr(attention, name)
                sizes = (own.in_features, width) if name in rows else (width, own.out_features)
                setattr(attention, name, nn.Linear(*sizes, own.bias is not None, own.weight.device, own.weight.dtype))
            attention.num_key_value_groups = attention.q_proj.out_features // attention.k_proj.out_features


def _set_rotated_layers(model: Any, rotates: list[bool]) -> None:
    for layer, own in zip(_decoder(model).layers, rotates, strict=True):
        layer.self_attn.is_local_attention = own


def _decoder(model: Any) -> Any:
    """The module that has the layers."""
    return next(module for module in model.modules() if isinstance(getattr(module, "layers", None), nn.ModuleList))


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


# -- which tokens see which --------------------------------------------------------------------------------------------------


def _add_window(model: Any, window: int) -> None:
    if window == 0:                                              # with sinks, which are all that such layers see
        for layer, kind in zip(_decoder(model).layers, model.config.layer_types, strict=True):
            if kind in WINDOWED:
                layer.self_attn.o_proj.register_forward_pre_hook(partial(_times, 0.0))
        return
    model.config.sliding_window = window
    _decoder(model).register_forward_pre_hook(partial(_with_masks, {
        "full_attention": create_sliding_window_causal_mask, "conv": create_recurrent_attention_mask}), with_kwargs=True)


def _set_causal(model: Any, is_causal: bool) -> None:
    model.config.is_causal = is_causal                           # of which transformers makes masks
    for module in model.modules():
        if hasattr(module, "is_causal"):
            module.is_causal = is_causal
    kinds = {*(getattr(model.config, "layer_types", None) or ())}
    if not kinds.isdisjoint(WINDOWED):
        makers = {kind: MASKS[kind] for kind in kinds}
        _decoder(model).register_forward_pre_hook(partial(_with_masks, makers), with_kwargs=True)


def _window_ahead(config: Any, **options: Any) -> Any:
    """A mask of tokens that see a window behind them, as llama.cpp's, and all ahead of them."""
    window = config.sliding_window
    wide = copy.copy(config)
    wide.sliding_window = WIDE                                   # transformers' own window is of both sides
    return create_bidirectional_sliding_window_mask(wide, **options, and_mask_function=lambda b, h, q, kv: kv > q - window)


def _chunk_ahead(config: Any, **options: Any) -> Any:
    size = config.attention_chunk_size
    return create_bidirectional_mask(config, **options, and_mask_function=lambda b, h, q, kv: kv >= q // size * size)


WIDE = 1 << 30
MASKS: Mapping[str, Callable[..., Any]] = {"full_attention": create_bidirectional_mask, "sliding_attention": _window_ahead,
                                           "chunked_attention": _chunk_ahead}


def _with_masks(makers: Mapping[str, Callable[..., Any]], decoder: Any, args: Any, kwargs: dict[str, Any]
                ) -> tuple[Any, dict[str, Any]]:
    """Arguments of a decoder's `forward`, with masks for kinds of layers.  makers: functions that make them, by kind."""
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
    return args, {**kwargs, "attention_mask": {kind: maker(**options) for kind, maker in makers.items()}}


ADD: Mapping[str, Callable[[Any, Any], None]] = {
    "biases": _add_biases, "scales": _add_scales, "expert_scales": _scale_experts, "rotated_layers": _set_rotated_layers,
    "expert_gating_func": _route,
    "rope.dimension_count": _keep_unrotated, "rope.freq_base_swa": _add_window_rotary, "attention.sliding_window": _add_window,
    "rope.dimension_sections": lambda model, sections: None,     # which only orders rows
    "attention.causal": _set_causal, "attention.scale": lambda model, scale: model.set_attn_implementation("eager"),
    "attention.head_count": partial(_set_heads, ("q_proj",), ("o_proj", "out_proj")),
    "attention.head_count_kv": partial(_set_heads, ("k_proj", "v_proj"), ()),
    "attention.layer_norm_rms_epsilon": _set_epsilon, "attention.layer_norm_epsilon": _set_epsilon}
