"""Weights that are stored as floats, without a scale."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.layout import FLOATS
from qdsl.runtime.packed import FormatError


def nearest(weight: Tensor, *, code: str) -> Tensor:
    """Each weight of [N, K] rounded to nearest, ties to even, in the float type `code`.

    Raises FormatError for the first weight that is too large for it.
    """
    stored = weight.to(FLOATS[code], copy=True)
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        n, k = (int(i) for i in bad[0])
        raise FormatError(f"the weight {float(weight[n, k]):g} at row {n}, column {k} does not fit {code}")
    return stored
