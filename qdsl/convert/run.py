"""The work: shard by shard, taken up again where it was broken off, by one machine or by many.

A shard is written into the stage (stage.py); when all are there, `complete` makes them a checkpoint.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO

from qdsl.checkpoint import worker
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.layers import Layers, layers
from qdsl.checkpoint.safetensors import shown
from qdsl.convert import ConvertError, stage, steps
from qdsl.convert.complete import complete
from qdsl.convert.plan import Aim, Plan, Shard, plan
from qdsl.files import replacing
from qdsl.processes import results
from qdsl.quantize.quality import Sums

Tell = Callable[[int, str], None]


@contextmanager
def quiet(total: int) -> Iterator[Tell]:
    """What is told nothing."""
    yield lambda done, name: None


def convert(folder: Folder, known: Layers, aim: Aim, out: Path, *, jobs: int = 1, part: tuple[int, int] | None = None,
            tell: Callable[[int], AbstractContextManager[Tell]] = quiet) -> dict[str, Any]:
    """Write a checkpoint whose quantized layers have become what is aimed at, and all else is as it was.

    part: (i, n), from 1: the i-th of n parts of the shards alone, which leaves the rest to `merge`.
    What was done by an earlier call is not done again, where it was made of the same files by the same version; bytes do not
    depend on jobs, parts or interruptions.
    tell: what, given the bytes of all tensors, is told how many are written.
    Memory: twice the largest tensor for each process, beside torch; to requantize some float32 weights as large as the largest.
    Raises ConvertError, CheckpointError and OSError.
    """
    if folder.root.resolve() in (out.resolve(), *out.resolve().parents) and folder.path.is_dir():
        raise ConvertError(f"{out}: lies in the folder that is read")
    planned = plan(folder, known, aim)
    if stage.was_ended(out):
        return _report(planned, out, planned.shards, 0, [], {})
    place = stage.begin(out, {"from": str(folder.path.resolve()), **asdict(aim)})
    mine = planned.shards if part is None else share(planned.shards, *part)
    todo = [shard for shard in mine if not stage.is_whole(shard, out)]
    with tell(sum(shard.nbytes for shard in todo)) as done:
        _write(folder, todo, place, jobs, done)
    costs = stage.costs(mine, out)
    notes = [] if part else complete(folder, planned, known, out)
    return _report(planned, out, mine, len(todo), notes, costs)


def merge(out: Path) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all there.

    Raises ConvertError where shards are missing, or are not of the input as it is now.
    """
    asked = stage.asked(out)
    with Folder(str(asked.get("from"))) as folder:
        known = layers(folder)
        planned = plan(folder, known, Aim(asked["format"], asked["storage"], asked["requantize"], asked["params"]))
        costs = stage.costs(planned.shards, out)
        return _report(planned, out, planned.shards, 0, complete(folder, planned, known, out), costs)


def share(shards: Sequence[Shard], place: int, count: int) -> list[Shard]:
    """The shards of part `place`, from 1, of `count` parts of about the same size."""
    sums = [0] * count
    found: list[list[Shard]] = [[] for _ in range(count)]
    for shard in sorted(shards, key=lambda each: -each.size):
        least = sums.index(min(sums))
        sums[least] += shard.size
        found[least].append(shard)
    chosen = {shard.name for shard in found[place - 1]}
    return [shard for shard in shards if shard.name in chosen]


def _write(folder: Folder, shards: Sequence[Shard], place: Path, jobs: int, tell: Tell) -> None:
    """Write shards under their names in the stage.  A shard appears when all of it is on disk, and then its note."""
    count = 0
    with ExitStack() as opened:
        files: dict[int, ExitStack] = {}
        left: dict[int, int] = {}
        costs: list[dict[str, Any]] = [{} for _ in shards]
        tasks = _tasks(shards, place, opened, files, left)
        most = sum(len(steps.batches(shard.steps)) for shard in shards)
        opened.callback(worker.finish)
        for done in opened.enter_context(closing(results(steps.done, tasks, min(jobs, most), worker.start, (folder.path,)))):
            number = done.task.shard
            count += sum(step.nbytes for step in done.task.steps)
            costs[number] |= {name: asdict(each) for name, each in done.costs.items()}
            left[number] -= 1
            if not left[number]:
                files[number].close()
                stage.note(shards[number], place, costs[number])
            tell(count, shards[number].name)


def _tasks(shards: Sequence[Shard], place: Path, opened: ExitStack, files: dict[int, ExitStack], left: dict[int, int],
           ) -> Iterator[steps.Task]:
    """The tasks of all shards; a shard's file is made before its first."""
    for number, shard in enumerate(shards):
        folder = place / shard.name
        folder.mkdir(exist_ok=True)
        for path in folder.iterdir():                            # of a process that was killed
            path.unlink()
        files[number] = opened.enter_context(ExitStack())
        file = files[number].enter_context(replacing(folder / shard.name))
        file.write(shard.start)
        _reserve(file, shard.size)
        parts = steps.batches(shard.steps)
        left[number] = len(parts)
        yield from (steps.Task(number, Path(file.name), part) for part in parts)


def _reserve(file: BinaryIO, size: int) -> None:
    """Room on the disk, or the error that there is none, before the work."""
    file.flush()
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(file.fileno(), 0, size)
    else:
        file.truncate(size)


def _report(planned: Plan, out: Path, shards: Sequence[Shard], written: int, notes: Sequence[str], costs: Mapping[str, Any],
            ) -> dict[str, Any]:
    changed: dict[tuple[str, str], int] = {}
    for layer in planned.changed:
        changed[layer.format, layer.storage] = changed.get((layer.format, layer.storage), 0) + 1
    aim, sums = planned.aim, {name: Sums(**cost) for name, cost in costs.items()}
    notes = [*(f"layer {shown(layer.name)}: {problem}" for layer in planned.changed for problem in layer.problems), *notes]
    return {"out": str(out), "shards": [shard.name for shard in shards], "shards_written": written,
            "nbytes": sum(shard.size for shard in shards), "notes": notes, "layers_kept": len(planned.kept),
            "layers": [{"from": f"{format}.{storage}", "to": f"{aim.format if aim.requantize else format}.{aim.storage}",
                        "count": count} for (format, storage), count in changed.items()],
            "requantized": {name: each.data() for name, each in sums.items()},
            "snr_db": sum(sums.values(), Sums()).data()["snr_db"]}
