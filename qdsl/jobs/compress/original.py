"""Reads and writes qdsl-original.json, from which `decompress` restores the files of a checkpoint byte for byte.

    headers  the safetensors header of each original file
    files    the original config.json and index
    groups   the matrices of each DF11 group; empty for other formats
    crc      CRC-32 of each matrix that was compressed

The file is not trusted: headers are parsed as strictly as those of safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdsl.checkpoint.files.folder import INDEX_LIMIT, ORIGINAL, Folder, read_object
from qdsl.checkpoint.files.safetensors import CheckpointError, Header, parse_header

SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Original:
    """headers: by file name, the bytes before the tensors, and the parsed header."""

    headers: Mapping[str, tuple[bytes, Header]]
    files: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    crc: Mapping[str, int]


def text(format: str, files: Mapping[str, tuple[bytes, Header]], texts: Mapping[str, str],
         groups: Mapping[str, Sequence[str]], crc: Mapping[str, int]) -> str:
    """The JSON text of qdsl-original.json.  files: by name the bytes before the tensors, and the header; texts: config.json and
    the index.
    """
    headers = {name: start[8:].decode() for name, (start, _) in files.items()}
    return json.dumps({"schema": SCHEMA, "format": format, "headers": headers, "files": texts, "groups": groups, "crc": crc},
                      indent=1, ensure_ascii=False) + "\n"


def read(folder: Folder) -> Original | None:
    """The contents of a folder's qdsl-original.json, None without one.  Raises CheckpointError for a wrong one."""
    path = folder.root / ORIGINAL
    if not folder.path.is_dir() or not path.exists():
        return None
    data = read_object(path, INDEX_LIMIT)
    if data.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: not of schema {SCHEMA}")
    headers, files, groups, crc = (_mapping(data.get(name), kind, f"{path}: {name}") for name, kind in
                                   (("headers", str), ("files", str), ("groups", list), ("crc", int)))
    for name in [*headers, *files]:
        if not name or "/" in name or name.startswith(".") or not name.isprintable() or "\\" in name:
            raise CheckpointError(f"{path}: {name!r} is not the name of a file in this folder")
    if not headers or any(not name.endswith(".safetensors") for name in headers) or any(
            not name.endswith(".json") for name in files):
        raise CheckpointError(f"{path}: headers are of .safetensors files, and files are .json")
    if any(not all(isinstance(part, str) for part in parts) for parts in groups.values()):
        raise CheckpointError(f"{path}: groups are lists of names")
    originals = {}
    for name, text in headers.items():
        start = text.encode()
        originals[name] = len(start).to_bytes(8, "little") + start, parse_header(start, path.parent / name)
    return Original(originals, files, groups, crc)


def _mapping(value: object, kind: type, where: str) -> dict[str, Any]:
    """A JSON object whose values all have a type.  Raises CheckpointError for anything else."""
    if not isinstance(value, dict) or not all(type(element) is kind for element in value.values()):
        raise CheckpointError(f"{where} is not a mapping to values of type {kind.__name__}")
    return value
