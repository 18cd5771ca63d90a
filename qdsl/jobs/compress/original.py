"""What is kept of a checkpoint beside its tensors, so that its files can be made again byte for byte: in qdsl-original.json.

    headers  of each file its header, as it was
    files    config.json and the index, as they were
    groups   of DF11's groups, the matrices; of other formats none
    crc      CRC-32 of each matrix that was compressed

A file of a stranger is not trusted: headers are read as those of safetensors files.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from qdsl.checkpoint.files.folder import INDEX_LIMIT, Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, Header, open_regular, parse_header, strict_json

ORIGINAL = "qdsl-original.json"
SCHEMA = 1


@dataclass(frozen=True, slots=True)
class Original:
    """headers: by the names of files, their bytes before the tensors, and what those say."""

    headers: Mapping[str, tuple[bytes, Header]]
    files: Mapping[str, str]
    groups: Mapping[str, Sequence[str]]
    crc: Mapping[str, int]


def text(format: str, files: Mapping[str, tuple[bytes, Header]], texts: Mapping[str, str],
         groups: Mapping[str, Sequence[str]], crc: Mapping[str, int]) -> str:
    """The text of the file.  files: by name their bytes before the tensors; texts: of config.json and the index."""
    headers = {name: start[8:].decode() for name, (start, _) in files.items()}
    return json.dumps({"schema": SCHEMA, "format": format, "headers": headers, "files": texts, "groups": groups, "crc": crc},
                      indent=1, ensure_ascii=False) + "\n"


def read(folder: Folder) -> Original | None:
    """What a folder has of it, None where there is no such file.  Raises CheckpointError for one that is wrong."""
    path = folder.root / ORIGINAL
    if not folder.path.is_dir() or not path.exists():
        return None
    with open_regular(path) as file:
        data = strict_json(file.read(INDEX_LIMIT), str(path), depth=8)
    if not isinstance(data, dict) or data.get("schema") != SCHEMA:
        raise CheckpointError(f"{path}: not of schema {SCHEMA}")
    headers, files, groups, crc = (_mapping(data.get(name), kind, f"{path}: {name}") for name, kind in
                                   (("headers", str), ("files", str), ("groups", list), ("crc", int)))
    for name in [*headers, *files]:
        if not name or "/" in name or name.startswith(".") or not name.isprintable() or "\\" in name:
            raise CheckpointError(f"{path}: {name!r} is not the name of a file in this folder")
    if not headers or any(not name.endswith(".safetensors") for name in headers) or any(
            not name.endswith(".json") for name in files):
        raise CheckpointError(f"{path}: headers are of .safetensors files, and files are .json")
    if any(not all(isinstance(each, str) for each in parts) for parts in groups.values()):
        raise CheckpointError(f"{path}: groups are lists of names")
    found = {}
    for name, text in headers.items():
        start = text.encode()
        found[name] = len(start).to_bytes(8, "little") + start, parse_header(start, path.parent / name)
    return Original(found, files, groups, crc)


def _mapping(value: object, kind: type, where: str) -> dict[str, Any]:
    if not isinstance(value, dict) or not all(type(each) is kind for each in value.values()):
        raise CheckpointError(f"{where} is not a mapping to values of type {kind.__name__}")
    return value
