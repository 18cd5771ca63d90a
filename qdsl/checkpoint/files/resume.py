"""Files that are written tensor by tensor, and continued where a process was interrupted."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO
from zlib import crc32

from qdsl.checkpoint.files.crc import beside, checksum, text
from qdsl.checkpoint.files.strict_json import CheckpointError, shown
from qdsl.host.files import check_unchanged, journal_of, replacing, write_text

Buffer = bytes | bytearray | memoryview
NewTensor = tuple[str, Iterable[Buffer], int, int]


@dataclass(slots=True)
class Resume:
    """How a file is continued that an interrupted process left.

    key: a digest of all that its bytes depend on.  inputs: files that it is made of, with the `identity` that they must have at
    the end, too.  notes: plain data about tensors by name, those that were whole among them.
    """

    key: str
    inputs: Mapping[Path, list[Any]]
    notes: dict[str, Any] = field(default_factory=dict)


def write_tensors(path: Path, start: bytes, tensors: Sequence[NewTensor], resume: Resume | None = None,
                  state_checksums: bool = False) -> dict[str, int]:
    """Write a file of `start` and then tensors: their names, bytes in pieces, sizes, and how many zeros follow.

    Returns the CRC-32 of each tensor.  resume: with it, tensors that are whole in a file of the same key are not asked for.
    state_checksums: write a file that states them, next to this one and before this one is in its place.
    Raises CheckpointError for pieces that do not add up to the size, InputError where an input changed.
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
            write_text(beside(path), text({path.name: checksums}))
    return checksums


def _whole(file: BinaryIO, journal: BinaryIO, start: bytes, tensors: Sequence[NewTensor], notes: dict[str, Any],
           checksums: dict[str, int]) -> int:
    """How many tensors of an unfinished file are whole, by their CRC; the file is cut after them, the journal too."""
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
        except (ValueError, KeyError, TypeError):                # the line that was being written, or a stranger's
            break
        count, end, place = count + 1, end + len(line), file.tell()
    journal.truncate(end)
    file.truncate(place)
    file.seek(place)
    return count


def copy_chunks(file: BinaryIO, pieces: Iterable[Buffer], size: int, where: str) -> int:
    """Write pieces that have `size` bytes together, and return their CRC-32.

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
        raise CheckpointError(f"{where}: takes {size} bytes, but was given {'more' if left < 0 else size - left}")
    return crc
