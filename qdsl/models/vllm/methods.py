"""Methods of vLLM's layers over packed weights: linear layers, embeddings and heads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs as envs
from torch import Tensor, nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.shards import Piece, ShardError, merged_pieces, piece, row_piece, unservable
from qdsl.models.shards import Collector, Part, joined, linear

if TYPE_CHECKING:
    from qdsl.models.vllm.config import QdslConfig

# Names in checkpoints of the parts of a layer, for models that do not state them or, as Qwen3-MoE, state them too late.
MERGED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj"), "w13": ("w1", "w3"),
          "to_qkv": ("to_q", "to_k", "to_v"), "add_kv_proj": ("add_q_proj", "add_k_proj", "add_v_proj")}
HEADS = {"q": 0, "k": 1, "v": 2}                                 # vLLM's names for the parts of a layer of q, k and v


def method_of(config: QdslConfig, layer: LinearBase, prefix: str) -> Any:
    """The method of a module, None for vLLM's own.  Raises ShardError where packed layers cannot be served."""
    if isinstance(layer, Attention | MLAAttention):
        return BaseKVCacheMethod(config)
    if isinstance(layer, RoutedExperts):
        from qdsl.models.vllm.experts import experts_method

        return experts_method(config, layer, prefix)
    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        return None
    parts = _parts(config, prefix)
    if parts:
        config.has_packed_embedding |= type(layer) is VocabParallelEmbedding
        return PackedLinearMethod(config, parts)
    if isinstance(layer, ParallelLMHead) and config.has_packed_embedding and prefix not in config.plain:
        return PackedLinearMethod(config, [])                    # tied to an embedding that is packed
    if isinstance(layer, LinearBase):
        return UnquantizedLinearMethod()
    return None


def _parts(config: QdslConfig, prefix: str) -> list[Layer]:
    """The layers of the checkpoint that a module consists of, none where all are plain."""
    if prefix in config.layers:
        config.served.add(prefix)
        return [config.layers[prefix]]
    stem, _, last = prefix.rpartition(".")
    names = [f"{stem}.{part}".lstrip(".") for part in config.packed_modules_mapping.get(last) or MERGED.get(last, ())]
    if not any(name in config.layers for name in names):
        return []
    layers = {**config.plain, **config.layers}
    if missing := [name for name in names if name not in layers]:
        raise ShardError(f"{prefix}: the checkpoint has some of {', '.join(names)} packed, and lacks {', '.join(missing)}")
    config.served.update(names)
    return [layers[name] for name in names]


def register_counters(layer: LinearBase, collectors: Sequence[Collector], load: Callable[..., Any], stem: str = "") -> None:
    """Register a parameter for every name under which vLLM's loader brings tensors of a module; `load` takes them.

    It counts the tensors that have come, one element for each; the weights are registered once all are there.
    """
    counts: Counter[str] = Counter()
    dtypes: dict[str, torch.dtype] = {}                          # vLLM warns of others
    for collector in collectors:
        counts.update((*collector.leaves, *collector.unused))
        dtypes |= {leaf: collector.dtype(leaf) for leaf in collector.leaves}
    for leaf, count in counts.items():
        counter = nn.Parameter(torch.zeros(count, dtype=dtypes.get(leaf, torch.uint8)), requires_grad=False)
        counter.leaf, counter.weight_loader = leaf, load         # type: ignore[attr-defined]
        layer.register_parameter(stem + leaf.replace(".", "_"), counter)


def take(collector: Collector, counter: nn.Parameter, tensor: Tensor) -> bool:
    """Hand a tensor of the checkpoint to a collector, and say whether it was the last one of its layer."""
    mark = counter.data[:1]
    mark.copy_(mark.clone())                                     # when vLLM reloads weights, it counts what is copied
    leaf = counter.leaf                                          # type: ignore[attr-defined]
    if counter.is_meta:
        return False
    collector.take(leaf, tensor)
    return collector.is_complete and leaf in collector.leaves


def remove_counters(layer: LinearBase) -> torch.device | None:
    """Remove the parameters that count tensors, and return their device; None where there are none."""
    device = None
    for name, param in list(layer.named_parameters(recurse=False)):
        if hasattr(param, "leaf"):
            device = param.device
            delattr(layer, name)
    return device


class PackedLinearMethod(LinearMethodBase):
    """A linear layer, an embedding or a head of packed layers of the checkpoint, whose rows follow one another.

    The packed tensors are parameters of the module, so that vLLM can move, count and reload them.
    """

    def __init__(self, config: QdslConfig, layers: Sequence[Layer]) -> None:
        self.config = config
        self.layers = list(layers)
        self.collectors: list[Collector] = []
        self.loaded: dict[int, list[Part]] = {}
        self.places: list[int] = []                              # the collector of every part of the module
        self.parts: list[Part] = []

    def create_weights(self, layer: LinearBase, input_size_per_partition: int, output_partition_sizes: list[int], input_size: int,
                       output_size: int, params_dtype: torch.dtype, **extra: Any) -> None:
        """Plan what the rank holds.  Raises ShardError, before anything is loaded."""
        pieces = self._pieces(layer, input_size_per_partition, output_partition_sizes, input_size) if self.layers else []
        self.collectors = [self.config.collector(own, [piece for piece in pieces if piece.layer is own]) for own in self.layers]
        self.places = [self.layers.index(own.layer) for own in pieces]
        register_counters(layer, self.collectors, self.load)

    def _pieces(self, layer: LinearBase, columns: int, rows: Sequence[int], all_columns: int) -> list[Piece]:
        """What the rank holds.  columns, rows: of the rank, rows of every part.  Raises ShardError."""
        first, vocabulary = self.layers[0], getattr(layer, "shard_indices", None)
        for own in self.layers:
            if not unservable(own) and own.shape[1] != all_columns:
                raise ShardError(f"{layer.prefix}: {own.name} has {own.shape[1]} columns, and the model {all_columns}")
        if vocabulary is not None:
            start, stop = vocabulary.org_vocab_start_index, vocabulary.org_vocab_end_index
            return [piece(layer.prefix, first, "N", start, stop, layer.tp_size)]
        if columns != all_columns:
            return [row_piece(layer.prefix, first, layer.tp_size, layer.tp_rank)]
        whole = [own.shape[0] for own in self.layers] if len(rows) == len(self.layers) else _rows(layer)
        return merged_pieces(layer.prefix, self.layers, list(zip(rows, whole, strict=True)), layer.tp_size, layer.tp_rank)

    def load(self, param: nn.Parameter, loaded_weight: Tensor, loaded_shard_id: Any = None) -> None:
        """Take a tensor of the checkpoint; with the last one of a layer the rank's part is cut and the tensors are let go."""
        shard = loaded_shard_id[0] if isinstance(loaded_shard_id, tuple) else loaded_shard_id
        number = self.places[HEADS.get(shard, shard) or 0]
        if take(self.collectors[number], param, loaded_weight):
            self.loaded[number] = self.collectors[number].parts(param.device)

    def process_weights_after_loading(self, layer: LinearBase) -> None:
        """Register the rank's weights; of a model loaded without weights, zeros.  Raises ShardError for missing tensors."""
        device = remove_counters(layer)
        if device is None:
            return
        if not self.loaded and not any(collector.has_begun for collector in self.collectors):
            self.loaded = {number: collector.zeros(device) for number, collector in enumerate(self.collectors)}
        for number, collector in enumerate(self.collectors):
            if number not in self.loaded:
                self.loaded[number] = collector.parts(device)    # says what is missing
        self.parts = joined([self.config.narrowed(part, self.collectors[number]) for number in sorted(self.loaded)
                             for part in self.loaded[number]])
        self.loaded = {}
        for number, part in enumerate(self.parts):
            for name, tensor in part.weight.tensors.items():
                layer.register_parameter(f"qdsl_{number}_{name}", nn.Parameter(tensor, requires_grad=False))

    def current(self, layer: LinearBase) -> list[Part]:
        """The parts, of the tensors that the module has now."""
        return [replace(part, weight=part.weight.derive({name: getattr(layer, f"qdsl_{number}_{name}")
                                                         for name in part.weight.tensors}))
                for number, part in enumerate(self.parts)]

    def apply(self, layer: LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x times the transpose of a rank's weight, as wide as vLLM has the layer; a vocabulary is padded with zeros."""
        product = linear(x, self.current(layer), envs.VLLM_BATCH_INVARIANT)
        missing = sum(layer.output_partition_sizes) - product.shape[-1]
        if missing:
            product = nn.functional.pad(product, (0, missing))
        return product if bias is None else product + bias

    def dequantize_weight(self, layer: LinearBase) -> Tensor:
        """A rank's weight, dense, for vLLM to quantize anew."""
        return torch.cat([part.dequantize(layer.params_dtype) for part in self.current(layer)])

    def embedding(self, layer: LinearBase, input_: Tensor) -> Tensor:
        part, = self.current(layer)
        if part.weight.shape[0] == 0:                            # a rank without rows of the vocabulary
            return torch.zeros(*input_.shape, part.weight.shape[1], dtype=layer.params_dtype, device=input_.device)
        rows: Tensor = part.weight.format.dequantize_rows(part.weight, input_ + part.span.padding[0], layer.params_dtype)
        return rows

    def tie_weights(self, layer: LinearBase, embed_tokens: nn.Module) -> nn.Module:
        """The embedding itself, which serves as the head, too."""
        return embed_tokens


def _rows(layer: LinearBase) -> list[int]:
    """The rows of every part of a merged layer, of all ranks, each head once."""
    if hasattr(layer, "total_num_kv_heads"):
        return [layer.total_num_heads * layer.head_size, layer.total_num_kv_heads * layer.head_size,
                layer.total_num_kv_heads * layer.v_head_size]
    return list(getattr(layer, "output_sizes", [layer.output_size]))
