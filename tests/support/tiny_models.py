"""Tiny random language models of transformers, in two sizes, for what is recorded and tested about GGUF files."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

# Numbers that configs of most model types have.  Those of one size differ, so that a rule cannot confuse two of them.
SIZES: tuple[dict[str, Any], ...] = (
    {"vocab_size": 96, "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4,
     "num_key_value_heads": 2, "head_dim": 16, "num_experts": 3, "num_local_experts": 3, "n_routed_experts": 3,
     "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 96, "max_position_embeddings": 128,
     "shared_intermediate_size": 96, "query_pre_attn_scalar": 16, "n_positions": 128, "n_embd": 64, "n_inner": 160,
     "n_layer": 3, "n_head": 4},
    {"vocab_size": 128, "hidden_size": 192, "intermediate_size": 224, "num_hidden_layers": 4, "num_attention_heads": 6,
     "num_key_value_heads": 3, "head_dim": 32, "num_experts": 5, "num_local_experts": 5, "n_routed_experts": 5,
     "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 160,
     "max_position_embeddings": 128, "shared_intermediate_size": 160, "query_pre_attn_scalar": 32, "n_positions": 128,
     "n_embd": 192, "n_inner": 224, "n_layer": 4, "n_head": 6},
)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# What other numbers a model type needs, in both sizes.
TIED = {"tie_word_embeddings": True}
MAMBA = ({"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2},
         {"mamba_n_heads": 12, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 2})
LATENT = ({"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 64,
           "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 4, "n_shared_experts": 1,
           "first_k_dense_replace": 1},
          {"q_lora_rank": 40, "kv_lora_rank": 64, "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "v_head_dim": 32,
           "n_group": 1, "topk_group": 1, "num_experts_per_tok": 2, "num_key_value_heads": 6, "n_shared_experts": 2,
           "first_k_dense_replace": 1})
LINEAR = ({"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16, "linear_value_head_dim": 32},
          {"linear_num_key_heads": 3, "linear_num_value_heads": 6, "linear_key_head_dim": 32, "linear_value_head_dim": 16})
KINDS = ["linear_attention", "full_attention", "linear_attention", "full_attention"]
CONVS = ["conv", "full_attention", "conv", "full_attention"]
WINDOWS = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
ROTARY = {"rope_type": "default", "rope_theta": 500000.0}
Changes = dict[str, Any] | tuple[dict[str, Any], ...]
SPECIAL: dict[str, Changes] = {
    "cohere": TIED, "cohere2": TIED, "gemma": TIED, "gemma2": TIED, "gemma3_text": TIED,
    "bamba": tuple({**sizes, "attn_layer_indices": [1]} for sizes in MAMBA),
    "deepseek_v2": LATENT, "deepseek_v3": LATENT, "glm4_moe_lite": LATENT,
    "youtu": tuple({key: value for key, value in own.items() if key.endswith(("_rank", "_dim", "_heads"))} for own in LATENT),
    "exaone4": tuple({"layer_types": ["full_attention"] * layers} for layers in (3, 4)),      # large ones alone have windows
    "ernie4_5_moe": ({"moe_num_experts": 3, "moe_k": 2}, {"moe_num_experts": 5, "moe_k": 2}),
    "granitemoehybrid": tuple({**sizes, "layer_types": ["mamba", "attention", "mamba", "mamba"][:3 + i]}
                              for i, sizes in enumerate(MAMBA)),
    "falcon": ({"num_kv_heads": 2, "new_decoder_architecture": True}, {"num_kv_heads": 3, "new_decoder_architecture": True}),
    "lfm2": tuple({"layer_types": CONVS[:3 + size]} for size in (0, 1)),
    # llama.cpp takes one base for all layers, whatever the file says
    "mellum": tuple({"layer_types": WINDOWS[:3 + size],
                     "rope_parameters": dict.fromkeys(("full_attention", "sliding_attention"), ROTARY)} for size in (0, 1)),
    "olmoe": ({"num_key_value_heads": 4}, {"num_key_value_heads": 6}),
    "lfm2_moe": tuple({"layer_types": CONVS[:3 + size], "num_dense_layers": 1, **TIED} for size in (0, 1)),
    "falcon_mamba": ({"intermediate_size": 128}, {"intermediate_size": 384}),
    "gpt2": {"n_ctx": 128},
    # llama.cpp rounds the borders of yarn, whatever the model does.
    "gpt_oss": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": True,
        "original_max_position_embeddings": 4096}},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1},
    "minicpm3": LATENT,
    "mamba": ({"intermediate_size": 128}, {"intermediate_size": 384}),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
               {"num_heads": 12, "head_dim": 32, "state_size": 32, "n_groups": 3}),
    "ministral3": {"rope_parameters": {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 32}},
    "phi": ({"num_key_value_heads": 4, "intermediate_size": 256}, {"num_key_value_heads": 6, "intermediate_size": 768}),
    "nemotron": ({"head_dim": 16}, {"head_dim": 32}),
    "solar_open": {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 1.0}},
    "qwen3_next": ({**LINEAR[0], "layer_types": KINDS[:3]}, {**LINEAR[1], "layer_types": KINDS}),
}
LARGEST = 1 << 22                                                # elements of a tiny model
# Other numbers than the usual ones, which a config must be read with.
UNUSUAL = {"rms_norm_eps": 0.01, "layer_norm_eps": 0.01, "layer_norm_epsilon": 0.01, "norm_eps": 0.01, "norm_epsilon": 0.01,
           "layernorm_epsilon": 0.01, "sliding_window": 8, "embedding_multiplier": 2.0, "attention_multiplier": 0.5,
           "residual_multiplier": 0.5, "attention_in_multiplier": 0.5, "ssm_in_multiplier": 0.5, "lm_head_multiplier": 0.5,
           "logits_scaling": 2.0, "logit_scale": 0.3, "final_logit_softcapping": 2.0,
           "attn_logit_softcapping": 2.0, "routed_scaling_factor": 1.5, "norm_topk_prob": True, "partial_rotary_factor": 0.5}
# Model types of which files, and so llama.cpp, have no place for a number.
SMALL = {"rms_norm_eps": 1e-6}                                   # some norms have this epsilon whatever the config says
PLAIN = {"rope_parameters": None}                                # the base of which the converter does not write
FIXED = {
    "afmoe": {"mup_enabled": True}, "bloom": {"tie_word_embeddings": True}, "deepseek_v2": {**SMALL, "norm_topk_prob": False},
    "deepseek_v3": SMALL, "exaone4": {"sliding_window": None}, "falcon": PLAIN, "gemma": PLAIN, "gemma2": PLAIN,
    "glm": {**PLAIN, "rms_norm_eps": 1e-5}, "glm4_moe_lite": SMALL, "gpt_neox": PLAIN, "lfm2_moe": {"routed_scaling_factor": 1.0},
    "minicpm3": {**PLAIN, **SMALL}, "mistral": {"sliding_window": None}, "mixtral": {"sliding_window": None},
    "olmoe": {"rms_norm_eps": 1e-5, "norm_topk_prob": False}, "phi": PLAIN, "qwen2_moe": {"norm_topk_prob": False},
    "qwen3_next": {**SMALL, "linear_key_head_dim": 32, "linear_value_head_dim": 32}, "stablelm": PLAIN, "youtu": SMALL}


def unusual(model_type: str) -> dict[str, Any]:
    """Changes of a tiny config: numbers of UNUSUAL that it has, and another base of rotary embeddings."""
    config = tiny_config(model_type)
    changes = {key: value for key, value in UNUSUAL.items() if getattr(config, key, None) is not None and key in config.to_dict()}
    rope = getattr(config, "rope_parameters", None)
    changes |= {"rope_parameters": {**rope, "rope_theta": 500.0}} if isinstance(rope, dict) and "rope_theta" in rope else {}
    fixed = FIXED.get(model_type, {})
    return {key: value for key, value in (changes | fixed).items() if key != "rope_parameters" or key not in fixed}


def tiny_config(model_type: str, size: int = 0, **changes: Any) -> Any:
    """The config of a tiny model: SIZES where the class has such numbers, then SPECIAL, then `changes`."""
    cls = CONFIG_MAPPING[model_type]
    usual = cls()
    numbers = {key: value for key, value in {**SIZES[size], **TOKENS}.items() if _is_settable(cls, usual, key)}
    special = SPECIAL.get(model_type, {})
    numbers |= special[size] if isinstance(special, tuple) else special
    return cls(**{"tie_word_embeddings": False, **numbers, **changes})


def _is_settable(cls: Any, usual: Any, key: str) -> bool:
    """Whether a config has a number of that name to be set; heads of keys, where it has them, too."""
    own = getattr(cls, key, None)
    if (isinstance(own, property) and own.fset is None) or key in cls.attribute_map:
        return False
    return hasattr(usual, key) and (getattr(usual, key) is not None or key in ("num_key_value_heads", "head_dim"))


def tiny_model(model_type: str, size: int = 0, **changes: Any) -> Any:
    """A model of random float32 weights, to be evaluated; vectors differ from their usual ones and zeros."""
    torch.manual_seed(0)
    config = tiny_config(model_type, size, **changes)
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in transformers.AutoModelForCausalLM.from_config(config).parameters())
    if count >= LARGEST:
        raise ValueError(f"{count} elements are too many: make the tiny {model_type} smaller")
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
