"""Pairs a GGUF file with the folder of diffusers that it was quantized from, under the folder's tensor names."""

from __future__ import annotations

import json
from pathlib import Path

import diffusers
import torch

from qdsl.checkpoint.detect.sources import FolderSource, GgufSource, Source
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.jobs.gguf.mixes import Tensor
from qdsl.models.gguf_maps import TensorRule
from qdsl.models.mapped_source import MappedSource
from qdsl.models.single_file_names import mapped_source, model_on_meta


class DecodedModel:
    """The decoded tensors of a file, by the names of a model.

    The type of a tensor that several of the file make up is the one with the fewest bits.
    """

    def __init__(self, source: MappedSource) -> None:
        self._source, self.path = source, source.path
        self.tensors = {name: Tensor(name, _matrix(source.shape(name)), self._type(rule)) for name, rule in source.rules.items()}
        self._decoded: tuple[str, torch.Tensor] | None = None    # the tensor whose rows were asked for last

    def rows(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Rows of a tensor as numbers [stop - start, columns], float32 where it is packed."""
        if self._decoded is None or self._decoded[0] != name:
            self._decoded = name, self._source.tensor(name)
        return self._decoded[1].reshape(self.tensors[name].rows, self.tensors[name].columns)[start:stop]

    def _type(self, rule: TensorRule) -> str:
        file = self._source.file
        if not isinstance(file, GgufSource):
            return "decoded"
        return min([file.file.entry(name).type for name in rule.sources], key=lambda type: type.bits).name


def _matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of a matrix of the numbers of a convolution, whose blocks run over its kernel."""
    return shape if len(shape) < 3 else (shape[0], torch.Size(shape[1:]).numel())


def decoded_pair(file: Path, folder: Path) -> tuple[DecodedModel, DecodedModel]:
    """A GGUF file and a folder of one model of diffusers, plain or packed, under the same tensor names.

    Raises LoadError where the file does not fill the folder's model, CheckpointError for files that cannot be read.
    """
    config = json.loads((folder / "config.json").read_text())
    cls = getattr(diffusers, str(config.get("_class_name")), None)
    if cls is None:
        raise CheckpointError(f"{folder}: diffusers has no class {shown(str(config.get('_class_name')))}")
    model = model_on_meta(cls, config, torch.float32)
    own: Source = FolderSource(Folder(folder))
    identity = {name: TensorRule((name,)) for name in model.state_dict()}
    return (DecodedModel(mapped_source(cls, model, GgufSource(file), config)),
            DecodedModel(MappedSource(own, identity, model, origin="the folder's names", has_experts=False)))
