"""The work: shard by shard into the stage (stage.py), each by as many processes as there are."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from qdsl.checkpoint.files.crc import checksum
from qdsl.host import system
from qdsl.host.files import naming, replacing
from qdsl.host.processes import results
from qdsl.jobs.engine import stage
from qdsl.jobs.engine.shards import Shard, Step

Some = TypeVar("Some", bound=Step)
Tell = Callable[[int, str], None]
Telling = Callable[[int], AbstractContextManager[Tell]]         # given how much there is to do


@contextmanager
def quiet(total: int) -> Iterator[Tell]:
    """What is told nothing."""
    yield lambda done, name: None


@dataclass(frozen=True, slots=True)
class Task:
    """Steps of a file, which lies under `path` while it is written.  shard: its number."""

    shard: int
    path: Path
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A task that is done, what its steps have to say, and the CRC-32 of the tensors that they wrote, by their places."""

    task: Task
    said: Mapping[str, dict[str, Any]]
    crc: Mapping[str, int | None]


def done(task: Task) -> Done:
    """Do a task.  Raises what its steps raise."""
    said = {}
    with naming(task.path), open(task.path, "r+b") as out:
        for step in task.steps:
            if (each := step.write(out)) is not None:
                said[each[0]] = each[1]
        crc = {str(start): checksum(out, start, nbytes) for step in task.steps for start, nbytes in step.extents if nbytes}
    return Done(task, said, crc)


def write(shards: Sequence[Shard], place: Path, jobs: int, tell: Tell, start: Callable[..., None] | None = None,
          given: tuple[Any, ...] = ()) -> None:
    """Write shards under their names in the stage.  A shard appears when all of it is on disk, and then its note.

    start: what a process does first, with `given`.
    """
    count = 0
    with stage.held(place, shared=True), ExitStack() as opened:
        files: dict[int, ExitStack] = {}
        left: dict[int, int] = {}
        said: list[dict[str, Any]] = [{} for _ in shards]
        crc: list[dict[str, Any]] = [{} for _ in shards]
        tasks = _tasks(shards, place, opened, files, left, said, crc)
        most = sum(len(batches(shard.steps)) for shard in shards)
        for each in opened.enter_context(closing(results(done, tasks, min(jobs, most), start, given))):
            number = each.task.shard
            count += sum(step.nbytes for step in each.task.steps)
            said[number] |= each.said
            crc[number] |= each.crc
            left[number] -= 1
            if not left[number]:
                files[number].close()
            tell(count, shards[number].name)


def _tasks(shards: Sequence[Shard], place: Path, opened: ExitStack, files: dict[int, ExitStack], left: dict[int, int],
           said: Sequence[Mapping[str, Any]], crc: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    """The tasks of all shards; a shard's file is made before its first."""
    for number, shard in enumerate(shards):
        files[number] = opened.enter_context(ExitStack())
        file = files[number].enter_context(_written(shard, place, said[number], crc[number]))
        parts = batches(shard.steps) if file is not None else []
        left[number] = len(parts)
        if file is None or not parts:
            files[number].close()
            continue
        yield from (Task(number, Path(file.name), part) for part in parts)


@contextmanager
def _written(shard: Shard, place: Path, said: Mapping[str, Any], crc: Mapping[str, Any]) -> Iterator[BinaryIO | None]:
    """A shard's file, which takes its place when the block ends, with its note; None where another process wrote it meanwhile."""
    folder = stage.room(place, shard)
    folder.mkdir(parents=True, exist_ok=True)
    with stage.held(folder):
        if stage.is_whole(shard, place.parent):
            yield None
            return
        for path in folder.iterdir():                            # of a process that was killed
            path.unlink()
        with replacing(folder / folder.name) as file:
            file.write(shard.start)
            system.allocate(file, shard.size)               # an error that the disk is full comes before the work
            yield file
        stage.note(shard, place, said, crc)


def batches(steps: Sequence[Some], nbytes: int = 1 << 25) -> list[tuple[Some, ...]]:
    """Steps in a row that are worth a task."""
    found: list[list[Some]] = []
    size = nbytes
    for step in steps:
        if size >= nbytes:
            found.append([])
            size = 0
        found[-1].append(step)
        size += step.nbytes
    return [tuple(each) for each in found]
