"""Names of a model's layers that multiply the same x, by which engines and products on a CPU join them along N."""

from __future__ import annotations

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"), ("w1", "w3"), ("q_a_proj", "kv_a_proj_with_mqa"),
            ("to_q", "to_k", "to_v"), ("add_q_proj", "add_k_proj", "add_v_proj"), ("query", "key", "value"))
