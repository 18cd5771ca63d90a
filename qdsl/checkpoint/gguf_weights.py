"""Tensors of GGUF files as weights of the formats that ship for their types."""

from __future__ import annotations

import math
import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

import qdsl.generated
from qdsl.checkpoint.safetensors import CheckpointError, shown

if TYPE_CHECKING:
    from qdsl.checkpoint.gguf import GgufFile, GgufTensor
    from qdsl.runtime.packed import PackedWeight


@cache
def module_of(type: str) -> ModuleType | None:
    """The generated module whose spec says that it is the format of a ggml type, as Q4_K."""
    names = [each.name for each in pkgutil.iter_modules(qdsl.generated.__path__)]
    for name in sorted(names, key=lambda name: (name != type.lower(), name)):    # most are called as their type is
        module = import_module(f"qdsl.generated.{name}")
        if module.SPEC.detect.get("gguf") == type:
            return module
    return None


def wrapped(file: GgufFile, entry: GgufTensor) -> PackedWeight:
    """A tensor as a weight, with those beside it that its format needs: as `name.scale` beside `name.weight`.

    Raises CheckpointError where no format is there for its type, and where the tensors do not fit together.
    """
    from qdsl.runtime.packed import FormatError

    where = f"{file.paths[entry.shard]}: tensor {shown(entry.name)}"
    module = module_of(entry.type.name)
    if module is None:
        raise CheckpointError(f"{where}: {entry.type.name} is not the type of a weight")
    storage = module.SPEC.storages[0]
    main, *others = next(iter(module.SPEC.variants.values())).storages[storage].tensors
    rows = math.prod(entry.shape[:-1])
    columns = entry.shape[-1] if entry.shape else 1
    tensors = {main: file.rows(entry.name)}
    stem = entry.name.removesuffix(".weight")
    tensors |= {each: file.tensor(f"{stem}.{each}") for each in others if f"{stem}.{each}" in file.tensors}
    try:
        packed: PackedWeight = module.wrap(tensors, shape=(rows, columns), storage=storage)
    except FormatError as error:
        raise CheckpointError(f"{where}: {error}") from None
    return packed
