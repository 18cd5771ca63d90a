"""What a process does: bytes of the old files into their places in a new one, as they are or as another storage has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch

from qdsl.checkpoint.folder import Folder
from qdsl.checkpoint.layer_weights import weights
from qdsl.checkpoint.safetensors import bytes_of, shown
from qdsl.checkpoint.worker import there
from qdsl.convert import ConvertError
from qdsl.convert.plan import Change, Copy, Step, become
from qdsl.quantize.quality import Sums, measured
from qdsl.runtime.packed import FormatError

CHUNK = 1 << 20                                                  # bytes that are copied at a time


@dataclass(frozen=True, slots=True)
class Task:
    """Steps of a file, which lies under `path` while it is written.  shard: its number."""

    shard: int
    path: Path
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Done:
    """A task that is done.  costs: what requantizing did to layers, signal and noise."""

    task: Task
    costs: Mapping[str, Sums]


def done(task: Task) -> Done:
    """Do a task.  Raises ConvertError where a storage cannot hold a layer after all, CheckpointError and OSError."""
    costs = {}
    with open(task.path, "r+b") as out:
        for step in task.steps:
            if isinstance(step, Copy):
                _copy(step, out)
            elif (cost := _change(step, there[0], out)) is not None:
                costs[step.layer.name] = cost
    return Done(task, costs)


def _copy(step: Copy, out: BinaryIO) -> None:
    out.seek(step.to)
    left = step.nbytes
    with open(step.path, "rb") as file:
        file.seek(step.start)
        while left:
            data = file.read(min(CHUNK, left))
            if not data:
                raise OSError(f"{step.path}: became shorter while it was read")
            out.write(data)
            left -= len(data)


def _change(step: Change, folder: Folder, out: BinaryIO) -> Sums | None:
    """What that cost, None where it is exact."""
    cost = Sums()
    for expert, weight in enumerate(weights(folder, step.layer)):
        try:
            found = become(weight, step.layer, step.aim)
        except FormatError as error:
            raise ConvertError(f"{folder.path}: layer {shown(step.layer.name)} cannot be {step.aim.storage}: {error}") from None
        assert found.tensors.keys() == step.to.keys(), step.layer.name
        for name, entry in step.to.items():
            data = bytes_of(found.tensors[name])
            assert data.nbytes * (step.layer.experts or 1) == entry.nbytes, (step.layer.name, name)
            out.seek(entry.start + expert * data.nbytes)
            out.write(data)
        if not step.aim.exact(step.layer):
            before, after = (each.format.dequantize(each, torch.float32) for each in (weight, found))
            cost += measured(before, after)
    return None if step.aim.exact(step.layer) else cost


def batches(steps: Sequence[Step], nbytes: int = 1 << 25) -> list[tuple[Step, ...]]:
    """Steps in a row that are worth a task."""
    found: list[list[Step]] = []
    size = nbytes
    for step in steps:
        if size >= nbytes:
            found.append([])
            size = 0
        found[-1].append(step)
        size += step.nbytes
    return [tuple(each) for each in found]
