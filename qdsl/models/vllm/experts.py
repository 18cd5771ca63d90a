"""vLLM's routed experts over packed weights, stored one by one or in stacks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.activation import SwigluOAIAndMul
from vllm.model_executor.layers.fused_moe import FusedMoEMethodBase, RoutedExperts
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.report.shards import ShardError, merged_pieces, row_piece, why_unservable
from qdsl.core.borders import StoredSpan
from qdsl.models.engine import register_counters, remove_counters, take
from qdsl.models.experts import Experts, routed_sum
from qdsl.models.shards import Collector, RankPart, needed
from qdsl.runtime.weight.algebra import concatenate_rows
from qdsl.runtime.weight.routing import Offsets

if TYPE_CHECKING:
    from qdsl.models.engine import EngineConfig

GATE, DOWN, UP = "w1", "w2", "w3"                                # vLLM's names for the weights of an expert
STACKED = {"gate_up_proj": "down_proj", "w13": "w2"}             # gate and up in one layer, and down beside it

STREAMED_SHARDS = {"gpt_oss_w13": GATE, "gpt_oss_w2": DOWN}


def experts_method(config: EngineConfig, layer: RoutedExperts, prefix: str) -> PackedExpertsMethod | None:
    """The method of a module of experts, None for plain ones.  Raises ShardError for experts that cannot be served."""
    begin = f"{prefix}."
    if not any(name.startswith(begin) for name in config.layers):
        return None
    layers = {name[len(begin):]: own for name, own in (config.plain | config.layers).items() if name.startswith(begin)}
    config.served.update(begin + name for name in layers)
    if problem := next(filter(None, map(why_unservable, layers.values())), ""):
        raise ShardError(f"{prefix}: {problem}")
    if config.batch_invariant:                                   # kernels are chosen by the number of rows
        raise ShardError(f"{prefix}: packed experts are not batch-invariant; serve without VLLM_BATCH_INVARIANT")
    config.warn_of_experts(prefix, layers.values())
    return PackedExpertsMethod(config, layer, layers)


class PackedExpertsMethod(FusedMoEMethodBase):
    """Experts of packed layers '3.gate_proj', '3.up_proj' and '3.down_proj', or of a stack, where '3.gate_up_proj' is one layer.

    A rank holds whole experts, or a part of each.  On a GPU few rows per expert take one launch for each stack; for more the host
    waits for the numbers of their rows.
    """

    def __init__(self, config: EngineConfig, layer: RoutedExperts, layers: Mapping[str, Layer]) -> None:
        super().__init__(layer.moe_config)
        gate, up = layer.ckpt_gate_proj_name, layer.ckpt_up_proj_name
        names = {GATE: gate, DOWN: layer.ckpt_down_proj_name, UP: up}
        for stacked, down in STACKED.items():
            if f"0.{stacked}" in layers:
                names = {GATE: stacked, DOWN: down}
        self.config, self.layers, self.is_gated = config, layers, layer.moe_config.is_act_and_mul
        self.names = {shard: name for shard, name in names.items() if name}
        self.places: dict[int, int] = {}                         # the rank's numbers of experts, -1 for those of other ranks
        self.collectors: dict[tuple[int, str], Collector] = {}
        self.loaded: dict[tuple[int, str], list[RankPart]] = {}
        self.down: StoredSpan | None = None
        # vLLM's builds for CPUs lack the operator of this activation, and its module does not need it.
        self.alternating = SwigluOAIAndMul() if layer.activation == MoEActivation.SWIGLUOAI else None

    def create_weights(self, layer: RoutedExperts, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
                       params_dtype: torch.dtype, **extra: Any) -> None:
        """Plan the rank's part of each of its experts.  Raises ShardError, before anything is loaded."""
        for expert in range(layer.global_num_experts):
            own = self.places[expert] = layer._map_global_expert_id_to_local_expert_id(expert)
            for shard, name in self.names.items() if own != -1 else ():
                self.collectors[own, shard] = self._collector(layer, f"{expert}.{name}", shard, intermediate_size_per_partition)
        for stem, shards in (("w13_", (GATE, UP)), ("w2_", (DOWN,))):
            register_counters(layer, [own for (_, shard), own in self.collectors.items() if shard in shards], self.load, stem)
        biases = {"w13_bias": 2 * intermediate_size_per_partition, "w2_bias": hidden_size} if self.moe.has_bias else {}
        for name, rows in biases.items():
            bias = torch.zeros(layer.local_num_experts, rows, dtype=params_dtype, device=torch.get_default_device())
            layer.register_parameter(name, nn.Parameter(bias, requires_grad=False))

    def _collector(self, layer: RoutedExperts, name: str, shard: str, size: int) -> Collector:
        own, full = self.layers.get(name), f"{layer.layer_name}.{name}"
        if own is None:
            raise ShardError(f"{full}: the checkpoint lacks it, and has other experts packed")
        ranks, rank = self.moe.tp_size, self.moe.tp_rank
        if shard == DOWN:
            pieces = [row_piece(full, own, ranks, rank)]
            self.down = pieces[0].span
        else:
            count = 2 if name.rpartition(".")[2] in STACKED else 1
            parts = [(size, own.shape[0] // count)] * count if self.alternating is None else [(size * count, own.shape[0])]
            pieces = merged_pieces(full, [own], parts, ranks, rank)
        if inside := next((piece.span for piece in pieces if piece.span.dim == "N" and piece.span.is_padded), None):
            raise ShardError(f"{full}: {own.format}.{own.storage} {list(own.shape)} cannot be divided among {ranks} ranks: row "
                             f"{inside.start} or {inside.stop} lies inside a block; serve whole experts "
                             "(--enable-expert-parallel)")
        return self.config.collector(own, pieces)

    def load(self, param: nn.Parameter, loaded_weight: Tensor, weight_name: str, shard_id: str, expert_id: int,
             return_success: bool = False) -> bool | None:
        """Take a tensor of an expert, if it is one of this rank."""
        own, shard_id = self.places.get(expert_id, -1), STREAMED_SHARDS.get(shard_id, shard_id)
        if own == -1:
            return False if return_success else None
        if take(self.collectors[own, shard_id], param, loaded_weight):
            self.loaded[own, shard_id] = self.collectors[own, shard_id].parts(param.device)
        return True if return_success else None

    def process_weights_after_loading(self, layer: RoutedExperts) -> None:
        """Join the experts' weights where possible.  Raises ShardError for missing tensors."""
        device = remove_counters(layer)
        if device is None:
            return
        is_empty = not self.loaded and not any(own.has_begun for own in self.collectors.values())
        for key, collector in self.collectors.items():
            if key not in self.loaded:
                self.loaded[key] = collector.zeros(device) if is_empty else collector.parts(device)
        for name, shards in (("qdsl_w13", (GATE, UP)), ("qdsl_w2", (DOWN,))):
            weights = [part.weight for expert in range(layer.local_num_experts) for shard in shards if shard in self.names
                       for part in self.loaded[expert, shard]]
            whole = concatenate_rows(weights) or weights
            layer.add_module(name, Experts(whole, layer.local_num_experts, dtype=layer.params_dtype))
        self.loaded = {}

    def dequantize_weight(self, layer: RoutedExperts) -> Any:
        """The rank's dense weights of gate and up [E, N, K], and of down [E, K, N].  vLLM 0.32 itself requantizes no experts."""
        assert self.down is not None
        return layer.qdsl_w13.dequantize(), needed(layer.qdsl_w2.dequantize(), self.down)

    def get_fused_moe_quant_config(self, layer: RoutedExperts) -> None:
        """None, as vLLM's own kernels of experts are not used."""
        return None

    def apply(self, layer: RoutedExperts, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, shared_experts: Any = None,
              shared_experts_input: Any = None) -> Tensor:
        """The weighted sum of the rank's experts' outputs for rows of x [M, K], by their ids and weights [M, top-k]."""
        def run(x: Tensor, offsets: Offsets, tokens: Tensor | None) -> Tensor:
            wide = layer.qdsl_w13(x, offsets, getattr(layer, "w13_bias", None), partial=True, rows=tokens)
            if self.alternating is None:
                half = x.new_empty(len(wide), wide.shape[1] // 2 if self.is_gated else wide.shape[1])
                apply_moe_activation(layer.activation, half, wide)
            else:
                half = self.alternating(wide)
            assert self.down is not None
            out: Tensor = layer.qdsl_w2(nn.functional.pad(half, self.down.padding) if self.down.is_padded else half, offsets,
                                        getattr(layer, "w2_bias", None), partial=True)
            return out

        return routed_sum(x, run, layer.local_num_experts, topk_weights, topk_ids, layer.expert_map,
                          layer.apply_router_weight_on_input)
