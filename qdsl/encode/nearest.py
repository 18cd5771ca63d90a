"""Weights that are stored as floats, without a scale; and the other end, signs with a scale."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from qdsl.encode.blocks import shaped, stored_scale
from qdsl.encode.rows import cut
from qdsl.runtime.layout import FLOATS
from qdsl.runtime.packed import Misfit


def nearest(weight: Tensor, *, code: str) -> Tensor:
    """Each weight of [N, K] rounded to nearest, ties to even, in the float type `code`.

    Raises Misfit for the first weight that is too large for it.
    """
    stored = weight.to(FLOATS[code], copy=True)
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        n, k = (int(i) for i in bad[0])
        raise Misfit(f"the weight {float(weight[n, k]):g} at row {{row}}, column {k} does not fit {code}", n)
    return stored


def meansign(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * (2 * code - 1): the mean magnitude, and 1 where a weight is not negative.

    Magnitudes are added one after the other, in float32 (ggml).
    """
    with np.errstate(over="ignore"):
        total = np.add.accumulate(np.abs(cut(weight, columns, rows)), axis=1)[:, -1]
    exact = torch.from_numpy(total / np.float32(rows * columns)).view(-(-weight.shape[0] // rows), 1, -1, 1)
    stored = stored_scale(exact, scale).to(weight.device)
    return (weight >= 0).byte(), shaped(stored, axes).contiguous()
