"""Packed layers in modules of vLLM that take plain numbers alone, such as the embeddings of Llama: decoded as they are loaded."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from vllm.model_executor.models.utils import WeightsMapper

from qdsl.checkpoint.layers import Layer
from qdsl.checkpoint.shards import piece
from qdsl.models.shards import Collector

if TYPE_CHECKING:
    from qdsl.models.vllm.config import QdslConfig


@dataclass
class DecodingMapper(WeightsMapper):
    """A mapper of vLLM that decodes the packed layers for which no module has asked its quantization config."""

    config: QdslConfig | None = None

    def __or__(self, other: WeightsMapper) -> DecodingMapper:
        return self._with(WeightsMapper.__or__(self, other))

    def __ror__(self, other: WeightsMapper) -> DecodingMapper:
        return self._with(WeightsMapper.__or__(other, self))

    def _with(self, mapper: WeightsMapper) -> DecodingMapper:
        return DecodingMapper(**{field.name: getattr(mapper, field.name) for field in fields(WeightsMapper)}, config=self.config)

    def apply(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The weights by the names of vLLM."""
        assert self.config is not None
        mapped: Iterable[tuple[str, Tensor]] = WeightsMapper.apply(self, decoded(weights, self.config.unserved()))
        return mapped


def decoded(weights: Iterable[tuple[str, Tensor]], layers: Iterable[Layer]) -> Iterator[tuple[str, Tensor]]:
    """Tensors of a checkpoint, with `NAME.weight` in torch's default dtype in place of the tensors of each of these layers."""
    collectors: dict[str, Collector] = {}
    for layer in layers:
        collector = Collector(layer, [piece(layer.name, layer, "N", 0, layer.shape[0])])
        collectors |= {f"{layer.name}.{leaf}": collector for leaf in (*collector.leaves, *collector.unused)}
    for name, tensor in weights:
        if name not in collectors:
            yield name, tensor
            continue
        collector, leaf = collectors[name], name[len(collectors[name].layer.name) + 1:]
        if leaf not in collector.leaves:
            continue
        collector.take(leaf, tensor)
        if collector.is_complete:
            part, = collector.parts()
            yield f"{collector.layer.name}.weight", part.dequantize(torch.get_default_dtype())
