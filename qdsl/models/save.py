"""Saves a model with packed weights as a checkpoint, with the names, storages and files that it was loaded from."""

from __future__ import annotations

import filecmp
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.checkpoint.detect.guard import FIELD, is_guard, with_guard, without_guard
from qdsl.checkpoint.files import crc
from qdsl.checkpoint.files.ggml_types import TORCH
from qdsl.checkpoint.files.gguf_write import NewTensor
from qdsl.checkpoint.files.gguf_write import write as write_gguf
from qdsl.checkpoint.files.resume import write_tensors
from qdsl.checkpoint.files.safetensors import Buffer, Header, bytes_of, plan_header, shown
from qdsl.core.text import Displayed, byte_text, counted
from qdsl.host.files import flush_folder, make_folder, shared_file, write_text
from qdsl.jobs.convert.config import own_settings
from qdsl.jobs.engine.others import INDICES, WEIGHTS, regular_files
from qdsl.jobs.engine.shards import Files, headers_index, shard_names
from qdsl.models.collect import CheckpointTensors, SaveError, Stored
from qdsl.models.origin import Origin, origin_in
from qdsl.runtime.libraries.private_apis import without_autocast

CONFIG = "config.json"
QUANTIZATION = ("quantization_config", "compression_config", "dfloat11_config")     # what states it in a config, at its top
SHARD_BYTES = 5 << 30                                            # of a file, where no checkpoint says how tensors are divided
STAGE = ".qdsl-save.part"                                        # a folder's files until all are written


@dataclass(frozen=True, slots=True, repr=False)
class SaveReport(Displayed):
    """The files of a saved model.  exact: whether config and weights are byte for byte those of the checkpoint.

    notes: what else to know.
    """

    folder: Path
    files: tuple[str, ...]
    nbytes: int
    exact: bool
    notes: tuple[str, ...] = ()

    def table(self) -> tuple[str, Sequence[str], list[tuple[object, ...]]]:
        """The files, and the notes."""
        return str(self).splitlines()[0], ("file",), [(text,) for text in (*self.files, *self.notes)]

    def __str__(self) -> str:
        same = ", the bytes of the checkpoint" if self.exact else ""
        return "\n".join([f"{self.folder}: {counted(len(self.files), 'file')} of weights, {byte_text(self.nbytes)}{same}",
                          *(f"  {note}" for note in self.notes)])


@without_autocast
def save(model: nn.Module, folder: Path, config: Mapping[str, Any] | None = None, stem: str = "model") -> SaveReport:
    """Write a model's weights, config and other files; `qdsl.save_model` explains the arguments.

    stem: what names of files of weights begin with, where no checkpoint has named them.
    """
    origin = origin_in(model)
    _check_target(folder, origin)
    collected = CheckpointTensors(model, origin or Origin(Path()))
    collected.collect()
    if origin is not None and origin.gguf is not None and not collected.changed:
        return _save_gguf(folder, origin, collected.tensors)
    files, exact = _files(collected.tensors, origin, collected.changed, stem)
    texts = _texts(model, origin, config, collected, files, exact, stem)
    stage = folder / STAGE
    shutil.rmtree(stage, ignore_errors=True)
    make_folder(stage)
    sums: dict[str, dict[str, int]] = {}
    try:
        for name, (start, header) in files.items():
            sums[name] = write_tensors(stage / name, start, [(own, _bytes(collected.tensors[own]), entry.nbytes, 0)
                                                             for own, entry in header.tensors.items()])
        if origin is not None and origin.config is not None and origin.path.is_dir():
            _copy_others(origin.path, folder, stage, texts)
        for name, text in {**texts, crc.FILE: crc.text(sums)}.items():
            write_text(stage / name, text)
        _put_in_place(stage, folder, list(files))
    finally:
        shutil.rmtree(stage, ignore_errors=True)
    nbytes = sum(header.size for _, header in files.values())
    gone = origin is not None and origin.config is not None and not origin.path.is_dir()
    notes = (f"{origin.path} is gone: its other files, such as a tokenizer, were not copied",) if origin and gone else ()
    exact = exact and texts.get(CONFIG) == (origin.config if origin else None)
    exact = exact and all(_is_same(folder, origin, name) for name in files)
    return SaveReport(folder, tuple(files), nbytes, exact, notes)


def _is_same(folder: Path, origin: Origin | None, name: str) -> bool:
    """Whether a written file has the bytes of the checkpoint's file; False where that does not exist any more."""
    if origin is None:
        return False
    old = (origin.path if origin.path.is_dir() else origin.path.parent) / name
    return old.is_file() and filecmp.cmp(old, folder / name, shallow=False)


def _check_target(folder: Path, origin: Origin | None) -> None:
    """Raises SaveError for a folder that has weights, such as those that the model is mapped from."""
    if folder.exists() and not folder.is_dir():
        raise SaveError(f"{folder}: is a file; give a folder")
    if origin is not None and folder.exists() and origin.path.exists() and folder.samefile(
            origin.path if origin.path.is_dir() else origin.path.parent):
        raise SaveError(f"{folder}: the model's weights are mapped from this folder; save into another one")
    if folder.is_dir() and (old := sorted(path.name for path in folder.iterdir() if path.name.endswith(WEIGHTS))):
        raise SaveError(f"{folder}: holds weights already ({old[0]}); save into another folder")
    if origin is not None and folder.is_dir() and origin.path.exists() and (shared := shared_file(origin.path, folder)):
        raise SaveError(f"{folder}: holds {shared}, which the model was loaded from, or links to it; save into another folder")


# -- files -------------------------------------------------------------------------------------------------------------


def _files(tensors: Mapping[str, Stored], origin: Origin | None, changed: bool, stem: str,
           ) -> tuple[dict[str, tuple[bytes, Header]], bool]:
    """The bytes before the tensors of each file, and whether all files are those of the checkpoint."""
    kinds = {name: tensor.kind for name, tensor in tensors.items()}
    if origin is None or not origin.files:
        return _new_files(tensors, stem), False
    files: dict[str, tuple[bytes, Header]] = {}
    placed = {name: file for file, (_, header) in origin.files.items() for name in header.tensors}
    last = next(reversed(origin.files))
    exact = True
    for file, (start, header) in origin.files.items():
        own = {name: kinds[name] for name in header.tensors if name in kinds}
        own |= {name: kind for name, kind in kinds.items() if name not in placed and _home(name, placed, last) == file}
        if own == {name: (entry.dtype, entry.shape) for name, entry in header.tensors.items()}:
            files[file] = start, header
            continue
        exact = False
        metadata = {key: text for key, text in header.metadata.items() if key == "format"} if changed else header.metadata
        if own:
            files[file] = plan_header(file, own, metadata or None)
    return files, exact


def _home(name: str, placed: Mapping[str, str], last: str) -> str:
    """The file for a new tensor: that of another tensor of its module, else the last."""
    module = name.rpartition(".")[0]
    return next((file for other, file in placed.items() if other.rpartition(".")[0] == module), last)


def _new_files(tensors: Mapping[str, Stored], stem: str) -> dict[str, tuple[bytes, Header]]:
    """Files of at most SHARD_BYTES each, in the order of the model."""
    shards: list[dict[str, tuple[str, tuple[int, ...]]]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.kind
        size += tensor.nbytes
    return {name: plan_header(name, own, {"format": "pt"})
            for name, own in zip(shard_names(stem, len(shards)), shards, strict=True)}


def _bytes(tensor: Stored) -> Iterator[Buffer]:
    yield bytes_of(tensor.read().reshape(tensor.shape))


def _texts(model: nn.Module, origin: Origin | None, config: Mapping[str, Any] | None, collected: CheckpointTensors,
           files: Files, exact: bool, stem: str) -> dict[str, str]:
    """The texts of config.json and the index."""
    texts: dict[str, str] = {}
    if origin is not None and not collected.changed and config is None:
        texts |= {} if origin.config is None else {CONFIG: origin.config}
    else:
        base = dict(config) if config is not None else _config_of(model, origin)
        stored = {} if origin is None or origin.config is None or collected.changed else json.loads(origin.config.encode())
        has_own = bool(collected.settings) or (origin is not None and bool(origin.groups))
        if stored:                                               # another config for the weights of the checkpoint
            base = {**{key: stored[key] for key in QUANTIZATION if key in stored}, **base}
            has_own = is_guard(stored.get(FIELD))
        elif collected.settings:
            base["quantization_config"] = own_settings(collected.settings, collected.dense, collected.transforms)
        elif not has_own:
            base.pop("quantization_config", None)
        base = with_guard(base) if has_own else without_guard(base)
        texts[CONFIG] = json.dumps(base, indent=2, ensure_ascii=False) + "\n"
    if exact and origin is not None:
        return texts | ({} if origin.index is None else dict([origin.index]))
    if len(files) > 1:
        name = origin.index[0] if origin is not None and origin.index is not None else f"{stem}.safetensors.index.json"
        texts[name] = headers_index(files)
    return texts


def _config_of(model: nn.Module, origin: Origin | None) -> dict[str, Any]:
    """The config of the checkpoint, else that of the model."""
    if origin is not None and origin.config is not None:
        config: dict[str, Any] = json.loads(origin.config.encode())
        return config
    own: Any = getattr(model, "config", None)
    settings = own.to_dict() if hasattr(own, "to_dict") else own
    return dict(settings) if isinstance(settings, Mapping) else {}


def _copy_others(source: Path, folder: Path, stage: Path, texts: Mapping[str, str]) -> None:
    """Copy the tokenizer and all other files of the checkpoint without weights, but those that the folder has already."""
    for path in regular_files(source):
        name = path.relative_to(source)
        if not path.name.endswith((*WEIGHTS, *INDICES, crc.FILE)) and str(name) not in texts and not (folder / name).exists():
            (stage / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, stage / name)


def _put_in_place(stage: Path, folder: Path, weights: Sequence[str]) -> None:
    """Move files into a folder, weights last: a folder without weights is no checkpoint."""
    others = [path.relative_to(stage) for path in regular_files(stage)]
    for name in [*(name for name in others if str(name) not in weights), *map(Path, weights)]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        os.replace(stage / name, folder / name)
    flush_folder(folder)


def _save_gguf(folder: Path, origin: Origin, tensors: Mapping[str, Stored]) -> SaveReport:
    """Write the tensors of a GGUF file, in its order and types, as one file."""
    assert origin.gguf is not None
    path = folder / origin.path.name
    new = []
    for name, (kind, shape) in origin.gguf.tensors.items():
        if name not in tensors:
            raise SaveError(f"the model holds no {shown(name)} of {origin.path}")
        if tensors[name].dtype != getattr(torch, TORCH.get(kind.name, "uint8")):
            raise SaveError(f"{shown(name)} has become {str(tensors[name].dtype)[6:]}, and {kind.name} cannot hold its numbers")
        new.append(NewTensor(name, kind, shape, _bytes(tensors[name])))
    make_folder(folder)
    write_gguf(path, origin.gguf.metadata, new, state_checksums=True)
    return SaveReport(folder, (path.name,), path.stat().st_size, _is_same(folder, origin, path.name))
