"""The stage: a hidden subfolder of the output, where shards lie until all are complete, each with a note of what it depends on.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from itertools import takewhile
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files.folder import read_object
from qdsl.checkpoint.files.safetensors import parse_header, shown
from qdsl.host import unfinished
from qdsl.host.files import locked, make_folder, write_text
from qdsl.jobs.engine import OccupiedFolder, RewriteError
from qdsl.jobs.engine.others import check_folder, check_overwrites, has_checkpoint, other_files, replaceable_files
from qdsl.jobs.engine.shards import Shard

STAGE = ".qdsl-stage"
DONE = ".qdsl-staged"                                            # the request, when everything is in its place
REQUEST = "request.json"                                         # what is to be written, of what
MARK = "complete"                                                # all shards are complete, and are being put in place
FORCE = "force"                                                  # a checkpoint in the folder is removed before that
SHARDS = "shards"
OTHERS = "others"                                                # the files other than shards
NOTE = "made-of.json"
LIMIT = 1 << 24                                                  # bytes of these files
REQUESTS = {"command": str, "from": str}


def begin(out: Path, request: dict[str, Any], force: bool = False) -> Path:
    """Creates the stage of an output folder, or reopens the one of an interrupted run.

    request: plain data; its 'work' names the job in messages, and 'from' may differ on resuming, as folders are moved.
    force: whether a checkpoint or other unfinished work in the folder is replaced.
    Raises OccupiedFolder where the folder has anything else, or the stage of another request.
    """
    stage = out / STAGE
    if out.is_file():
        raise OccupiedFolder(f"{out} is a file: the output is a folder")
    _refuse_links(stage)
    begun = read(stage / REQUEST) if (stage / REQUEST).exists() else {}
    is_resumed = {**begun, "from": request["from"]} == request
    if begun and not is_resumed and not force:
        raise OccupiedFolder(f"{out}: {begun.get('work', 'something else')} was begun here; remove the folder, write "
                             "another, or begin anew with --force")
    if not is_resumed or not ((stage / MARK).exists() or (stage / FORCE).exists()):
        _check_empty(out, force, Path(request["from"]))
    if begun and not is_resumed:
        shutil.rmtree(stage)
    make_folder(stage)
    if force:
        write(stage / FORCE, {})
    write(stage / REQUEST, request)
    unfinished.begin(stage)
    return stage


def check_output(out: Path, source: Path, force: bool = False) -> None:
    """Raises OutputError for a folder that `begin` refuses whatever the request is, before the input is read."""
    check_folder(out, source)
    if out.is_file():
        raise OccupiedFolder(f"{out} is a file: the output is a folder")
    if not any((out / place).exists() for place in (DONE, Path(STAGE, REQUEST))):
        _check_empty(out, force, source)


def _check_empty(out: Path, force: bool, source: Path) -> None:
    """Raises OccupiedFolder for the name of a file and a folder with files; with `force`, for one whose files are not those of a
    checkpoint and would be lost.
    """
    if out.suffix in (".gguf", ".safetensors") and not out.exists():
        raise OccupiedFolder(f"{out}: the output is a folder, and this is the name of a file"
                             + ("; `qdsl quantize --type` writes GGUF files" if out.suffix == ".gguf" else ""))
    others = [path for path in out.iterdir() if path.name not in (STAGE, DONE)] if out.exists() else []
    if others and not force:
        raise OccupiedFolder(f"{out} exists already, and no interrupted run left it; --force replaces what is in it")
    if others:
        mine = replaceable_files(out)
        if not has_checkpoint(mine):
            raise OccupiedFolder(f"{out}: --force replaces a checkpoint, and this folder holds none")
        check_overwrites(out, other_files(source), mine)


def _refuse_links(stage: Path) -> None:
    """Raises RewriteError for symbolic links in the stage, through which files outside of it would be read or written."""
    for path in (stage, *stage.rglob("*")) if os.path.lexists(stage) else ():
        if path.is_symlink():
            raise RewriteError(f"{path}: a link in unfinished work; remove {stage}")


@contextmanager
def lock_folder(folder: Path, shared: bool = False) -> Iterator[None]:
    """Locks a folder for this process, or with `shared` for all that share it; does nothing on file systems without locks.

    Raises RewriteError where another process has locked it.  A killed process loses its lock.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, shared))
        except FileNotFoundError:
            raise RewriteError(f"{folder}: does not exist any more; another process may have completed the work") from None
        except BlockingIOError:
            raise RewriteError(f"{folder}: another process is writing here") from None
        yield


def read_request(out: Path, kinds: Mapping[str, Any] = REQUESTS) -> dict[str, Any]:
    """The request of the work in a folder.  kinds: as of `has_type`.  Raises RewriteError where there is none of these types."""
    _refuse_links(out / STAGE)
    if (out / DONE).is_file() or not (out / STAGE / REQUEST).is_file():
        raise RewriteError(f"{out}: no work was begun here, or it is complete")
    request = read(out / STAGE / REQUEST)
    if not all(has_type(request.get(name), kind) for name, kind in kinds.items()):
        raise RewriteError(f"{out / STAGE / REQUEST}: no request that qdsl wrote; remove {out / STAGE}")
    return request


def has_type(value: object, kind: Any) -> bool:
    """Whether a JSON value has a type: a type, None, any of a tuple, a list of one, or {"*": type of all values}."""
    if isinstance(kind, tuple):
        return any(has_type(value, element) for element in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(has_type(element, kind[0]) for element in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(has_type(element, kind["*"]) for element in value.values())
    return value is None if kind is None else type(value) is kind


def end(out: Path) -> None:
    """Remove the stage, and last the request, from which a repeated call sees that the work is complete."""
    os.replace(out / STAGE / REQUEST, out / DONE)
    remove(out)


def remove_if_ended(out: Path, request: dict[str, Any]) -> bool:
    """Whether an earlier process completed this work, but was killed before it removed the stage; removes it.

    Raises OccupiedFolder where another work is complete in the folder.
    """
    if not (out / DONE).is_file() or (out / DONE).is_symlink():
        return False
    done = read(out / DONE)
    remove(out)
    if {**done, "from": request["from"]} != request:
        raise OccupiedFolder(f"{out}: {done.get('work', 'another work')} is complete here; write another folder")
    return True


def was_merged(out: Path) -> bool:
    """Whether an earlier process merged all parts, but was killed before it removed the stage; removes it."""
    is_done = (out / DONE).is_file() and not (out / DONE).is_symlink()
    if is_done:
        remove(out)
    return is_done


def remove(out: Path) -> None:
    """Removes the stage of an output folder."""
    _refuse_links(out / STAGE)
    shutil.rmtree(out / STAGE, ignore_errors=True)               # another process may be at it, too
    unfinished.end(out / STAGE)
    unfinished.remove_last(out / DONE)


def make_room(out: Path, new: Mapping[str, Path | None]) -> list[str]:
    """Makes room for new files; returns notes on files that stay.  With `--force` the checkpoint in the folder is removed.

    new: as of `check_overwrites`, which raises OccupiedFolder before anything is removed.
    """
    mine = replaceable_files(out) if (out / STAGE / FORCE).exists() else []
    check_overwrites(out, new, mine)
    for path in mine:
        path.unlink(missing_ok=True)
        for folder in takewhile(lambda folder: folder != out and not any(folder.iterdir()), path.parents):
            folder.rmdir()
    names = {Path(name).parts[0] for name in new}
    return [f"{path.name} is no file of a checkpoint, and stays" for path in sorted(out.iterdir())
            if path.name not in names and not path.name.startswith(".")]


def shard_folder(stage: Path, shard: Shard) -> Path:
    """The folder of the stage in which a shard is written."""
    return stage / SHARDS / shard.name


def shard_path(shard: Shard, out: Path) -> Path:
    """The current path of a shard: in the stage, or its final one."""
    folder = shard_folder(out / STAGE, shard)
    return folder / folder.name if (folder / folder.name).exists() else out / shard.name


def is_staged(shard: Shard, out: Path) -> bool:
    """Whether a shard is complete and depends on the same inputs as now."""
    note, path = shard_folder(out / STAGE, shard) / NOTE, shard_path(shard, out)
    if not (note.is_file() and path.is_file()):
        return False
    return _fingerprint(shard).items() <= read(note).items() and path.stat().st_size == shard.size


def write_note(shard: Shard, stage: Path, content: Mapping[str, Any]) -> None:
    """Record that a shard is complete.

    content: the reports of its steps, and CRC-32 of its tensors by their offsets and of what each step read by its number.
    """
    write(shard_folder(stage, shard) / NOTE, {**_fingerprint(shard), **content})


def recorded_checksums(shard: Shard, out: Path) -> dict[str, int]:
    """The CRC-32 of a shard's tensors, by name."""
    checksums = read(shard_folder(out / STAGE, shard) / NOTE).get("crc", {})
    if not has_type(checksums, {"*": int}):
        raise RewriteError(f"{out / STAGE}: a note that qdsl did not write; remove the folder")
    tensors = parse_header(shard.start[8:], Path(shard.name)).tensors
    return {name: checksums.get(str(entry.start), 0) if entry.nbytes else 0 for name, entry in tensors.items()}


def step_reports(shards: Sequence[Shard], out: Path) -> dict[str, Any]:
    """The reports of the steps of all complete shards, by name."""
    staged = [read(shard_folder(out / STAGE, shard) / NOTE) for shard in shards if is_staged(shard, out)]
    if wrong := [note for note in staged if not has_type(note.get("reports"), {"*": {"*": (int, float)}})]:
        raise RewriteError(f"{out / STAGE}: a note that qdsl did not write, {shown(str(wrong[0]))}; remove the folder")
    return {name: report for note in staged for name, report in note["reports"].items()}


def _fingerprint(shard: Shard) -> dict[str, Any]:
    """What identifies the contents of a shard: its key and size."""
    return {"key": shard.key, "size": shard.size}


def read(path: Path) -> dict[str, Any]:
    """A JSON object of the stage.  Raises CheckpointError for anything else."""
    return read_object(path, LIMIT)


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON object of the stage, atomically."""
    write_text(path, json.dumps(value) + "\n")
