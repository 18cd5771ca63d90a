"""Compares two checkpoints bit for bit: tensors, dtypes, shapes and values.

Files are read in pieces of fixed size; torch is imported only to describe a difference.
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
from qdsl.host import progress
from qdsl.host.files import open_input
from qdsl.host.processes import results

PIECE = 1 << 24                                                  # bytes of a tensor that a process compares at a time
READ = 1 << 20                                                   # bytes of a piece that are in memory at a time
WORTH = 1 << 30                                                  # bytes for which another process is worth its start
Tell = Callable[[int, str], None]


@dataclass(frozen=True, slots=True)
class DifferingValues:
    """Elements that differ (bytes, for dtypes under a byte): how many of how many, the index of the first, and both its values.
    """

    count: int
    of: int
    index: tuple[int, ...]
    a: str
    b: str
    what: str = "elements"

    def __str__(self) -> str:
        return f"{self.count} of {self.of} {self.what} differ, the first at {list(self.index)}: {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """The values as a dictionary for JSON."""
        return {"differing": self.count, "elements": self.of, "index": list(self.index)}


@dataclass(frozen=True, slots=True)
class LargestDifference:
    """The two numbers of decoded tensors that differ most, their distance, and the largest magnitude in A."""

    distance: float
    largest: float
    index: tuple[int, ...] = ()
    a: str = ""
    b: str = ""

    def __str__(self) -> str:
        part = f", {self.distance / self.largest:.2e} of the largest magnitude" if self.largest else ""
        return f"apart by up to {self.distance:.6g}{part}, at {list(self.index)}: {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """The values as a dictionary for JSON."""
        return {"distance": self.distance if math.isfinite(self.distance) else None, "largest": self.largest,
                "index": list(self.index)}


@dataclass(frozen=True, slots=True)
class Noise:
    """The relative RMS error of a tensor, and the usual one of its type."""

    error: float
    usual: float
    type: str

    def __str__(self) -> str:
        return f"relative error {self.error:.3g}; {self.type} has {self.usual:.3g} on these weights"

    def data(self) -> dict[str, Any]:
        """The values as a dictionary for JSON."""
        return {"error": self.error if math.isfinite(self.error) else None, "usual_error": self.usual, "type": self.type}


@dataclass(frozen=True, slots=True)
class Difference:
    """A difference between two checkpoints in one tensor.  kind: 'missing', 'dtype', 'shape', 'values' or 'decoded'."""

    tensor: str
    kind: str
    a: str | None
    b: str | None
    values: DifferingValues | LargestDifference | Noise | None = None

    def __str__(self) -> str:
        if self.kind == "missing":
            return f"only in {'B' if self.a is None else 'A'}: {self.b or self.a}"
        return str(self.values) if self.values else f"{self.kind} {self.a} and {self.b}"

    def data(self) -> dict[str, Any]:
        """The difference as a dictionary for JSON."""
        data: dict[str, Any] = {"tensor": self.tensor, "kind": self.kind, "a": self.a, "b": self.b}
        return data | (self.values.data() if self.values else {})


@dataclass(frozen=True, slots=True)
class Piece:
    """Bytes [start, stop) of a tensor that is in both files."""

    name: str
    paths: tuple[Path, Path]
    entries: tuple[Entry, Entry]
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class PieceDifference:
    """Elements of a piece that differ: how many, the index of the first in the flat tensor, and its bytes in both files."""

    count: int
    first: int
    a: bytes
    b: bytes


def size(path: Path) -> int:
    """Bytes of all tensors of a checkpoint, or of several models.  Raises CheckpointError and OSError as `differences` does."""
    with components.open_models(path) as models:
        return sum(folder.entry(name).nbytes for folder in models.values() for name in folder.names())


def model_differences(a: Path, b: Path, compare: Callable[[Path, Path, Tell], list[Difference]], tell: Tell) -> list[Difference]:
    """All differences between two checkpoints, or between the models of diffusion pipelines; these have the model's name in
    front.
    """
    mine, other = components.names(a), components.names(b)
    if mine == other == [""]:
        return compare(a, b, tell)
    differences: list[Difference] = []
    before = 0
    for model in dict.fromkeys([*mine, *other]):
        if model not in mine or model not in other:
            differences.append(Difference(f"{model}/", "missing", *(("a model", None) if model in mine else (None, "a model"))))
            continue
        inner = compare(a / model, b / model, _further(tell, before))
        differences += [replace(one, tensor=components.within(model, one.tensor)) for one in inner]
        before += size(a / model)
    return differences


def _further(tell: Tell, before: int) -> Tell:
    """A progress callback for a part that begins after `before` bytes."""
    return lambda done, name: tell(before + done, name)


def differences(a: Path, b: Path, *, jobs: int = 1, tell: Tell = lambda done, name: None) -> list[Difference]:
    """Everything that differs between two checkpoints, folders or .safetensors files, in the order of A's tensors.

    tell: a callback for progress, in bytes of A.  Raises CheckpointError and OSError for files that cannot be read.
    """
    with Folder(a) as left, Folder(b) as right:
        names = left.names()
        by_name = {difference.tensor: difference for difference in bitwise(left, right, names, jobs, tell)}
        extra = [Difference(name, "missing", None, _text(right.entry(name))) for name in right.names() if name not in left]
        return [*(by_name[name] for name in names if name in by_name), *extra]


def _described(a: Folder, b: Folder, name: str) -> Difference | None:
    """The difference of a tensor of A in existence, dtype or shape; None where these agree."""
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
    """Differences of tensors in dtype, shape or any bit."""
    differing = {name: difference for name in names if (difference := _described(a, b, name)) is not None}
    pieces = [piece for name in names if name not in differing for piece in _pieces(a, b, name)]
    for name, values in _compared(pieces, jobs, tell):
        differing[name] = Difference(name, "values", values.a, values.b, values)
    return list(differing.values())


def _text(entry: Entry) -> str:
    return f"{entry.dtype} {list(entry.shape)}"


def _pieces(a: Folder, b: Folder, name: str) -> Iterator[Piece]:
    paths, entries = (a.file(name).path, b.file(name).path), (a.entry(name), b.entry(name))
    for start in range(0, entries[0].nbytes, PIECE):
        yield Piece(name, paths, entries, start, min(start + PIECE, entries[0].nbytes))


def _compared(pieces: list[Piece], jobs: int, tell: Tell) -> Iterator[tuple[str, DifferingValues]]:
    """Compares pieces in parallel; yields the tensors that differ."""
    done = 0
    parts_of: dict[str, list[PieceDifference]] = {}
    with closing(results(compare, pieces, min(jobs, len(pieces)))) as answers:
        for piece, answer in zip(pieces, answers, strict=True):
            done += piece.stop - piece.start
            tell(done, piece.name)
            if answer is not None:
                parts_of.setdefault(piece.name, []).append(answer)
    entries = {piece.name: piece.entries[0] for piece in pieces}
    for name, parts in parts_of.items():
        yield name, _values(entries[name], parts)


def compare(piece: Piece) -> PieceDifference | None:
    """The first differing element of a piece and how many differ (bytes, for dtypes under a byte); None where all are equal."""
    width = max(1, element_bits(piece.entries[0].dtype) // 8)
    size = READ // width * width
    count, first = 0, None
    a, b = bytearray(size), bytearray(size)
    with progress.step(progress.COMPARE, piece.stop - piece.start), open_input(piece.paths[0]) as left, \
            open_input(piece.paths[1]) as right:
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
                first = first or PieceDifference(0, start // width + place, bytes(a[at]), bytes(b[at]))
                count += some
    return None if first is None else replace(first, count=count)


def _differing(a: bytearray, b: bytearray, width: int) -> tuple[int, int]:
    """How many elements of two buffers differ, and the place of the first."""
    import torch

    wrong = (torch.frombuffer(a, dtype=torch.uint8) != torch.frombuffer(b, dtype=torch.uint8)).view(-1, width).any(1)
    return int(wrong.sum()), int(wrong.to(torch.uint8).argmax())


def _values(entry: Entry, parts: list[PieceDifference]) -> DifferingValues:
    bits, first = element_bits(entry.dtype), parts[0]
    index = index_of(first.first, entry.shape) if bits >= 8 else (first.first,)
    return DifferingValues(sum(part.count for part in parts), entry.nbytes // max(1, bits // 8), index,
                           _element_text(entry.dtype, first.a), _element_text(entry.dtype, first.b),
                           "elements" if bits >= 8 else "bytes")


def _element_text(dtype: str, data: bytes) -> str:
    """An element as a number and as bits."""
    import torch

    bits = f"0x{int.from_bytes(data, 'little'):0{2 * len(data)}x}"
    if dtype not in torch_dtypes():
        return bits
    return f"{torch.frombuffer(bytearray(data), dtype=torch.uint8).view(torch_dtypes()[dtype]).item()} ({bits})"


def index_of(place: int, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The index, in a shape, of an element of the flat tensor."""
    index: list[int] = []
    for extent in reversed(shape):
        index.insert(0, place % extent)
        place //= extent
    return tuple(index)
