"""Verifies a checkpoint against the CRC-32 checksums of its tensors, which every job of qdsl writes with its output."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

from qdsl.checkpoint.files import components
from qdsl.checkpoint.files.crc import FILE, checksum, checksums_path
from qdsl.checkpoint.files.folder import read_object
from qdsl.checkpoint.files.gguf import GgufFile
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.host import progress
from qdsl.host.files import open_input

LIMIT = 100_000_000
Extents = Mapping[str, tuple[int, int]]                          # of tensors: the first byte, and how many


def checksum_problems(path: Path, tell: Callable[[int, str], None] = lambda done, name: None) -> list[str]:
    """Problems, one sentence each, with tensors that do not match the checksums of a checkpoint: damaged, missing, or without a
    checksum.

    path: as of `qdsl.open`.  Raises CheckpointError for one without checksums, and for files that are wrong.
    """
    problems: list[str] = []
    done = 0
    for root, files in _models(path):
        checksums = _read_checksums(root, files)
        if not checksums:
            raise CheckpointError(f"{root}: no {FILE} states checksums; qdsl writes it with its outputs")
        for file, tensors in files.items():
            expected = checksums.pop(file.name, {})
            with open_input(file) as data:
                for tensor, (start, nbytes) in tensors.items():
                    crc = expected.pop(tensor, None)
                    with progress.step(progress.CHECK, nbytes), progress.step_share(nbytes, nbytes):
                        is_right = crc is not None and crc == checksum(data, start, nbytes)
                    if not is_right:
                        why = f"has no checksum in {FILE}" if crc is None else "is damaged"
                        problems.append(f"{file}: tensor {shown(tensor)} {why}")
                    tell(done := done + nbytes, tensor)
            problems += [f"{file}: tensor {shown(tensor)} is missing" for tensor in expected]
        problems += [f"{root}: {shown(name)} is missing" for name in checksums]
    return problems


def check(path: Path, is_optional: bool = False) -> None:
    """Raise CheckpointError where a tensor of a checkpoint does not match its checksum, or has none.

    is_optional: whether a checkpoint without any checksums passes.
    """
    if is_optional and not any(_read_checksums(root, files) for root, files in _models(path)):
        return
    if problems := checksum_problems(path):
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"{path}: {problems[0]}{more}; write or download it again")


def size(path: Path) -> int:
    """Bytes of all tensors of a checkpoint.  Raises as `checksum_problems` does."""
    return sum(nbytes for _, files in _models(path) for tensors in files.values() for _, nbytes in tensors.values())


def _models(path: Path) -> Iterator[tuple[Path, dict[Path, Extents]]]:
    """The models of a checkpoint (folders or files), with the byte ranges of the tensors in their files."""
    if (first := components.gguf(path)) is not None:
        with GgufFile(first) as file:
            entries = file.tensors.items()
            yield first, {own: {name: (entry.start, entry.nbytes) for name, entry in entries if entry.shard == shard}
                          for shard, own in enumerate(file.paths)}
        return
    with components.open_models(path) as models:
        for folder in models.values():
            yield folder.path, {file.path: {name: (entry.start, entry.nbytes) for name, entry in file.header.tensors.items()}
                                for file in folder.files()}


def _read_checksums(root: Path, files: Iterable[Path]) -> dict[str, dict[str, int]]:
    """CRC-32 by file name and tensor name, read from the checksum file of the folder and from those next to single files."""
    checksums: dict[str, dict[str, int]] = {}
    folder = root if root.is_dir() else root.parent
    for source in (folder / FILE, *map(checksums_path, files)):
        own = read_object(source, LIMIT).get("crc32") if source.is_file() else {}
        if not isinstance(own, dict) or not all(isinstance(tensors, dict) for tensors in own.values()):
            raise CheckpointError(f"{source}: crc32 must map files and tensors to numbers")
        checksums |= own
    names = {file.name for file in files}
    return checksums if root.is_dir() else {name: own for name, own in checksums.items() if name in names}
