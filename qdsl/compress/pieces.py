"""Units encoded into files of the stage, some at a time: what such a file depends on, and what a process does to make it."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.checkpoint.safetensors import CheckpointError, Chunks, Header, read_header, write_chunks
from qdsl.compress import codecs
from qdsl.compress.units import Aim, Unit
from qdsl.entropy.lookup import StreamError
from qdsl.rewrite.shards import key

PIECES = "pieces"                                                # their folder in the stage
WORTH = 1 << 25                                                  # bytes of units that are worth a file
MOST = 256                                                       # units of a file


@dataclass(frozen=True, slots=True)
class Piece:
    """Units and the file that they are encoded into.  key: what it depends on."""

    path: Path
    aim: Aim
    units: tuple[Unit, ...]
    key: str

    @property
    def size(self) -> int:
        return sum(unit.nbytes for unit in self.units)


@dataclass(frozen=True, slots=True)
class Made:
    """What is in a piece.  raw: units that stay as they are, and why.  crc: of each matrix that does not, CRC-32 of its bytes."""

    header: Header
    raw: Mapping[str, str]
    crc: Mapping[str, int]


def pieces(units: Sequence[Unit], aim: Aim, stage: Path, sources: Mapping[Path, list[Any]]) -> list[Piece]:
    """Units in a row, cut by their sizes.  sources: what is known of their files."""
    found = []
    for number, some in enumerate(_batches(units)):
        said = [[unit.label, [[name, sources[each.path], each.shape, each.start] for name, each in unit.parts.items()]]
                for unit in some]
        found.append(Piece(stage / PIECES / f"{number:06}.safetensors", aim, tuple(some),
                           key(aim.format, aim.threads, aim.may_grow, said)))
    return found


def _batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units of one model each."""
    some: list[Unit] = []
    for unit in units:
        full = len(some) == MOST or sum(each.nbytes for each in some) + unit.nbytes > WORTH
        if some and (unit.model != some[0].model or full):
            yield some
            some = []
        some.append(unit)
    if some:
        yield some


def made(piece: Piece) -> Made | None:
    """What is in a piece that was made of what it would be made of now; None where there is no such file."""
    try:
        header = read_header(piece.path)
    except (FileNotFoundError, CheckpointError):
        return None
    if header.metadata.get("key") != piece.key:
        return None
    return Made(header, json.loads(header.metadata["raw"]), json.loads(header.metadata["crc"]))


def held(there: Iterable[tuple[Piece, Made]]) -> Iterator[tuple[Unit, Piece, Made]]:
    """The units of pieces that do not stay as they are."""
    return ((unit, piece, each) for piece, each in there for unit in piece.units if unit.name not in each.raw)


def encode(piece: Piece) -> int:
    """Write a piece; returns how many bytes its units have now, be it that they stay as they are.  Raises OSError."""
    tensors: dict[str, Chunks] = {}
    raw: dict[str, str] = {}
    crc: dict[str, int] = {}
    size = 0
    for unit in piece.units:
        matrices = [each.read() for each in unit.parts.values()]
        try:
            found = codecs.encode(piece.aim.format, matrices, piece.aim.threads)
        except StreamError as error:
            raw[unit.name] = str(error)
            size += unit.nbytes
            continue
        now = sum(each.nbytes for each in found.values())
        if now >= unit.nbytes and not piece.aim.may_grow:
            raw[unit.name] = f"{now} bytes would take the place of {unit.nbytes}"
            size += unit.nbytes
            continue
        size += now
        crc |= {name: checksum(matrix) for name, matrix in zip(unit.parts, matrices, strict=True)}
        tensors |= {unit.full(leaf): Chunks(codecs.DTYPES[each.dtype.name], each.shape, [octets(each)])
                    for leaf, each in found.items()}
    write_chunks(piece.path, tensors, {"key": piece.key, "raw": json.dumps(raw), "crc": json.dumps(crc)})
    return size


def octets(array: NDArray[Any]) -> memoryview:
    """The bytes of an array, in order."""
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def checksum(array: NDArray[Any]) -> int:
    return zlib.crc32(octets(array))
