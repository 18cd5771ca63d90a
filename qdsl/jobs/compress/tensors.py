"""Sources of a tensor's bytes: a range of a file, or a matrix that is decoded from encoded tensors."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.checkpoint.files.crc import Range
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import Entry, read_into, shown
from qdsl.core.codecs import StreamError
from qdsl.jobs.compress import codecs
from qdsl.jobs.compress.codecs import NUMPY, Shape
from qdsl.jobs.engine import RewriteError


@dataclass(frozen=True, slots=True)
class StoredTensor:
    path: Path
    dtype: str
    shape: Shape
    start: int
    nbytes: int

    @property
    def places(self) -> list[StoredTensor]:
        """The stored tensors that it depends on."""
        return [self]

    @property
    def range(self) -> Range:
        """The bytes of its file."""
        return self.path, self.start, self.nbytes

    def read(self) -> NDArray[Any]:
        """Reads the tensor into memory, not from a map: a file that is truncated meanwhile raises CheckpointError."""
        array = np.empty(self.shape, NUMPY[self.dtype])
        read_into(self.path, self.start, byte_view(array))
        return array


def bytes_of(folder: Folder, name: str) -> StoredTensor:
    """A tensor of a folder."""
    return stored_tensor(folder.file(name).path, folder.entry(name))


def stored_tensor(path: Path, entry: Entry) -> StoredTensor:
    return StoredTensor(path, entry.dtype, entry.shape, entry.start, entry.nbytes)


@dataclass(frozen=True, slots=True)
class EncodedMatrices:
    """Matrices that are encoded together: their encoded tensors, and in order the names, shapes and CRC-32 of the matrices.

    where: the folder, for messages.  crc: None where it is unknown.  threads: of a block, in DF11.
    """

    where: str
    format: str
    name: str
    tensors: Mapping[str, StoredTensor]
    names: tuple[str, ...]
    shapes: tuple[Shape, ...]
    crc: tuple[int | None, ...]
    threads: int | None

    @property
    def nbytes(self) -> int:
        """Bytes of all matrices after decoding."""
        return sum(2 * math.prod(shape) for shape in self.shapes)

    def decoded(self) -> list[NDArray[np.uint16]]:
        """The bit patterns of all matrices, [n] each.  Raises RewriteError for damaged tensors."""
        tensors = {leaf: data.read() for leaf, data in self.tensors.items()}
        try:
            matrices = codecs.decode(self.format, tensors, self.shapes, self.threads)
        except StreamError as error:
            raise RewriteError(f"{self.where}: {shown(self.name)}: {error}") from None
        for name, crc, matrix in zip(self.names, self.crc, matrices, strict=True):
            if crc is not None and checksum(matrix) != crc:
                raise RewriteError(f"{self.where}: {shown(name)} is not what was compressed: its tensors are damaged")
        return matrices


@dataclass(frozen=True, slots=True)
class EncodedMatrix:
    """One matrix of several that are encoded together.  number: its index."""

    coded: EncodedMatrices
    number: int

    @property
    def dtype(self) -> str:
        """The safetensors dtype of the decoded matrix."""
        return "BF16"

    @property
    def shape(self) -> Shape:
        """The shape of the decoded matrix."""
        return self.coded.shapes[self.number]

    @property
    def nbytes(self) -> int:
        """Bytes of the decoded matrix."""
        return 2 * math.prod(self.shape)

    @property
    def places(self) -> list[StoredTensor]:
        """The stored tensors that it depends on."""
        return list(self.coded.tensors.values())


Data = StoredTensor | EncodedMatrix


class Reader:
    """Reads tensors one by one; consecutive matrices that are encoded together are decoded once."""

    def __init__(self) -> None:
        self._last: tuple[EncodedMatrices, list[NDArray[np.uint16]]] | None = None

    def read(self, data: Data) -> NDArray[Any]:
        """A tensor in its shape, bfloat16 as bit patterns.  Raises RewriteError for damaged streams."""
        if isinstance(data, StoredTensor):
            return data.read()
        if self._last is None or self._last[0] is not data.coded:
            self._last = None                                    # its memory first
            self._last = data.coded, data.coded.decoded()
        return self._last[1][data.number].reshape(data.shape)


def byte_view(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, in row-major order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def checksum(array: NDArray[Any]) -> int:
    """The CRC-32 of the bytes of an array."""
    return zlib.crc32(byte_view(array))
