"""safetensors files: a bounded header parser, tensors out of a memory map, and a writer whose bytes are reproducible.

The parser accepts less than the safetensors library does, never more.  Reading a header does not import torch.
"""

from __future__ import annotations

import json
import math
import mmap
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from io import BufferedReader
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from qdsl.checkpoint.files.resume import Buffer as Buffer
from qdsl.checkpoint.files.resume import Resume, write_tensors
from qdsl.checkpoint.files.strict_json import CheckpointError as CheckpointError
from qdsl.checkpoint.files.strict_json import shown as shown
from qdsl.checkpoint.files.strict_json import strict_json as strict_json
from qdsl.host.files import InputError, open_input
from qdsl.host.system import map_file

if TYPE_CHECKING:
    import torch

    from qdsl.checkpoint.files.buffer_pool import BufferPool

HEADER_LIMIT = 100_000_000                                       # the library's own bound
RANK_LIMIT = 64                                                  # as many dimensions as torch's operators take
NAME_LIMIT = 1024
COMPARED = 1 << 20                                              # bytes of two tensors that are compared at a time
START_BYTES = 1 << 16                                           # of a tensor, from which its format is detected
LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_METADATA = "__metadata__"

# Bits of an element and the name in torch (none: loaded as bytes), in the library's order: by alignment.
_DTYPES = {
    "BOOL": (8, "bool"), "F4": (4, None), "F6_E2M3": (6, None), "F6_E3M2": (6, None),
    "U8": (8, "uint8"), "I8": (8, "int8"), "F8_E5M2": (8, "float8_e5m2"), "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"), "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"), "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"), "U16": (16, "uint16"), "F16": (16, "float16"), "BF16": (16, "bfloat16"),
    "I32": (32, "int32"), "U32": (32, "uint32"), "F32": (32, "float32"),
    "C64": (64, "complex64"), "F64": (64, "float64"), "I64": (64, "int64"), "U64": (64, "uint64"),
}
_ORDER = {dtype: place for place, dtype in enumerate(_DTYPES)}


def element_bits(dtype: str) -> int:
    return _DTYPES[dtype][0]


def torch_name(dtype: str) -> str:
    """The torch name of a safetensors dtype; the safetensors name where torch has none."""
    return _DTYPES[dtype][1] or dtype


def dtype_of(name: str) -> str:
    """The safetensors dtype for a torch or safetensors name: 'torch.bfloat16', 'bfloat16' and 'BF16' are the same.

    Raises CheckpointError for an unknown name.
    """
    short = name.removeprefix("torch.")
    for dtype, (_, torch_dtype) in _DTYPES.items():
        if short in (dtype, torch_dtype):
            return dtype
    raise CheckpointError(f"unknown dtype {shown(name)}")


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file: its safetensors dtype, its shape, and its bytes [start, stop) from the start of the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int

    @property
    def nbytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.stop - self.start


def as_byte_entry(entry: Entry) -> Entry:
    """A tensor of elements under a byte, such as F4, as the bytes U8 that hold its rows; others, and partial bytes, unchanged."""
    bits = element_bits(entry.dtype) * (entry.shape[-1] if entry.shape else 1)
    if element_bits(entry.dtype) >= 8 or not entry.shape or bits % 8:
        return entry
    return Entry("U8", (*entry.shape[:-1], bits // 8), entry.start, entry.stop)


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file: its tensors in the order of their bytes, its metadata, and the size of the file in bytes."""

    tensors: dict[str, Entry]
    metadata: dict[str, str]
    size: int


# The header

def read_header(path: str | os.PathLike[str]) -> Header:
    """The header of a safetensors file, checked against the file's size; no tensor is read.

    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """
    with open_regular(path) as file:
        return _read(file, Path(path))


def open_regular(path: str | os.PathLike[str]) -> BufferedReader:
    """Opens a regular file for reading.

    Raises CheckpointError for a pipe or a device, on which a read might never end, and for a pointer that Git LFS left.
    """
    try:
        file = open_input(path)
    except InputError as error:
        raise CheckpointError(f"{error}") from None
    if file.peek(len(LFS_POINTER)).startswith(LFS_POINTER):
        file.close()
        raise CheckpointError(f"{path}: a pointer of Git LFS, not the file itself; `git lfs pull` in its repository fetches that")
    return file


def _read(file: BinaryIO, path: Path) -> Header:
    size = os.fstat(file.fileno()).st_size
    length = int.from_bytes(file.read(8), "little")
    if size < 8:
        raise CheckpointError(f"{path}: {size} bytes; a safetensors file begins with 8 bytes of header length")
    if length > HEADER_LIMIT:
        raise CheckpointError(f"{path}: header length {length} at byte 0 is over the limit of {HEADER_LIMIT}")
    if length > size - 8:
        raise CheckpointError(f"{path}: header length {length} at byte 0, but only {size - 8} bytes follow")
    return _parse(file.read(length), size, path)


def parse_header(data: bytes, path: Path) -> Header:
    """A header from its bytes alone, of a file that ends with its last tensor.  Raises CheckpointError as read_header does."""
    return _parse(data, None, path)


def _parse(data: bytes, size: int | None, path: Path) -> Header:
    """Parses a header whose bytes begin at byte 8 of a file of `size` bytes; None: of a file that ends with its last tensor."""
    where = f"{path}: header"
    if data[:1] != b"{":
        raise CheckpointError(f"{where}: begins with {data[:1]!r} at byte 8, not with '{{'")
    if not data.rstrip(b" ").endswith(b"}"):
        raise CheckpointError(f"{where}: only spaces may follow its closing '}}'")
    items = strict_json(data, where, depth=3)
    assert isinstance(items, dict)                               # it begins with a brace
    metadata = items.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CheckpointError(f"{where}: {_METADATA} must map strings to strings")
    base = 8 + len(data)
    entries = [(name, _entry(name, item, base, path)) for name, item in items.items()]
    entries.sort(key=lambda pair: (pair[1].start, pair[1].stop))
    whole = max((entry.stop for _, entry in entries), default=base) if size is None else size
    _check_cover(entries, base, whole, path)
    return Header(dict(entries), metadata, whole)


def _entry(name: str, item: object, base: int, path: Path) -> Entry:
    where = f"{path}: tensor {shown(name)}"
    if not 0 < len(name) <= NAME_LIMIT or not name.isprintable():
        raise CheckpointError(f"{where}: a name is 1 to {NAME_LIMIT} printable characters")
    if not isinstance(item, dict) or set(item) != {"dtype", "shape", "data_offsets"}:
        raise CheckpointError(f"{where}: needs exactly the keys dtype, shape and data_offsets")
    dtype = item["dtype"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise CheckpointError(f"{where}: unknown dtype {shown(str(dtype))}")
    shape = _naturals(item["shape"], f"{where}: shape")
    offsets = _naturals(item["data_offsets"], f"{where}: data_offsets")
    if len(shape) > RANK_LIMIT:
        raise CheckpointError(f"{where}: {len(shape)} dimensions are over the limit of {RANK_LIMIT}")
    if len(offsets) != 2 or offsets[0] > offsets[1]:
        raise CheckpointError(f"{where}: data_offsets must be a start and a stop that is not before it")
    bits = _DTYPES[dtype][0]
    if bits * math.prod(max(length, 1) for length in shape) >= 1 << 63:    # a zero hides no overflow
        raise CheckpointError(f"{where}: shape {list(shape)} is too large")
    if bits * math.prod(shape) != 8 * (offsets[1] - offsets[0]):
        raise CheckpointError(f"{where}: {dtype} {list(shape)} takes {bits * math.prod(shape)} bits, "
                              f"but data_offsets hold {offsets[1] - offsets[0]} bytes")
    return Entry(dtype, shape, base + offsets[0], base + offsets[1])


def _naturals(value: object, where: str) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(number) is int and number >= 0 for number in value):
        raise CheckpointError(f"{where} must be a list of integers from 0 up")
    return tuple(value)


def _check_cover(entries: list[tuple[str, Entry]], base: int, size: int, path: Path) -> None:
    """Raise CheckpointError unless every byte after the header belongs to exactly one tensor."""
    place = base
    for name, entry in entries:
        if entry.start != place:
            gap = entry.start - place
            what = "overlaps the tensor before it" if gap < 0 else f"leaves a hole of {gap} bytes"
            raise CheckpointError(f"{path}: tensor {shown(name)}: begins at byte {entry.start} and {what}")
        place = entry.stop
    if place != size:
        what = f"{size - place} bytes follow" if place < size else f"{place - size} bytes are missing"
        raise CheckpointError(f"{path}: the tensors end at byte {place}, the file at {size}: {what}")


# Tensors

@cache
def torch_dtypes() -> dict[str, torch.dtype]:
    """The torch dtype of each safetensors dtype, without those under one byte."""
    import torch

    return {dtype: getattr(torch, name) for dtype, (_, name) in _DTYPES.items() if name is not None}


class TensorFile:
    """A safetensors file, mapped into memory privately: changing a tensor in place does not change the file.

    A tensor keeps the map alive, also after close().  The file must not shrink while it is mapped: that ends the process.
    copies: read tensors into memory of their own, as jobs do; a file that shrinks is then an error.  buffers: the pool of this
    memory.
    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """

    def __init__(self, path: str | os.PathLike[str], copies: bool = False, buffers: BufferPool | None = None) -> None:
        self.path = Path(path)
        self._copies = copies
        self._buffers = buffers
        with open_regular(path) as file:
            self.header = _read(file, self.path)
            self._map: mmap.mmap | None = map_file(file)

    def __enter__(self) -> TensorFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Drop the memory map.  It is not closed by force: a tensor that still points into it would crash."""
        self._map = None

    def names(self) -> list[str]:
        """Names of all tensors, in the order of their bytes."""
        return list(self.header.tensors)

    def entry(self, name: str) -> Entry:
        """The dtype, shape and byte range of a tensor.  Raises CheckpointError for a name that the file does not have."""
        if name not in self.header.tensors:
            raise CheckpointError(f"{self.path}: no tensor {shown(name)}")
        return self.header.tensors[name]

    def start_bytes(self) -> bytes:
        """The bytes before the tensors.  Raises CheckpointError for a file that became shorter."""
        memory = bytearray(next((entry.start for entry in self.header.tensors.values()), self.header.size))
        read_into(self.path, 0, memoryview(memory))
        return bytes(memory)

    def start(self, name: str, limit: int) -> bytes:
        """The first bytes of a tensor, at most `limit`.  Raises CheckpointError for an unknown name or a closed file."""
        entry = self.entry(name)
        if self._map is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: the file is closed")
        check_whole(self._map, self.path)
        return self._map[entry.start:min(entry.stop, entry.start + limit)]

    def has_same(self, name: str, other: TensorFile) -> bool:
        """Whether a tensor has the dtype, shape and bytes that it has in another open file."""
        own, its = self.entry(name), other.entry(name)
        if (own.dtype, own.shape) != (its.dtype, its.shape):
            return False
        assert self._map is not None and other._map is not None
        check_whole(self._map, self.path)
        check_whole(other._map, other.path)
        return all(self._map[own.start + start:min(own.start + start + COMPARED, own.stop)] ==
                   other._map[its.start + start:min(its.start + start + COMPARED, its.stop)]
                   for start in range(0, own.nbytes, COMPARED))

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, not copied where its bytes are aligned; elements under a byte as the bytes that hold them.

        Raises CheckpointError for an unknown name, a BOOL other than 0 and 1, rows that end in a byte, or a closed file.
        """
        shape = as_byte_entry(self.entry(name)).shape
        return self.numbers(name, 0, math.prod(shape)).view(shape)

    def numbers(self, name: str, start: int, stop: int) -> torch.Tensor:
        """Elements [start, stop) of a flattened tensor.  Raises CheckpointError as `tensor` does."""
        import torch

        entry = as_byte_entry(self.entry(name))
        if entry.dtype not in torch_dtypes():
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: rows of {entry.dtype} {list(entry.shape)} end in a byte")
        dtype = torch_dtypes()[entry.dtype]
        if self._map is None:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: the file is closed")
        check_whole(self._map, self.path)
        flat = elements(self.path if self._copies else self._map, entry.start + start * dtype.itemsize,
                        (stop - start) * dtype.itemsize, dtype, self._buffers)
        if entry.dtype == "BOOL" and entry.nbytes and int(flat.view(torch.uint8).max()) > 1:
            raise CheckpointError(f"{self.path}: tensor {shown(name)}: a BOOL that is neither 0 nor 1")
        return flat


def elements(data: mmap.mmap | Path, start: int, nbytes: int, dtype: torch.dtype, buffers: BufferPool | None = None,
             ) -> torch.Tensor:
    """Bytes of a memory map as a flat tensor, not copied where they are aligned; the bytes of a path are read from the file.

    buffers: a pool for these.
    Raises CheckpointError for a file that is too short.
    """
    import torch

    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    if isinstance(data, Path):
        copied = torch.empty(nbytes, dtype=torch.uint8, device="cpu") if buffers is None else \
            torch.from_numpy(buffers.take(nbytes))
        read_into(data, start, copied.numpy().data)
        return copied.view(dtype)
    raw = torch.frombuffer(data, dtype=torch.uint8, count=nbytes, offset=start)
    return (raw.clone() if start % dtype.itemsize else raw).view(dtype)


def read_into(path: Path, start: int, memory: memoryview) -> None:
    """Fill memory with bytes of a file from `start` on.  Raises CheckpointError for a file that is too short."""
    with open_input(path) as file:
        file.seek(start)
        place = 0
        while place < memory.nbytes:
            if not (count := file.readinto(memory[place:])):
                raise CheckpointError(f"{path}: became shorter while it was read")
            place += count


def check_whole(data: mmap.mmap, path: Path) -> None:
    """Raise CheckpointError for a file that was truncated after it was mapped: reading past its end would end the process."""
    if data.size() < len(data):
        raise CheckpointError(f"{path}: became shorter while it was read: {data.size()} bytes of {len(data)} are left")


@dataclass(frozen=True, slots=True)
class Chunks:
    """A tensor to be written: its safetensors dtype, its shape, and its bytes in chunks of any length, read once."""

    dtype: str
    shape: tuple[int, ...]
    pieces: Iterable[Buffer]


def write(path: str | os.PathLike[str], tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file; the same tensors and metadata give the same bytes, in whatever order they come.

    Tensors are ordered as by the safetensors library: by alignment, then by name.  Each tensor is read from the mapping twice,
    for the header and for the bytes, so a lazy mapping needs only one in memory at a time.
    Raises CheckpointError for what read_header would refuse; the destination is then as it was.
    """
    target = Path(path)
    plan = {}
    for name, tensor in tensors.items():
        dtype, shape = _described(name, tensor, target)
        plan[name] = Chunks(dtype, shape, _checked_bytes(tensors, name, (dtype, shape), target))
    write_chunks(target, plan, metadata)


def write_chunks(path: str | os.PathLike[str], tensors: Mapping[str, Chunks], metadata: Mapping[str, str] | None = None,
                 resume: Resume | None = None, state_checksums: bool = False) -> None:
    """Write a safetensors file as `write` does, from tensors that come in chunks.

    resume, state_checksums: as of `write_tensors`.
    Raises CheckpointError for what read_header would refuse, and for pieces that do not add up to their tensor.
    """
    target = Path(path)
    start, header = plan_header(target, {name: (chunks.dtype, chunks.shape) for name, chunks in tensors.items()}, metadata)
    write_tensors(target, start, [(name, tensors[name].pieces, entry.nbytes, 0) for name, entry in header.tensors.items()],
                  resume, state_checksums)


def plan_header(path: Path | str, tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str] | None = None,
                ) -> tuple[bytes, Header]:
    """The encoded header of a new file, from dtypes and shapes, and the parsed header with where each tensor goes.

    Raises CheckpointError for what read_header would refuse.
    """
    plan = [(name, dtype, shape) for name, (dtype, shape) in tensors.items()]
    plan.sort(key=lambda item: (-_ORDER[item[1]], item[0]))
    items: dict[str, object] = {} if metadata is None else {_METADATA: dict(sorted(metadata.items()))}
    place = 0
    for name, dtype, shape in plan:
        if name == _METADATA:
            raise CheckpointError(f"{path}: tensor {shown(name)}: the name belongs to the metadata")
        nbytes = _DTYPES[dtype][0] * math.prod(shape) // 8
        items[name] = {"dtype": dtype, "shape": shape, "data_offsets": (place, place + nbytes)}
        place += nbytes
    try:
        data = json.dumps(items, ensure_ascii=False, separators=(",", ":")).encode()
    except UnicodeEncodeError:
        raise CheckpointError(f"{path}: header: half of a surrogate pair in a string") from None
    data += b" " * (-len(data) % 8)
    if len(data) > HEADER_LIMIT:
        raise CheckpointError(f"{path}: header length {len(data)} is over the limit of {HEADER_LIMIT}")
    return len(data).to_bytes(8, "little") + data, _parse(data, 8 + len(data) + place, Path(path))


def _checked_bytes(tensors: Mapping[str, torch.Tensor], name: str, expected: tuple[str, tuple[int, ...]],
                   path: Path) -> Iterator[Buffer]:
    """Yields the bytes of a tensor, which must still have the dtype and shape of the header."""
    tensor = tensors[name]
    if _described(name, tensor, path) != expected:
        raise CheckpointError(f"{path}: tensor {shown(name)}: dtype or shape changed while it was written")
    yield bytes_of(tensor)


def _described(name: str, tensor: torch.Tensor, path: Path) -> tuple[str, tuple[int, ...]]:
    """The safetensors dtype and the shape of a tensor.  Raises CheckpointError where it cannot be stored."""
    import torch

    for dtype, same in torch_dtypes().items():
        if same == tensor.dtype and tensor.layout is torch.strided and not tensor.is_meta:
            return dtype, tuple(tensor.shape)
    kind = "meta tensor" if tensor.is_meta else f"tensor of {tensor.dtype}, {tensor.layout}"
    raise CheckpointError(f"{path}: tensor {shown(name)}: a {kind} cannot be stored")


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """The elements of a tensor in row-major order as bytes, copied only where they are not contiguous."""
    import torch

    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat = plain.as_strided((plain.numel(),), (1,))              # a lone element is contiguous whatever its strides are
    return flat.view(torch.uint8).numpy().data

