"""A folder converted: planned, written shard by shard, taken up again where it was broken off, by one machine or by many.

A shard is written into the stage (qdsl/rewrite); when all are there, they are made a checkpoint.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from qdsl.checkpoint import worker
from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.layers import Layers, layers
from qdsl.checkpoint.safetensors import shown
from qdsl.convert.config import rewritten
from qdsl.convert.plan import Aim, Change, Plan, plan
from qdsl.quantize.quality import Sums
from qdsl.rewrite import stage
from qdsl.rewrite.complete import complete
from qdsl.rewrite.shards import Shard, index, share
from qdsl.rewrite.work import Telling, quiet, write


def convert(folder: Folder, known: Layers, aim: Aim, out: Path, *, jobs: int = 1, part: tuple[int, int] | None = None,
            tell: Telling = quiet) -> dict[str, Any]:
    """Write a checkpoint whose quantized layers have become what is aimed at, and all else is as it was.

    part: (i, n), from 1: the i-th of n parts of the shards alone, which leaves the rest to `merge`.
    What was done by an earlier call is not done again, where it was made of the same files by the same version; bytes do not
    depend on jobs, parts or interruptions.
    tell: what, given the bytes of all tensors, is told how many are written.
    Memory: twice the largest tensor for each process, beside torch; to requantize some float32 weights as large as the largest.
    Raises RewriteError, CheckpointError and OSError.
    """
    stage.check_apart(folder.path, out)
    planned = plan(folder, known, aim)
    if stage.was_ended(out):
        return _report(planned, out, planned.shards, 0, [], {})
    what = f"a conversion to {f'{aim.format}.{aim.storage}'.removeprefix('.')}"
    place = stage.begin(out, {"command": "convert", "work": what, "from": str(folder.path.resolve()), **asdict(aim)})
    mine = planned.shards if part is None else share(planned.shards, *part)
    todo = [shard for shard in mine if not stage.is_whole(shard, out)]
    with tell(sum(shard.nbytes for shard in todo)) as done:
        try:
            write(todo, place, jobs, done, worker.start, (folder.path,))
        finally:
            worker.finish()
    costs = stage.said(mine, out)
    notes = [] if part else _complete(folder, planned, known, out)
    return _report(planned, out, mine, len(todo), notes, costs)


def merge(out: Path) -> dict[str, Any]:
    """Complete a checkpoint whose parts are all there.

    Raises RewriteError where shards are missing, or are not of the input as it is now.
    """
    asked = stage.asked(out)
    with Folder(str(asked.get("from"))) as folder:
        known = layers(folder)
        planned = plan(folder, known, Aim(asked["format"], asked["storage"], asked["requantize"], asked["params"]))
        costs = stage.said(planned.shards, out)
        return _report(planned, out, planned.shards, 0, _complete(folder, planned, known, out), costs)


def _complete(folder: Folder, planned: Plan, known: Layers, out: Path) -> list[str]:
    said, notes = rewritten(folder, planned, known)
    if folder.index or len(planned.shards) > 1:
        said[folder.index_name] = index(planned.shards, folder.index)
    return [*notes, *complete(folder.path, folder.shards, planned.shards, said, out)]


def _report(planned: Plan, out: Path, shards: Sequence[Shard], written: int, notes: Sequence[str], costs: Mapping[str, Any],
            ) -> dict[str, Any]:
    """What is in these shards, of which so many were written now."""
    done = {step.layer.name for shard in shards for step in shard.steps if isinstance(step, Change)}
    made = [layer for layer in planned.changed if layer.name in done]
    changed = Counter((layer.format, layer.storage) for layer in made)
    there = {name for shard in shards for name in shard.tensors}
    kept = sum(next(iter(layer.tensors.values())) in there for layer in planned.kept)
    aim, sums = planned.aim, {name: Sums(**cost) for name, cost in costs.items()}
    notes = [*(f"layer {shown(layer.name)}: {problem}" for layer in made for problem in layer.problems), *notes]
    return {"out": str(out), "shards": [shard.name for shard in shards], "shards_written": written,
            "nbytes": sum(shard.size for shard in shards), "notes": notes, "layers_kept": kept,
            "layers": [{"from": f"{format}.{storage}", "to": f"{aim.format if aim.requantize else format}.{aim.storage}",
                        "count": count} for (format, storage), count in changed.items()],
            "requantized": {name: each.data() for name, each in sums.items()},
            "snr_db": sum(sums.values(), Sums()).data()["snr_db"]}
