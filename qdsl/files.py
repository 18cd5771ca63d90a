"""Files that appear whole or not at all: written under a temporary name in the same folder, flushed, then renamed."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """The folder of files that can be built again: $QDSL_CACHE, or qdsl below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QDSL_CACHE") or Path(base) / "qdsl")


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and is removed when the block fails.

    It lies hidden in the same folder until it is on disk; a process that is killed leaves it there as `.qdsl-*.part`.
    """
    target = Path(path)
    part = target.parent / f".qdsl-{secrets.token_hex(8)}.part"
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{target} cannot be written: {target.parent} is no folder")
    try:
        with open(part, "xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(target.parent)


def flush_folder(path: Path) -> None:
    """Names that are new in a folder reach the disk."""
    if sys.platform != "win32":
        folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock a folder for this process, or for those that share it; a process that is killed lets go.

    Without effect where files have no locks.  Raises BlockingIOError where another process has it, FileNotFoundError.
    """
    if sys.platform == "win32":
        yield
        return
    import fcntl

    opened = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(opened, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except BlockingIOError:
            raise
        except OSError:                                          # some network file systems
            pass
        yield
    finally:
        os.close(opened)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file in UTF-8, whole or not at all."""
    with replacing(path) as file:
        file.write(text.encode())
