"""Compares finished work of the stage with its notes, and with the inputs as they are now, before a resumed job keeps it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Protocol, TypeVar
from zlib import crc32

from qdsl.checkpoint.files.crc import Range, checksum, ranges_checksum
from qdsl.checkpoint.files.safetensors import CheckpointError, Chunks, Header, read_header
from qdsl.host import progress
from qdsl.host.files import open_input
from qdsl.host.processes import results
from qdsl.host.progress import FINISHED
from qdsl.jobs.engine import stage
from qdsl.jobs.engine.shards import Shard
from qdsl.jobs.engine.work import Telling, quiet

WORTH = 1 << 28                                                  # bytes that are worth another process
NUMBERS = {"*": int}


class Piece(Protocol):
    """A file of the stage with encoded tensors, and the ranges of input files that they depend on."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def reads(self) -> Sequence[Range]:
        """The ranges of input files."""


PieceT = TypeVar("PieceT", bound=Piece)
Work = TypeVar("Work")


def missing(shards: Sequence[Shard], out: Path, jobs: int, tell: Telling = quiet) -> list[Shard]:
    """The shards that have to be written: those that are not staged, or whose bytes or inputs are not what they were.

    tell: progress of the comparison, which is called where something is staged.
    """
    staged = [shard for shard in shards if stage.is_whole(shard, out)]
    bad = _not_intact(_is_intact, [((shard, out), shard.nbytes) for shard in staged], jobs, tell)
    for shard, _ in bad:
        (stage.room(out / stage.STAGE, shard) / stage.NOTE).unlink(missing_ok=True)
    return [shard for shard in shards if not stage.is_whole(shard, out)]


def keep_intact(pieces: Sequence[PieceT], header: Callable[[PieceT], object | None], jobs: int,
                tell: Telling = quiet) -> list[PieceT]:
    """The pieces that have to be encoded: those without a `header`, and those whose bytes or inputs changed, which it removes.

    tell: as of `missing`.
    """
    staged = [piece for piece in pieces if header(piece) is not None]
    for piece in _not_intact(_piece_is_intact, [(piece, piece.path.stat().st_size) for piece in staged], jobs, tell):
        piece.path.unlink()
    return [piece for piece in pieces if header(piece) is None]


def piece_notes(tensors: Mapping[str, Chunks], reads: int) -> dict[str, str]:
    """Metadata of a piece for `keep_intact`.  reads: `ranges_checksum` of its inputs, from before they were read."""
    return {"reads": str(reads), "stored": json.dumps({name: _checksum(chunks) for name, chunks in tensors.items()})}


def _checksum(chunks: Chunks) -> int:
    crc = 0
    for data in chunks.pieces:
        crc = crc32(data, crc)
    return crc


def _not_intact(is_intact: Callable[[Work], bool], sizes: Sequence[tuple[Work, int]], jobs: int, tell: Telling) -> list[Work]:
    """The staged work that is not intact, of work and its bytes."""
    if not sizes:
        return []
    staged, nbytes = [work for work, _ in sizes], [size for _, size in sizes]
    with tell({FINISHED: sum(nbytes)}) as done, \
            closing(results(is_intact, staged, min(jobs, len(staged), 1 + sum(nbytes) // WORTH))) as answers:
        wrong = []
        for work, answer, count in zip(staged, answers, accumulate(nbytes), strict=True):
            done(count, "")
            wrong += [] if answer else [work]
        return wrong


def _is_intact(work: tuple[Shard, Path]) -> bool:
    shard, _ = work
    with progress.step(FINISHED, shard.nbytes), progress.part(shard.nbytes, shard.nbytes + _nbytes(
            reads for step in shard.steps for reads in step.reads)):
        return _fits_notes(*work)


def _nbytes(ranges: Iterable[Range]) -> int:
    return sum(nbytes for *_, nbytes in ranges)


def _fits_notes(shard: Shard, out: Path) -> bool:
    note = stage.read(stage.room(out / stage.STAGE, shard) / stage.NOTE)
    crc, reads = note.get("crc", {}), note.get("reads", {})
    if not (stage.fits(crc, NUMBERS) and stage.fits(reads, NUMBERS)):
        return False
    with open_input(stage.place(shard, out)) as file:
        if file.read(len(shard.start)) != shard.start:
            return False
        if any(checksum(file, start, nbytes) != crc.get(str(start)) for step in shard.steps for start, nbytes in step.extents
               if nbytes):
            return False
    return all(ranges_checksum(step.reads) == reads.get(str(number)) for number, step in enumerate(shard.steps))


def _piece_is_intact(piece: Piece) -> bool:
    try:
        header: Header = read_header(piece.path)
        stored = json.loads(header.metadata.get("stored", ""))
    except (CheckpointError, ValueError):
        return False
    size = piece.path.stat().st_size
    with progress.step(FINISHED, size), progress.part(size, size + _nbytes(piece.reads)), open_input(piece.path) as file:
        return stage.fits(stored, NUMBERS) and header.metadata.get("reads") == str(ranges_checksum(piece.reads)) and all(
            checksum(file, entry.start, entry.nbytes) == stored.get(name) for name, entry in header.tensors.items())
