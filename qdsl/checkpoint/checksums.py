"""CRC-32 checksums of a folder's tensors, which every job that writes folders states, and how a folder is verified by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from qdsl.checkpoint import components
from qdsl.checkpoint.folder import read_object
from qdsl.checkpoint.resume import checksum
from qdsl.checkpoint.safetensors import CheckpointError, shown

FILE = "qdsl-checksums.json"                                     # file -> tensor -> CRC-32 of its bytes
LIMIT = 100_000_000


def text(checksums: Mapping[str, Mapping[str, int]]) -> str:
    """The text of FILE.  checksums: by names of files and of tensors."""
    return json.dumps({"schema": 1, "crc32": checksums}, indent=1) + "\n"


def are_stated(path: Path) -> bool:
    """Whether a folder, or one of several models, states checksums."""
    return (path / FILE).is_file() or (path.is_dir() and any(path.glob(f"*/{FILE}")))


def damaged(path: Path, tell: Callable[[int, str], None] = lambda done, name: None) -> list[str]:
    """Sentences about tensors that are not those of a checkpoint's checksums: damaged, missing, or not stated.

    path: a folder, or one of several models.  Raises CheckpointError for one without checksums, and for files that are wrong.
    """
    problems: list[str] = []
    done = 0
    with components.opened(path) as models:
        for folder in models.values():
            stated = _stated(folder.root)
            for file in folder.files():
                known = stated.pop(file.path.name, {})
                with open(file.path, "rb") as data:
                    for tensor, entry in file.header.tensors.items():
                        crc = known.pop(tensor, None)
                        if crc != checksum(data, entry.start, entry.nbytes):
                            why = f"has no checksum in {FILE}" if crc is None else "is damaged"
                            problems.append(f"{file.path}: tensor {shown(tensor)} {why}")
                        tell(done := done + entry.nbytes, tensor)
                problems += [f"{file.path}: tensor {shown(tensor)} is missing" for tensor in known]
            problems += [f"{folder.root}: {shown(name)} is missing" for name in stated]
    return problems


def _stated(folder: Path) -> dict[str, dict[str, int]]:
    """The checksums that a folder states.  Raises CheckpointError where it states none."""
    if not (folder / FILE).is_file():
        raise CheckpointError(f"{folder}: no {FILE} states checksums; folders that qdsl writes have it")
    stated = read_object(folder / FILE, LIMIT).get("crc32")
    if not isinstance(stated, dict) or not all(isinstance(tensors, dict) for tensors in stated.values()):
        raise CheckpointError(f"{folder / FILE}: crc32 must map files and tensors to numbers")
    return stated


def check(path: Path) -> None:
    """Raise CheckpointError where a tensor of a folder is damaged, as its checksums show, or where it has none."""
    if problems := damaged(path):
        more = f", and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"{path}: {problems[0]}{more}; write or download the folder again")
