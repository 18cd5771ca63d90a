"""A device of torch without Triton, float64 and 8-bit floats, as Apple's GPUs are; its tensors lie on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

try:
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
    HAS_BACKENDS = True
except ImportError:                                              # before torch 2.10
    HAS_BACKENDS = False

from qdsl.runtime.torch import ops

FORBIDDEN = (torch.float64, torch.complex128, torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz,
             torch.float8_e5m2fnuz, torch.float8_e8m0fnu)
NAME = "other"
_is_set_up = False


class OtherTensor(Tensor):
    """A tensor on the device, with its numbers in `inner`."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> OtherTensor:
        tensor: OtherTensor = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=torch.device(NAME, 0))
        tensor.inner = inner
        return tensor

    def tolist(self) -> list:  # type: ignore[type-arg]
        return self.inner.tolist()

    def __repr__(self) -> str:  # type: ignore[override]
        return f"OtherTensor({self.inner})"

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        return _run(function, arguments, options or {})


class Factories(TorchDispatchMode):
    """New tensors for the device, which torch has no memory for."""

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        device = (options or {}).get("device")
        if (device is not None and torch.device(device).type == NAME) or any(isinstance(a, OtherTensor) for a in arguments):
            return _run(function, arguments, options or {})
        return function(*arguments, **(options or {}))


def _run(function: Any, arguments: Any, options: dict[str, Any]) -> Any:
    """An operation on the inner tensors.  Raises TypeError for a type that the device lacks."""
    assert function.namespace != "qdsl", "the work is done by torch's operations, on the device"
    onto = options.get("device")
    leaves = onto is not None and torch.device(onto).type != NAME
    inner = tree_map_only(OtherTensor, lambda tensor: tensor.inner, (arguments, options))
    inner[1].update({"device": "cpu"} if onto is not None else {})
    result = function(*inner[0], **inner[1])
    if leaves:
        return result
    if function is torch.ops.aten._local_scalar_dense.default or function is torch.ops.aten.equal.default:
        return result
    if function.namespace == "aten" and function is torch.ops.aten.copy_.default and not isinstance(arguments[0], OtherTensor):
        return arguments[0]
    result = tree_map_only(Tensor, _wrapped, result)
    return return_and_correct_aliasing(function, arguments, options, result)


def _wrapped(tensor: Tensor) -> OtherTensor:
    if tensor.dtype in FORBIDDEN:
        raise TypeError(f"the device has no {tensor.dtype}")
    return tensor if isinstance(tensor, OtherTensor) else OtherTensor(tensor)


@contextmanager
def other_device() -> Iterator[torch.device]:
    """The device, for as long as the block lasts; qdsl takes its tensors for plain ones, as those of a device in C++ are."""
    global _is_set_up
    if not _is_set_up:
        _setup_privateuseone_for_python_backend(NAME)
        _is_set_up = True
    with Factories(), patch.object(ops, "PLAIN", (*ops.PLAIN, OtherTensor)), \
            patch.object(ops, "is_in_torch_dispatch_mode", lambda: False):
        yield torch.device(NAME, 0)
