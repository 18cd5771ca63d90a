"""Writes files atomically, and never over an input.

A file is written under a temporary name in the same folder, flushed, then renamed.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import secrets
import shutil
import stat
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache
from io import BufferedReader, FileIO, TextIOWrapper
from pathlib import Path
from typing import Any, BinaryIO

import qdsl
from qdsl.host import system, unfinished

JOURNAL = ".journal"                                             # what is complete in an interrupted file
DEPTH_LIMIT = 256                                                # folders in the path of an output
FIRST = 1 << 20                                                  # bytes of a file by which it is known


def cache_folder() -> Path:
    """The folder of files that can be built again: $QDSL_CACHE, or qdsl below the user's cache folder.

    Where that cannot be written, a temporary folder of this process, with a warning.
    """
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    folder = Path(os.environ.get("QDSL_CACHE") or Path(base) / "qdsl")
    return folder if is_writable(folder) else _temporary_cache(folder)


@cache
def is_writable(folder: Path) -> bool:
    """Whether a folder, or its nearest existing parent, takes new files; Windows offers no other test."""
    import tempfile

    nearest = next((path for path in (folder, *folder.absolute().parents) if path.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=nearest):
            return True
    except OSError:
        return False


@cache
def _temporary_cache(folder: Path) -> Path:
    """A cache folder that only this user can enter and that ends with the process, because its files are executed."""
    import tempfile

    temporary = Path(tempfile.mkdtemp(prefix="qdsl-"))
    atexit.register(shutil.rmtree, temporary, ignore_errors=True)
    warnings.warn(f"{folder} cannot be written; the cache is {temporary} until this process ends. "
                  "Set QDSL_CACHE to a folder that can be written.", stacklevel=3)
    return temporary


def digest(*values: Any) -> str:
    """The SHA-256 of this version of qdsl and of plain data that determine the bytes of an output."""
    return hashlib.sha256(json.dumps([qdsl.__version__, *values], sort_keys=True).encode()).hexdigest()


def identity(path: Path) -> list[Any]:
    """A file's name, size, modification time, and a digest of its first MiB, to notice changes of inputs.

    Other changes are noticed when work is resumed, which compares checksums of all that finished work has read.
    """
    with open_input(path) as file:
        status = os.fstat(file.fileno())
        return [path.name, status.st_size, status.st_mtime_ns, hashlib.sha256(file.read(FIRST)).hexdigest()]


@contextmanager
def name_in_errors(path: str | os.PathLike[str], part: Path | None = None) -> Iterator[None]:
    """Adds this file name to system errors that name no file, such as those of reads and writes, or that name `part`."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename not in (None, part, os.fspath(part or "")):
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from None


def read_chunks(path: Path, start: int, nbytes: int) -> Iterator[bytes]:
    """Bytes of a file, a MiB at a time.  Raises OSError, with the path, also for a file that is too short."""
    with open_input(path) as file:
        file.seek(start)
        while nbytes:
            if not (data := file.read(min(1 << 20, nbytes))):
                raise InputError(f"{path}: became shorter while it was read")
            yield data
            nbytes -= len(data)


def check_unchanged(inputs: Mapping[Path, list[Any]]) -> None:
    """Raises InputError if a file is missing or has changed.  inputs: the `identity` of each file when it was read."""
    for path, before in inputs.items():
        if not path.is_file() or identity(path) != before:
            raise InputError(f"{path} changed while it was read; run the same command again")


class InputError(OSError):
    """An input that changed while it was read, or that is no regular file."""


class _Input(FileIO):
    """A file whose errors name it: those of reads name none."""

    def __init__(self, file: int, path: str | os.PathLike[str]) -> None:
        super().__init__(file, "rb")
        self._path = path

    def readinto(self, buffer: Any) -> int | None:
        with name_in_errors(self._path):
            return super().readinto(buffer)

    def readall(self) -> bytes:
        with name_in_errors(self._path):
            return super().readall()


def open_input(path: str | os.PathLike[str]) -> BufferedReader:
    """A regular file, opened for reading, at once: a pipe or a device could wait for ever.

    Raises InputError for anything else, and OSError, with the path also where a read fails.
    """
    if not stat.S_ISREG(mode := os.stat(path).st_mode):          # to open a device may change it
        raise InputError(f"{path}: not a regular file{', but a folder' if stat.S_ISDIR(mode) else ''}")
    file = os.open(path, system.READ)
    if not stat.S_ISREG(os.fstat(file).st_mode):
        os.close(file)
        raise InputError(f"{path}: not a regular file")
    return BufferedReader(_Input(file, path))


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """The bytes of a regular file.  Raises as `open_input` does."""
    with open_input(path) as file:
        return file.read()


def read_utf8(path: str | os.PathLike[str]) -> str:
    """The text of a regular file as it is.  Raises as `open_input` does, InputError where it is not UTF-8."""
    try:
        return read_bytes(path).decode()
    except UnicodeDecodeError as error:
        raise InputError(f"{path}: not UTF-8 text: {error.reason} at byte {error.start}") from None


def read_text(path: str | os.PathLike[str]) -> str:
    """The UTF-8 text of a regular file, with any line ends as line feeds.  Raises as `open_input` does, UnicodeDecodeError."""
    with TextIOWrapper(open_input(path), "utf-8") as file:
        return file.read()


def _check_depth(path: Path) -> None:
    if len(path.parts) > DEPTH_LIMIT:
        raise OutputError(f"{str(path)[:80]}...: {len(path.parts)} folders in one path; at most {DEPTH_LIMIT} are written to")


def make_folder(path: Path) -> None:
    """Make a folder, and those above it.  Raises OutputError for a file, and for more than DEPTH_LIMIT of them, OSError."""
    _check_depth(path.absolute())
    if path.is_file():
        raise OutputError(f"{path} is a file: the output is a folder")
    path.mkdir(parents=True, exist_ok=True)


class OutputError(OSError):
    """An output that would destroy an input or another file, or that is not a regular file."""


def check_output(out: str | os.PathLike[str], *inputs: str | os.PathLike[str], force: bool = True) -> None:
    """Raises OutputError if `out` is an input, links to one, lies in an input folder, or is a folder that contains an input.

    Files and folders are compared by device and inode, with all links followed: inputs never change.
    Raises OSError, with this path, where its folder cannot be written, or cannot be created.
    force: an existing file may be replaced; without it, that raises OutputError too.
    """
    target = Path(os.path.realpath(out))
    if os.fspath(out) == "-":
        raise OutputError("-: this output cannot go to standard output; a file of that name is ./-")
    for path in inputs:
        source = Path(os.path.realpath(path))
        if _is_same(target, source):
            raise OutputError(f"{out}: the output is the input, or links to it")
        if any(_is_same(parent, source) for parent in target.parents):
            raise OutputError(f"{out}: the output lies in {path}, which is an input")
        if any(_is_same(parent, target) for parent in source.parents):
            raise OutputError(f"{out}: the output is a folder that holds the input {path}")
        if shared := shared_file(source, target):
            raise OutputError(f"{out}: the output is the input, or links to it" if target.is_file() else
                              f"{out}: the output is a folder that holds the input {shared}, or links to it")
    if target.is_file() and not force and not any(target.parent.glob(f"{_prefix(target)}*{JOURNAL}")):
        raise OutputError(f"{out} exists already; --force replaces it")
    _check_depth(target)
    nearest = next(folder for folder in target.parents if folder.exists())
    if not nearest.is_dir():
        raise OutputError(f"{out} cannot be written: {nearest} is no folder")
    into = target if target.is_dir() else nearest
    if code := system.write_error(into):
        raise OSError(code, f"cannot write into {into}: {os.strerror(code)}", os.fspath(out))


def _is_same(a: Path, b: Path) -> bool:
    """Whether two paths lead to one file or folder, such as Model and model on file systems that ignore case."""
    return a == b or (a.exists() and b.exists() and a.samefile(b))


def shared_file(source: Path, target: Path) -> Path | None:
    """A file or folder that can be reached from an input, and that an output is, or holds; None where there is none."""
    written = _inodes(target)
    return next((path for inode, path in _inodes(source, True).items() if inode in written), None) if written else None


def _inodes(path: Path, through_links: bool = False) -> dict[tuple[int, int], Path]:
    """A file, or a folder with all that it holds, by device and inode.  through_links: of folders that are links, too."""
    paths: dict[tuple[int, int], Path] = {}

    def add(path: Path) -> bool:
        with suppress(OSError):                                  # a link to nothing, or a file that has gone meanwhile
            status = os.stat(path)
            return paths.setdefault((status.st_dev, status.st_ino), path) is path
        return False

    add(path)
    for folder, subfolders, files in os.walk(path, followlinks=through_links):
        subfolders[:] = [name for name in subfolders if add(Path(folder, name))]
        for name in files:
            add(Path(folder, name))
    return paths


def regular_file(path: str | os.PathLike[str]) -> Path:
    """The path of a file to write, with links resolved.  Raises OutputError for a device, a pipe or a folder."""
    target = Path(os.path.realpath(path))
    if os.path.lexists(target) and not target.is_file():
        raise OutputError(f"{path} cannot be written: it is no regular file")
    return target


@contextmanager
def replacing(path: str | os.PathLike[str], key: str = "") -> Iterator[BinaryIO]:
    """A new file that replaces `path` when the block ends, and is removed if the block fails.  Folders are created.

    It is hidden in the same folder until it is on disk.  A killed process leaves `.qdsl-*.part`, which the next writer of the
    same file removes.  Links are followed, and the mode of a replaced file stays.  key: keep an interrupted file; the next call
    with the same key continues with its bytes.  Its journal is removed last: one without its part is of a complete file.
    Raises OutputError if another process writes the file with this key.
    """
    target = regular_file(path)
    make_folder(target.parent)
    part = part_of(target, key or secrets.token_hex(8))
    _remove_abandoned(target.parent, _prefix(target), part)
    with name_in_errors(path, part):
        file = _open_locked(part)
    try:
        if key:
            unfinished.begin(part)
        with name_in_errors(path), file:
            if target.exists():
                system.copy_mode(target, file)
            yield file
            file.flush()
            os.fsync(file.fileno())
        system.replace(part, target)
    except BaseException as error:
        if isinstance(error, Exception) or not key:
            _remove_part(part)
            unfinished.end(part)
        raise
    flush_folder(target.parent)
    if key:
        unfinished.end(part)
        unfinished.remove_last(journal_of(part))


def part_of(path: Path, key: str) -> Path:
    """The path of an unfinished file, which takes its name when it is complete."""
    return path.with_name(f"{_prefix(path)}{key[:16]}.part")


def _prefix(path: Path) -> str:
    return f".qdsl-{hashlib.sha256(path.name.encode(errors='surrogateescape')).hexdigest()[:12]}-"


def _open_locked(part: Path) -> BinaryIO:
    """A file to write, new or continued, locked for this process.  Raises OutputError if another process has locked it."""
    file = open(part, "r+b", opener=lambda path, _: system.open_new(path))  # noqa: SIM115
    if system.lock(file.fileno()) is False or not part.exists() or not os.path.samestat(os.fstat(file.fileno()), part.stat()):
        file.close()
        raise OutputError(f"{part}: another process is writing this file")
    return file


def journal_of(part: Path) -> Path:
    """The path of the journal with the complete parts of an unfinished file; it is removed with the file."""
    return part.with_name(part.name + JOURNAL)


def _remove_part(part: Path) -> None:
    """Remove an unfinished file, after its journal."""
    journal_of(part).unlink(missing_ok=True)
    part.unlink(missing_ok=True)


def _remove_abandoned(folder: Path, prefix: str, continued: Path) -> None:
    """Remove unfinished files that no living process has open for writing, and journals alone, except what is to be continued."""
    for journal in folder.glob(f"{prefix}*{JOURNAL}"):
        if journal != journal_of(continued) and not journal.with_name(journal.name.removesuffix(JOURNAL)).exists():
            journal.unlink(missing_ok=True)
    for part in folder.glob(f"{prefix}*.part"):
        if part == continued:
            continue
        try:
            descriptor = os.open(part, os.O_RDONLY)
        except OSError:                                          # another process removed it, or has exclusive access
            continue
        try:
            if system.lock(descriptor):
                _remove_part(part)
        finally:
            os.close(descriptor)


def flush_folder(path: Path) -> None:
    """Flush new names in a folder to disk."""
    folder = system.open_folder(path)
    if folder is not None:
        try:
            with name_in_errors(path):
                os.fsync(folder)
        finally:
            os.close(folder)


@contextmanager
def locked(folder: Path, shared: bool = False) -> Iterator[None]:
    """Lock a folder for this process, or shared; the lock ends with its process.

    Does nothing if folders have no locks.  Raises BlockingIOError if another process has locked it, FileNotFoundError.
    """
    descriptor = system.open_folder(folder)
    if descriptor is None:
        yield
        return
    try:
        if system.lock(descriptor, shared) is False:
            raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN), str(folder))
        yield
    finally:
        os.close(descriptor)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a small text file in UTF-8, atomically."""
    with replacing(path) as file:
        file.write(text.encode())
