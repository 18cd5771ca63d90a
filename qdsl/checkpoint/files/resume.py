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

from qdsl.checkpoint.files.crc import Range, checksum, checksums_path, ranges_checksum, text
from qdsl.checkpoint.files.strict_json import CheckpointError, shown
from qdsl.host import progress
from qdsl.host.files import OutputError, check_unchanged, journal_of, open_input, part_of, replacing, write_text
from qdsl.host.system import open_new
from qdsl.host.unfinished import remove_last

Buffer = bytes | bytearray | memoryview
NewTensor = tuple[str, Iterable[Buffer], int, int]


@dataclass(slots=True)
class Resume:
    """What is needed to resume an interrupted write of a file.

    key: a digest of everything that its bytes depend on.  inputs: the files it is computed from, with the `identity` that they
    must still have at the end.  reads: by tensor name, the ranges of files that its bytes depend on.  notes: plain data by tensor
    name, also of tensors that were complete before.  force: whether an existing file may be replaced.
    """

    key: str
    inputs: Mapping[Path, list[Any]]
    reads: Mapping[str, Sequence[Range]] = field(default_factory=dict)
    notes: dict[str, Any] = field(default_factory=dict)
    force: bool = True
    _checksums: dict[str, int] = field(default_factory=dict)

    def read(self, name: str) -> int:
        """The CRC-32 of what a tensor depends on, computed by the first call, which comes before it is read."""
        if name not in self._checksums:
            self._checksums[name] = ranges_checksum(self.reads.get(name, ()))
        return self._checksums[name]


def write_tensors(path: Path, start: bytes, tensors: Sequence[NewTensor], resume: Resume | None = None,
                  state_checksums: bool = False) -> dict[str, int]:
    """Write a file that begins with `start` and continues with tensors: (name, chunks of bytes, size in bytes, zeros of padding).

    Returns the CRC-32 of each tensor.  resume: tensors that are complete in an unfinished file of the same key are kept, and
    their chunks not read, where their bytes and inputs are what they were.  state_checksums: also write the checksum file, before
    this file is renamed into place.
    Raises CheckpointError for chunks that do not add up to the size, InputError where an input changed, OutputError for a file
    that may not be replaced.
    """
    checksums: dict[str, int] = {}
    if resume and _was_written(path, start, tensors, resume, checksums):
        return checksums
    with replacing(path, resume.key if resume else "") as file, ExitStack() as stack:
        journal = None
        if resume:
            lines = journal_of(Path(file.name))
            journal = stack.enter_context(open(lines, "r+b", opener=lambda path, _: open_new(path)))
        whole = _keep_complete(file, journal, start, tensors, resume, checksums) if journal and resume else 0
        if not whole:
            file.write(start)
        for name, pieces, size, zeros in tensors[whole:]:
            read = resume.read(name) if resume else 0
            crc = checksums[name] = copy_chunks(file, pieces, size, f"{path}: tensor {shown(name)}")
            file.write(bytes(zeros))
            if journal and resume:
                file.flush()
                line = {"name": name, "crc": crc, "zeros": bytes(zeros).hex(), "read": read, "note": resume.notes.get(name)}
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


def _was_written(path: Path, start: bytes, tensors: Sequence[NewTensor], resume: Resume, checksums: dict[str, int]) -> bool:
    """Whether a process that was killed after its last byte has written the file; removes the mark that it left.

    Raises OutputError for any other file that may not be replaced.
    """
    part = part_of(path, resume.key)
    journal = journal_of(part)
    if path.is_file() and journal.is_file() and not part.exists():
        with open_input(path) as file, open_input(journal) as lines:
            is_complete = _count_complete(file, lines, start, tensors, resume, checksums)[0] == len(tensors) and not file.read(1)
        if is_complete:
            remove_last(journal)
            return True
    if path.is_file() and not resume.force:
        raise OutputError(f"{path} exists already; --force replaces it")
    return False


def _keep_complete(file: BinaryIO, journal: BinaryIO, start: bytes, tensors: Sequence[NewTensor], resume: Resume,
                   checksums: dict[str, int]) -> int:
    """How many tensors of an unfinished file are complete; cuts the file and the journal after them."""
    count, end, place = _count_complete(file, journal, start, tensors, resume, checksums)
    journal.truncate(end)
    journal.seek(end)
    file.truncate(place)
    file.seek(place)
    return count


def _count_complete(file: BinaryIO, journal: BinaryIO, start: bytes, tensors: Sequence[NewTensor], resume: Resume,
                    checksums: dict[str, int]) -> tuple[int, int, int]:
    """How many tensors are complete by the CRC of their bytes and inputs, and where they end in the journal and in the file."""
    count = end = place = 0
    lines = journal.readlines() if file.read(len(start)) == start else []
    named = [(line, tensor, tensor[2] + sum(nbytes for *_, nbytes in resume.reads.get(tensor[0], ())))
             for line, tensor in zip(lines, tensors, strict=False)]
    with progress.counting({progress.FINISHED: sum(nbytes for *_, nbytes in named)}):
        for line, tensor, nbytes in named:
            with progress.step(progress.FINISHED, nbytes), progress.step_share(nbytes, nbytes):
                if not _is_complete(file, line, tensor, resume, checksums):
                    break
            count, end, place = count + 1, end + len(line), file.tell()
    return count, end, place


def _is_complete(file: BinaryIO, line: bytes, tensor: NewTensor, resume: Resume, checksums: dict[str, int]) -> bool:
    """Whether a tensor is in the file as its line of the journal says, of inputs as they are now; takes over what that notes."""
    name, _, size, zeros = tensor
    try:
        record = json.loads(line)
        note = {"name": name, "crc": checksum(file, file.tell(), size), "zeros": file.read(zeros).hex(),
                "read": resume.read(name)}
        if note != {key: record[key] for key in note}:
            return False
        resume.notes[name], checksums[name] = record["note"], record["crc"]
    except (ValueError, KeyError, TypeError):                    # an incomplete line, or one that qdsl did not write
        return False
    return True


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
