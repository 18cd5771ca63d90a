"""Pickling of 8-bit floats: torch's own pickle of them cannot be read back, so they travel as bytes."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Any]


class FloatBytes:
    """A float8 tensor that is pickled as uint8 and its dtype.  A deep copy of it is one of the tensor, memo and all."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor.detach()
        return _float_bytes, (tensor.view(torch.uint8), tensor.dtype, isinstance(self.tensor, nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> FloatBytes:
        return FloatBytes(copy.deepcopy(self.tensor, memo))


def _float_bytes(data: Tensor, dtype: torch.dtype, is_parameter: bool) -> FloatBytes:
    tensor = data.view(dtype)
    return FloatBytes(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def picklable(tensors: Tensors) -> dict[str, Any]:
    """The same mapping, its float8 tensors as FloatBytes."""
    return {name: FloatBytes(tensor) if isinstance(tensor, Tensor) and tensor.is_floating_point() and tensor.element_size() == 1
            else tensor for name, tensor in tensors.items()}


def unpickled(tensors: Tensors) -> dict[str, Any]:
    """The mapping of which `picklable` was made."""
    return {name: value.tensor if isinstance(value, FloatBytes) else value for name, value in tensors.items()}
