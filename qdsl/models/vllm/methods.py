"""Methods of vLLM's layers over packed weights: linear layers, embeddings and heads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import nn
from vllm.model_executor.layers.attention import Attention, MLAAttention
from vllm.model_executor.layers.fused_moe import RoutedExperts
from vllm.model_executor.layers.linear import LinearBase, LinearMethodBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding

from qdsl.models.engine import PackedLinear
from qdsl.models.vllm.experts import experts_method

if TYPE_CHECKING:
    from qdsl.models.engine import EngineConfig


class PackedLinearMethod(PackedLinear, LinearMethodBase):
    """A linear layer, an embedding or a head of packed layers of the checkpoint."""


def method_of(config: EngineConfig, layer: nn.Module, prefix: str) -> Any:
    """The method of a module, None for vLLM's own.  Raises ShardError where packed layers cannot be served."""
    if isinstance(layer, Attention | MLAAttention):
        return BaseKVCacheMethod(config)
    if isinstance(layer, RoutedExperts):
        return experts_method(config, layer, prefix)
    if not isinstance(layer, LinearBase | VocabParallelEmbedding):
        return None
    parts = config.parts(prefix, layer)
    if parts:
        config.has_packed_embedding |= type(layer) is VocabParallelEmbedding
        return PackedLinearMethod(config, parts)
    if isinstance(layer, ParallelLMHead) and config.has_packed_embedding and prefix not in config.plain:
        return PackedLinearMethod(config, [])                    # tied to an embedding that is packed
    return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
