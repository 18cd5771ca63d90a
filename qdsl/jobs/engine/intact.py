"""Compares finished work of the stage with its notes, and with the inputs as they are now, before a resumed job keeps it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from itertools import accumulate
from pathlib import Path
from typing import Any, TypeVar

from qdsl.checkpoint.files.crc import Range, checksum, ranges_checksum
from qdsl.host import progress
from qdsl.host.files import open_input
from qdsl.host.processes import results
from qdsl.host.progress import FINISHED
from qdsl.jobs.engine import stage
from qdsl.jobs.engine.shards import Shard, bytes_by_kind
from qdsl.jobs.engine.work import ShowProgress, no_progress, write

WORTH = 1 << 28                                                  # bytes that are worth another process
NUMBERS = {"*": int}

Work = TypeVar("Work")


def missing_shards(shards: Sequence[Shard], out: Path, jobs: int, tell: ShowProgress = no_progress) -> list[Shard]:
    """The shards that have to be written: those that are not staged, or whose bytes or inputs are not what they were.

    tell: progress of the comparison, which is called where something is staged.
    """
    staged = [shard for shard in shards if stage.is_staged(shard, out)]
    bad = not_intact(_is_intact, [((shard, out), shard.nbytes) for shard in staged], jobs, tell)
    for shard, _ in bad:
        (stage.shard_folder(out / stage.STAGE, shard) / stage.NOTE).unlink(missing_ok=True)
    return [shard for shard in shards if not stage.is_staged(shard, out)]


def write_missing(shards: Sequence[Shard], out: Path, jobs: int, tell: ShowProgress, start: Callable[..., None] | None = None,
                  arguments: tuple[Any, ...] = ()) -> int:
    """Write the files that are missing or out of date; returns their number.  start, arguments: as of `write`."""
    todo = missing_shards(shards, out, jobs, tell)
    with tell(bytes_by_kind(todo)) as done:
        write(todo, out / stage.STAGE, jobs, done, start, arguments)
    return len(todo)


def not_intact(is_intact: Callable[[Work], bool], sizes: Sequence[tuple[Work, int]], jobs: int, tell: ShowProgress) -> list[Work]:
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
    with progress.step(FINISHED, shard.nbytes), progress.step_share(shard.nbytes, shard.nbytes + nbytes_read(
            reads for step in shard.steps for reads in step.reads)):
        return _fits_notes(*work)


def nbytes_read(ranges: Iterable[Range]) -> int:
    """Bytes of all ranges."""
    return sum(nbytes for *_, nbytes in ranges)


def _fits_notes(shard: Shard, out: Path) -> bool:
    note = stage.read(stage.shard_folder(out / stage.STAGE, shard) / stage.NOTE)
    crc, reads = note.get("crc", {}), note.get("reads", {})
    if not (stage.has_type(crc, NUMBERS) and stage.has_type(reads, NUMBERS)):
        return False
    with open_input(stage.shard_path(shard, out)) as file:
        if file.read(len(shard.start)) != shard.start:
            return False
        if any(checksum(file, start, nbytes) != crc.get(str(start)) for step in shard.steps for start, nbytes in step.extents
               if nbytes):
            return False
    return all(ranges_checksum(step.reads) == reads.get(str(number)) for number, step in enumerate(shard.steps))
