"""Completes an output folder when all its shards are written: other files, config, index, and last the shards themselves.

A folder without shards, or whose index names missing ones, cannot be read: renaming the last shard completes the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files import crc
from qdsl.checkpoint.files.components import within
from qdsl.host.files import check_unchanged, flush_folder, read_chunks, replacing, write_text
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.shards import Shard

# Weights: those of the input are in other files now, and others would be of another model.
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".gguf", ".h5", ".msgpack", ".onnx", ".onnx_data", ".tflite", ".npz")
Inputs = Mapping[Path, list[Any]]
INDICES = tuple(f"{suffix}.index.json" for suffix in WEIGHTS)


def complete(source: Path, read: Collection[Path], shards: Sequence[Shard], changed_texts: Mapping[str, str | None], out: Path,
             inputs: Inputs, is_restored: bool = False) -> list[str]:
    """Move all shards to their final names and write the other files; returns notes on files that were not copied.  Re-run to
    resume.

    source: the input folder or file.  read: its weight files and indices, which are not copied.
    changed_texts: new texts of files, by name relative to the folder; None for a file that is not copied.
    inputs: the identities of files when they were read.  is_restored: whether the original checkpoint is restored, to which no
    checksums are added.
    Raises RewriteError, before it changes anything, where shards are missing, of another input, or being written, and InputError
    where an input changed.
    """
    with stage.lock_folder(out / stage.STAGE):
        sums = {} if is_restored else _checksums([shard for shard in shards if stage.is_whole(shard, out)], out)
        return _completed(source, read, shards, {**changed_texts, **sums}, out, inputs)


def _checksums(shards: Sequence[Shard], out: Path) -> dict[str, str]:
    """The checksum files of shards, one for each model, as file name -> text."""
    models: dict[str, dict[str, dict[str, int]]] = {}
    for shard in shards:
        model, _, file = shard.name.rpartition("/")
        models.setdefault(model, {})[file] = stage.crc(shard, out)
    return {within(model, crc.FILE): crc.text(files) for model, files in models.items()}


def _completed(source: Path, read: Collection[Path], shards: Sequence[Shard], changed_texts: Mapping[str, str | None], out: Path,
               inputs: Inputs) -> list[str]:
    """`complete`, with the stage locked."""
    check_unchanged(inputs)
    missing = [shard.name for shard in shards if not stage.is_whole(shard, out)]
    if missing:
        raise RewriteError(f"{out}: {len(missing)} of {len(shards)} shards are not there, or not of {source} as it is "
                           f"now: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    if (out / stage.STAGE / stage.FORCE).exists() and not (out / stage.STAGE / stage.MARK).exists():
        stage.clear(out)
    stage.write(out / stage.STAGE / stage.MARK, {})
    others = out / stage.STAGE / stage.OTHERS
    notes = _copy_others(source, read, others, changed_texts)
    for path in regular_files(others):
        last = out / path.relative_to(others)
        last.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, last)
    for shard in shards:
        (out / shard.name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage.place(shard, out), out / shard.name)
    for folder in {(out / shard.name).parent for shard in shards} | {out}:
        flush_folder(folder)                                     # before the stage, which marks unfinished work, is removed
    stage.end(out)
    return notes


def _copy_others(source: Path, read: Collection[Path], out: Path, changed_texts: Mapping[str, str | None]) -> list[str]:
    """Copy all files without weights, with the texts of `changed_texts`; returns notes on files that were not copied.

    Hidden files and links out of the folder are not copied: they may be private, such as a key.
    """
    shutil.rmtree(out, ignore_errors=True)                       # of a process that was killed
    out.mkdir()
    left, private = [], []
    for path in regular_files(source) if source.is_dir() else ():
        short = path.relative_to(source)
        if path.name.endswith(crc.FILE):                          # of the old files
            continue
        if path.name.endswith((*WEIGHTS, *INDICES)):
            left += [] if path in read or str(short) in changed_texts else [str(short)]
        elif path.name.startswith(".") or _links_outside(path, source):
            private.append(str(short))
        elif str(short) not in changed_texts:
            (out / short).parent.mkdir(parents=True, exist_ok=True)
            with replacing(out / short) as new:
                new.writelines(read_chunks(path, 0, path.stat().st_size))
    for name, text in changed_texts.items():
        if text is not None:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(out / name, text)
    return [*(f"{name} holds other weights, and was not copied" for name in sorted(left)),
            *(f"{name} is hidden or a link out of the folder, and was not copied" for name in sorted(private))]


def _links_outside(path: Path, root: Path) -> bool:
    """Whether a file is a link out of its folder, other than to a blob of the hub's cache."""
    target = path.resolve()
    return root.resolve() not in target.parents and target.parent.name != "blobs"


def regular_files(root: Path) -> Iterator[Path]:
    """The regular files of a folder and of its subfolders, without hidden subfolders such as .git."""
    for path in sorted(root.iterdir()):
        if path.is_dir() and not path.is_symlink() and not path.name.startswith("."):
            yield from regular_files(path)
        elif path.is_file():
            yield path
