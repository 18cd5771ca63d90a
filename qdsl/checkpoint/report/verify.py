"""Two checkpoints side by side: the same tensors, of the same dtypes and shapes, bit for bit; or where they differ.

Files are read in pieces, whatever the tensors' sizes; torch is imported only where a difference has to be shown.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry, element_bits, torch_dtypes
from qdsl.host.processes import results

PIECE = 1 << 24                                                  # bytes of a tensor that a process compares at a time
READ = 1 << 20                                                   # and of those in memory
WORTH = 1 << 30                                                  # bytes for which another process is worth its start
Tell = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class Values:
    """Elements (bytes, of dtypes under a byte) that differ: how many of how many, the index of the first, and both its values."""

    count: int
    of: int
    index: tuple[int, ...]
    a: str
    b: str
    what: str = "elements"

    def __str__(self) -> str:
        return f"{self.count} of {self.of} {self.what} differ, the first at {list(self.index)}: {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {"differing": self.count, "elements": self.of, "index": list(self.index)}


@dataclass(frozen=True, slots=True)
class Apart:
    """The two numbers of decoded tensors that lie farthest apart, and how far; and the largest magnitude in A."""

    distance: float
    largest: float
    index: tuple[int, ...] = ()
    a: str = ""
    b: str = ""

    def __str__(self) -> str:
        part = f", {self.distance / self.largest:.2e} of the largest magnitude" if self.largest else ""
        return f"apart by up to {self.distance:.6g}{part}, at {list(self.index)}: {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {"distance": self.distance if math.isfinite(self.distance) else None, "largest": self.largest,
                "index": list(self.index)}


@dataclass(frozen=True, slots=True)
class Noise:
    """The relative root mean square of a tensor's errors, and what a type usually has."""

    error: float
    usual: float
    type: str

    def __str__(self) -> str:
        return f"relative error {self.error:.3g}; {self.type} has {self.usual:.3g} on these weights"

    def data(self) -> dict[str, Any]:
        """For programs."""
        return {"error": self.error if math.isfinite(self.error) else None, "usual_error": self.usual, "type": self.type}


@dataclass(frozen=True, slots=True)
class Difference:
    """What is not the same about a tensor.  kind: 'missing', 'dtype', 'shape', 'values' or 'decoded'."""

    tensor: str
    kind: str
    a: str | None
    b: str | None
    values: Values | Apart | Noise | None = None

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"only in {'B' if self.a is None else 'A'}: {self.b or self.a}"
        return str(self.values) if self.values else f"{self.kind} {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """For programs."""
        found: dict[str, Any] = {"tensor": self.tensor, "kind": self.kind, "a": self.a, "b": self.b}
        return found | (self.values.data() if self.values else {})


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a tensor, which lies at `a` and `b` of two files."""

    name: str
    paths: tuple[Path, Path]
    entries: tuple[Entry, Entry]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Found:
    """Elements of a piece that differ: how many, and which of the tensor is the first, with its bytes in both."""

    count: int
    first: int
    a: bytes
    b: bytes


def size(path: Path) -> int:
    """Bytes of all tensors of a checkpoint, or of several models.  Raises CheckpointError and OSError as `differences` does."""
    with components.opened(path) as models:
        return sum(folder.entry(name).nbytes for folder in models.values() for name in folder.names())


def of_models(a: Path, b: Path, compare: Callable[[Path, Path, Tell], list[Difference]], tell: Tell) -> list[Difference]:
    """What differs between two checkpoints, or between the models of diffusion pipelines, whose names stand in front."""
    mine, other = components.names(a), components.names(b)
    if mine == other == [""]:
        return compare(a, b, tell)
    found: list[Difference] = []
    before = 0
    for model in dict.fromkeys([*mine, *other]):
        if model not in mine or model not in other:
            found.append(Difference(f"{model}/", "missing", *(("a model", None) if model in mine else (None, "a model"))))
            continue
        each = compare(a / model, b / model, _further(tell, before))
        found += [replace(one, tensor=components.within(model, one.tensor)) for one in each]
        before += size(a / model)
    return found


def _further(tell: Tell, before: int) -> Tell:
    """What is told of a part that begins after so many bytes."""
    return lambda done, name: tell(before + done, name)


def differences(a: Path, b: Path, *, jobs: int = 1, tell: Tell = lambda done, name: None) -> list[Difference]:
    """Everything that differs between two checkpoints, folders or .safetensors files, in the order of A's tensors.

    tell: is told how many bytes of A are done.  Raises CheckpointError and OSError for files that cannot be read.
    """
    with Folder(a) as left, Folder(b) as right:
        names = left.names()
        found = {each.tensor: each for each in bitwise(left, right, names, jobs, tell)}
        extra = [Difference(name, "missing", None, _text(right.entry(name))) for name in right.names() if name not in left]
        return [*(found[name] for name in names if name in found), *extra]


def _described(a: Folder, b: Folder, name: str) -> Difference | None:
    """What differs about a tensor of A without reading it."""
    entry = a.entry(name)
    if name not in b:
        return Difference(name, "missing", _text(entry), None)
    other = b.entry(name)
    if entry.dtype != other.dtype:
        return Difference(name, "dtype", entry.dtype, other.dtype)
    if entry.shape != other.shape:
        return Difference(name, "shape", str(list(entry.shape)), str(list(other.shape)))
    return None


def bitwise(a: Folder, b: Folder, names: Sequence[str], jobs: int, tell: Tell) -> list[Difference]:
    """Tensors of the same dtype and shape in both of which some bits differ, or that have not the same dtype and shape."""
    found = {name: each for name in names if (each := _described(a, b, name)) is not None}
    pieces = [piece for name in names if name not in found for piece in _pieces(a, b, name)]
    for name, values in _compared(pieces, jobs, tell):
        found[name] = Difference(name, "values", values.a, values.b, values)
    return list(found.values())


def _text(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _pieces(a: Folder, b: Folder, name: str) -> Iterator[Piece]:
    paths, entries = (a.file(name).path, b.file(name).path), (a.entry(name), b.entry(name))
    for start in range(0, entries[0].nbytes, PIECE):
        yield Piece(name, paths, entries, start, min(start + PIECE, entries[0].nbytes))


def _compared(pieces: list[Piece], jobs: int, tell: Tell) -> Iterator[tuple[str, Values]]:
    """The tensors among pieces that differ."""
    done = 0
    found: dict[str, list[Found]] = {}
    with closing(results(compare, pieces, min(jobs, len(pieces)))) as answers:
        for piece, answer in zip(pieces, answers, strict=True):
            done += piece.stop - piece.start
            tell(done, piece.name)
            if answer is not None:
                found.setdefault(piece.name, []).append(answer)
    entries = {piece.name: piece.entries[0] for piece in pieces}
    for name, parts in found.items():
        yield name, _values(entries[name], parts)


def compare(piece: Piece) -> Found | None:
    """The elements of a piece that differ; of dtypes under a byte the bytes."""
    width = max(1, element_bits(piece.entries[0].dtype) // 8)
    size = READ // width * width
    count, first = 0, None
    a, b = bytearray(size), bytearray(size)
    with open(piece.paths[0], "rb") as left, open(piece.paths[1], "rb") as right:
        left.seek(piece.entries[0].start + piece.start)
        right.seek(piece.entries[1].start + piece.start)
        for start in range(piece.start, piece.stop, size):
            length = min(size, piece.stop - start)
            if length < size:
                a, b = a[:length], b[:length]
            for file, data, path in ((left, a, piece.paths[0]), (right, b, piece.paths[1])):
                if file.readinto(data) != length:
                    raise OSError(f"{path}: became shorter while it was read")
            if a != b:
                some, place = _differing(a, b, width)
                at = slice(place * width, (place + 1) * width)
                first = first or Found(0, start // width + place, bytes(a[at]), bytes(b[at]))
                count += some
    return None if first is None else replace(first, count=count)


def _differing(a: bytearray, b: bytearray, width: int) -> tuple[int, int]:
    """How many elements differ, and the place of the first."""
    import torch

    wrong = (torch.frombuffer(a, dtype=torch.uint8) != torch.frombuffer(b, dtype=torch.uint8)).view(-1, width).any(1)
    return int(wrong.sum()), int(wrong.to(torch.uint8).argmax())


def _values(entry: Entry, parts: list[Found]) -> Values:
    bits, first = element_bits(entry.dtype), parts[0]
    index = index_of(first.first, entry.shape) if bits >= 8 else (first.first,)
    return Values(sum(part.count for part in parts), entry.nbytes // max(1, bits // 8), index, _shown(entry.dtype, first.a),
                  _shown(entry.dtype, first.b), "elements" if bits >= 8 else "bytes")


def _shown(dtype: str, data: bytes) -> str:
    """An element in words and in bits."""
    import torch

    bits = f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"
    if dtype not in torch_dtypes():
        return bits
    return f"{torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtypes()[dtype]).item()} ({bits})"


def index_of(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Where the element at a place of the flat tensor lies."""
    index: list[int] = []
    for extent in reversed(shape):
        index.insert(0, place % extent)
        place //= extent
    return tuple(index)
