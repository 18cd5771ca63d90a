"""Writes shards into the stage (stage.py) with several processes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from qdsl.checkpoint.files.crc import checksum, ranges_checksum
from qdsl.host import progress, system
from qdsl.host.files import name_in_errors, replacing
from qdsl.host.processes import results
from qdsl.jobs.engine import stage
from qdsl.jobs.engine.shards import Output, Shard, Step

Some = TypeVar("Some", bound=Output)
ReportProgress = Callable[[int, str], None]
# Called with the bytes to write, by kind of work.
ShowProgress = Callable[[Mapping[str, int]], AbstractContextManager[ReportProgress]]


@contextmanager
def no_progress(amounts: Mapping[str, int]) -> Iterator[ReportProgress]:
    """A progress callback that does nothing."""
    yield lambda done, name: None


@dataclass(frozen=True, slots=True)
class Task:
    """Steps of one shard for one process.  shard: its number.  first: the number of its first step in the shard.  path: the file,
    while it is written.
    """

    shard: int
    first: int
    path: Path
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class TaskResult:
    """The result of a task: the reports of its steps by name, the CRC-32 of the tensors that they wrote, by offset, and of what
    they read, by the number of the step.
    """

    task: Task
    reports: Mapping[str, dict[str, Any]]
    crc: Mapping[str, int | None]
    reads: Mapping[str, int]


def run_task(task: Task) -> TaskResult:
    """Runs the steps of a task.  Raises what its steps raise."""
    reports, reads = {}, {}
    with name_in_errors(task.path), open(task.path, "r+b") as out:
        for number, step in enumerate(task.steps, task.first):
            with progress.step(step.kind, step.nbytes):
                reads[str(number)] = ranges_checksum(step.reads)     # before the step reads: a change meanwhile is noticed
                if (report := step.write(out)) is not None:
                    reports[report[0]] = report[1]
        crc = {str(start): checksum(out, start, nbytes) for step in task.steps for start, nbytes in step.extents if nbytes}
    return TaskResult(task, reports, crc, reads)


def write(shards: Sequence[Shard], place: Path, jobs: int, tell: ReportProgress, start: Callable[..., None] | None = None,
          arguments: tuple[Any, ...] = ()) -> None:
    """Write shards into the stage.  A shard takes its name when all its bytes are on disk, and then gets its note.

    start: a function that every process calls first, with `arguments`.
    """
    count = 0
    with stage.lock_folder(place, shared=True), ExitStack() as stack:
        files: dict[int, ExitStack] = {}
        left: dict[int, int] = {}
        notes: list[dict[str, dict[str, Any]]] = [{"reports": {}, "crc": {}, "reads": {}} for _ in shards]
        tasks = _tasks(shards, place, stack, files, left, notes)
        most = sum(len(batches(shard.steps)) for shard in shards)
        for result in stack.enter_context(closing(results(run_task, tasks, min(jobs, most), start, arguments))):
            number = result.task.shard
            count += sum(step.nbytes for step in result.task.steps)
            notes[number]["reports"] |= result.reports
            notes[number]["crc"] |= result.crc
            notes[number]["reads"] |= result.reads
            left[number] -= 1
            if not left[number]:
                files[number].close()
            tell(count, shards[number].name)


def _tasks(shards: Sequence[Shard], place: Path, stack: ExitStack, files: dict[int, ExitStack], left: dict[int, int],
           notes: Sequence[Mapping[str, Any]]) -> Iterator[Task]:
    """The tasks of all shards; a shard's file is created before its first task."""
    for number, shard in enumerate(shards):
        files[number] = stack.enter_context(ExitStack())
        file = files[number].enter_context(_written(shard, place, notes[number]))
        parts = batches(shard.steps) if file is not None else []
        left[number] = len(parts)
        if file is None or not parts:
            files[number].close()
            continue
        first = 0
        for part in parts:
            yield Task(number, first, Path(file.name), part)
            first += len(part)


@contextmanager
def _written(shard: Shard, place: Path, note: Mapping[str, Any]) -> Iterator[BinaryIO | None]:
    """Creates a shard's file, and renames it when the block ends; None where another process has written it meanwhile."""
    folder = stage.shard_folder(place, shard)
    folder.mkdir(parents=True, exist_ok=True)
    with stage.lock_folder(folder):
        if stage.is_staged(shard, place.parent):
            yield None
            return
        for path in folder.iterdir():                            # of a process that was killed
            path.unlink()
        with replacing(folder / folder.name) as file:
            file.write(shard.start)
            system.allocate(file, shard.size)               # an error that the disk is full comes before the work
            yield file
        stage.write_note(shard, place, note)


def batches(steps: Sequence[Some], nbytes: int = 1 << 25) -> list[tuple[Some, ...]]:
    """Consecutive steps, grouped so that each group writes about `nbytes`."""
    groups: list[list[Some]] = []
    size = nbytes
    for step in steps:
        if size >= nbytes:
            groups.append([])
            size = 0
        groups[-1].append(step)
        size += step.nbytes
    return [tuple(group) for group in groups]
