"""Files that appear whole or not at all, and never in place of an input.

They are written under a temporary name in the same folder, flushed, then renamed.
"""

from __future__ import annotations

import hashlib
import os
import secrets
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO


def cache_folder() -> Path:
    """The folder of files that can be built again: $QDSL_CACHE, or qdsl below the user's cache folder."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(os.environ.get("QDSL_CACHE") or Path(base) / "qdsl")


class OutputError(OSError):
    """An output that would destroy an input, or that is no regular file."""


def check_output(out: str | os.PathLike[str], *inputs: str | os.PathLike[str]) -> None:
    """Raise OutputError where `out` is an input, links to one, lies inside of an input folder, or is a folder that holds one."""
    target = Path(os.path.realpath(out))
    for path in inputs:
        source = Path(os.path.realpath(path))
        files = source.rglob("*") if source.is_dir() else [source]
        if target == source or (target.is_file() and any(file.is_file() and file.samefile(target) for file in files)):
            raise OutputError(f"{out}: the output is the input, or links to it")
        if source in target.parents:
            raise OutputError(f"{out}: the output lies in {path}, which is an input")
        if target in source.parents:
            raise OutputError(f"{out}: the output is a folder that holds the input {path}")


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file to be written, after its links.  Raises OutputError where a device, a pipe or a folder is there."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OutputError(f"{path} cannot be written: it is no regular file")
    if not target.parent.is_dir():
        raise FileNotFoundError(f"{path} cannot be written: {target.parent} is no folder")
    return target


@contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[BinaryIO]:
    """A new file that takes the place of `path` when the block ends, and is removed when the block fails.

    It lies hidden in the same folder until it is on disk.  A process that is killed leaves it there as `.qdsl-*.part`; the next
    one that writes the same file removes it.  Links are followed, and the mode of a file that is replaced stays.
    """
    target = regular_file(path)
    prefix = f".qdsl-{hashlib.sha256(target.name.encode(errors='surrogateescape')).hexdigest()[:12]}-"
    _remove_abandoned(target.parent, prefix)
    part = target.parent / f"{prefix}{secrets.token_hex(8)}.part"
    try:
        with open(part, "xb") as file:
            _lock(file.fileno())
            if target.exists() and sys.platform != "win32":
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, target)
    except BaseException:
        part.unlink(missing_ok=True)
        raise
    flush_folder(target.parent)


def _remove_abandoned(folder: Path, prefix: str) -> None:
    """Remove unfinished files that no living process has open for writing."""
    for part in folder.glob(f"{prefix}*.part"):
        try:
            opened = os.open(part, os.O_RDONLY)
        except OSError:                                          # another process removed it, or may read it alone
            continue
        try:
            if _lock(opened):
                part.unlink(missing_ok=True)
        finally:
            os.close(opened)


def _lock(file: int) -> bool:
    """Lock an open file for this process; False where another has it, or where files have no locks."""
    if sys.platform == "win32":
        return False
    import fcntl

    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


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
