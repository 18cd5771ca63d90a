"""Completes an output folder when all its shards are written: other files, config, index, and last the shards themselves.

A folder without shards, or whose index names missing ones, cannot be read: renaming the last shard completes the checkpoint.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from qdsl.checkpoint.files import crc
from qdsl.checkpoint.files.components import within
from qdsl.host.files import check_unchanged, flush_folder, read_chunks, replacing, write_text
from qdsl.jobs.engine import RewriteError, stage
from qdsl.jobs.engine.others import INDICES, WEIGHTS, check_folder, other_files, regular_files
from qdsl.jobs.engine.shards import Shard

ADAPTER = "adapter_config.json"                                  # by which programs load an adapter with the model
Inputs = Mapping[Path, list[Any]]


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
    check_folder(out, source, *inputs)
    with stage.lock_folder(out / stage.STAGE):
        sums = {} if is_restored else _checksums([shard for shard in shards if stage.is_staged(shard, out)], out)
        return _completed(source, read, shards, changed_texts, out, inputs, None if is_restored else sums)


def _checksums(shards: Sequence[Shard], out: Path) -> dict[str, dict[str, dict[str, int]]]:
    """The checksums of shards: model -> file -> tensor -> CRC-32."""
    models: dict[str, dict[str, dict[str, int]]] = {"": {}}
    for shard in shards:
        model, _, file = shard.name.rpartition("/")
        models.setdefault(model, {})[file] = stage.recorded_checksums(shard, out)
    return models


def _completed(source: Path, read: Collection[Path], shards: Sequence[Shard], changed_texts: Mapping[str, str | None], out: Path,
               inputs: Inputs, checksums: Mapping[str, dict[str, dict[str, int]]] | None) -> list[str]:
    """`complete`, with the stage locked.  checksums: by model, None where they are not written."""
    check_unchanged(inputs)
    missing = [shard.name for shard in shards if not stage.is_staged(shard, out)]
    if missing:
        raise RewriteError(f"{out}: {len(missing)} of {len(shards)} shards are not there, or not of {source} as it is "
                           f"now: {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}")
    others = out / stage.STAGE / stage.OTHERS
    notes = _copy_others(source, read, others, changed_texts)
    if checksums is not None:
        _list_files(others, checksums)
    if not (out / stage.STAGE / stage.MARK).exists():
        new = {str(path.relative_to(others)): path for path in regular_files(others)}
        notes += stage.make_room(out, {**new, **dict.fromkeys(shard.name for shard in shards)})
    stage.write(out / stage.STAGE / stage.MARK, {})
    for path in sorted(regular_files(others), key=lambda path: path != others / crc.FILE):      # what says that they are qdsl's
        last = out / path.relative_to(others)
        last.parent.mkdir(parents=True, exist_ok=True)
        os.replace(path, last)
    for shard in shards:
        (out / shard.name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage.shard_path(shard, out), out / shard.name)
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
    copied = other_files(source)
    adapters = [short for short in copied if short.rpartition("/")[2] == ADAPTER]
    for short in adapters:                                       # without its weights the new folder could not be loaded
        del copied[short]
    left, private = [], []
    for path in regular_files(source) if source.is_dir() else ():
        short = str(path.relative_to(source))
        if path.name.endswith((*WEIGHTS, *INDICES)):
            left += [] if path in read or short in changed_texts else [short]
        elif short not in (*copied, *adapters) and not path.name.endswith(crc.FILE):     # which is of the old files
            private.append(short)
    for short, path in copied.items():
        if short not in changed_texts:
            (out / short).parent.mkdir(parents=True, exist_ok=True)
            with replacing(out / short) as new:
                new.writelines(read_chunks(path, 0, path.stat().st_size))
    for name, text in changed_texts.items():
        if text is not None:
            (out / name).parent.mkdir(parents=True, exist_ok=True)
            write_text(out / name, text)
    return [*(f"{name} is of an adapter, which programs add to the model, and was not copied" for name in adapters),
            *(f"{name} holds other weights, and was not copied" for name in sorted(left)),
            *(f"{name} is hidden or a link out of the folder, and was not copied" for name in sorted(private))]


def _list_files(others: Path, checksums: Mapping[str, dict[str, dict[str, int]]]) -> None:
    """Write the checksum file of each model, and in the one of the whole folder those of all files without weights, which
    `--force` may replace later.
    """
    for model, files in checksums.items():
        if model:
            write_text(others / within(model, crc.FILE), crc.text(files))
    listed = {str(path.relative_to(others)): crc.file_checksum(path) or 0 for path in regular_files(others)}
    write_text(others / crc.FILE, crc.text(checksums[""], listed))
