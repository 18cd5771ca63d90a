"""Vectors fitted to runs of a weight's rows or columns by k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode.blocks import cut_blocks
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import UnrepresentableValue

ROUNDS = 12                                                      # the error then falls by less than 1 % each
COSTS = 1 << 20                                                  # that are computed at a time, to fit caches


@scheme
def vector_kmeans(weight: Tensor, *, code: str, levels: str, rows: int, columns: int, importance: Tensor | None = None,
                  ) -> tuple[Tensor, Tensor]:
    """(codes, levels) of w = levels[code, place]: vectors of `rows` rows or `columns` columns, and the nearest of one table.

    Lloyd's algorithm in float64, which begins with vectors at even distances: each of the table becomes the mean of those nearest
    to it, of equals the first; one without any stays.  A table that can hold all vectors has them.  importance [K]: the weight of
    columns in distances.  Raises UnrepresentableValue for a number that the type of levels cannot hold.
    """
    blocks = cut_blocks(weight.double(), rows, columns).transpose(1, 2).flatten(2)
    counts = weight.new_ones(1, weight.shape[1]) if importance is None else importance[None]
    counts = cut_blocks(counts.to(blocks.device, torch.float64).expand(rows, -1), rows, columns).transpose(1, 2).flatten(2)
    x = blocks.flatten(0, 1)
    count = counts.expand(blocks.shape).reshape(x.shape)
    entries = number(code).high + 1
    table, is_exact = _first_table(x, entries)
    for _ in range(0 if is_exact else ROUNDS):
        codes = _nearest(x, count, table)
        sums, total = (torch.zeros_like(table).index_add_(0, codes, part) for part in (x * count, count))
        moved = torch.where(total > 0, sums / total, table)
        if torch.equal(moved, table):
            break
        table = moved
    stored = table.float().to(FLOATS[levels])
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        raise UnrepresentableValue(f"the level {float(table[tuple(bad[0])]):g} of block {{row}} does not fit {levels}", 0)
    return _nearest(x, count, stored.double()).view(blocks.shape[:2]).to(torch_dtype(code)), stored


def _first_table(x: Tensor, entries: int) -> tuple[Tensor, bool]:
    """Vectors at even distances, False; or all vectors, the last or zeros again and again, True, where a table holds them."""
    places = torch.arange(entries, device=x.device)
    if entries < len(x):
        distinct = torch.unique(x, dim=0)
        if len(distinct) > entries:
            return x[(2 * places + 1) * len(x) // (2 * entries)], False
        x = distinct
    return (x[places.clamp(max=len(x) - 1)] if len(x) else x.new_zeros(entries, x.shape[1])), True


def _nearest(x: Tensor, count: Tensor, table: Tensor) -> Tensor:
    """The nearest entry of a table for each vector, int64; sums are in the order of the vectors' numbers."""
    step, chosen = max(1, COSTS // len(table)), []
    for own, by in zip(torch.split(x, step), torch.split(count, step), strict=True):
        costs = own.new_zeros(len(own), len(table))
        for place in range(x.shape[1]):
            costs += (own[:, place, None] - table[:, place]).square_().mul_(by[:, place, None])
        chosen.append(costs.argmin(1))
    return torch.cat(chosen)
