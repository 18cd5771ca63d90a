"""Launches of a format's kernels on weights that have a shape and no data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import torch

import qdsl
from qdsl import places
from qdsl.runtime import FormatError, PackedWeight, Stored, launch
from qdsl.runtime.launch import Call
from qdsl.runtime.match import stored_dtype

KERNELS = ("linear", "dequantize")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def module(name: str) -> ModuleType:
    """The generated module of a spec, a file or the name of one that ships.  Raises what qdsl.load raises."""
    path = places.find(name)
    if path.parent.resolve() == places.specs().resolve():
        return importlib.import_module(f"qdsl.generated.{path.stem}")
    return qdsl.load(path)


def weight(module: ModuleType, shape: tuple[int, int], storage: str | None, params: Mapping[str, int | str]) -> PackedWeight:
    """A weight [N, K] on the meta device, streams decoded, without the tensors that a storage may lack.  Raises FormatError."""
    format = module.FORMAT
    chosen = format.complete(params)
    name, layout = format.storage(storage, chosen)
    layout, opened = layout.opened, bool(layout.streams)
    sizes = format.sizes(chosen, shape)
    tensors = {key: torch.empty(_extents(f"{format.name}.{name}", stored, shape, sizes), device="meta",
                                dtype=stored_dtype(str(chosen.get(stored.dtype, stored.dtype))))
               for key, stored in layout.tensors.items() if not stored.optional}
    return PackedWeight(format, name, tensors, shape, chosen, opened=opened)


def _extents(label: str, stored: Stored, shape: tuple[int, int], sizes: Mapping[str, int]) -> list[int]:
    """A stored tensor's shape.  Raises FormatError where N or K does not divide as it must."""
    found: list[int] = []
    for axis in stored.axes:
        extent = axis.extent(*shape, sizes)
        if extent is None:
            raise FormatError(f"{label}: {axis.dim} = {shape[axis.dim == 'K']} must be a multiple of {axis.by(sizes)}")
        found.append(extent)
    return found


def calls(packed: PackedWeight, kind: str, rows: int, dtype: torch.dtype) -> list[Call]:
    """The launches of `linear` with so many rows of x, or of `dequantize`; x and what comes out in a dtype."""
    n, k = packed.shape
    if kind == "dequantize":
        return list(launch.dequantize_calls(packed, torch.empty(n, k, dtype=dtype, device="meta")))
    x, out = (torch.empty(rows, columns, dtype=dtype, device="meta") for columns in (k, n))
    return list(launch.linear_calls(x, packed, None, out))
