"""The rest of a folder, when all its shards are there: the other files, the config, the index, and last the shards themselves.

Nothing reads a folder whose index names shards that are missing, or that has no shard: it is whole with the last one's renaming.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from qdsl.checkpoint.folder import INDEX, Folder
from qdsl.checkpoint.layers import Layers
from qdsl.convert import ConvertError, stage
from qdsl.convert.config import rewritten
from qdsl.convert.plan import Plan, Shard
from qdsl.files import flush_folder, replacing, write_text

# Weights: those of the input are in other files now, and others would be of another model.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".npz")
INDICES = tuple(f"{suffix}.index.json" for suffix in WEIGHTS)


def complete(folder: Folder, plan: Plan, layers: Layers, out: Path) -> list[str]:
    """Put everything in its place; returns notes of what was left out.  A call that is broken off is made again.

    Raises ConvertError, before it changes anything, where shards are missing or of another input.
    """
    missing = [shard.name for shard in plan.shards if not stage.is_whole(shard, out)]
    if missing:
        raise ConvertError(f"{out}: {len(missing)} of {len(plan.shards)} shards are not there, or not of {folder.path} as it is "
                           f"now: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    stage.write(out / stage.STAGE / stage.MARK, {})
    others = out / stage.STAGE / stage.OTHERS
    said, notes = rewritten(folder, plan, layers)
    notes += _copy_others(folder, others, said)
    if folder.index or len(plan.shards) > 1:
        write_text(others / INDEX, _index(folder, plan.shards))
    for path in _files(others):
        last = out / path.relative_to(others)
        last.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, last)
    for shard in plan.shards:
        os.replace(stage.place(shard, out), out / shard.name)
    flush_folder(out)                                            # before the stage, which says that more is to be done, is gone
    stage.end(out)
    return notes


def _index(folder: Folder, shards: Sequence[Shard]) -> str:
    """The index of the new files: what the old one said besides places and size stays."""
    old = folder.index.get("metadata", {})
    placed = {name: shard.name for shard in shards for name in shard.tensors}
    size = sum(shard.nbytes for shard in shards)
    metadata = {**(old if isinstance(old, dict) else {}), "total_size": size}
    return json.dumps({"metadata": metadata, "weight_map": dict(sorted(placed.items()))}, indent=2) + "\n"


def _copy_others(folder: Folder, out: Path, said: Mapping[str, str | None]) -> list[str]:
    """All files that hold no weights, those in `said` with another text; returns notes of those that were left."""
    shutil.rmtree(out, ignore_errors=True)                       # of a process that was killed
    out.mkdir()
    left = []
    for path in _files(folder.path) if folder.path.is_dir() else ():
        short = path.relative_to(folder.root)
        if path.name.endswith((*WEIGHTS, *INDICES)):
            left += [] if path in folder.shards or str(short) == INDEX else [str(short)]
            continue
        if str(short) not in said:
            (out / short).parent.mkdir(parents=True, exist_ok=True)
            with open(path, "rb") as old, replacing(out / short) as new:
                shutil.copyfileobj(old, new)
    for name, text in said.items():
        if text is not None:
            write_text(out / name, text)
    return [f"{name} holds other weights, and was not copied" for name in sorted(left)]


def _files(root: Path) -> Iterator[Path]:
    """The regular files of a folder, and of those in it that are not hidden, such as .git."""
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from _files(path)
        elif path.is_file():
            yield path
