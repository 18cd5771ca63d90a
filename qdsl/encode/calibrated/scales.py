"""Fields that blocks of weights share, chosen for the least weighted error among several clipped ranges."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import lcm
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from qdsl.encode.blocks import cut_blocks, join_blocks
from qdsl.encode.calibrated.affine import decoded
from qdsl.encode.calibrated.levels import code_field
from qdsl.host import progress
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.quantize import encoded_again

if TYPE_CHECKING:
    from qdsl.runtime.format import Format

CLIPS = (0.95, 0.9, 0.85, 0.8, 0.75, 0.7, 0.6)                   # of the range of each block; with three, texts lose more


def quantize_clipped(format: Format, weight: Tensor, importance: Tensor, options: Mapping[str, Any],
                     ) -> tuple[PackedWeight, dict[str, Tensor]]:
    """The quantized weight [N, K] and its fields, ranges of blocks clipped where that lessens the weighted error.

    Schemes that search with an importance do so, and clip nothing.  Progress: 1 for each trial.
    """
    options = {**_fixed_options(format, weight), **options}
    with progress.step_share(1, weight.numel()):
        packed = format.quantize(weight, importance=importance, **options)
    fields = format.unpack(packed)
    code = code_field(packed.variant)
    own = [name for name in fields if packed.variant.fields[name].groups is None]    # columns are in order
    size = _shared_blocks(packed, [name for name in own if packed.variant.fields[name].axes or "amax" not in options])
    if packed.variant.importance or not code or size is None:
        return packed, fields
    blocks = cut_blocks(weight, *size)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)

    def clipped(clips: Tensor | float) -> Tensor:
        return join_blocks(torch.minimum(torch.maximum(blocks, low * clips), high * clips), *weight.shape)

    least = _block_errors(packed, fields, weight, importance, size)
    chosen = torch.ones_like(least)
    for clip in CLIPS:
        with progress.step_share(1, weight.numel()):
            trial = encoded_again(packed, clipped(clip), options)
        errors = _block_errors(packed, trial, weight, importance, size)
        chosen = torch.where(errors < least, clip, chosen)
        least = torch.minimum(errors, least)
    with progress.step_share(1, weight.numel()):
        packed = format.quantize(clipped(chosen[:, None, :, None]), importance=importance, **options)
    return packed, format.unpack(packed)


def _fixed_options(format: Format, weight: Tensor) -> dict[str, Any]:
    """The option that keeps the super-scale of a whole weight, whatever is clipped."""
    largest = float(weight.abs().max()) if weight.numel() else 0.0
    return {"amax": largest} if "amax" in next(iter(format.variants.values())).options and largest > 0 else {}


def _shared_blocks(packed: PackedWeight, names: Iterable[str]) -> tuple[int, int] | None:
    """The rows and columns of blocks that share no field with others; None if blocks are not of rows and columns."""
    n, k = packed.shape
    rows, columns = 1, 1
    for name in names:
        by = _steps(packed, name)
        if by is None:
            return None
        rows, columns = lcm(rows, by[0]), lcm(columns, by[1])
    return min(rows, n), min(columns, k)


def _steps(packed: PackedWeight, name: str) -> tuple[int, int] | None:
    """The rows and columns per value of a field; None if it has none, as a stored table or a run across rows."""
    n, k = packed.shape
    by = {axis.dim: axis.by(packed.sizes) for axis in packed.variant.fields[name].axes}
    if "N*K" in by:
        return None if k % by["N*K"] else (1, by["N*K"])
    return None if by.keys() - {"N", "K"} else (by.get("N", n), by.get("K", k))


def _block_errors(packed: PackedWeight, fields: Mapping[str, Tensor], weight: Tensor, importance: Tensor, size: tuple[int, int],
                  ) -> Tensor:
    """The squared errors of each block, weighted by the importance of columns: [blocks of rows, blocks of columns]."""
    error = decoded(packed, fields).sub_(weight).square_().mul_(importance)
    return cut_blocks(error, *size).sum((1, 3))
