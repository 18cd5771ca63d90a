"""Pickles packed weights, also for torch.load(weights_only=True), and tensors that torch's own pickle does not support.

8-bit floats and unsigned words are pickled as integers of the same size.  A weight is pickled as the arguments of `wrap` of its
format's module, which validates them: a file can neither state what its tensors are not, nor name any other function.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.runtime.weight.errors import FormatError

Tensors = Mapping[str, Any]
MODULES = re.compile(r"qdsl\.generated\.\w+|qdsl_loaded_\w+")  # of formats that ship, and of specs that qdsl.load has built
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


def wrapped(module: str, storage: str, tensors: Tensors, shape: tuple[int, int], params: Mapping[str, int | str],
            notes: Sequence[str], names: Mapping[str, str]) -> Any:
    """The weight that a pickle describes, validated.  Raises FormatError for tensors that do not fit, and unknown modules."""
    if not MODULES.fullmatch(module):
        raise FormatError(f"{module!r} is no module of a format")
    try:
        format = import_module(module).FORMAT
    except ModuleNotFoundError:
        name = module.rpartition("_" if module.startswith("qdsl_loaded_") else ".")[2]
        raise FormatError(f"the weight's format {name!r} is not here: load its spec with qdsl.load first") from None
    packed = format.wrap(unpickled(tensors), tuple(shape), storage, **params)
    packed.notes, packed.names = tuple(map(str, notes)), {str(name): str(other) for name, other in names.items()}
    return packed


torch.serialization.add_safe_globals([wrapped, _stored_bits])
