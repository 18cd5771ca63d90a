"""A GGUF file as the weights that `from_pretrained` of transformers gives a model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.sources import GgufSource
from qdsl.models.gguf_maps import GgufMap
from qdsl.models.mapped_source import MappedSource, tensor_names
from qdsl.models.plan import listed


@dataclass(eq=False)
class GgufWeights:
    """A file, its map, and the plain tensors that transformers loads: `state` is filled when the packed layers are placed."""

    path: Path
    map: GgufMap
    state: dict[str, Tensor] = field(default_factory=dict)

    def open(self, model: nn.Module, config: object) -> Checkpoint:
        """The file as a checkpoint with a model's names.  Raises LoadError where it does not fit, CheckpointError for damage."""
        file, map = GgufSource(self.path), self.map
        prefix = f"{getattr(model, 'base_model_prefix', '')}."   # of a model without a head, whose names lack it
        rules = {name: rule for name in model.state_dict()
                 if (rule := map.rule(name) or map.rule(prefix + name)) is not None}
        unknown = [name for name in tensor_names(file) if not map.is_recorded(name)]
        problems = [f"{len(unknown)} tensors are in no recorded map of {map.model_type}: {listed(unknown)}"] if unknown else []
        try:
            source = MappedSource(file, rules, model, config, origin=f"the map of {map.recorded}", problems=problems)
            return Checkpoint(self.path, {"": source})
        except Exception:
            file.close()
            raise

    def __deepcopy__(self, memo: Any) -> GgufWeights:
        """Itself: transformers copies configs, and `state` is filled once."""
        return self
