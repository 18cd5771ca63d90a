"""Launches of a format's kernels on weights that have a shape and no data."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from types import ModuleType

import torch

import qdsl
from qdsl import places
from qdsl.runtime import PackedWeight, launch, streams
from qdsl.runtime.call import Call

KERNELS = ("linear", "dequantize")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def module(name: str) -> ModuleType:
    """The generated module of a spec, a file or the name of one that ships.  Raises what qdsl.load raises."""
    path = places.find(name)
    if path.parent.resolve() == places.specs().resolve():
        return importlib.import_module(f"qdsl.generated.{path.stem}")
    return qdsl.load(path)


def weight(module: ModuleType, shape: tuple[int, int], storage: str | None, params: Mapping[str, int | str]) -> PackedWeight:
    """A weight [N, K] on the meta device, without the tensors that a storage may lack, with streams as they usually are.

    Raises FormatError.
    """
    return streams.usual(module.FORMAT.empty(shape, storage, **module.FORMAT.complete(params)))


def calls(packed: PackedWeight, kind: str, rows: int, dtype: torch.dtype) -> list[Call]:
    """The launches of `linear` with so many rows of x, or of `dequantize`; x and what comes out in a dtype.

    A kernel whose loops go round as often as the weights have it, DF11's, does not say how many weights a program takes.
    """
    n, k = packed.shape
    if kind == "dequantize":
        return list(launch.dequantize_calls(packed, torch.empty(n, k, dtype=dtype, device="meta")))
    x, out = (torch.empty(rows, columns, dtype=dtype, device="meta") for columns in (k, n))
    return list(launch.linear_calls(x, packed, None, out))
