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
     "shared_intermediate_size": 96, "n_positions": 128, "n_embd": 64, "n_inner": 160, "n_layer": 3, "n_head": 4},
    {"vocab_size": 128, "hidden_size": 192, "intermediate_size": 224, "num_hidden_layers": 4, "num_attention_heads": 6,
     "num_key_value_heads": 3, "head_dim": 32, "num_experts": 5, "num_local_experts": 5, "n_routed_experts": 5,
     "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 160, "max_position_embeddings": 128,
     "shared_intermediate_size": 160, "n_positions": 128, "n_embd": 192, "n_inner": 224, "n_layer": 4, "n_head": 6},
)
TOKENS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
# What other numbers a model type needs, in both sizes.
TIED = {"tie_word_embeddings": True}
MAMBA = ({"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_n_groups": 1, "mamba_expand": 2},
         {"mamba_n_heads": 12, "mamba_d_head": 32, "mamba_d_state": 32, "mamba_n_groups": 2, "mamba_expand": 2})
LATENT = {"q_lora_rank": 32, "kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32}
SPECIAL: dict[str, dict[str, Any] | tuple[dict[str, Any], dict[str, Any]]] = {
    "bitnet": TIED, "cohere": TIED, "cohere2": TIED, "gemma": TIED, "gemma2": TIED, "gemma3_text": TIED,
    "bamba": tuple({**sizes, "attn_layer_indices": [1]} for sizes in MAMBA),
    "falcon_h1": MAMBA,
    "granitemoehybrid": tuple({**sizes, "layer_types": ["mamba", "attention", "mamba", "mamba"][:3 + i]}
                              for i, sizes in enumerate(MAMBA)),
    "falcon": ({"num_kv_heads": 2, "new_decoder_architecture": True}, {"num_kv_heads": 3, "new_decoder_architecture": True}),
    "mamba2": ({"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 2},
               {"num_heads": 12, "head_dim": 32, "state_size": 32, "n_groups": 3}),
    "nemotron": ({"head_dim": 16}, {"head_dim": 32}),
}


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
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
    return model
