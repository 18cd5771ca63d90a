"""Launches of `window` and `row_window` (their reference.py): the same kernels, with or without a tensor of third bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs.window import kernels
from qdsl.codecs.window import reference as entropy
from qdsl.runtime.gpu import configure, tiles
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.arrays import cdiv

STEP, PATCHES = 8, 128                                           # words of a row, one per thread, and patches at a time
SPAN = 1 << 16                                                   # columns of a list of patches of a row
TAIL = 32                                                        # patches at a time in `skinny`, for each 16 x 8 sums
WARPS = 4
CHUNK = 128                                                      # columns per warp and iteration of `skinny`

Tensors = Mapping[str, Tensor]
BULK = ("codes",)                                                # tensors whose shape alone is checked
ASSUMED = {"patches": 0}


def stream_info(tensors: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, int]:
    """Validates tensors; returns the most patches of a row.  Raises StreamError.

    That is all patches if a patched code could mean 0: infinite x times 0 could not be corrected.
    """
    entropy.check(tensors, shape)
    if len(tensors["index"]) and not tensors["base"][0]:
        return {"patches": shape[1]}
    rows = np.repeat(np.arange(len(tensors["start"]) - 1) * entropy.ROWS, np.diff(tensors["start"]))
    rows += tensors["index"] // max(1, shape[1])
    return {"patches": int(np.bincount(rows).max(initial=0))}


def typical_shapes(shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that depend on the weights, for exponents of normal weights: 5 patches in 100 000."""
    n, k = shape
    patches = cdiv(n * k, 20000)
    return {"start": (cdiv(n, entropy.ROWS) + 1,), "index": (patches,), "value": (patches,)}


def block_rows(shape: tuple[int, int]) -> int:
    return entropy.ROWS


def group_rows(shape: tuple[int, int]) -> int:
    """Rows that share a list of patches."""
    return entropy.ROWS


def row_band(tensors: Tensors, shape: tuple[int, int], start: int, stop: int) -> dict[str, Tensor]:
    """The tensors of rows [start, stop), with the same base: codes are views, patches are copied.

    start: a multiple of group_rows; stop: a multiple too, or N.
    """
    starts = tensors["start"][start // entropy.ROWS:cdiv(stop, entropy.ROWS) + 1]
    patches = slice(*starts[[0, -1]].tolist())
    return {"codes": tensors["codes"][start:stop], "base": tensors["base"], "start": starts - starts[0],
            "index": tensors["index"][patches].clone(), "value": tensors["value"][patches].clone()}   # aligned for kernels' loads


def decode_calls(tensors: Tensors, info: Mapping[str, int], out: Tensor, shape: tuple[int, int], blocks: Tensor | None = None,
               ) -> Iterator[Call]:
    """The launch that makes the symbols u8 [N, K].

    blocks: int32 [B], only these blocks of rows, one after the other in out.
    """
    n, k = shape
    yield Call(kernels.symbols, (*_arguments(tensors), out, n, k, blocks),
               {"ROWS": entropy.ROWS, "STEP": STEP, "PATCHES": PATCHES if "index" in tensors else PATCHES // 16,
                "SPANS": cdiv(k, SPAN)},
               (cdiv(n, entropy.ROWS) if blocks is None else len(blocks),), {"num_warps": WARPS},
               weights=entropy.ROWS * k, step=entropy.ROWS * 8 * STEP)


def dequantize_calls(to_weights: Any, at: int, tensors: Tensors, uncoded: Tensor, info: Mapping[str, int], out: Tensor,
                     ) -> Iterator[Call]:
    """The launch that makes 16-bit weights [N, K]; K is a multiple of 128.

    to_weights: the function that makes pairs of weights from pairs of symbols at bit `at` and the uncoded bits.  uncoded: the
    tensor of those bits.
    """
    n, k = out.shape
    most = 4 if "index" in tensors else 8                        # words of three bits are shorter
    times = next(times for times in (most, 4, 2) if k % (8 * times * STEP) == 0)
    yield Call(kernels.dequantize, (*_arguments(tensors), uncoded.view(torch.int32), uncoded.view(torch.int64),
                                    out.view(torch.int32), out.view(torch.int16), n, k, k // 8),
               {"to_weights": to_weights, "AT": at, "ROWS": entropy.ROWS, "STEP": STEP, "TIMES": times,
                "PATCHES": PATCHES if "index" in tensors else PATCHES // 4, "SPANS": cdiv(k, SPAN)},
               (cdiv(n, entropy.ROWS),), {"num_warps": WARPS}, weights=entropy.ROWS * k, step=entropy.ROWS * 8 * STEP * times)


def has_skinny(shape: tuple[int, int], info: Mapping[str, int]) -> bool:
    """Whether most columns of every row are unpatched: each correction adds a float32 error."""
    return 4 * info["patches"] <= shape[1]


def skinny_calls(to_weights: Any, at: int, tensors: Tensors, uncoded: Tensor, info: Mapping[str, int], x: Tensor,
              bias: Tensor | None, out: Tensor, F: Any) -> Iterator[Call]:
    """The launch of x [M, K] times the weight's transpose, plus bias [N], into out [M, N]; K is a multiple of 128."""
    (m, k), n = x.shape, out.shape[1]
    places = configure.target(x.device).multiprocessors
    warps = 1
    while warps < 8 and cdiv(n, entropy.ROWS) * warps < tiles.WARPS * places and 2 * CHUNK * warps <= k:
        warps *= 2
    blocks, tokens = 1 if m <= 8 else 2, 1 if m == 1 else 8
    yield Call(kernels.skinny, (*_arguments(tensors), uncoded.view(torch.int32), x.view(torch.int32), x, bias, out, m, n, k,
                                k // 8),
               {"to_weights": to_weights, "AT": at, "ROWS": entropy.ROWS, "W": warps, "BLOCKS": blocks, "TOKENS": tokens,
                "PATCHES": TAIL if "index" in tensors else max(4, 8 * warps // tokens), "EVEN": k % (CHUNK * warps) == 0, "F": F},
               (cdiv(n, entropy.ROWS), cdiv(m, 8 * blocks)), {"num_warps": warps, "num_stages": 1},
               weights=entropy.ROWS * k, step=entropy.ROWS * CHUNK * warps)


def _arguments(tensors: Tensors) -> tuple[Tensor | None, ...]:
    upper = tensors["upper"].contiguous() if "upper" in tensors else None
    others = ("base", "start", "index" if upper is None else "column", "value")
    return tensors["codes"].contiguous(), upper, *(tensors[name].contiguous() for name in others)
