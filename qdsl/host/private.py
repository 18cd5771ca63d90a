"""Files of the cache that are executed: modules and compiled libraries.  Only those that no other user can write are used.

A folder above the cache that everybody can write must be sticky, as /tmp is: else others could replace the cache after the check.
"""

from __future__ import annotations

import os
import stat
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from qdsl.host.files import cache_folder, name_in_errors
from qdsl.host.system import READ, replace

UNFINISHED = ".qdsl-"                                            # how the names of files begin that are being written
BYTECODE = "__pycache__"                                         # is never executed
OWN = "files of the cache are executed; set QDSL_CACHE to a folder of your own"


class UnsafeCache(OSError):
    """Other users can write a file of the cache, or its folder; or there is a file that qdsl did not write."""


def private_folder(name: str) -> Path:
    """A folder below the cache folder, made where it is missing.  name: its path there, with '/' between folders.

    Raises UnsafeCache if other users can write it or a folder between, OSError.
    """
    folder = Path(os.path.realpath(cache_folder()))
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    for parent in folder.parents:
        if hasattr(os, "geteuid") and os.stat(parent).st_mode & (stat.S_IWOTH | stat.S_ISVTX) == stat.S_IWOTH:
            raise UnsafeCache(f"{parent}, above the cache, can be written by everybody, and {OWN}")
    for part in ("", *name.split("/")):
        folder = folder / part
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        status = os.lstat(folder)
        if not stat.S_ISDIR(status.st_mode):
            raise UnsafeCache(f"{folder} is no folder, and {OWN}, or remove it")
        _check_owner(folder, status)
    return folder


def read_private(path: Path) -> bytes | None:
    """The bytes of a file, None where it is missing.  Raises UnsafeCache if other users can write it, OSError."""
    try:
        file = os.open(path, READ | getattr(os, "O_NOFOLLOW", 0))
    except FileNotFoundError:
        return None
    except OSError:
        if not path.is_symlink():
            raise
        raise UnsafeCache(f"{path} is a link, and its text is executed; remove it") from None
    with name_in_errors(path), open(file, "rb") as data:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode):
            raise UnsafeCache(f"{path} is no regular file; remove it")
        _check_owner(path, status)
        return data.read()


def write_private(path: Path, data: bytes, mode: int = 0o600) -> None:
    """Write a file that only this user can write, atomically: parallel processes write the same bytes."""
    file, part = tempfile.mkstemp(prefix=UNFINISHED, suffix=".part", dir=path.parent)
    try:
        with name_in_errors(path), open(file, "wb") as out:
            out.write(data)
        os.chmod(part, mode)
        replace(Path(part), path)
    except BaseException:
        Path(part).unlink(missing_ok=True)
        raise


def check_only(folder: Path, names: Collection[str]) -> None:
    """Raises UnsafeCache for a file or folder that is none of these, because Python or qdsl could read it."""
    for entry in sorted(os.listdir(folder)):
        if entry not in names and entry != BYTECODE and not entry.startswith(UNFINISHED):
            raise UnsafeCache(f"{folder / entry} is no file of qdsl, and modules are imported from its folder; remove it")


def _check_owner(path: Path, status: os.stat_result) -> None:
    """Raises UnsafeCache for a file or folder of another user, or that others can write."""
    if not hasattr(os, "geteuid"):
        return
    if status.st_uid != os.geteuid():
        raise UnsafeCache(f"{path} is another user's, and {OWN}")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UnsafeCache(f"{path} can be written by others, and {OWN}, or remove it")
