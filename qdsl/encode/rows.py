"""Prepares rows of blocks for searches: splits a weight, searches a few blocks at a time, and makes fields of the results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode.blocks import cast_scale, cut_blocks, join_blocks
from qdsl.encode.search import Floats
from qdsl.runtime.weight.match import torch_dtype

ELEMENTS = 1 << 17                                               # elements to search together: their arrays fit a cache


def split_blocks(weight: Tensor, columns: int, rows: int = 1) -> Floats:
    """[N, K] as [blocks, elements] in float32, with zeros where the last blocks are short."""
    blocks = cut_blocks(weight.float(), rows, columns).permute(0, 2, 1, 3)
    cut_rows: Floats = blocks.reshape(-1, rows * columns).cpu().numpy()
    return cut_rows


def error_weights(x: Floats, importance: Floats, spread: float) -> Floats:
    """The weights of squared errors: importance * sqrt(spread * mean square of the row + x^2); only importance for spread 0."""
    if not spread:
        return importance
    square = x * x
    mean = np.float32(spread) * np.add.accumulate(square, axis=1)[:, -1:] / np.float32(x.shape[1])
    weighted: Floats = np.multiply(importance, np.sqrt(np.add(square, mean, out=square), out=square), out=square)
    return weighted


def batches(blocks: Floats) -> Iterator[slice]:
    """Slices that cut the blocks into batches of at most ELEMENTS elements."""
    step = max(1, ELEMENTS // blocks.shape[1])
    return (slice(i, i + step) for i in range(0, len(blocks), step))


def fit_blocks(blocks: Floats, weights: Floats | None, fit: Callable[[Floats, Floats | None], tuple[Floats, ...]],
         ) -> tuple[Floats, ...]:
    """The results of `fit` for blocks [blocks, columns] and the weights of their errors; fit takes both as [columns, blocks]."""
    fits = [fit(transposed(blocks[at]), None if weights is None else transposed(weights[at])) for at in batches(blocks)]
    return tuple(np.concatenate(values) for values in zip(*fits, strict=True))


def search_blocks(weight: Tensor, importance: Tensor, rows: int, columns: int, code: str,
                  fit: Callable[[Floats, Floats], tuple[Floats, ...]]) -> tuple[Tensor, ...]:
    """(codes [N, K], scales and further results as blocks [R, 1, C, 1]) that `fit` returns for blocks of rows and columns.

    fit: takes weights [elements, blocks] and the weights of their squared errors, importance [K] * sqrt(mean square of the row +
    w^2); returns codes [elements, blocks], scales [blocks] and further results.
    """
    def fitted(x: Floats, by: Floats | None) -> tuple[Floats, ...]:
        assert by is not None
        codes, *values = fit(x, by)
        return codes.T, *values

    n, k = weight.shape
    count = torch.from_numpy(error_weights(weight.float().cpu().numpy(), importance.cpu().numpy(), 1))
    with np.errstate(all="ignore"):
        codes, *values = fit_blocks(split_blocks(weight, columns, rows), split_blocks(count, columns, rows), fitted)
    whole = torch.from_numpy(codes.astype(integers(code))).view(-(-n // rows), -(-k // columns), rows, columns)
    chosen = [torch.from_numpy(value).view(len(whole), 1, -1, 1).to(weight.device) for value in values]
    return join_blocks(whole.transpose(1, 2), n, k).to(weight.device), *chosen


class SubBlocks:
    """The blocks of a weight's rows, flat and in order: x [blocks, columns].  `super_columns` columns share a mean square.

    counts: the weights of squared errors, as of `error_weights`; None without importance [K].
    """

    def __init__(self, weight: Tensor, columns: int, super_columns: int, importance: Tensor | None, spread: float) -> None:
        x = split_blocks(weight, super_columns)
        self.weight, self.supers = weight, len(x)
        self.x: Floats = x.reshape(-1, columns)
        self.counts: Floats | None = None
        if importance is not None:
            every = split_blocks(importance.expand_as(weight), super_columns)
            self.counts = error_weights(x, every, spread).reshape(-1, columns)

    def fit(self, fit: Callable[[Floats, Floats | None], tuple[Floats, ...]]) -> tuple[Floats, ...]:
        """What `fit` finds for all blocks, as of `fit_blocks`."""
        return fit_blocks(self.x, self.counts, fit)

    def codes(self, kind: str, find: Callable[[Floats, slice], Floats]) -> Tensor:
        """The codes [N, K] that `find` returns for blocks [columns, blocks] and their slice."""
        return field_of_blocks(find_codes(self.x, find, kind), kind, self.weight)

    def stored(self, exact: Floats, kind: str) -> Tensor:
        """Scales [N, blocks or super-blocks of a row] in their stored type."""
        return cast_scale(torch.from_numpy(exact).view(self.weight.shape[0], 1, -1, 1), kind)[:, 0, :, 0].contiguous().to(
            self.weight.device)


def transposed(blocks: Floats) -> Floats:
    """The transposed array, contiguous."""
    return np.ascontiguousarray(blocks.T)


def find_codes(blocks: Floats, find: Callable[[Floats, slice], Floats], kind: str) -> NDArray[Any]:
    """The codes that `find` returns for blocks [columns, blocks] and their slice, as [blocks, columns] of the integer type."""
    chosen = np.empty(blocks.shape, integers(kind))
    for at in batches(blocks):
        chosen[at] = find(transposed(blocks[at]), at).T
    return chosen


def integers(kind: str) -> np.dtype[Any]:
    """Numpy's dtype of fields of an integer type."""
    return torch.empty(0, dtype=torch_dtype(kind), device="cpu").numpy().dtype


def field_of_blocks(values: NDArray[Any], kind: str, weight: Tensor, columns: int = 1) -> Tensor:
    """Values of all blocks as the field with one per `columns` columns of the weight."""
    n, k = weight.shape
    tensor = torch.from_numpy(np.ascontiguousarray(values, integers(kind)))
    return tensor.reshape(n, -1)[:, :-(-k // columns)].contiguous().to(weight.device)


def integer_range(kind: str, offset: int = 0) -> tuple[int, int]:
    """The least and largest value of an integer type, minus an offset."""
    return number(kind).low - offset, number(kind).high - offset
