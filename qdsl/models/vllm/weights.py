"""Brings the tensors of a checkpoint into the names and pieces of vLLM's models."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from contextlib import closing
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
from vllm.model_executor.models.utils import WeightsMapper

from qdsl.checkpoint.files.safetensors import CheckpointError
from qdsl.models.served import gguf_path, open_gguf, source_tensors

if TYPE_CHECKING:
    from qdsl.models.engine import EngineConfig


class GgufLoader(DefaultModelLoader):
    """vLLM's load format `qdsl`: loads the tensors of the model's GGUF file."""

    def download_model(self, model_config: Any) -> None:
        """Download the GGUF file of a model.  Raises CheckpointError for a model without one."""
        settings = getattr(model_config.hf_config, "quantization_config", None) or {}
        self.path = gguf_path(model_config.model, settings.get("gguf_model"))
        if self.path is None:
            raise CheckpointError(f"{model_config.model} has no GGUF file; serve it without --load-format")

    def get_all_weights(self, model_config: Any, model: nn.Module) -> Generator[tuple[str, Tensor]]:
        """The tensors under the names of transformers."""
        self.download_model(model_config)
        assert self.path is not None
        with closing(open_gguf(self.path, model_config.hf_config)) as source:
            yield from source_tensors(source)


@dataclass
class AssemblingMapper(WeightsMapper):
    """A mapper of vLLM that first converts the checkpoint's tensors to those of modules."""

    config: EngineConfig | None = None

    def __or__(self, other: WeightsMapper) -> AssemblingMapper:
        return self._with(WeightsMapper.__or__(self, other))

    def __ror__(self, other: WeightsMapper) -> AssemblingMapper:
        return self._with(WeightsMapper.__or__(other, self))

    def _with(self, mapper: WeightsMapper) -> AssemblingMapper:
        return AssemblingMapper(**{field.name: getattr(mapper, field.name) for field in fields(WeightsMapper)},
                                config=self.config)

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The weights under the names of vLLM."""
        assert self.config is not None
        mapped: Iterable[tuple[str, Tensor]] = WeightsMapper.apply(self, self.config.assembled(weights))
        return mapped
