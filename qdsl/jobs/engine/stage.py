"""Where shards lie until all of them are there: in a hidden folder of the one to be written, each with a note of what it was
made of.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files.safetensors import CheckpointError, parse_header, shown, strict_json
from qdsl.host.files import locked, write_text
from qdsl.jobs.engine import OccupiedFolder, RewriteError
from qdsl.jobs.engine.shards import Shard

STAGE = ".qdsl-stage"
DONE = ".qdsl-staged"                                            # the request, when everything is in its place
REQUEST = "request.json"                                         # what is to be written, of what
MARK = "complete"                                                # all shards were there, and are being put in place
FORCE = "force"                                                  # what is in the folder is removed before that
SHARDS = "shards"
OTHERS = "others"                                                # the files beside the shards
NOTE = "made-of.json"
LIMIT = 1 << 24                                                  # bytes of these files
CHECKPOINT = (".safetensors", ".safetensors.index.json", "model_index.json", "config.json")   # of a folder that may be replaced
REQUESTS = {"command": str, "from": str}


def begin(out: Path, request: dict[str, Any], force: bool = False) -> Path:
    """The stage of a folder to be written, a new one or the one that was left.

    request: plain data; its 'work' is said where something else was begun, and 'from' may change, for folders are moved.
    force: whether a checkpoint, or other unfinished work, that lies in the folder is replaced.
    Raises OccupiedFolder where the folder has anything else, or the stage of something else.
    """
    stage = out / STAGE
    _refuse_links(stage)
    if not (stage / MARK).exists() and not (stage / FORCE).exists():
        _check_empty(out, force)
    if (stage / REQUEST).exists() and {**(begun := read(stage / REQUEST)), "from": request["from"]} != request:
        if not force:
            raise OccupiedFolder(f"{out}: {begun.get('work', 'something else')} was begun here; remove the folder, write "
                                 "another, or begin anew with --force")
        shutil.rmtree(stage)
    stage.mkdir(parents=True, exist_ok=True)
    if force:
        write(stage / FORCE, {})
    write(stage / REQUEST, request)
    return stage


def _check_empty(out: Path, force: bool) -> None:
    """Raises OccupiedFolder for one that holds files; with `force`, for one that holds no checkpoint that can be replaced."""
    others = [path for path in out.iterdir() if path.name not in (STAGE, DONE)] if out.exists() else []
    if others and not force:
        raise OccupiedFolder(f"{out} exists already, and no interrupted run left it; --force replaces what is in it")
    if others and not any(path.name.endswith(CHECKPOINT) for path in others):
        raise OccupiedFolder(f"{out}: --force replaces a checkpoint, and this folder holds none")


def _refuse_links(stage: Path) -> None:
    """Raises RewriteError for links, through which work would be written elsewhere, or taken from there."""
    for path in (stage, *stage.rglob("*")) if os.path.lexists(stage) else ():
        if path.is_symlink():
            raise RewriteError(f"{path}: a link in unfinished work; remove {stage}")


@contextmanager
def held(folder: Path, shared: bool = False) -> Iterator[None]:
    """A folder, for this process alone or for those that share it; where files have no locks, for anyone.

    Raises RewriteError where another process has it.  One that is killed has it no more.
    """
    with ExitStack() as stack:
        try:
            stack.enter_context(locked(folder, shared))
        except FileNotFoundError:
            raise RewriteError(f"{folder}: is gone, as where another process completed the work") from None
        except BlockingIOError:
            raise RewriteError(f"{folder}: another process is writing here") from None
        yield


def asked(out: Path, kinds: Mapping[str, Any] = REQUESTS) -> dict[str, Any]:
    """What is being written here.  kinds: as of `fits`.  Raises RewriteError where nothing is, or where it is of other kinds."""
    _refuse_links(out / STAGE)
    if (out / DONE).is_file() or not (out / STAGE / REQUEST).is_file():
        raise RewriteError(f"{out}: no work was begun here, or it is complete")
    request = read(out / STAGE / REQUEST)
    if not all(fits(request.get(name), kind) for name, kind in kinds.items()):
        raise RewriteError(f"{out / STAGE / REQUEST}: no request that qdsl wrote; remove {out / STAGE}")
    return request


def fits(value: object, kind: Any) -> bool:
    """Whether a value of JSON is of a kind: a type, None, any of a tuple, a list of one, or {"*": kind of all values}."""
    if isinstance(kind, tuple):
        return any(fits(value, each) for each in kind)
    if isinstance(kind, list):
        return isinstance(value, list) and all(fits(each, kind[0]) for each in value)
    if isinstance(kind, dict):
        return isinstance(value, dict) and all(fits(each, kind["*"]) for each in value.values())
    return value is None if kind is None else type(value) is kind


def end(out: Path) -> None:
    """Everything is in its place: remove the stage, and last the request, by which a repeated call knows that all is done."""
    os.replace(out / STAGE / REQUEST, out / DONE)
    _remove(out)


def was_ended(out: Path, request: dict[str, Any]) -> bool:
    """Whether a process was killed when everything was in its place; then what it left is removed.

    Raises OccupiedFolder where that was another work, which is complete.
    """
    if not (out / DONE).is_file() or (out / DONE).is_symlink():
        return False
    done = read(out / DONE)
    _remove(out)
    if {**done, "from": request["from"]} != request:
        raise OccupiedFolder(f"{out}: {done.get('work', 'another work')} is complete here; write another folder")
    return True


def was_merged(out: Path) -> bool:
    """Whether a process that merged parts was killed when everything was in its place; then what it left is removed."""
    is_done = (out / DONE).is_file() and not (out / DONE).is_symlink()
    if is_done:
        _remove(out)
    return is_done


def _remove(out: Path) -> None:
    _refuse_links(out / STAGE)
    shutil.rmtree(out / STAGE, ignore_errors=True)               # another process may be at it, too
    (out / DONE).unlink(missing_ok=True)


def clear(out: Path) -> None:
    """Remove what a folder holds that is replaced, but what is hidden."""
    for path in out.iterdir():
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            shutil.rmtree(path)
        elif not path.name.startswith("."):
            path.unlink()


def room(stage: Path, shard: Shard) -> Path:
    """The folder in which a shard is written, under the last part of its name."""
    return stage / SHARDS / shard.name


def place(shard: Shard, out: Path) -> Path:
    """Where a shard lies: still in the stage, or in its place."""
    folder = room(out / STAGE, shard)
    return folder / folder.name if (folder / folder.name).exists() else out / shard.name


def is_whole(shard: Shard, out: Path) -> bool:
    """Whether a shard is there, made of what it would be made of now."""
    note, path = room(out / STAGE, shard) / NOTE, place(shard, out)
    if not (note.is_file() and path.is_file()):
        return False
    return _made_of(shard).items() <= read(note).items() and path.stat().st_size == shard.size


def note(shard: Shard, stage: Path, said: Mapping[str, Any], crc: Mapping[str, Any]) -> None:
    """Say that a shard is whole, what its steps had to say, and the CRC-32 of its tensors, by their places."""
    write(room(stage, shard) / NOTE, {**_made_of(shard), "said": dict(said), "crc": dict(crc)})


def crc(shard: Shard, out: Path) -> dict[str, int]:
    """The CRC-32 of a shard's tensors, by name."""
    stated = read(room(out / STAGE, shard) / NOTE).get("crc", {})
    if not fits(stated, {"*": int}):
        raise RewriteError(f"{out / STAGE}: a note that qdsl did not write; remove the folder")
    tensors = parse_header(shard.start[8:], Path(shard.name)).tensors
    return {name: stated.get(str(entry.start), 0) if entry.nbytes else 0 for name, entry in tensors.items()}


def said(shards: Sequence[Shard], out: Path) -> dict[str, Any]:
    """What the steps of shards had to say that are whole."""
    notes = [read(room(out / STAGE, shard) / NOTE) for shard in shards if is_whole(shard, out)]
    if wrong := [note for note in notes if not fits(note.get("said"), {"*": {"*": (int, float)}})]:
        raise RewriteError(f"{out / STAGE}: a note that qdsl did not write, {shown(str(wrong[0]))}; remove the folder")
    return {name: each for note in notes for name, each in note["said"].items()}


def _made_of(shard: Shard) -> dict[str, Any]:
    return {"key": shard.key, "size": shard.size}


def read(path: Path) -> dict[str, Any]:
    """A small file of the stage.  Raises CheckpointError where it is not a JSON object."""
    with open(path, "rb") as file:
        found = strict_json(file.read(LIMIT), str(path), depth=4)
    if not isinstance(found, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return found


def write(path: Path, value: dict[str, Any]) -> None:
    write_text(path, json.dumps(value) + "\n")
