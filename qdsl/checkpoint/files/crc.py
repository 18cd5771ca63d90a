"""CRC-32 checksums of tensors, and the files that store them."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import BinaryIO
from zlib import crc32

from qdsl.host.files import open_input, read_chunks
from qdsl.host.progress import advance_units

Range = tuple[Path, int, int]                                    # of a file: its first byte, and how many
FILE = "qdsl-checksums.json"                                     # file -> tensor -> CRC-32 of its bytes, for a folder


def checksums_path(path: Path) -> Path:
    """The path of the file that stores the checksums of a single file, next to it."""
    return path.with_name(f"{path.name}.{FILE}")


def text(checksums: Mapping[str, Mapping[str, int]], others: Mapping[str, int] | None = None) -> str:
    """The JSON text of a checksum file.  checksums: CRC-32 by file name and tensor name.  others: of whole files without weights.
    """
    return json.dumps({"schema": 1, "crc32": checksums, **({} if others is None else {"others": others})}, indent=1) + "\n"


def file_checksum(path: Path) -> int | None:
    with open_input(path) as file:
        return checksum(file, 0, os.fstat(file.fileno()).st_size)


def ranges_checksum(ranges: Iterable[Range]) -> int:
    """The CRC-32 of ranges of files, one after the other.  Raises OSError for a file that is missing or too short."""
    crc = 0
    for path, start, nbytes in ranges:
        for data in read_chunks(path, start, nbytes):
            crc = crc32(data, crc)
            advance_units(len(data))
    return crc


def checksum(file: BinaryIO, start: int, nbytes: int) -> int | None:
    """The CRC-32 of `nbytes` bytes of an open file from `start` on; None where the file ends before."""
    file.seek(start)
    crc, left = 0, nbytes
    while data := file.read(min(left, 1 << 20)):
        crc, left = crc32(data, crc), left - len(data)
        advance_units(len(data))
    return None if left else crc
