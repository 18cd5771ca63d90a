"""Scales and zero points from the range of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.encode.blocks import arithmetic, codes, cut_blocks, join_blocks, shaped, stored_scale
from qdsl.numbers import number


def minmax(weight: Tensor, *, code: str, scale: str, zero: str, rows: int, columns: int, axes: int, by: str = "stored",
           symmetric: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zero points, scales) of w = (code - zero) * scale, round to nearest as GPTQ's quantizer starts.

    The range from the smallest to the largest weight, zero included, is cut into 2^bits - 1 steps; symmetric makes it
    -largest to largest with the zero point in the middle code.  A block of zeros ranges from -1 to 1.
    by 'stored': codes are w / the stored scale; 'exact': w / the exact one.
    """
    kind = number(code)
    assert kind is not None
    blocks = cut_blocks(arithmetic(weight, scale), rows, columns)
    low = blocks.amin((1, 3), keepdim=True).clamp(max=0)
    high = blocks.amax((1, 3), keepdim=True).clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = torch.where(low < 0, -high, low)
    empty = (low == 0) & (high == 0)
    low, high = torch.where(empty, -1.0, low), torch.where(empty, 1.0, high)
    exact = (high - low) / (kind.high - kind.low)
    stored = stored_scale(exact, scale)
    used = exact if by == "exact" else stored.to(exact.dtype)
    used = torch.where(used == 0, torch.ones_like(used), used)
    middle = torch.full_like(low, (kind.high - kind.low + 1) // 2 + kind.low)
    zeros = middle if symmetric else torch.round(kind.low - low / used).clamp(kind.low, kind.high)
    chosen = codes((blocks / used).round_().add_(zeros), code, "even")
    return join_blocks(chosen, *weight.shape), shaped(codes(zeros, zero, "even"), axes).contiguous(), \
        shaped(stored, axes).contiguous()
