"""Reads tensors of GGUF files as weights of the shipped formats."""

from __future__ import annotations

import math
import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import qdsl.generated
from qdsl.checkpoint.files.ggml_types import TORCH, WEIGHTLESS
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.shapes import slicing_step

if TYPE_CHECKING:
    from qdsl.checkpoint.files.gguf import GgufFile, GgufTensor
    from qdsl.runtime.weight.packed import PackedWeight


def module_of(type: str) -> ModuleType | None:
    """The generated module whose spec names a ggml type, such as Q4_K, for its first storage."""
    module, storage = type_storage(type) or (None, "")
    return module if module is not None and storage == module.SPEC.storages[0] else None


@cache
def type_storage(type: str) -> tuple[ModuleType, str] | None:
    """The module of a ggml type's format, and the storage: the first, or the one for an interleaved order."""
    names = [info.name for info in pkgutil.iter_modules(qdsl.generated.__path__)]
    for name in sorted(names, key=lambda name: (name != type.lower(), name)):    # most have the name of their type
        module = import_module(f"qdsl.generated.{name}")
        storages = {module.SPEC.detect.get("gguf"): module.SPEC.storages[0], **module.SPEC.detect.get("repacked", {})}
        if type in storages:
            return module, storages[type]
    return None


def packed_weight(file: GgufFile, name: str, expert: int | None = None, start: int = 0, stop: int | None = None) -> PackedWeight:
    """A tensor of a GGUF file as a weight of its type's format, not copied: [N, K] with N as in `file.rows`.

    K is the stored row length, even if the model has another shape.  expert: only this one of experts' weights [E, N, K], needed
    if their separate scales differ (NVFP4).  start, stop: rows, by default all.  Raises CheckpointError as `file.entry` does, for
    a type without a format, for tensors that do not fit together, and for scales that are NaN or infinite.
    """
    from qdsl.runtime.weight.finite_scales import refuse_special_scales
    from qdsl.runtime.weight.packed import FormatError

    entry = file.entry(name)
    where = f"{file.paths[entry.shard]}: tensor {shown(entry.name)}"
    of_type = None if entry.type.name in WEIGHTLESS else type_storage(entry.type.name)
    if of_type is None:
        raise CheckpointError(f"{where}: {entry.type.name} is not the type of a weight")
    module, storage = of_type
    others = {key: file.tensor(name) for key, name in companions(file, entry).items()}
    if expert is not None:
        if len(entry.shape) != 3 or not 0 <= expert < entry.shape[0]:
            raise CheckpointError(f"{where}: {list(entry.shape)} has no expert {expert}")
        count = entry.shape[1]
        start, stop = start + expert * count, min(count if stop is None else stop, count) + expert * count
        others = {key: tensor[expert] if tensor.shape == entry.shape[:1] else tensor for key, tensor in others.items()}
    columns = entry.shape[-1] if entry.shape else 1
    count = math.prod(entry.shape[:-1])
    stop = count if stop is None else min(stop, count)
    step = 1
    if storage != module.SPEC.storages[0]:
        stored = next(iter(module.SPEC.variants.values())).storages[storage].tensors.values()
        step = slicing_step([axis for tensor in stored for axis in tensor.axes], "N", {}, columns)
    first, last = start // step * step, -(-stop // step) * step   # interleaved rows are read together
    try:
        rows = file.rows(entry.name, first, last)
        packed: PackedWeight = module.wrap({_names(module)[0]: rows, **others}, shape=(rows.shape[0], columns), storage=storage)
        refuse_special_scales(packed)
        if (first, last) != (start, stop):
            packed = module.convert(packed, module.SPEC.storages[0]).cut("N", start - first, stop - first)
    except FormatError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return packed


def companions(file: GgufFile, entry: GgufTensor) -> dict[str, str]:
    """Other tensors of a weight, such as NAME.scale for NAME.weight: names in the format -> in the file."""
    of_type = None if entry.type.name in TORCH else type_storage(entry.type.name)
    others = _names(of_type[0])[1:] if of_type else []
    stem = entry.name.removesuffix(".weight")
    return {leaf: f"{stem}.{leaf}" for leaf in others if f"{stem}.{leaf}" in file.tensors}


def _names(module: ModuleType) -> list[str]:
    """The tensors of a format's first storage, which files have."""
    return list(next(iter(module.SPEC.variants.values())).storages[module.SPEC.storages[0]].tensors)
