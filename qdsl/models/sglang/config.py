"""SGLang's quantization config `qdsl`, and its linear layers, embeddings and heads over packed weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import wraps
from typing import Any

from sglang.srt.arg_groups.choices import add_quantization_method_choices
from sglang.srt.distributed.utils import get_group_rank_size
from sglang.srt.layers.linear import LinearBase
from sglang.srt.layers.quantization import QUANTIZATION_METHODS
from sglang.srt.layers.quantization.base_config import LinearMethodBase, QuantizationConfig
from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
from sglang.srt.layers.vocab_parallel_embedding import VocabParallelEmbedding
from sglang.srt.model_loader import loader
from torch import Tensor, nn

from qdsl.checkpoint.detect.rules import OWN
from qdsl.checkpoint.files.references import local_path
from qdsl.checkpoint.report.shards import ShardError
from qdsl.models.engine import EngineConfig, PackedLinear
from qdsl.models.served import Served


class PackedLinearMethod(PackedLinear, LinearMethodBase):
    """A linear layer, an embedding or a head of packed layers of the checkpoint."""

    def ranks(self, layer: Any) -> tuple[int, int]:
        rank, size = get_group_rank_size(layer.tp_group)
        return size, rank


class QdslConfig(EngineConfig, QuantizationConfig):
    """Serves packed checkpoints of any producer, and quantizes plain ones on the way.  Experts stay as SGLang has them."""

    def get_scaled_act_names(self) -> list[str]:
        """[], as activations have no scales."""
        return []

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """The method of a module, None for SGLang's own.  Raises ShardError for packed experts."""
        if isinstance(layer, LinearBase | VocabParallelEmbedding):
            if parts := self.parts(prefix, layer):
                return PackedLinearMethod(self, parts)
            return UnquantizedLinearMethod() if isinstance(layer, LinearBase) else None
        if any(name.startswith(f"{prefix}.") for name in self.layers) and type(layer).__name__.endswith("MoE"):
            raise ShardError(f"{prefix}: packed experts are not served by SGLang; serve them with vLLM")
        return None


def install() -> None:
    """Register the quantization, which reads a model's headers before it is built, and takes its weights before it does."""
    QUANTIZATION_METHODS[OWN] = QdslConfig
    add_quantization_method_choices([OWN])
    loader._get_quantization_config = _with_headers(loader._get_quantization_config)
    loader.DefaultModelLoader._get_all_weights = _with_packed(loader.DefaultModelLoader._get_all_weights)


def _with_headers(configured: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """SGLang's function that creates configs, extended to read the headers of the model's folder."""
    @wraps(configured)
    def config_of(model_config: Any, load_config: Any) -> Any:
        config = configured(model_config, load_config)
        if isinstance(config, QdslConfig):
            config.plan(Served.of_folder(config.verified(local_path(model_config.model_path))))
        return config

    return config_of


def _with_packed(read: Callable[..., Iterator[tuple[str, Tensor]]]) -> Callable[..., Iterator[tuple[str, Tensor]]]:
    """SGLang's function that reads a model's weights, extended to packed ones."""
    @wraps(read)
    def weights(self: Any, model_config: Any, model: nn.Module) -> Iterator[tuple[str, Tensor]]:
        config, stored = getattr(model, "quant_config", None), read(self, model_config, model)
        yield from config.assembled(stored) if isinstance(config, QdslConfig) else stored

    return weights
