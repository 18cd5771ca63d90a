"""Shared code of the plug-ins for transformers and diffusers."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from pathlib import Path
from typing import Any

import torch
from torch import nn

from qdsl.checkpoint.checkpoint import Checkpoint
from qdsl.checkpoint.detect.guard import describes_model
from qdsl.checkpoint.detect.sources import FolderSource
from qdsl.checkpoint.files import checksums
from qdsl.checkpoint.files.folder import Folder
from qdsl.models.base import check_described
from qdsl.models.plan import LoadError


def missing_library_part(used: Mapping[Any, str]) -> str:
    """The first part of a library that a plug-in uses and that is missing; '' where all are present.

    used: by module or class, names of attributes, with parameters that a function among them must have.
    """
    for owner, attributes in used.items():
        for name, *parameters in map(str.split, attributes.split(", ")):
            if not hasattr(owner, name):
                return f"has no {owner.__name__}.{name}"
            accepted = inspect.signature(getattr(owner, name)).parameters if parameters else {}
            if missing := [own for own in parameters if own not in accepted]:
                return f"has {owner.__name__}.{name} without {', '.join(missing)}"
    return ""


def open_files(files: Sequence[Path], verify: bool = False) -> Checkpoint:
    """Opens the checkpoint of the files that a library has resolved.  Raises LoadError for other kinds of files.

    verify: compare files with the checksums that qdsl wrote with them.  Raises CheckpointError for damaged ones.
    """
    if not files or any(file.suffix != ".safetensors" for file in files):
        kinds = ", ".join(sorted({file.suffix for file in files})) or "no file"
        raise LoadError(f"packed weights are read from .safetensors files, not from {kinds}")
    for file in files if verify else ():
        checksums.check(file, is_optional=True)
    folder = Folder(files[0].parent, files=[file.name for file in files])        # others may lie there, such as a variant
    source = FolderSource(folder)
    if source.groups and not describes_model(folder.config):     # else the library has built the class with default sizes
        folder.close()
        check_described(folder.path, folder.config,
                        "call `from_pretrained` of qdsl.models.transformers or diffusers with its base")
    return Checkpoint(folder.path, {"": source})


def check_format(checkpoint: Checkpoint, format: str | None) -> None:
    """Raises LoadError for a plain checkpoint without a format to quantize it in."""
    if format is None and not checkpoint.source.layers and not checkpoint.source.groups:
        raise LoadError(f"{checkpoint.path} has no packed weights: name a format to quantize it in, as QdslConfig('q4_0')")


def without_disk(device_map: Any) -> Any:
    """The device map with the CPU in place of the disk: mapped weights lie on the disk anyway."""
    if isinstance(device_map, Mapping):
        return {name: "cpu" if device == "disk" else device for name, device in device_map.items()}
    return device_map


def usable_device(device: str | None = None) -> str:
    """A device by name, by default a GPU if there is one.  Raises LoadError for a device that this machine lacks."""
    if device is None:
        return "cuda" if torch.cuda.is_available() else "cpu"
    try:
        is_meta = torch.empty(0, dtype=torch.uint8, device=device).is_meta
    except (RuntimeError, AssertionError) as error:              # torch without CUDA asserts
        raise LoadError(f"device {device!r} cannot be used here: {str(error).splitlines()[0]}") from error
    if is_meta:
        raise LoadError(f"device {device!r} has no numbers: nothing can be computed on it")
    return device


def single_device(device_map: Any) -> Any:
    """The device of a map with one for the whole model; None for other maps."""
    return device_map[""] if isinstance(device_map, Mapping) and list(device_map) == [""] else None


def move_to_map(model: nn.Module, names: Iterable[str], device_map: Mapping[str, Any]) -> None:
    """Move tensors to the devices of a map; those on the CPU stay mapped."""
    for name in {name.rpartition(".")[0] for name in names}:
        key = max((key for key in device_map if not key or f"{name}.".startswith(f"{key}.")), key=len, default=None)
        device = "cpu" if key is None else device_map[key]
        if str(device) != "cpu":
            module: Any = model.get_submodule(name)
            module._apply(lambda tensor, to=device: tensor if tensor.is_meta else tensor.to(to), recurse=False)


def wrap_save(save_pretrained: Any, quantizer: Any, is_others: Callable[[Any], bool], refused: Mapping[str, Any]) -> Any:
    """Wraps `save_pretrained`, so that models with packed weights are saved as the files they were loaded from.

    quantizer: the plug-in's class, which has `save(model, folder)`.  is_others: models that the library saves nevertheless.
    refused: arguments that have no effect on such files, and the values with which they are accepted.
    """
    signature = inspect.signature(save_pretrained)

    @wraps(save_pretrained)
    def saved(self: Any, save_directory: Any, *args: Any, **kwargs: Any) -> Any:
        own: Any = getattr(self, "hf_quantizer", None)
        if not isinstance(own, quantizer) or is_others(self):
            return save_pretrained(self, save_directory, *args, **kwargs)
        values = signature.bind(self, save_directory, *args, **kwargs).arguments
        values |= values.pop("kwargs", {})
        if any(values.get(name, value) != value for name, value in refused.items()):
            raise ValueError(f"save_pretrained: packed weights are saved as their files were, without {', '.join(refused)}")
        if values.get("is_main_process", True):
            own.save(self, Path(save_directory))
        if values.get("push_to_hub", False):
            self.push_to_hub(values.get("repo_id", Path(save_directory).name), token=values.get("token"))

    return saved
