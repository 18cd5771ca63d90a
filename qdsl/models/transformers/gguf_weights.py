"""The weights of a GGUF file for `from_pretrained` of transformers."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.models.gguf_maps import GgufMap
from qdsl.models.mapped_source import gguf_source


@dataclass(eq=False)
class GgufWeights:
    """A file, its map, and in `state` the plain tensors that transformers loads, filled when packed layers are placed."""

    path: Path
    map: GgufMap
    fills_biases: bool = False                                   # whether biases that the file leaves out are zero
    state: dict[str, Tensor] = field(default_factory=dict)

    def names(self, model: Any, rules: list[Any]) -> None:
        """None: the checkpoint has the model's names."""

    def open(self, model: Any, names: None) -> Checkpoint:
        """The file as a checkpoint under a model's names.  Raises LoadError where it does not fit, CheckpointError for damage.
        """
        return Checkpoint(self.path, {"": gguf_source(self.path, self.map, model, model.config,
                                                       self.fills_biases)})

    def __deepcopy__(self, memo: Any) -> GgufWeights:
        """Itself: transformers copies configs, and `state` is filled once."""
        return self
