"""An output file (shard) and the steps that write it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, Protocol, TypeVar

from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry, Header
from qdsl.host.files import read_chunks
from qdsl.host.progress import COPY, advance

Files = Mapping[str, tuple[bytes, Header]]                       # by name: the bytes before the tensors, and the parsed header


class Sized(Protocol):
    """Anything with a size, by which work is divided."""

    @property
    def size(self) -> int:
        """The amount of work."""


SizedT = TypeVar("SizedT", bound=Sized)


class Output(Protocol):
    """Anything that becomes bytes of a file."""

    @property
    def nbytes(self) -> int:
        """Bytes that it writes."""


class Step(Output, Protocol):
    """A unit of work of one process, as plain data that can be sent to it."""

    @property
    def kind(self) -> str:
        """The kind of its work, as of qdsl/host/progress.py."""

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        """Offset and size in the file of each tensor that it writes."""

    @property
    def reads(self) -> Sequence[Range]:
        """The ranges of input files that its bytes depend on."""

    def write(self, out: BinaryIO) -> tuple[str, dict[str, Any]] | None:
        """Write the bytes at their offsets; returns a layer's name and the cost of requantizing it, or None."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that is copied unchanged: `nbytes` from offset `start` of a file to offset `to` of the new one."""

    name: str
    path: Path
    start: int
    nbytes: int
    to: int

    @property
    def kind(self) -> str:
        return COPY

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        return [(self.to, self.nbytes)]

    @property
    def reads(self) -> Sequence[Range]:
        return [(self.path, self.start, self.nbytes)]

    def write(self, out: BinaryIO) -> None:
        """Copy the bytes.  Raises OSError for a file that has become shorter."""
        out.seek(self.to)
        for data in read_chunks(self.path, self.start, self.nbytes):
            out.write(data)
            advance(len(data))


def copy(folder: Folder, name: str, to: Entry) -> Copy:
    """The step that copies a tensor of a folder to the place of an entry."""
    entry = folder.entry(name)
    return Copy(name, folder.file(name).path, entry.start, entry.nbytes, to.start)


@dataclass(frozen=True, slots=True)
class Shard:
    """An output file: the bytes before its tensors, its size, its tensors, and the steps that write them.

    name: relative to the output folder.  key: a digest of what the file depends on; two with the same key have the same bytes.
    """

    name: str
    start: bytes
    size: int
    tensors: tuple[str, ...]
    steps: tuple[Step, ...]
    key: str

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        return self.size - len(self.start)


def bytes_by_kind(shards: Iterable[Shard]) -> dict[str, int]:
    """Bytes that the steps of files write, by kind."""
    sums: dict[str, int] = {}
    for shard in shards:
        for step in shard.steps:
            sums[step.kind] = sums.get(step.kind, 0) + step.nbytes
    return sums


def by_offset(steps: Iterable[Step]) -> tuple[Step, ...]:
    """Steps ordered by the first byte that they write."""
    return tuple(sorted(steps, key=lambda step: min(start for start, _ in step.extents)))


def balanced_part(every: Sequence[SizedT], place: int, count: int) -> list[SizedT]:
    """Part `place` (from 1) of `count` parts with about the same total size."""
    sums = [0] * count
    chosen = set()
    for number, unit in sorted(enumerate(every), key=lambda pair: -pair[1].size):
        least = sums.index(min(sums))
        sums[least] += unit.size
        chosen |= {number} if least == place - 1 else set()
    return [unit for number, unit in enumerate(every) if number in chosen]


def index(shards: Sequence[Shard], old: Mapping[str, Any]) -> str:
    """The index of new shards of a folder, as text: metadata of the old index stay, except the total size."""
    placed = {name: Path(shard.name).name for shard in shards for name in shard.tensors}
    return index_text(placed, sum(shard.nbytes for shard in shards), old)


def headers_index(files: Files, old: Mapping[str, Any] = MappingProxyType({})) -> str:
    """The text of the index of files by their headers.  old: as of `index_text`."""
    placed = {name: file for file, (_, header) in files.items() for name in header.tensors}
    return index_text(placed, sum(entry.nbytes for _, header in files.values() for entry in header.tensors.values()), old)


def shard_names(stem: str, count: int) -> list[str]:
    """The names of a model's files, as Hugging Face's libraries number them."""
    return [f"{stem}.safetensors"] if count == 1 else [f"{stem}-{number:05d}-of-{count:05d}.safetensors"
                                                       for number in range(1, count + 1)]


def index_text(placed: Mapping[str, str], nbytes: int, old: Mapping[str, Any]) -> str:
    """The text of an index.  placed: the file name of each tensor.  old: an index whose other metadata stay."""
    metadata = old.get("metadata", {})
    metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": nbytes}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(placed.items()))}, indent=2) + "\n"
