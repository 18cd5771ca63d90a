"""Pieces: files of the stage with encoded tensors, whose sizes are unknown before, written by parallel processes."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol, TypeVar
from zlib import crc32

from qdsl.checkpoint.files.crc import Range, checksum, ranges_checksum
from qdsl.checkpoint.files.safetensors import CheckpointError, Chunks, Header, read_header, write_chunks
from qdsl.host import progress
from qdsl.host.files import open_input
from qdsl.host.processes import results
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.intact import NUMBERS, nbytes_read, not_intact
from qdsl.jobs.engine.work import ShowProgress, no_progress


class Piece(Protocol):
    """Work whose result is a file of the stage."""

    @property
    def path(self) -> Path:
        """The file."""

    @property
    def key(self) -> str:
        """A digest of what it depends on."""

    @property
    def size(self) -> int:
        """The amount of work."""

    @property
    def label(self) -> str:
        """Its last part, for progress."""

    @property
    def reads(self) -> Sequence[Range]:
        """The ranges of input files that it depends on."""


PieceT = TypeVar("PieceT", bound=Piece)
Contents = TypeVar("Contents")


def write_piece(piece: Piece, tensors: Mapping[str, Chunks], reads: int, **notes: Any) -> None:
    """Write a piece with notes, plain data.  reads: `ranges_checksum` of its inputs, from before they were read."""
    notes["stored"] = {name: _checksum(chunks) for name, chunks in tensors.items()}
    metadata = {name: json.dumps(value) for name, value in notes.items()}
    write_chunks(piece.path, tensors, {"key": piece.key, "reads": str(reads), **metadata})


def _checksum(chunks: Chunks) -> int:
    crc = 0
    for data in chunks.pieces:
        crc = crc32(data, crc)
    return crc


def read_piece(piece: Piece, **kinds: Any) -> tuple[Header, dict[str, Any]] | None:
    """The header and notes of a piece that is complete and whose inputs are unchanged; else None.  kinds: as of `has_type`."""
    try:
        header = read_header(piece.path)
        notes = {name: json.loads(header.metadata.get(name, "")) for name in kinds}
    except (FileNotFoundError, CheckpointError, ValueError):
        return None
    is_ours = header.metadata.get("key") == piece.key and all(stage.has_type(notes[name], kind) for name, kind in kinds.items())
    return (header, notes) if is_ours else None


def encode_missing(pieces: Sequence[PieceT], contents: Callable[[PieceT], object | None], encode: Callable[[PieceT], int],
                   jobs: int, tell: ShowProgress, start: Callable[..., None] | None = None,
                   arguments: tuple[Any, ...] = ()) -> None:
    """Write the pieces without `contents`, and those whose bytes or inputs changed.

    encode: writes one, and returns the size that it has then.  start, arguments: as of `work.write`.
    """
    todo = keep_intact(pieces, contents, jobs, tell)
    if not todo:
        return
    todo[0].path.parent.mkdir(exist_ok=True)                     # removed with the stage
    before = after = 0
    with tell({progress.ENCODE: sum(piece.size for piece in todo)}) as report, \
            closing(results(encode, todo, min(jobs, len(todo)), start, arguments)) as sizes:
        for piece, size in zip(todo, sizes, strict=True):
            before, after = before + piece.size, after + size
            report(before, piece.label if before == after else f"{100 * after / before:.1f} % {piece.label}")


def keep_intact(pieces: Sequence[PieceT], contents: Callable[[PieceT], object | None], jobs: int,
                tell: ShowProgress = no_progress) -> list[PieceT]:
    """The pieces that have to be encoded: those without `contents`, and those whose bytes or inputs changed, which it removes.

    tell: progress of the comparison, which is called where something is staged.
    """
    staged = [piece for piece in pieces if contents(piece) is not None]
    for piece in not_intact(_is_intact, [(piece, piece.path.stat().st_size) for piece in staged], jobs, tell):
        piece.path.unlink()
    return [piece for piece in pieces if contents(piece) is None]


def _is_intact(piece: Piece) -> bool:
    staged = read_piece(piece, stored=NUMBERS)
    if staged is None:
        return False
    (header, notes), size = staged, piece.path.stat().st_size
    with progress.step(progress.FINISHED, size), progress.step_share(size, size + nbytes_read(piece.reads)), \
            open_input(piece.path) as file:
        return header.metadata.get("reads") == str(ranges_checksum(piece.reads)) and all(
            checksum(file, entry.start, entry.nbytes) == notes["stored"].get(name) for name, entry in header.tensors.items())


def read_all(pieces: Sequence[PieceT], contents: Callable[[PieceT], Contents | None]) -> list[tuple[PieceT, Contents]]:
    """All pieces with their contents.  Raises RewriteError where some are missing."""
    complete = [(piece, own) for piece in pieces if (own := contents(piece)) is not None]
    if missing := len(pieces) - len(complete):
        raise RewriteError(f"{pieces[0].path.parent}: {missing} of {len(pieces)} pieces are not there, or not of the input as it "
                           "is now")
    return complete
