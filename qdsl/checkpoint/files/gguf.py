"""GGUF files: a bounded parser of headers, and the mapped tensors of a file or of a set of split files.

A file is refused where its structure is in doubt.  A problem of a single tensor is stored as its `problem`, so that an unknown
type or missing data of one tensor does not hide the others.  Reading a header does not import torch.
"""

from __future__ import annotations

import math
import mmap
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.ggml_types import TORCH, GgmlType, type_of
from qdsl.checkpoint.files.gguf_metadata import KEYS_LIMIT, Cursor, Metadata, Value, read_metadata
from qdsl.checkpoint.files.safetensors import CheckpointError, check_whole, elements, open_regular, shown
from qdsl.host.system import map_file

if TYPE_CHECKING:
    import torch


MAGIC = b"GGUF"
VERSIONS = (2, 3)                                                # 1 had counts of 32 bits
TENSORS_LIMIT = 1 << 18
NAME_LIMIT = 127                                                 # bytes; llama.cpp takes 63, builds for diffusion models 127
RANK_LIMIT = 5                                                   # llama.cpp takes 4; convolutions over video have 5
ALIGNMENT = 32                                                   # where general.alignment is missing
ALIGNMENT_LIMIT = 1 << 20
SHARDS_LIMIT = 1024
ORIG_SHAPE = "comfy.gguf.orig_shape."
SPLIT = ("split.no", "split.count", "split.tensors.count")
_SHARD = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.DOTALL)


def is_gguf(path: Path) -> bool:
    """Whether a path names a GGUF file, by its ending or by its first bytes: files in Ollama's store have no ending."""
    if path.suffix in (".gguf", ".safetensors") or not path.is_file():
        return path.suffix == ".gguf"
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor.  shape: in torch's order, the dimension of rows last, as it is stored; orig_shape: that of the model where it
    was stored in another.  start: its first byte in the file.  shard: the file of a set.  problem: why it cannot be read.
    """

    name: str
    type: GgmlType
    shape: tuple[int, ...]
    start: int
    nbytes: int
    orig_shape: tuple[int, ...] | None = None
    shard: int = 0
    problem: str | None = None

    @property
    def logical_shape(self) -> tuple[int, ...]:
        """The shape that the tensor has in the model."""
        return self.shape if self.orig_shape is None else self.orig_shape


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a GGUF file; notes describe what is unusual in it but harmless here."""

    version: int
    alignment: int
    metadata: Metadata
    tensors: dict[str, GgufTensor]
    notes: tuple[str, ...]


# The header

def parse(file: BinaryIO, size: int, path: Path) -> Header:
    """Parses the header at the start of a GGUF file of `size` bytes.

    Raises CheckpointError, with the place, for a header that is not one.  Takes time and memory as the header, whatever the
    numbers in it say.
    """
    cursor = Cursor(file, size, path)
    version = _version(cursor)
    count = _count(cursor, "tensors", 24, TENSORS_LIMIT)
    metadata = read_metadata(cursor, _count(cursor, "metadata keys", 13, KEYS_LIMIT))
    alignment = alignment_of(metadata.stored(), path)
    infos = _read_infos(cursor, count)
    tensors, notes = _place_tensors(infos, _padded(cursor.place, alignment), alignment, size)
    shapes, more = _orig_shapes(metadata, tensors)
    return Header(version, alignment, metadata, tensors | shapes, (*notes, *more))


def _version(cursor: Cursor) -> int:
    cursor.skip(4, "magic")
    if (magic := bytes(cursor.data[:4])) != MAGIC:
        hint = "" if cursor.path.suffix == ".gguf" else ": a model is a folder, or a file .safetensors or .gguf"
        raise cursor.fail(f"{magic!r} is not how a GGUF file begins{hint}", 0)
    version = cursor.u32("version")
    if version in VERSIONS:
        return version
    if int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS:
        raise cursor.fail("a big-endian file; only little-endian ones are read", 4)
    raise cursor.fail(f"version {version}; read are {' and '.join(map(str, VERSIONS))}", 4)


def _count(cursor: Cursor, what: str, least: int, limit: int) -> int:
    """Reads how many entries, of at least `least` bytes each, follow."""
    count = cursor.u64(f"the number of {what}")
    if count > limit:
        raise cursor.fail(f"{count} {what} are over the limit of {limit}", cursor.place - 8)
    if count > (cursor.end - cursor.place) // least:
        raise cursor.fail(f"{count} {what} take {least} bytes each at least, but {cursor.left()}", cursor.place - 8)
    return count


def alignment_of(metadata: Mapping[str, Value], path: Path) -> int:
    """The value of general.alignment, 32 where it is missing.  Raises CheckpointError where it is wrong."""
    value = metadata.get("general.alignment")
    if value is None:
        return ALIGNMENT
    alignment = value.decoded(1)
    if value.type != "u32" or not isinstance(alignment, int) or not 0 < alignment <= ALIGNMENT_LIMIT or alignment & alignment - 1:
        raise CheckpointError(f"{path}: general.alignment must be a u32, a power of two up to {ALIGNMENT_LIMIT}, "
                              f"not {value.type} {shown(repr(alignment))}")
    return alignment


def _padded(place: int, alignment: int) -> int:
    return -(-place // alignment) * alignment


@dataclass(frozen=True, slots=True)
class _TensorInfo:
    """A tensor as the header describes it; dims: row length first."""

    name: str
    dims: tuple[int, ...]
    type: int
    offset: int


def _read_infos(cursor: Cursor, count: int) -> list[_TensorInfo]:
    """Reads the descriptions of `count` tensors."""
    infos: dict[str, _TensorInfo] = {}
    for _ in range(count):
        start = cursor.place
        name = cursor.text(NAME_LIMIT, "a tensor's name")
        if name in infos or "\0" in name:
            raise cursor.fail(f"tensor {shown(name)} " + ("occurs twice" if name in infos else "has a NUL in its name"), start)
        rank = cursor.u32("the number of dimensions")
        if rank > RANK_LIMIT:
            raise cursor.fail(f"tensor {shown(name)} has {rank} dimensions, over the limit of {RANK_LIMIT}", cursor.place - 4)
        dims = tuple(cursor.u64("a dimension") for _ in range(rank))
        infos[name] = _TensorInfo(name, dims, cursor.u32("a tensor's type"), cursor.u64("a tensor's offset"))
    return list(infos.values())


def _place_tensors(infos: Sequence[_TensorInfo], base: int, alignment: int, size: int) -> tuple[dict[str, GgufTensor], list[str]]:
    """All tensors with their byte ranges, which must not overlap; and notes on gaps between them."""
    tensors = {info.name: _tensor(info, base, alignment, size) for info in infos}
    whole = sorted((tensor for tensor in tensors.values() if tensor.problem is None and tensor.nbytes),
                   key=lambda tensor: (tensor.start, tensor.nbytes))
    furthest = None
    for tensor in whole:
        if furthest is not None and tensor.start < furthest.start + furthest.nbytes:
            tensors[tensor.name] = replace(tensor, problem=f"overlaps tensor {shown(furthest.name)}")
            if tensors[furthest.name].problem is None:
                tensors[furthest.name] = replace(furthest, problem=f"overlaps tensor {shown(tensor.name)}")
        if furthest is None or tensor.start + tensor.nbytes > furthest.start + furthest.nbytes:
            furthest = tensor
    return tensors, _oddities(list(tensors.values()), base, alignment, size)


def _tensor(info: _TensorInfo, base: int, alignment: int, size: int) -> GgufTensor:
    type = type_of(info.type)
    row = info.dims[0] if info.dims else 1
    start = base + info.offset
    nbytes = 0
    problem = None
    if any(length >= 1 << 63 for length in info.dims) or math.prod(max(1, length) for length in info.dims) >= 1 << 63:
        problem = "its shape is too large"                       # a zero hides no overflow
    elif not type.is_readable:
        problem = f"{type.name} is no type that can be read"
    elif row % type.elements:
        problem = f"rows of {row} elements are not made of {type.name}'s blocks of {type.elements}"
    else:
        nbytes = math.prod(info.dims[1:]) * type.row_bytes(row)
        if info.offset % alignment:
            problem = f"offset {info.offset} is no multiple of the alignment {alignment}"
        elif nbytes and start + nbytes > size:
            problem = f"its bytes end at {start + nbytes}, the file at {size}"
    return GgufTensor(info.name, type, info.dims[::-1], start, nbytes, problem=problem)


def _oddities(tensors: Sequence[GgufTensor], base: int, alignment: int, size: int) -> list[str]:
    """Notes on what llama.cpp would refuse: tensors that do not follow one another in order, each padded to the alignment."""
    place = base
    for tensor in tensors:
        if tensor.problem is not None:
            return []                                            # it is refused for that
        if tensor.start != place:
            return [f"tensor {shown(tensor.name)} begins at byte {tensor.start}, not at {place} after the one before it"]
        place += _padded(tensor.nbytes, alignment)
    if tensors and size < place:
        return [f"the last tensor is not padded: {place - size} bytes are missing"]
    return [f"{size - place} bytes follow the last tensor"] if size > place else []


def _orig_shapes(metadata: Metadata, tensors: dict[str, GgufTensor]) -> tuple[dict[str, GgufTensor], list[str]]:
    """Tensors to which metadata give another shape, and notes on metadata of tensors that do not exist."""
    changed: dict[str, GgufTensor] = {}
    notes = []
    for key, value in metadata.stored().items():
        if not key.startswith(ORIG_SHAPE):
            continue
        name = key.removeprefix(ORIG_SHAPE)
        if name not in tensors:
            notes.append(f"metadata {shown(key)}: no such tensor")
            continue
        shape: Any = value.decoded(RANK_LIMIT + 1) if value.type == "i32[]" else []
        fits = 0 < len(shape) <= RANK_LIMIT and min(shape) >= 0
        if fits and math.prod(shape) == math.prod(tensors[name].shape):
            changed[name] = replace(tensors[name], orig_shape=tuple(shape))
        elif tensors[name].problem is None:
            stored = list(tensors[name].shape)
            changed[name] = replace(tensors[name], problem=f"its orig_shape is no i32[] for as many elements as {stored} has")
    return changed, notes


# Files

class GgufFile:
    """A GGUF file, or a set of split files by its first, mapped into memory privately.

    metadata: of a set, those of its first file without the keys of the split.  tensors: by name, in the order of the header.
    What was read keeps the map alive, also after close().  The file must not shrink while it is mapped: that ends the process.
    copies: read tensors into memory of their own, as jobs do; a file that shrinks is then an error.
    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], copies: bool = False) -> None:
        self.path = Path(path)
        self._copies = copies
        self.paths: list[Path] = []
        self._maps: list[mmap.mmap] = []
        first = self._open(self.path)
        self.version, self.alignment, self.metadata, self.tensors = first.version, first.alignment, first.metadata, first.tensors
        self.notes = first.notes
        number, count, total = _split_numbers(first, self.path)
        if number:
            raise CheckpointError(f"{self.path}: file {number + 1} of {count}; give the first of them")
        if count > 1:
            self._add_others(count, total)

    def _open(self, path: Path) -> Header:
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24 and MAGIC.startswith(file.read(4)):
                raise CheckpointError(f"{path}: {size} bytes; a GGUF file begins with 24 bytes of magic, version and counts")
            header = parse(file, size, path)
            self.paths.append(path)
            self._maps.append(map_file(file))
            return header

    def _add_others(self, count: int, total: int) -> None:
        """Open the other files of a split set; together they must have the number of tensors that each one states."""
        for shard, path in enumerate(_shards(self.path, count)[1:], 1):
            if not path.exists():
                raise CheckpointError(f"{self.path}: {path.name}, file {shard + 1} of {count}, is missing")
            other = self._open(path)
            if _split_numbers(other, path) != (shard, count, total):
                raise CheckpointError(f"{path}: {', '.join(SPLIT)} are {', '.join(map(str, _split_numbers(other, path)))}; "
                                      f"as file {shard + 1} of {self.path.name} it must have {shard}, {count}, {total}")
            for name, tensor in other.tensors.items():
                if name in self.tensors:
                    before = self.paths[self.tensors[name].shard].name
                    raise CheckpointError(f"{path}: tensor {shown(name)} occurs in {before} too")
                self.tensors[name] = replace(tensor, shard=shard)
            self.notes += tuple(f"{path.name}: {note}" for note in other.notes)
        if len(self.tensors) != total:
            raise CheckpointError(f"{self.path}: split.tensors.count is {total}, but the {count} files have {len(self.tensors)}")
        self.metadata = Metadata({key: value for key, value in self.metadata.stored().items() if key not in SPLIT})

    def __repr__(self) -> str:
        return f"GgufFile({self.path}: tensors {len(self.tensors)}, keys of metadata {len(self.metadata)})"

    def __enter__(self) -> GgufFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the memory maps.  They are not closed by force: a tensor that still points into one would crash."""
        self._maps = []

    def range(self, name: str) -> Range:
        """The file of a tensor, its first byte there, and how many.  Raises CheckpointError as `entry` does."""
        entry = self.entry(name)
        return self.paths[entry.shard], entry.start, entry.nbytes

    def entry(self, name: str) -> GgufTensor:
        """The entry of a readable tensor.  Raises CheckpointError for an unknown name and for a tensor with a problem."""
        if name not in self.tensors:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        entry = self.tensors[name]
        if entry.problem is not None:
            raise CheckpointError(f"{self.paths[entry.shard]}: tensor {shown(name)}: {entry.problem}")
        if not self._maps:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: the file is closed")
        check_whole(self._maps[entry.shard], self.paths[entry.shard])
        return entry

    def data(self, name: str) -> memoryview:
        """The bytes of a tensor, mapped.  Raises CheckpointError as `entry` does."""
        entry = self.entry(name)
        return memoryview(self._maps[entry.shard])[entry.start:entry.start + entry.nbytes].toreadonly()

    def tensor(self, name: str) -> torch.Tensor:
        """A tensor of plain numbers in its logical shape, not copied where it is aligned.

        Raises CheckpointError as `entry` does, and for a type of blocks.
        """
        entry = self.entry(name)
        if entry.type.name not in TORCH:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: {entry.type.name} is stored in blocks, not as numbers")
        return self.rows(name).view(entry.logical_shape)

    def rows(self, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        """A tensor's bytes as it stores them, not copied where they are aligned: numbers, or the uint8 of blocks, [N, per row].

        start, stop: of the rows, by default all.  Dimensions but the last are N: of experts' weights, all rows of all experts.
        Raises CheckpointError as `entry` does.
        """
        import torch

        entry = self.entry(name)
        dtype: torch.dtype = getattr(torch, TORCH.get(entry.type.name, "uint8"))
        data = self.paths[entry.shard] if self._copies else self._maps[entry.shard]
        size, count = entry.type.row_bytes(entry.shape[-1] if entry.shape else 1), math.prod(entry.shape[:-1])
        count = max(0, min(count if stop is None else stop, count) - start)
        return elements(data, entry.start + start * size, count * size, dtype).view(count, size // dtype.itemsize)


def _split_numbers(header: Header, path: Path) -> tuple[int, int, int]:
    """The number of this file in a split set, the number of files, and the number of tensors in all of them."""
    numbers = []
    for key, default in zip(SPLIT, (0, 1, len(header.tensors)), strict=True):
        value = header.metadata.get(key, default)
        if type(value) is not int or not 0 <= value <= (TENSORS_LIMIT if key == SPLIT[2] else SHARDS_LIMIT):
            raise CheckpointError(f"{path}: {key} is {shown(repr(value))}")
        numbers.append(value)
    number, count, total = numbers
    if number and number >= count:
        raise CheckpointError(f"{path}: split.no is {number}, split.count {count}")
    return number, count, total


def _shards(path: Path, count: int) -> list[Path]:
    """The paths of the files of a split set, from the path of the first."""
    named = _SHARD.fullmatch(path.name)
    if named is None or (int(named[2]), int(named[3])) != (1, count):
        raise CheckpointError(f"{path}: the first of {count} files; its name must end in -00001-of-{count:05d}.gguf")
    return [path.with_name(f"{named[1]}-{number:05d}-of-{count:05d}.gguf") for number in range(1, count + 1)]
