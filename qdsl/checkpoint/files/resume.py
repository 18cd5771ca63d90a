"""Writes files tensor by tensor, and resumes after an interruption."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from qdsl.checkpoint.files.crc import checksum, checksums_path, text
from qdsl.checkpoint.files.strict_json import CheckpointError, shown
from qdsl.host.files import check_unchanged, journal_of, replacing, write_text

Buffer = bytes | bytearray | memoryview
NewTensor = tuple[str, Iterable[Buffer], int, int]


@dataclass(slots=True)
class Resume:
    """What is needed to resume an interrupted write of a file.

    key: a digest of everything that its bytes depend on.  inputs: the files it is computed from, with the `identity` that they
    must still have at the end.  notes: plain data by tensor name, also of tensors that were complete before.
    """

    key: str
    inputs: Mapping[Path, list[Any]]
    notes: dict[str, Any] = field(default_factory=dict)


def write_tensors(path: Path, start: bytes, tensors: Sequence[NewTensor], resume: Resume | None = None,
                  state_checksums: bool = False) -> dict[str, int]:
    """Write a file that begins with `start` and continues with tensors: (name, chunks of bytes, size in bytes, zeros of padding).

    Returns the CRC-32 of each tensor.  resume: tensors that are complete in an unfinished file of the same key are kept, and
    their chunks not read.  state_checksums: also write the checksum file, before this file is renamed into place.
    Raises CheckpointError for chunks that do not add up to the size, InputError where an input changed.
    """
    checksums: dict[str, int] = {}
    with replacing(path, resume.key if resume else "") as file, ExitStack() as stack:
        journal = stack.enter_context(open(journal_of(Path(file.name)), "a+b")) if resume else None
        whole = _whole(file, journal, start, tensors, resume.notes, checksums) if journal and resume else 0
        if not whole:
            file.write(start)
        for name, pieces, size, zeros in tensors[whole:]:
            crc = checksums[name] = copy_chunks(file, pieces, size, f"{path}: tensor {shown(name)}")
            file.write(bytes(zeros))
            if journal and resume:
                file.flush()
                line = {"name": name, "crc": crc, "zeros": bytes(zeros).hex(), "note": resume.notes.get(name)}
                journal.write(json.dumps(line).encode() + b"\n")
                journal.flush()
        if resume:
            check_unchanged(resume.inputs)
        if state_checksums:
            file.flush()
            os.fsync(file.fileno())
            if (listed := checksums_path(path)).is_symlink():    # to an input, perhaps
                listed.unlink()
            write_text(listed, text({path.name: checksums}))
    return checksums


def _whole(file: BinaryIO, journal: BinaryIO, start: bytes, tensors: Sequence[NewTensor], notes: dict[str, Any],
           checksums: dict[str, int]) -> int:
    """How many tensors of an unfinished file are complete, by their CRC; cuts the file and the journal after them."""
    journal.seek(0)
    count = end = place = 0
    lines = journal.readlines() if file.read(len(start)) == start else []
    for line, (name, _, size, zeros) in zip(lines, tensors, strict=False):
        try:
            record = json.loads(line)
            note = {"name": name, "crc": checksum(file, file.tell(), size), "zeros": file.read(zeros).hex()}
            if note != {key: record[key] for key in note}:
                break
            notes[name], checksums[name] = record["note"], record["crc"]
        except (ValueError, KeyError, TypeError):                # an incomplete line, or one that qdsl did not write
            break
        count, end, place = count + 1, end + len(line), file.tell()
    journal.truncate(end)
    file.truncate(place)
    file.seek(place)
    return count


def copy_chunks(file: BinaryIO, pieces: Iterable[Buffer], size: int, where: str) -> int:
    """Write chunks that have `size` bytes in total, and return their CRC-32.

    Raises CheckpointError, beginning with `where`, for more or fewer.
    """
    left, crc = size, 0
    for piece in pieces:
        left -= memoryview(piece).nbytes
        if left < 0:
            break
        file.write(piece)
        crc = crc32(piece, crc)
    if left:
        raise CheckpointError(f"{where}: takes {size} bytes, but got {'more' if left < 0 else size - left}")
    return crc
