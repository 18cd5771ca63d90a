"""A GGUF file and the model that it was made of: the same tensors, with numbers as near as their types come."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.report.verify import Difference, Noise
from qdsl.jobs.gguf.quality import Sums, measured
from qdsl.jobs.gguf.run import Task, encode

if TYPE_CHECKING:
    from qdsl.jobs.gguf.mixes import Tensor
    from qdsl.jobs.gguf.source import Weights

FACTOR = 1.5                                                     # an importance matrix, or another search, explains so much
SAMPLE = 32                                                      # rows, at the beginning and in the middle of a tensor
CHUNK = 1 << 22                                                  # weights that are compared at a time


def differences(made: Weights, source: Weights, tell: Callable[[int, str], None]) -> list[Difference]:
    """Where a GGUF file (A) is not the model (B): tensors, shapes, and errors that its types do not explain.

    F32, F16 and BF16 are the model's numbers rounded once.  Of any other type the error may be FACTOR times that of qdsl's own
    quantizer on some rows.  Raises QuantizeError and CheckpointError for files that cannot be read.
    """
    found, done = [], 0
    for name in dict.fromkeys((*source.tensors, *made.tensors)):
        ours, theirs = made.tensors.get(name), source.tensors.get(name)
        if ours is None or theirs is None:
            found.append(Difference(name, "missing", _described(ours), _described(theirs)))
        elif ours.shape != theirs.shape:
            found.append(Difference(name, "shape", str(list(ours.shape)), str(list(theirs.shape))))
        elif (noise := _noise(made, source, name)) is not None:
            found.append(Difference(name, "decoded", ours.type, theirs.type, noise))
        if ours is not None:
            done += math.prod(ours.shape)
            tell(done, name)
    return found


def _described(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.type} {list(tensor.shape)}"


def _noise(made: Weights, source: Weights, name: str) -> Noise | None:
    """The error of a tensor, where its type does not explain it."""
    import torch

    tensor = made.tensors[name]
    rows, size = math.prod(tensor.shape[:-1]), max(1, CHUNK // max(1, tensor.shape[-1]))
    total = Sums()
    for start in range(0, rows, size):
        stop = min(rows, start + size)
        weight = source.rows(name, start, stop).float()
        if tensor.type in TORCH:
            weight = weight.to(getattr(torch, TORCH[tensor.type])).float()
        total += measured(weight, made.rows(name, start, stop).float())
    if total.noise == 0.0:
        return None
    usual = Sums()
    for start in {0, rows // 2} if tensor.type not in TORCH else ():
        usual += encode(source, Task(name, tensor.type, start, min(rows, start + SAMPLE), None))[1]
    noise = Noise(_relative(total), _relative(usual), tensor.type)
    return noise if not noise.error <= FACTOR * noise.usual else None


def _relative(sums: Sums) -> float:
    """The root mean square of errors, as a part of that of the weights."""
    return math.sqrt(sums.noise / sums.signal) if sums.signal else math.inf if sums.noise else 0.0
