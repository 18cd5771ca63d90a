"""A checkpoint of which only the headers are available: names, dtypes, shapes, metadata and the config, but no tensor's bytes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.files.folder import INDEX, Folder
from qdsl.checkpoint.files.safetensors import (
    CheckpointError,
    Entry,
    Header,
    TensorFile,
    as_byte_entry,
    dtype_of,
    element_bits,
    shown,
    torch_dtypes,
)

if TYPE_CHECKING:
    import torch

NAME = "model.safetensors"                                       # what the one file is called in messages


class HeaderFile(TensorFile):
    """A safetensors file of which only the header is available; its tensors are on meta."""

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self.header = header
        self._map = None

    def start(self, name: str, limit: int) -> bytes:
        """Returns b"": a header has no tensor bytes.  Raises CheckpointError for an unknown name."""
        self.entry(name)
        return b""

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor on meta.  Raises CheckpointError for an unknown name, and for rows that end in a byte."""
        import torch

        entry = as_byte_entry(self.entry(name))
        if entry.dtype not in torch_dtypes():
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: rows of {entry.dtype} {list(entry.shape)} end in a byte")
        return torch.empty(entry.shape, dtype=torch_dtypes()[entry.dtype], device="meta")


class Headers(Folder):
    """A checkpoint described by its headers alone, for readers that have no files.

    dtypes: as torch or safetensors calls them.  metadata: of the safetensors header.  config: what config.json holds.
    Raises CheckpointError for a dtype that is unknown, and for lists of different lengths.
    """

    _json: dict[str, dict[str, Any]]

    def __init__(self, names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]],
                 metadata: Mapping[str, str] | None = None, config: Mapping[str, Any] | None = None) -> None:
        if not len(names) == len(dtypes) == len(shapes):
            raise CheckpointError(f"{len(names)} names, {len(dtypes)} dtypes and {len(shapes)} shapes: give one of each for each "
                                  "tensor")
        self.path = self.root = Path(NAME)
        self.partial = self.is_completed = False
        self.missing, self.notes = {}, []
        self.index_name, self.index, self.shards = INDEX, {}, []
        file = HeaderFile(self.path, Header(_entries(names, dtypes, shapes), dict(metadata or {}), 0))
        self._files = dict.fromkeys(file.header.tensors, file)
        self._json = {"config.json": dict(config or {})}

    def close(self) -> None:
        """Does nothing: no file is open."""

    def json(self, name: str) -> dict[str, Any]:
        """The config for 'config.json', {} for other names."""
        return self._json.get(name, {})


def _entries(names: Sequence[str], dtypes: Sequence[str], shapes: Sequence[Sequence[int]]) -> dict[str, Entry]:
    entries: dict[str, Entry] = {}
    stop = 0
    for name, dtype, shape in zip(names, dtypes, shapes, strict=True):
        if name in entries:
            raise CheckpointError(f"tensor {shown(name)} occurs twice")
        kind = dtype_of(str(dtype))
        if not all(type(extent) is int and extent >= 0 for extent in shape):
            raise CheckpointError(f"tensor {shown(name)}: shape {list(shape)} is no list of integers from 0 up")
        start = stop
        stop += -(-math.prod(shape) * element_bits(kind) // 8)
        entries[name] = Entry(kind, tuple(shape), start, stop)
    return entries
