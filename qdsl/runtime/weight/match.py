"""Matches tensors with storages, viewed in the dtypes and shapes that `qdsl.core.stored` computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from qdsl.core.stored import Description, LayoutMismatch, TensorInfo, element_dtype, field_dtype, storage_fits
from qdsl.runtime.weight.errors import FormatError


@dataclass(frozen=True, slots=True)
class Match:
    """One interpretation of tensors: a storage, its parameters and the shape."""

    storage: str
    params: Mapping[str, int | str]
    shape: tuple[int, int]
    tensors: Mapping[str, Tensor]


def matches(description: Description, tensors: Mapping[str, Tensor], shape: tuple[int, int] | None, storage: str | None,
            params: Mapping[str, int | str]) -> list[Match]:
    """All interpretations of the tensors.  Raises FormatError with the reason of the nearest miss if there is none."""
    for name, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise FormatError(f"'{name}' is a {type(tensor).__name__}, not a torch tensor")
        if tensor.layout != torch.strided:
            raise FormatError(f"'{name}' is a {str(tensor.layout)[6:]} tensor, whose elements do not all lie in memory")
    says = {name for name, stored in description.tensors if stored.dtype == "shape"}
    infos = {name: TensorInfo(str(tensor.dtype)[6:], tuple(tensor.shape), _values(tensor) if name in says else ())
             for name, tensor in tensors.items()}
    try:
        fitting = storage_fits(description, infos, shape, storage, params)
    except LayoutMismatch as miss:
        raise FormatError(str(miss)) from None
    return [Match(fit.storage, fit.params, fit.shape,
                  {name: _viewed(tensors[use.name], use.dtype).reshape(use.shape) for name, use in fit.tensors.items()})
            for fit in fitting]


def _values(tensor: Tensor) -> tuple[int, ...]:
    """The integers of a small tensor."""
    return () if tensor.is_meta or tensor.numel() > 2 or tensor.is_floating_point() else tuple(tensor.flatten().tolist())


@cache
def torch_dtype(kind: str) -> torch.dtype:
    """The torch dtype of a field: uint8 for codes up to 8 bits and floats that torch lacks, int32 for wider codes and indices."""
    return _dtype(field_dtype(kind))


@cache
def stored_dtype(kind: str) -> torch.dtype:
    """The torch dtype of a stored tensor's elements."""
    return _dtype(element_dtype(kind))


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    assert isinstance(dtype, torch.dtype)
    return dtype


def _viewed(tensor: Tensor, dtype: str) -> Tensor:
    return tensor if tensor.dtype == _dtype(dtype) else tensor.view(_dtype(dtype))
