"""Names of a model's layers that multiply the same x, by which engines and products on a CPU join them along N."""

from __future__ import annotations

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
            ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"), ("query", "key", "value"))
# Layers that engines and stacks of experts have in place of such, by the last parts of their names.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
          "to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
