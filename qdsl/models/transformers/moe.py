"""The forward of experts with packed weights, for transformers' registry of experts' implementations."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from qdsl.models.experts import Experts, routed_sum
from qdsl.runtime.weight.routing import Offsets

NAME = "qdsl"                                                    # of the implementation


def experts_forward(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The weighted outputs of the experts [T, k], with weights [T, k], that the router chose for tokens [T, K]: [T, K].

    The library's own implementation runs experts of plain weights and those that match dense ones, and decodes those whose rows
    are the columns of the product.
    """
    up = self.gate_up_proj if self.has_gate else self.up_proj
    if not all(isinstance(stack, Experts) and stack.transposed == self.is_transposed and not stack.match_dense
               for stack in (up, self.down_proj)):
        plain: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return plain
    bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None

    def run(x: Tensor, offsets: Offsets, tokens: Tensor | None) -> Tensor:
        inner = up(x, offsets, bias, rows=tokens)
        inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
        rows: Tensor = self.down_proj(inner, offsets, self.down_proj_bias if self.has_bias else None)
        return self.post_expert_norm(rows) if getattr(self, "has_post_expert_norm", False) else rows

    return routed_sum(hidden_states, run, self.num_experts, top_k_weights, top_k_index)
