"""Launches of `row_window` (reference.py), by the kernels of `window`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs.row_window import reference as entropy
from qdsl.core.codecs import implementation
from qdsl.runtime.weight.arrays import cdiv

_shared = implementation("window", "launch")
ASSUMED, block_rows, decode_calls = _shared.ASSUMED, _shared.block_rows, _shared.decode_calls
dequantize_calls, skinny_calls = _shared.dequantize_calls, _shared.skinny_calls
BULK = ("codes", "upper")                                        # tensors whose shape alone is checked


def stream_info(tensors: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, int]:
    """Validates tensors; returns the most patches of a row.  Raises StreamError.

    That is all patches if a patched code could mean 0: infinite x times 0 could not be corrected.
    """
    entropy.check(tensors, shape)
    patches = np.diff(tensors["start"]).reshape(shape[0], entropy.spans_of(shape[1])).sum(1)
    if (patches[tensors["base"] == 0] > 0).any():
        return {"patches": shape[1]}
    return {"patches": int(patches.max(initial=0))}


def typical_shapes(shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that depend on the weights, for exponents of normal weights: one patch in 80."""
    n, k = shape
    patches = cdiv(n * k, 80)
    return {"start": (n * entropy.spans_of(k) + 1,), "column": (patches,), "value": (patches,)}


def has_skinny(shape: tuple[int, int], info: Mapping[str, int]) -> bool:
    """Whether rows have one list of patches each, and most of their columns none."""
    return shape[1] <= entropy.SPAN and bool(_shared.has_skinny(shape, info))


def group_rows(shape: tuple[int, int]) -> int:
    """Rows that share a list of patches: each has its own."""
    return 1


def row_band(tensors: Mapping[str, Tensor], shape: tuple[int, int], start: int, stop: int) -> dict[str, Tensor]:
    """The tensors of rows [start, stop): codes are views, bases and patches are copied."""
    spans = entropy.spans_of(shape[1])
    starts = tensors["start"][start * spans:stop * spans + 1]
    patches = slice(*starts[[0, -1]].tolist())
    views = {name: tensors[name][start:stop] for name in ("codes", "upper")}
    copies = {"base": tensors["base"][start:stop], "column": tensors["column"][patches], "value": tensors["value"][patches]}
    return {**views, "start": starts - starts[0], **{name: tensor.clone() for name, tensor in copies.items()}}    # aligned
