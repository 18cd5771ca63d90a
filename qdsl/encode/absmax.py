"""Scales from the largest magnitude of a block."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.encode.blocks import arithmetic, codes, cut_blocks, join_blocks, shaped, stored_scale


def absmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float, offset: int = 0,
           by: str = "stored", ties: str = "even") -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * (code - offset), with scale = largest magnitude / divisor.

    rows, columns: the block that shares a scale; axes: how many axes the scale field has.
    by 'stored': codes are w / the stored scale (compressed-tensors); 'exact': w * (1 / the exact scale) (ggml);
    'inverse': divisor * (1 / largest) comes first, codes are w times it, and its reciprocal is stored (transformers).
    A block of zeros has codes of zero; its scale is the dtype's epsilon ('stored'), 0 or 1 / divisor.
    """
    blocks = cut_blocks(arithmetic(weight, scale), rows, columns)
    return _encode(weight, blocks, blocks.abs().amax((1, 3), keepdim=True), code, scale, axes, divisor, offset, by, ties)


def signmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float, offset: int = 0,
            by: str = "stored", ties: str = "even") -> tuple[Tensor, Tensor]:
    """As absmax, with scale = the value of largest magnitude, sign and all, / divisor; of equals, the first counts (ggml).

    A block of -0.0 has the extreme value +0.0, as one that nothing was larger than.
    """
    blocks = cut_blocks(arithmetic(weight, scale), rows, columns)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    largest = torch.where(-low > high, low, high) + 0.0
    tied = (-low == high) & (high != 0)
    if bool(tied.any()):
        flat = blocks.permute(0, 2, 1, 3).flatten(2)[tied[:, 0, :, 0]]
        largest[tied] = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    return _encode(weight, blocks, largest, code, scale, axes, divisor, offset, by, ties)


def _encode(weight: Tensor, blocks: Tensor, largest: Tensor, code: str, scale: str, axes: int, divisor: float, offset: int,
            by: str, ties: str) -> tuple[Tensor, Tensor]:
    if by == "inverse":
        factor = divisor / torch.where(largest == 0, torch.ones_like(largest), largest)
        stored = stored_scale(1 / factor, scale)
        scaled = blocks * factor
    elif by == "exact":
        exact = largest / divisor
        stored = stored_scale(exact, scale)
        factor = torch.where(exact == 0, torch.zeros_like(exact), 1 / exact)
        # A scale whose reciprocal overflows is stored as 0; ggml's codes are then 0, offset and all.
        lost = torch.isinf(factor)
        scaled = blocks * factor
        if bool(lost.any()):
            scaled.masked_fill_(lost.expand_as(blocks), -offset)
    else:
        exact = largest / divisor
        stored = stored_scale(torch.where(exact == 0, torch.full_like(exact, torch.finfo(exact.dtype).eps), exact), scale)
        used = stored.to(blocks.dtype)
        scaled = blocks / used
        if bool((used == 0).any()):
            scaled.masked_fill_((used == 0).expand_as(blocks), 0)
    return join_blocks(codes(scaled, code, ties, offset), *weight.shape), shaped(stored, axes).contiguous()
