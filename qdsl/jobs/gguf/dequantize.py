"""Writes a GGUF file's weights as plain floats into a safetensors file, a few rows at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.gguf_weights import companions, packed_weight
from qdsl.checkpoint.files.ggml_types import TORCH, WEIGHTLESS
from qdsl.checkpoint.files.gguf import GgufFile, GgufTensor
from qdsl.checkpoint.files.resume import Resume
from qdsl.checkpoint.files.safetensors import Buffer, CheckpointError, Chunks, bytes_of, shown, write_chunks
from qdsl.host.files import check_output, digest, identity

if TYPE_CHECKING:
    import torch

DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
WEIGHTS = 1 << 20                                                # of one chunk: 4 MiB of floats, which stay in the CPU's cache


def dequantize_file(path: str | os.PathLike[str], out: str | os.PathLike[str], dtype: str = "f32", force: bool = True,
                    ) -> dict[str, Any]:
    """Write every tensor of a GGUF file under its name, in the model's shape; returns the number of tensors and their bytes.

    Checksums are written next to the file, for `qdsl verify`.

    force: whether an existing file is replaced.
    dtype: of the floats, f32, bf16 or f16; F64 and integers stay as they are.  Scale tensors of other weights are multiplied in,
    and not written.  Re-run to resume with the first tensor that is not complete.
    Raises CheckpointError for a tensor that cannot be read or whose numbers a dtype cannot hold; nothing is written then.
    """
    with GgufFile(path, copies=True) as file:
        check_output(out, *file.paths)
        entries = [file.entry(name) for name in file.tensors]
        used = {other for entry in entries for other in companions(file, entry).values()}
        plan = {entry.name: _chunks(file, entry, dtype) for entry in entries if entry.name not in used}
        inputs = {path: identity(path) for path in file.paths}
        reads = {entry.name: [file.range(name) for name in (entry.name, *companions(file, entry).values())] for entry in entries}
        resume = Resume(digest("dequantize", list(inputs.values()), dtype), inputs, reads, force=force)
        write_chunks(out, plan, {"format": "pt"}, resume, state_checksums=True)
    return {"file": str(out), "tensors": len(plan), "nbytes": Path(out).stat().st_size}


def _chunks(file: GgufFile, entry: GgufTensor, dtype: str) -> Chunks:
    if entry.type.name in WEIGHTLESS or entry.type.name == DTYPES[dtype]:
        return Chunks(entry.type.name, entry.logical_shape,
                      (bytes_of(file.rows(entry.name, *rows)) for rows in _row_ranges(math.prod(entry.shape[:-1]), entry)))
    return Chunks(DTYPES[dtype], entry.logical_shape, _rounded(file, entry, dtype))


def _rounded(file: GgufFile, entry: GgufTensor, dtype: str) -> Iterator[Buffer]:
    import torch

    to: torch.dtype = getattr(torch, TORCH[DTYPES[dtype]])
    for exact in _exact(file, entry):
        rounded = exact.to(to)
        if to != exact.dtype and bool((rounded.isinf() & exact.isfinite()).any()):
            raise CheckpointError(f"{file.path}: tensor {shown(entry.name)}: a number of {float(exact.abs().max())} does not fit "
                                  f"{dtype}")
        yield bytes_of(rounded)


def _exact(file: GgufFile, entry: GgufTensor) -> Iterator[torch.Tensor]:
    """The decoded floats of a tensor, some rows at a time."""
    import torch

    has_own = len(entry.shape) == 3 and bool(companions(file, entry))    # scales, for each expert
    count = math.prod(entry.shape[1 if has_own else 0:-1])
    for expert in range(entry.shape[0]) if has_own else [None]:
        for start, stop in _row_ranges(count, entry):
            packed = packed_weight(file, entry.name, expert, start, stop)
            yield packed.format.dequantize(packed, torch.float32)


def _row_ranges(count: int, entry: GgufTensor) -> Iterator[tuple[int, int]]:
    """Ranges of rows of some MiB each; none for a tensor without elements."""
    step = max(1, WEIGHTS // max(1, entry.shape[-1] if entry.shape else 1))
    for start in range(0, count if entry.nbytes else 0, step):
        yield start, min(start + step, count)
