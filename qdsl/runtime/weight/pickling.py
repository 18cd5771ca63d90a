"""Pickles 8-bit floats and unsigned words, which torch's own pickle does not support, as integers of the same size."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

Tensors = Mapping[str, Any]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}      # by bytes per element


class StoredBits:
    """A tensor that is pickled as integers and its dtype.  A deep copy is a deep copy of the tensor, memo included."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def __reduce__(self) -> tuple[Any, ...]:
        tensor = self.tensor.detach()
        return _stored_bits, (tensor.view(INTEGERS[tensor.element_size()]), tensor.dtype, isinstance(self.tensor, nn.Parameter))

    def __deepcopy__(self, memo: dict[int, Any]) -> StoredBits:
        return StoredBits(copy.deepcopy(self.tensor, memo))


def _stored_bits(data: Tensor, dtype: torch.dtype, is_parameter: bool) -> StoredBits:
    tensor = data.view(dtype)
    return StoredBits(nn.Parameter(tensor, requires_grad=False) if is_parameter else tensor)


def picklable(tensors: Tensors) -> dict[str, Any]:
    """The mapping with its tensors of 8-bit floats and unsigned words as StoredBits."""
    return {name: StoredBits(tensor) if isinstance(tensor, Tensor) and _is_odd(tensor) else tensor
            for name, tensor in tensors.items()}


def _is_odd(tensor: Tensor) -> bool:
    """Whether torch cannot read its own pickle of a tensor."""
    return tensor.dtype in (torch.uint16, torch.uint32) or (tensor.is_floating_point() and tensor.element_size() == 1)


def unpickled(tensors: Tensors) -> dict[str, Any]:
    """The inverse of `picklable`."""
    return {name: value.tensor if isinstance(value, StoredBits) else value for name, value in tensors.items()}
