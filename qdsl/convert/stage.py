"""Where shards lie until all of them are there: in a hidden folder of the one to be written, each with a note of what it was
made of.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.safetensors import CheckpointError, strict_json
from qdsl.convert import ConvertError
from qdsl.convert.plan import Shard
from qdsl.files import write_text

STAGE = ".qdsl-convert"
GONE = ".qdsl-converted"                                         # the stage, on its way to be removed
REQUEST = "request.json"                                         # what is to be converted, into what
MARK = "complete"                                                # all shards were there, and are being put in place
OTHERS = "others"                                                # the files beside the shards
NOTE = "made-of.json"
LIMIT = 1 << 24                                                  # bytes of these files


def begin(out: Path, asked: dict[str, Any]) -> Path:
    """The stage of a folder to be written, a new one or the one that was left.

    Raises ConvertError where the folder has anything else, or the stage of something else.
    """
    stage = out / STAGE
    if out.exists() and any(path.name != STAGE for path in out.iterdir()) and not (stage / MARK).exists():
        raise ConvertError(f"{out}: is there already, and is no conversion that was broken off")
    if (stage / REQUEST).exists() and (found := {**read(stage / REQUEST), "from": asked["from"]}) != asked:
        what = f"{found.get('format')}.{found.get('storage')}".removeprefix(".")
        raise ConvertError(f"{out}: a conversion to {what} was begun here; remove the folder, or write another")
    stage.mkdir(parents=True, exist_ok=True)
    write(stage / REQUEST, asked)
    return stage


def asked(out: Path) -> dict[str, Any]:
    """What is being converted here.  Raises ConvertError where nothing is."""
    was_ended(out)
    if not (out / STAGE / REQUEST).is_file():
        raise ConvertError(f"{out}: no conversion was begun here, or it is complete")
    return read(out / STAGE / REQUEST)


def end(out: Path) -> None:
    """Everything is in its place: remove the stage."""
    os.rename(out / STAGE, out / GONE)
    was_ended(out)


def was_ended(out: Path) -> bool:
    """Whether a process was killed when everything was in its place; then the rest of the stage is removed."""
    if not (out / GONE).exists():
        return False
    shutil.rmtree(out / GONE)
    return True


def place(shard: Shard, out: Path) -> Path:
    """Where a shard lies: still in the stage, or in its place."""
    staged = out / STAGE / shard.name / shard.name
    return staged if staged.exists() else out / shard.name


def is_whole(shard: Shard, out: Path) -> bool:
    """Whether a shard is there, made of what it would be made of now."""
    note, path = out / STAGE / shard.name / NOTE, place(shard, out)
    if not (note.is_file() and path.is_file()):
        return False
    return _made_of(shard).items() <= read(note).items() and path.stat().st_size == shard.size


def note(shard: Shard, stage: Path, costs: dict[str, Any]) -> None:
    """Say that a shard is whole, and what its layers cost."""
    write(stage / shard.name / NOTE, {**_made_of(shard), "costs": costs})


def costs(shards: Sequence[Shard], out: Path) -> dict[str, Any]:
    """What the layers of shards cost that are whole."""
    notes = [read(out / STAGE / shard.name / NOTE) for shard in shards if is_whole(shard, out)]
    return {name: cost for each in notes for name, cost in each["costs"].items()}


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
