"""8-bit floats on devices that lack them, such as Apple's GPUs: their tensors are uint8 bytes there."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

COMPLETE = ("cpu", "cuda", "meta", "xpu")                        # devices whose tensors may have any dtype
_supported: dict[tuple[str, torch.dtype], bool] = {}


def is_float8(dtype: torch.dtype) -> bool:
    """Whether a dtype is a float of 8 bits."""
    return dtype.itemsize == 1 and dtype.is_floating_point


def has_dtype(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a device supports an 8-bit float dtype; other dtypes are assumed to be supported."""
    if device.type in COMPLETE or not is_float8(dtype):
        return True
    key = device.type, dtype
    if key not in _supported:
        try:
            _supported[key] = torch.zeros(1, dtype=torch.uint8, device=device).view(dtype).dtype == dtype
            torch.zeros(1, dtype=dtype, device="cpu").to(device)
        except (TypeError, RuntimeError):
            _supported[key] = False
    return _supported[key]


def dtype_on(device: torch.device, dtype: torch.dtype) -> torch.dtype:
    """The dtype of stored tensors on a device: uint8 for 8-bit floats that it lacks."""
    return dtype if has_dtype(device, dtype) else torch.uint8


def as_stored(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor in its stored dtype, as files have it; on the CPU if its own device lacks an 8-bit float."""
    return tensor.detach().cpu().view(dtype) if is_float8(dtype) and tensor.dtype == torch.uint8 else tensor


def as_bytes_like(tensor: Tensor, like: Tensor) -> Tensor:
    """A tensor of 8-bit floats as uint8 if `like`, its destination, is uint8; else unchanged."""
    return tensor.view(torch.uint8) if is_float8(tensor.dtype) and like.dtype == torch.uint8 else tensor


def move_tensor(tensor: Tensor, dtype: torch.dtype, move: Callable[[Tensor], Tensor]) -> Tensor:
    """move(tensor) for a stored tensor of a dtype; 8-bit floats move as bytes to and from devices that lack them."""
    if not is_float8(dtype):
        return move(tensor)
    target = move(torch.empty(0, dtype=torch.float32, device=tensor.device)).device
    if tensor.dtype == dtype and has_dtype(target, dtype):
        return move(tensor)
    codes = move(tensor.view(torch.uint8))
    return codes.view(dtype_on(codes.device, dtype)) if codes.dtype == torch.uint8 else codes
