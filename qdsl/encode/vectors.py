"""Vectors fitted to runs of a weight's rows or columns by k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode import native
from qdsl.encode.blocks import cast_scale, cut_blocks, quotients
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import UnrepresentableValue

ROUNDS = 12                                                      # the error then falls by less than 1 % each
TURNS, TURN_ROUNDS = 4, 4                                        # of each of two tables, and the rounds of a turn
COSTS = 1 << 20                                                  # that are computed at a time, to fit caches


@scheme
def vector_kmeans(weight: Tensor, *, code: str, levels: str, rows: int, columns: int, residual: str | None = None,
                  residuals: str | None = None, scale: str | None = None, importance: Tensor | None = None,
                  ) -> tuple[Tensor, ...]:
    """(codes, residual codes, scales, levels, residual levels), of those that the format has.

    Vectors are of `rows` rows or `columns` columns.  Lloyd's algorithm in float64, which begins with vectors at even distances:
    each of the table becomes the mean of those nearest to it, of equals the first; one without any stays.  A table that can hold
    all vectors has them.  Of two tables each is fitted in turns to what the other leaves; without `residuals` they are one field.
    A scale is the largest magnitude of its row.  importance [K]: the weight of columns in distances.  Raises
    UnrepresentableValue for a number that its type cannot hold.
    """
    values, counts = weight.double(), weight.new_ones(weight.shape, dtype=torch.float64)
    if importance is not None:
        counts *= importance.to(counts)
    scales = []
    if scale is not None:
        scales = [cast_scale(weight.float().abs().amax(1)[:, None, None, None], scale).flatten()]
        stored = scales[0].double()[:, None]
        values, counts = quotients(values, stored), counts * stored.square()
    x, count = (cut_blocks(part, rows, columns).transpose(1, 2).flatten(2) for part in (values, counts))
    shape, x, count = x.shape[:2], x.flatten(0, 1), count.flatten(0, 1)
    kinds = [code] if residual is None else [code, residual]
    tables, codes, parts, is_exact = [x] * len(kinds), [x] * len(kinds), [torch.zeros_like(x)] * len(kinds), [False] * len(kinds)
    for turn in range(TURNS if residual else 1):
        for own, kind in enumerate(kinds):
            remainder, rounds = (x - parts[1 - own], TURN_ROUNDS) if residual else (x, ROUNDS)
            if turn == 0:
                tables[own], is_exact[own] = _first_table(remainder, number(kind).high + 1)
            tables[own] = _stored(_fitted(remainder, count, tables[own], 0 if is_exact[own] else rounds), levels).double()
            codes[own] = nearest_vectors(remainder, count, tables[own])
            parts[own] = tables[own][codes[own]]
    chosen = [part.view(shape).to(torch_dtype(kind)) for part, kind in zip(codes, kinds, strict=True)]
    stored_tables = [_stored(table, levels) for table in tables]
    return *chosen, *scales, *(stored_tables if residuals or not residual else [torch.stack(stored_tables)])


def _first_table(x: Tensor, entries: int) -> tuple[Tensor, bool]:
    """Vectors at even distances, False; or all vectors, the last or zeros again and again, True, where a table holds them."""
    places = torch.arange(entries, device=x.device)
    if entries < len(x):
        distinct = torch.unique(x, dim=0)
        if len(distinct) > entries:
            return x[(2 * places + 1) * len(x) // (2 * entries)], False
        x = distinct
    return (x[places.clamp(max=len(x) - 1)] if len(x) else x.new_zeros(entries, x.shape[1])), True


def _fitted(x: Tensor, count: Tensor, table: Tensor, rounds: int) -> Tensor:
    """The table after some rounds of Lloyd's algorithm."""
    for _ in range(rounds):
        codes = nearest_vectors(x, count, table)
        sums, total = (torch.zeros_like(table).index_add_(0, codes, part) for part in (x * count, count))
        moved = torch.where(total > 0, sums / total, table)
        if torch.equal(moved, table):
            break
        table = moved
    return table


def _stored(table: Tensor, levels: str) -> Tensor:
    """A table in its type.  Raises UnrepresentableValue."""
    stored = table.float().to(FLOATS[levels])
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        raise UnrepresentableValue(f"the level {float(table[tuple(bad[0])]):g} of block {{row}} does not fit {levels}", 0)
    return stored


def nearest_vectors(x: Tensor, count: Tensor, table: Tensor) -> Tensor:
    """The nearest entry of a table for each vector, int64; sums are in the order of the vectors' numbers."""
    codes = native.nearest_vectors(x, count, table)
    if codes is not None:
        return codes
    step, chosen = max(1, COSTS // len(table)), []
    for own, by in zip(torch.split(x, step), torch.split(count, step), strict=True):
        costs = own.new_zeros(len(own), len(table))
        for place in range(x.shape[1]):
            costs += (own[:, place, None] - table[:, place]).square_().mul_(by[:, place, None])
        chosen.append(costs.argmin(1))
    return torch.cat(chosen)
