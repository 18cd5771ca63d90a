"""A file to be written, and the steps that it is made of."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Protocol, TypeVar

from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry
from qdsl.host.files import read_chunks


class Sized(Protocol):
    """What is shared out by its size."""

    @property
    def size(self) -> int: ...


Each = TypeVar("Each", bound=Sized)


class Step(Protocol):
    """What a process does at a time; plain data, because another process does it."""

    @property
    def nbytes(self) -> int:
        """Of what it writes."""

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        """Where in the file the tensors go that it writes whole, and their bytes."""

    def write(self, out: BinaryIO) -> tuple[str, dict[str, Any]] | None:
        """Put bytes in their places; something to say of it, by name, or nothing."""


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that stays as it is: `nbytes` from `start` of a file, to `to` of the new one."""

    name: str
    path: Path
    start: int
    nbytes: int
    to: int

    @property
    def extents(self) -> Sequence[tuple[int, int]]:
        return [(self.to, self.nbytes)]

    def write(self, out: BinaryIO) -> None:
        """Raises OSError for a file that has become shorter."""
        out.seek(self.to)
        out.writelines(read_chunks(self.path, self.start, self.nbytes))


def copy(folder: Folder, name: str, there: Entry) -> Copy:
    """A tensor of a folder that goes where an entry says."""
    entry = folder.entry(name)
    return Copy(name, folder.file(name).path, entry.start, entry.nbytes, there.start)


@dataclass(frozen=True, slots=True)
class Shard:
    """A file to be written: the bytes before its tensors, its size, and what its tensors are made of, in their order.

    name: from the folder that is written.  key: what the file depends on; two with one key have the same bytes.
    """

    name: str
    start: bytes
    size: int
    tensors: tuple[str, ...]
    steps: tuple[Step, ...]
    key: str

    @property
    def nbytes(self) -> int:
        """Of its tensors."""
        return self.size - len(self.start)


def in_order(steps: Iterable[Step]) -> tuple[Step, ...]:
    """As their first bytes lie."""
    return tuple(sorted(steps, key=lambda step: min(start for start, _ in step.extents)))


def share(every: Sequence[Each], place: int, count: int) -> list[Each]:
    """Part `place`, from 1, of `count` parts of about the same size."""
    sums = [0] * count
    chosen = set()
    for number, each in sorted(enumerate(every), key=lambda pair: -pair[1].size):
        least = sums.index(min(sums))
        sums[least] += each.size
        chosen |= {number} if least == place - 1 else set()
    return [each for number, each in enumerate(every) if number in chosen]


def index(shards: Sequence[Shard], old: Mapping[str, Any]) -> str:
    """The text of the index of new files of a folder: what the old one said besides places and size stays."""
    placed = {name: Path(shard.name).name for shard in shards for name in shard.tensors}
    return index_text(placed, sum(shard.nbytes for shard in shards), old)


def index_text(placed: Mapping[str, str], nbytes: int, old: Mapping[str, Any]) -> str:
    """The text of an index.  placed: the file of each tensor.  old: an index whose other metadata stays."""
    metadata = old.get("metadata", {})
    metadata = {**(metadata if isinstance(metadata, dict) else {}), "total_size": nbytes}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(placed.items()))}, indent=2) + "\n"
