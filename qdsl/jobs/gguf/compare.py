"""Compares a GGUF file with the model that it was quantized from: the same tensors, with errors that its types explain."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.report.verify import Difference, Noise
from qdsl.host import progress
from qdsl.jobs.gguf.quality import Sums, quantization_error
from qdsl.jobs.gguf.run import Task, encode

if TYPE_CHECKING:
    from qdsl.jobs.gguf.mixes import Tensor
    from qdsl.jobs.gguf.source import Weights

FACTOR = 1.5                                                     # an importance matrix, or another search, explains so much
SAMPLE = 32                                                      # rows, at the beginning and in the middle of a tensor
CHUNK = 1 << 22                                                  # weights that are compared at a time


def differences(quantized: Weights, source: Weights, tell: Callable[[int, str], None]) -> list[Difference]:
    """Differences between a GGUF file (A) and its model (B) in tensors, shapes, and errors larger than their types explain.

    F32, F16 and BF16 are the model's numbers rounded once.  Of any other type the error may be FACTOR times that of qdsl's own
    quantizer on some rows.  Raises QuantizeError and CheckpointError for files that cannot be read.
    """
    problems, done = [], 0
    for name in dict.fromkeys((*source.tensors, *quantized.tensors)):
        ours, theirs = quantized.tensors.get(name), source.tensors.get(name)
        if ours is None or theirs is None:
            problems.append(Difference(name, "missing", _described(ours), _described(theirs)))
        elif ours.shape != theirs.shape:
            problems.append(Difference(name, "shape", str(list(ours.shape)), str(list(theirs.shape))))
        else:
            with progress.step(progress.COMPARE, ours.nbytes), progress.step_share(ours.nbytes, math.prod(ours.shape[:-1])):
                noise = _noise(quantized, source, name)
            problems += [] if noise is None else [Difference(name, "decoded", ours.type, theirs.type, noise)]
        if ours is not None:
            done += ours.nbytes
            tell(done, name)
    return problems


def _described(tensor: Tensor | None) -> str | None:
    return None if tensor is None else f"{tensor.type} {list(tensor.shape)}"


def _noise(quantized: Weights, source: Weights, name: str) -> Noise | None:
    """The error of a tensor, where it is larger than its type explains; else None."""
    import torch

    tensor = quantized.tensors[name]
    rows, size = math.prod(tensor.shape[:-1]), max(1, CHUNK // max(1, tensor.shape[-1]))
    total = Sums()
    for start in range(0, rows, size):
        stop = min(rows, start + size)
        weight = source.rows(name, start, stop).float()
        if tensor.type in TORCH:
            weight = weight.to(getattr(torch, TORCH[tensor.type])).float()
        total += quantization_error(weight, quantized.rows(name, start, stop).float())
        progress.advance_units(stop - start)
    if total.noise == 0.0:
        return None
    usual = Sums()
    for start in {0, rows // 2} if tensor.type not in TORCH else ():
        usual += encode(source, Task(name, tensor.type, start, min(rows, start + SAMPLE), None))[1]
    noise = Noise(_relative(total), _relative(usual), tensor.type)
    return noise if not noise.error <= FACTOR * noise.usual else None


def _relative(sums: Sums) -> float:
    """The RMS of errors relative to the RMS of the weights."""
    return math.sqrt(sums.noise / sums.signal) if sums.signal else math.inf if sums.noise else 0.0
