"""Reads importance matrices (weights of columns by their inputs) as llama-imatrix writes them, in its GGUF and its older format.

The file is untrusted, so every length is checked against the bytes that follow.  Values are decoded, and torch is imported, on
access.
"""

from __future__ import annotations

import os
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from qdsl.checkpoint.files.gguf import MAGIC, GgufFile
from qdsl.checkpoint.files.safetensors import CheckpointError, bytes_of, open_regular, shown
from qdsl.host.system import map_file
from qdsl.jobs.gguf.mixes import EMBEDDINGS, Tensor

if TYPE_CHECKING:
    import torch

NAME_LIMIT = 1024
DATASET_LIMIT = 4096
_SUMS, _COUNTS = ".in_sum2", ".counts"


@dataclass(frozen=True, slots=True)
class Entry:
    """A tensor's sums of squared inputs, float32 per column and expert, and how many inputs were summed.

    counts: float32 for each expert; where there are none, `calls` is the number for all.
    """

    sums: memoryview
    counts: memoryview | None
    calls: int = 0


@dataclass(frozen=True, slots=True)
class Imatrix:
    """An importance matrix: entries by tensor name.  datasets: what it was measured on; chunks: their number."""

    path: Path
    entries: dict[str, Entry]
    datasets: tuple[str, ...] = ()
    chunks: int = 0

    def entry(self, tensor: Tensor) -> Entry | None:
        """The entry of a tensor, None without one.  Raises CheckpointError for an entry of another length."""
        entry = self.entries.get(tensor.name)
        wanted = tensor.experts * tensor.columns
        if entry is None or entry.sums.nbytes == 4 * wanted:
            return entry
        if tensor.name in EMBEDDINGS:
            return None                                          # it has counted tokens there
        per_expert = f" for each of {tensor.experts} experts" if tensor.experts > 1 else ""
        raise CheckpointError(f"{self.path}: importance of {shown(tensor.name)}: {entry.sums.nbytes // 4} values, the tensor "
                              f"needs {tensor.columns}{per_expert}")

    def values(self, tensor: Tensor) -> torch.Tensor | None:
        """The mean squared input of each column, float32 [experts, columns]; None without an entry.

        An expert that was never used has importance 1 in all columns.  Raises CheckpointError as `entry` does, and for values
        that no sum of squares can have.
        """
        import torch

        entry = self.entry(tensor)
        if entry is None:
            return None
        where = f"{self.path}: importance of {shown(tensor.name)}"
        wanted = tensor.experts * tensor.columns
        sums = torch.frombuffer(bytearray(entry.sums), dtype=torch.float32)
        counts = torch.tensor([float(entry.calls or 1)], dtype=torch.float32, device="cpu")
        if entry.counts is not None:
            counts = torch.frombuffer(bytearray(entry.counts), dtype=torch.float32).round()
        if counts.numel() > wanted or wanted % counts.numel():
            raise CheckpointError(f"{where}: {counts.numel()} counts for {wanted} values")
        if not bool(torch.isfinite(sums).all() and torch.isfinite(counts).all() and (sums >= 0).all() and (counts >= 0).all()):
            raise CheckpointError(f"{where}: a value that is negative or not finite")
        by_expert = sums.view(counts.numel(), -1) / counts[:, None]
        by_expert[counts == 0] = 1.0
        return by_expert.view(tensor.experts, tensor.columns)


def read(path: str | os.PathLike[str]) -> Imatrix:
    """Reads an importance matrix, in GGUF or in the older format.

    Raises CheckpointError for anything that is wrong in the file, OSError when it cannot be read.
    """
    with open_regular(path) as file:
        is_gguf = file.read(4) == MAGIC
    return _gguf(Path(path)) if is_gguf else _older(Path(path))


def _gguf(path: Path) -> Imatrix:
    """Reads the GGUF format: tensors NAME.in_sum2 [experts, columns] and NAME.counts [experts, 1]."""
    importances: dict[str, Entry] = {}
    with GgufFile(path, copies=True) as file:
        for name in file.tensors:
            stem = name.removesuffix(_SUMS)
            if stem == name:
                if name.endswith(_COUNTS) and name.removesuffix(_COUNTS) + _SUMS not in file.tensors:
                    raise CheckpointError(f"{path}: {shown(name)} without {shown(name.removesuffix(_COUNTS) + _SUMS)}")
                continue
            for tensor in (name, stem + _COUNTS):
                entry = file.entry(tensor)
                if entry.type.name != "F32" or not entry.nbytes:
                    raise CheckpointError(f"{path}: tensor {shown(tensor)}: importances are F32, not {entry.type.name} "
                                          f"{list(entry.shape)}")
            importances[stem] = Entry(bytes_of(file.rows(name)), bytes_of(file.rows(stem + _COUNTS)))
        if not importances:
            raise CheckpointError(f"{path}: no tensor ends in {_SUMS}; this is no importance matrix")
        stored = file.metadata.stored()
        datasets, chunks = stored.get("imatrix.datasets"), stored.get("imatrix.chunk_count")
    texts = datasets.decoded(16) if datasets is not None and datasets.type == "string[]" else []
    count = chunks.decoded() if chunks is not None and chunks.type == "u32" else 0
    assert isinstance(texts, list) and isinstance(count, int)
    return Imatrix(path, importances, tuple(map(str, texts)), count)


def _older(path: Path) -> Imatrix:
    """Reads the older format: i32 number of entries; per entry i32 length, name, i32 calls, i32 values, f32[values]; optionally
    i32 chunks, i32 length, dataset.
    """
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size < 4:
            raise CheckpointError(f"{path}: {size} bytes are no importance matrix")
        reader = _Reader(memoryview(map_file(file)).toreadonly(), path)
    count = reader.number("the number of entries of an importance matrix", 1, size // 17)
    importances: dict[str, Entry] = {}
    for _ in range(count):
        start = reader.place
        name = reader.text(reader.number("the length of a name", 1, NAME_LIMIT))
        if name in importances:
            raise reader.fail(f"{shown(name)} occurs twice", start)
        calls = reader.number("the number of calls", 0, (1 << 31) - 1)
        values = reader.number("the number of values", 1, (1 << 31) - 1)
        data = bytes(reader.take(4 * values, f"{values} values of {shown(name)}"))   # a map would end with a file that is cut
        importances[name] = Entry(memoryview(data), None, calls)
    if reader.place == size:
        return Imatrix(path, importances)
    chunks = reader.number("the number of chunks", -1, (1 << 31) - 1)
    dataset = reader.text(reader.number("the length of the dataset's name", 0, DATASET_LIMIT))
    if reader.place != size:
        raise reader.fail(f"{size - reader.place} bytes follow the last entry", reader.place)
    return Imatrix(path, importances, (dataset,) if dataset else (), max(0, chunks))


class _Reader:
    """A read position in a file of the older format."""

    def __init__(self, data: memoryview, path: Path) -> None:
        self.data, self.path, self.place = data, path, 0

    def fail(self, what: str, place: int) -> CheckpointError:
        return CheckpointError(f"{self.path}: byte {place}: {what}")

    def take(self, count: int, what: str) -> memoryview:
        left = len(self.data) - self.place
        if count > left:
            raise self.fail(f"{what} take {count} bytes, but {left} follow", self.place)
        self.place += count
        return self.data[self.place - count:self.place]

    def number(self, what: str, least: int, most: int) -> int:
        number = int(struct.unpack("<i", self.take(4, what))[0])
        if not least <= number <= most:
            raise self.fail(f"{what} is {number}; it can be {least} to {most}", self.place - 4)
        return number

    def text(self, count: int) -> str:
        data = bytes(self.take(count, "a text"))
        try:
            return data.decode()
        except UnicodeDecodeError:
            raise self.fail("a text that is not UTF-8", self.place - count) from None
