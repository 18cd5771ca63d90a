"""What a model records about the checkpoint that filled it, so that it can be saved as the same files."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.sources import FolderSource, GgufSource
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.safetensors import Header, torch_dtypes
from qdsl.host.files import read_bytes

if TYPE_CHECKING:
    from qdsl.checkpoint.detect.sources import Source
    from qdsl.checkpoint.files.ggml_types import GgmlType

ATTRIBUTE = "_qdsl_origin"                                       # of the model


@dataclass(frozen=True, slots=True)
class GgufOrigin:
    """A GGUF file: its metadata, and the type and stored shape of each tensor, in order."""

    metadata: Mapping[str, Value]
    tensors: Mapping[str, tuple[GgmlType, tuple[int, ...]]]


@dataclass(slots=True)
class Origin:
    """The checkpoint that filled a model.

    files: the bytes before the tensors and the header of each safetensors file.  config: the text of config.json, or None.
    index: the name of the index and its text, or None.  layers, groups: by module name.  stacks: single experts of the
    checkpoint by the parameter that they filled.  plain: tensors of the checkpoint by the parameter or buffer that they filled.
    biases: as in LoadPlan.  settings: small tensors of layers that no module stores.  unused: tensors that the model does not
    use.  decoded: packed layers that were decoded, by parameter; changed: whether others were decoded too.  revert: a function
    that restores the tensors of files from plain tensors of the model that a library merged or divided; both by name.
    """

    path: Path
    files: dict[str, tuple[bytes, Header]] = field(default_factory=dict)
    config: str | None = None
    index: tuple[str, str] | None = None
    gguf: GgufOrigin | None = None
    layers: dict[str, Layer] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    stacks: dict[str, tuple[Layer, ...]] = field(default_factory=dict)
    plain: dict[str, str] = field(default_factory=dict)
    biases: dict[str, dict[str, int]] = field(default_factory=dict)
    settings: dict[str, Tensor] = field(default_factory=dict)
    unused: dict[str, Tensor] = field(default_factory=dict)
    decoded: dict[str, Layer] = field(default_factory=dict)
    changed: bool = False
    revert: Callable[[nn.Module, dict[str, Tensor]], Mapping[str, Tensor]] | None = None

    def kinds(self) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
        """Dtypes and shapes of the checkpoint's tensors."""
        dtypes = torch_dtypes()
        kinds = {name: (dtypes[entry.dtype], entry.shape) for _, header in self.files.values()
                 for name, entry in header.tensors.items() if entry.dtype in dtypes}
        if self.gguf is not None:
            kinds |= {name: (getattr(torch, TORCH[kind.name]), shape) for name, (kind, shape) in self.gguf.tensors.items()
                      if kind.name in TORCH}
        return kinds


def source_origin(source: Source) -> Origin:
    """The origin of a checkpoint, before a model takes its weights."""
    origin = Origin(source.path)
    if isinstance(source, GgufSource):
        tensors = {name: (entry.type, entry.shape) for name, entry in source.file.tensors.items()}
        origin.gguf = GgufOrigin(source.file.metadata.stored(), tensors)
    elif isinstance(source, FolderSource) and source.folder.shards:
        folder = source.folder
        origin.files = {file.path.name: (file.start_bytes(), file.header) for file in folder.files()}
        origin.config = _text(folder.root / "config.json") if folder.path.is_dir() else None
        if folder.is_completed:
            origin.config = json.dumps(folder.config, indent=2, ensure_ascii=False) + "\n"
        origin.index = (folder.index_name, _text(folder.root / folder.index_name) or "") if folder.index else None
    elif not isinstance(source, FolderSource):
        origin.changed = True                                    # a file of other names and shapes than the model's
    return origin


def _text(path: Path) -> str | None:
    return read_bytes(path).decode() if path.is_file() else None


def record_origin(model: nn.Module, origin: Origin) -> None:
    setattr(model, ATTRIBUTE, origin)


def origin_in(model: nn.Module) -> Origin | None:
    """The checkpoint that filled a model; None for a model filled in another way."""
    origin = getattr(model, ATTRIBUTE, None)
    return origin if isinstance(origin, Origin) else None
