"""Writes a GGUF file's weights as plain floats into a safetensors file, a few rows at a time."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from qdsl.checkpoint.detect.gguf_keys import key_findings
from qdsl.checkpoint.detect.gguf_weights import companions, packed_weight
from qdsl.checkpoint.detect.ledger import refuse_changes
from qdsl.checkpoint.files.ggml_types import TORCH, WEIGHTLESS
from qdsl.checkpoint.files.gguf import GgufFile, GgufTensor
from qdsl.checkpoint.files.resume import Resume
from qdsl.checkpoint.files.safetensors import Buffer, CheckpointError, Chunks, bytes_of, shown, write_chunks
from qdsl.host.files import check_output, digest, identity
from qdsl.host.progress import COPY, counted, skip_before

if TYPE_CHECKING:
    import torch

DTYPES = {"f32": "F32", "bf16": "BF16", "f16": "F16"}
WEIGHTS = 1 << 20                                                # of one chunk: 4 MiB of floats, which stay in the CPU's cache


def dequantize_file(path: str | os.PathLike[str], out: str | os.PathLike[str], dtype: str = "f32", force: bool = True,
                    tell: Callable[[Mapping[str, int]], AbstractContextManager[Any]] = nullcontext,
                    allow_unknown: bool = False) -> dict[str, Any]:
    """Write every tensor of a GGUF file under its name, in the model's shape; returns the number of tensors and their bytes.

    Checksums are written next to the file, for `qdsl verify`.

    force: whether an existing file is replaced.  tell: called with the bytes to write by kind of work, shows progress.
    dtype: of the floats, f32, bf16 or f16; F64 and integers stay as they are.  Scale tensors of other weights are multiplied in,
    and not written.  Re-run to resume with the first tensor that is not complete.
    allow_unknown: go on where metadata changes the model in a way that is not understood.
    Raises CheckpointError for such metadata, for a tensor that cannot be read, or whose numbers a dtype cannot hold; nothing is
    written then.
    """
    with GgufFile(path, copies=True) as file:
        check_output(out, *file.paths)
        allowed = refuse_changes(file.path, key_findings(file), allow_unknown)
        entries = [file.entry(name) for name in file.tensors]
        used = {other for entry in entries for other in companions(file, entry).values()}
        written = [entry for entry in entries if entry.name not in used]
        sizes = [(_kind(entry, dtype), _size(entry, dtype)) for entry in written]
        amounts: dict[str, int] = {}
        for kind, nbytes in sizes:
            amounts[kind] = amounts.get(kind, 0) + nbytes
        plan = {entry.name: _counted(_chunks(file, entry, dtype), sizes, number) for number, entry in enumerate(written)}
        inputs = {path: identity(path) for path in file.paths}
        reads = {entry.name: [file.range(name) for name in (entry.name, *companions(file, entry).values())] for entry in entries}
        resume = Resume(digest("dequantize", list(inputs.values()), dtype), inputs, reads, force=force)
        with tell(amounts):
            write_chunks(out, plan, {"format": "pt"}, resume, state_checksums=True)
    return {"file": str(out), "tensors": len(plan), "nbytes": Path(out).stat().st_size, "allowed": allowed}


def _kind(entry: GgufTensor, dtype: str) -> str:
    return COPY if _is_copied(entry, dtype) else entry.type.name


def _size(entry: GgufTensor, dtype: str) -> int:
    """Bytes of a tensor in the new file."""
    return entry.nbytes if _is_copied(entry, dtype) else math.prod(entry.shape) * (4 if dtype == "f32" else 2)


def _is_copied(entry: GgufTensor, dtype: str) -> bool:
    return entry.type.name in WEIGHTLESS or entry.type.name == DTYPES[dtype]


def _counted(chunks: Chunks, sizes: Sequence[tuple[str, int]], number: int) -> Chunks:
    """The chunks of a tensor, counted as progress.  sizes: kind and bytes of all tensors.  number: of this one."""
    def pieces() -> Iterator[Buffer]:
        skip_before(sizes[:number])
        yield from counted(sizes[number][0], chunks.pieces)

    return Chunks(chunks.dtype, chunks.shape, pieces())


def _chunks(file: GgufFile, entry: GgufTensor, dtype: str) -> Chunks:
    if _is_copied(entry, dtype):
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
