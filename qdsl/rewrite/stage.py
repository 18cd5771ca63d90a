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

from qdsl.checkpoint.safetensors import CheckpointError, strict_json
from qdsl.files import locked, write_text
from qdsl.rewrite import RewriteError
from qdsl.rewrite.shards import Shard

STAGE = ".qdsl-stage"
GONE = ".qdsl-staged"                                            # the stage, on its way to be removed
REQUEST = "request.json"                                         # what is to be written, of what
MARK = "complete"                                                # all shards were there, and are being put in place
SHARDS = "shards"
OTHERS = "others"                                                # the files beside the shards
NOTE = "made-of.json"
LIMIT = 1 << 24                                                  # bytes of these files


def begin(out: Path, asked: dict[str, Any]) -> Path:
    """The stage of a folder to be written, a new one or the one that was left.

    asked: plain data; its 'work' is said where something else was begun, and 'from' may change, for folders are moved.
    Raises RewriteError where the folder has anything else, or the stage of something else.
    """
    stage = out / STAGE
    if out.exists() and any(path.name != STAGE for path in out.iterdir()) and not (stage / MARK).exists():
        raise RewriteError(f"{out}: is there already, and is no work that was broken off")
    if (stage / REQUEST).exists() and (found := {**read(stage / REQUEST), "from": asked["from"]}) != asked:
        raise RewriteError(f"{out}: {found.get('work', 'something else')} was begun here; remove the folder, or write another")
    stage.mkdir(parents=True, exist_ok=True)
    write(stage / REQUEST, asked)
    return stage


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


def asked(out: Path) -> dict[str, Any]:
    """What is being written here.  Raises RewriteError where nothing is."""
    was_ended(out)
    if not (out / STAGE / REQUEST).is_file():
        raise RewriteError(f"{out}: no work was begun here, or it is complete")
    return read(out / STAGE / REQUEST)


def end(out: Path) -> None:
    """Everything is in its place: remove the stage."""
    os.rename(out / STAGE, out / GONE)
    was_ended(out)


def was_ended(out: Path) -> bool:
    """Whether a process was killed when everything was in its place; then the rest of the stage is removed."""
    if not (out / GONE).exists():
        return False
    shutil.rmtree(out / GONE, ignore_errors=True)                # another process may be at it, too
    return True


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


def note(shard: Shard, stage: Path, said: Mapping[str, Any]) -> None:
    """Say that a shard is whole, and what its steps had to say."""
    write(room(stage, shard) / NOTE, {**_made_of(shard), "said": dict(said)})


def said(shards: Sequence[Shard], out: Path) -> dict[str, Any]:
    """What the steps of shards had to say that are whole."""
    notes = [read(room(out / STAGE, shard) / NOTE) for shard in shards if is_whole(shard, out)]
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
