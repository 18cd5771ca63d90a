"""Pieces: files of the stage with encoded units, written by parallel processes, and what such a file depends on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from qdsl.checkpoint.files.crc import Range, ranges_checksum
from qdsl.checkpoint.files.safetensors import Chunks, Header
from qdsl.core.codecs import StreamError
from qdsl.host import progress
from qdsl.host.files import digest
from qdsl.jobs.compress import codecs
from qdsl.jobs.compress.tensors import EncodedMatrices, Reader, byte_view, checksum
from qdsl.jobs.compress.units import Compression, Unit
from qdsl.jobs.engine.intact import NUMBERS
from qdsl.jobs.engine.pieces import read_piece, write_piece

PIECES = "pieces"                                                # their folder in the stage
WORTH = 1 << 25                                                  # bytes of units that are worth a file
MOST = 256                                                       # units of a file


@dataclass(frozen=True, slots=True)
class Piece:
    """Units, and the file of the stage that they are encoded into.  key: a digest of what it depends on."""

    path: Path
    aim: Compression
    units: tuple[Unit, ...]
    key: str

    @property
    def size(self) -> int:
        """Bytes of the units before they are encoded."""
        return sum(unit.nbytes for unit in self.units)

    @property
    def label(self) -> str:
        return self.units[-1].label

    @property
    def reads(self) -> list[Range]:
        """The ranges of input files that hold its units."""
        return list(dict.fromkeys(own.range for unit in self.units for data in unit.parts.values() for own in data.places))


@dataclass(frozen=True, slots=True)
class Contents:
    """The contents of a piece.  raw: why units are not encoded.  crc: CRC-32 of the bytes of each encoded matrix."""

    header: Header
    raw: Mapping[str, str]
    crc: Mapping[str, int]


Complete = Sequence[tuple[Piece, Contents]]


def pieces(units: Sequence[Unit], aim: Compression, stage: Path, sources: Mapping[Path, list[Any]]) -> list[Piece]:
    """Divides units into pieces by size, in order.  sources: the identities of their files."""
    result = []
    for number, some in enumerate(_batches(units)):
        origins = [[unit.label, unit.plain, [[name, data.shape, [[sources[own.path], own.start] for own in data.places]]
                                             for name, data in unit.parts.items()]] for unit in some]
        result.append(Piece(stage / PIECES / f"{number:06}.safetensors", aim, tuple(some),
                            digest(aim.format, aim.threads, aim.may_grow, origins)))
    return result


def _batches(units: Sequence[Unit]) -> Iterator[list[Unit]]:
    """Units of one model each; those that are decoded together are consecutive, in one batch."""
    first: dict[int, int] = {}
    some: list[Unit] = []
    last: EncodedMatrices | None = None
    for unit in sorted(units, key=lambda unit: first.setdefault(id(unit.source), unit.number) if unit.source else unit.number):
        full = len(some) == MOST or sum(other.nbytes for other in some) + unit.nbytes > WORTH
        is_same = unit.source is not None and unit.source is last
        if some and (unit.model != some[0].model or (full and not is_same)):
            yield some
            some = []
        some.append(unit)
        last = unit.source
    if some:
        yield some


def read_contents(piece: Piece) -> Contents | None:
    """The contents of a piece that is complete and whose inputs are unchanged; else None."""
    stored = read_piece(piece, raw={"*": str}, crc=NUMBERS)
    if stored is None:
        return None
    header, notes = stored
    streams = codecs.STREAM_NAMES[piece.aim.format]
    is_ours = all(notes["crc"].keys() >= unit.parts.keys() and header.tensors.keys() >= set(map(unit.full, streams))
                  for unit in piece.units if unit.name not in notes["raw"])
    return Contents(header, **notes) if is_ours else None


def encoded_units(pieces: Complete) -> list[tuple[Unit, Piece, Contents]]:
    """The encoded units of pieces, in the order of the files."""
    encoded = [(unit, piece, contents) for piece, contents in pieces for unit in piece.units if unit.name not in contents.raw]
    return sorted(encoded, key=lambda item: item[0].number)


def encode(piece: Piece) -> int:
    """Write a piece; returns the bytes of its units, those that are not encoded included.

    Matrices that were decoded from compressed input but are not encoded are stored under their own names.  Raises OSError, and
    RewriteError for damaged streams.
    """
    tensors: dict[str, Chunks] = {}
    raw: dict[str, str] = {}
    crc: dict[str, int] = {}
    size, reader, reads = 0, Reader(), ranges_checksum(piece.reads)
    for unit in piece.units:
        with progress.step(progress.ENCODE, unit.nbytes):
            matrices = {name: reader.read(data) for name, data in unit.parts.items()}
            progress.advance(unit.nbytes / 4)                    # about its share of the time
            streams = _encoded(unit, piece.aim, list(matrices.values()))
        if isinstance(streams, str):
            raw[unit.name] = streams
            size += unit.nbytes
            tensors |= {name: Chunks("BF16", matrix.shape, [byte_view(matrix)]) for name, matrix in matrices.items()
                        if unit.source is not None}
            continue
        size += sum(stream.nbytes for stream in streams.values())
        crc |= {name: checksum(matrix) for name, matrix in matrices.items()}
        tensors |= {unit.full(leaf): Chunks(codecs.DTYPES[stream.dtype.name], stream.shape, [byte_view(stream)])
                    for leaf, stream in streams.items()}
    write_piece(piece, tensors, reads, raw=raw, crc=crc)
    return size


def _encoded(unit: Unit, aim: Compression, matrices: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]] | str:
    """The tensors of an encoded unit, or the reason why it is not encoded."""
    if unit.plain:
        return unit.plain
    try:
        streams = codecs.encode(aim.format, matrices, aim.threads)
    except StreamError as error:
        return str(error)
    now = sum(stream.nbytes for stream in streams.values())
    if now >= unit.nbytes and not aim.may_grow:
        return f"{now} bytes would take the place of {unit.nbytes}"
    return streams
