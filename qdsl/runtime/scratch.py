"""Memory in which a weight is decoded each time that it is used: one buffer for each device, stream and use, which grows."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

_held: dict[tuple[torch.device, int, str], Tensor] = {}


def scratch(use: str, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor that is whole until the next one for this use: work of one stream comes one after the other.

    Elsewhere than on a GPU, and in a graph that is being captured, which has memory of its own, it is a fresh one.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    key = (device, torch.cuda.current_stream(device).cuda_stream, use)
    size = math.prod(shape) * dtype.itemsize
    if key not in _held or _held[key].numel() < size:
        _held.pop(key, None)                                     # its memory first
        _held[key] = torch.empty(size, dtype=torch.uint8, device=device)
    return _held[key][:size].view(dtype).view(tuple(shape))


def release() -> None:
    """Give all buffers back; the next weight that is used takes new ones."""
    _held.clear()
