"""Completes a folder of compressed weights from its base, the model that it was made of.

The dfloat11 package writes a config.json without the model's sizes, and authors publish folders without what is not compressed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from qdsl.checkpoint.detect.guard import describes_model
from qdsl.checkpoint.detect.sources import FolderSource, Source
from qdsl.checkpoint.files.folder import CONFIG_LIMIT, INDEX_LIMIT, ORIGINAL, Folder, read_object
from qdsl.checkpoint.files.references import local_path
from qdsl.checkpoint.files.safetensors import strict_json
from qdsl.models.names import Names
from qdsl.models.plan import LoadError, Rename, renamed
from qdsl.models.save import QUANTIZATION

Base = Callable[[], Path]                                        # returns the local folder of a base, which it may download


def stored_config(path: Path) -> dict[str, Any]:
    """The config.json of a folder, or next to a file; {} where there is none.

    Where it does not describe the model, and `qdsl compress` has kept the one that did, that one with the settings of this one.
    Raises CheckpointError for damaged files.
    """
    root = path if path.is_dir() else path.parent
    config = _read(root / "config.json", CONFIG_LIMIT)
    if describes_model(config):
        return config
    kept = _read(root / ORIGINAL, INDEX_LIMIT).get("files")
    text = kept.get("config.json") if isinstance(kept, dict) else None
    original = strict_json(text.encode(), str(root / ORIGINAL), depth=64, constants=True) if isinstance(text, str) else {}
    return {**original, **config} if isinstance(original, dict) else config


def _read(path: Path, limit: int) -> dict[str, Any]:
    return read_object(path, limit, constants=True) if path.exists() else {}


def check_described(path: Path, config: Mapping[str, Any], remedy: str) -> None:
    """Raises LoadError for a config that leaves the sizes of its model to defaults."""
    if not describes_model(config):
        kept = ", ".join(config) or "nothing"
        raise LoadError(f"{path}: config.json has {kept}, and does not describe a model: {remedy}")


def complete_from(source: FolderSource, names: Names, base: str | Path, rename: Rename | None = None) -> None:
    """Complete a folder from a folder or repository; `complete_folder` explains the other arguments."""
    path, own = local_path(base), stored_config(source.path)
    complete_folder(source, names, own if describes_model(own) else stored_config(path), lambda: path, rename)


def complete_folder(source: FolderSource, names: Names, config: Mapping[str, Any], base: Base | None = None,
                    rename: Rename | None = None) -> None:
    """Give a folder the config of its model, and the base's plain tensors for parameters that it has no tensor for.

    names: those of the model, whose weights are tied.  config: without the folder's own quantization settings, which stay.
    base: called only if a parameter has no tensor.  rename: of tensors of both folders to parameters.
    """
    filled = {own for full in _weights(source) if (name := renamed(full, rename)) is not None for own in names.tied(name)}
    missing = names.parameters.keys() - filled
    folder, base_folder = source.folder, None
    path = base() if missing and base is not None else None
    if path is not None and any(path.glob("*.safetensors")):
        base_folder = Folder(path)
    extra = [] if base_folder is None else [full for full in FolderSource(base_folder).plain
                                      if full not in folder and renamed(full, rename) in missing]
    own = {key: value for key, value in folder.config.items() if key in QUANTIZATION}
    folder.complete({**{key: value for key, value in config.items() if key not in QUANTIZATION}, **own}, base_folder, extra)
    source.use_shapes({})                                        # recognises layers again, by the completed folder


def _weights(source: Source) -> list[str]:
    """Names of all tensors that a checkpoint has, as they are before they are packed or coded."""
    parts = [part for group in source.groups for part in group.parts]
    return [*source.plain, *parts, *(f"{name}.weight".lstrip(".") for name in source.layers)]
