"""Schemes for weights stored as floats without a scale, and for ternary and sign codes with a mean scale."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qdsl.encode.blocks import cast_scale, codes, cut_blocks, join_blocks, per_field
from qdsl.encode.rows import split_blocks
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.packed import UnrepresentableValue

LEAST = 1e-5                                                     # the least mean


@scheme
def nearest(weight: Tensor, *, code: str) -> Tensor:
    """Each weight of [N, K] rounded to nearest, ties to even, in the float type `code`.

    Raises UnrepresentableValue for the first weight that is too large for it.
    """
    stored = weight.to(FLOATS[code], copy=True)
    if stored.element_size() > 1 and math.isfinite(float(stored.sum())):
        return stored                                            # one fast pass; a sum that overflows is checked again
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        n, k = (int(i) for i in bad[0])
        raise UnrepresentableValue(f"the weight {float(weight[n, k]):g} at row {{row}}, column {k} does not fit {code}", n)
    return stored


@scheme
def ternary(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divided: int = 0,
            ) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * (code - 1), or, `divided`, (code - 1) / scale: weights in units of the mean magnitude.

    As BitNet b1.58: the mean, summed in float64, is at least 0.00001; codes are the weight times its inverse, which is the scale
    if `divided`.
    """
    blocks = cut_blocks(weight.float(), rows, columns)
    lengths = (_block_lengths(length, size) for length, size in zip(weight.shape, (rows, columns), strict=True))
    count = torch.outer(*lengths).to(weight.device)[:, None, :, None]
    mean = (blocks.abs().sum((1, 3), keepdim=True, dtype=torch.float64) / count).float().clamp_(min=LEAST)
    inverse = 1 / mean
    chosen = codes((blocks * inverse).round_().clamp_(-1, 1), code, "even", 1)
    return join_blocks(chosen, *weight.shape), per_field(cast_scale(inverse if divided else mean, scale), axes).contiguous()


def _block_lengths(length: int, size: int) -> Tensor:
    """The lengths of an axis's blocks; the last one may be shorter."""
    lengths = torch.full((-(-length // size),), size, dtype=torch.float64, device="cpu")
    lengths[-1:] -= -length % size
    return lengths


@scheme
def meansign(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * (2 * code - 1): the mean magnitude, and 1 for weights that are not negative.

    Magnitudes are added one by one in float32 (ggml).
    """
    with np.errstate(over="ignore"):
        total = np.add.accumulate(np.abs(split_blocks(weight, columns, rows)), axis=1)[:, -1]
    exact = torch.from_numpy(total / np.float32(rows * columns)).view(-(-weight.shape[0] // rows), 1, -1, 1)
    return (weight >= 0).byte(), per_field(cast_scale(exact, scale).to(weight.device), axes).contiguous()
