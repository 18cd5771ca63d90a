"""Levels fitted to a block's weights by one-dimensional k-means."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode.blocks import cast_scale, cut_blocks, join_blocks, per_field, quotients
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import UnrepresentableValue

ROUNDS = 100                                                     # 16 levels of a row of normal weights take about 30


@scheme
def kmeans(weight: Tensor, *, code: str, levels: str, rows: int, columns: int, axes: int, importance: Tensor | None = None,
           ) -> tuple[Tensor, Tensor]:
    """(codes, levels) of w = levels[code]: rising levels of a block with a small sum of squared errors, and the nearest codes.

    Lloyd's algorithm in float64 over sorted weights: each level becomes the mean of its nearest weights, ties to the lower level,
    until no level changes.  A level without weights stays.  If a block has no more distinct weights than levels, they are the
    levels, with the largest repeated.  importance [K]: the weight of a column in means.  Raises UnrepresentableValue for a level
    that its type cannot hold.
    """
    for dim, size in enumerate((rows, columns)):
        if weight.shape[dim] > size and weight.shape[dim] % size:
            whole = weight.shape[dim] // size * size
            counts = [importance] * 2 if importance is None or dim == 0 else [importance[:whole], importance[whole:]]
            parts = [weight.narrow(dim, 0, whole), weight.narrow(dim, whole, weight.shape[dim] - whole)]
            pieces = []
            for i, (part, count) in enumerate(zip(parts, counts, strict=True)):
                try:
                    pieces.append(kmeans(part, code=code, levels=levels, rows=rows, columns=columns, axes=axes, importance=count))
                except UnrepresentableValue as error:
                    raise error.after(i * whole // rows if dim == 0 else 0) from None
            chosen, tables = zip(*pieces, strict=True)
            return torch.cat(chosen, dim), torch.cat(tables, min(dim, axes - 1))
    n, k = weight.shape
    rows, columns = min(rows, n), min(columns, k)
    blocks = cut_blocks(weight.float() + 0.0, rows, columns).transpose(1, 2)        # [R, C, rows, columns], without -0.0
    x = blocks.flatten(2).flatten(0, 1).double().cpu()
    count = None if importance is None else cut_blocks(importance.double().cpu().expand(n, k), rows, columns).transpose(1, 2)
    fitted = _fit_levels(x, None if count is None else count.reshape(x.shape), number(code).high + 1)
    stored = _cast_levels(fitted, levels, blocks.shape[1])
    middles = _middles(stored.double())
    codes = torch.searchsorted(middles, x).to(torch_dtype(code)).view(blocks.shape).transpose(1, 2)
    table = stored.view(*blocks.shape[:2], -1) if axes == 2 else stored if axes else stored[0]
    return join_blocks(codes, n, k).to(weight.device), table.to(weight.device)


@scheme
def scaled_kmeans(weight: Tensor, *, code: str, scale: str, levels: str, rows: int, columns: int, axes: int,
                  importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, levels) of w = scale * levels[code]: a scale is the largest magnitude of its block.

    Levels are those of `kmeans` for all weights divided by their stored scales.  Each counts by its squared scale times its
    column's importance, so that the sum of squared errors is that of the weight.  Codes are those of the nearest levels.  Raises
    UnrepresentableValue for a scale or a level that its type cannot hold.
    """
    n, k = weight.shape
    blocks = cut_blocks(weight.float() + 0.0, rows, columns)
    scales = cast_scale(blocks.abs().amax((1, 3), keepdim=True), scale)
    x = join_blocks(quotients(blocks, scales.float()), n, k).double().cpu().view(1, -1)
    squares = join_blocks(scales.double().square().expand_as(blocks), n, k).cpu()
    count = squares if importance is None else squares * importance.double().cpu()
    stored = _cast_levels(_fit_levels(x, count.view(1, -1), number(code).high + 1), levels, 1)
    codes = torch.searchsorted(_middles(stored.double()), x).to(torch_dtype(code)).view(n, k)
    return codes.to(weight.device), per_field(scales, axes).contiguous(), stored[0].to(weight.device)


def _middles(levels: Tensor) -> Tensor:
    return (levels[:, 1:] + levels[:, :-1]) / 2


def _fit_levels(x: Tensor, count: Tensor | None, entries: int) -> Tensor:
    """Rising levels [blocks, entries] of weights [blocks, weights] with these counts; all float64."""
    x, order = x.sort(dim=1, stable=True)                        # a stable order makes sums of equal weights reproducible
    count = torch.ones_like(x) if count is None else count.gather(1, order)
    nothing = x.new_zeros(len(x), 1)
    sums, counts = (torch.cat([nothing, part.cumsum(1)], 1) for part in (x * count, count))
    passed = torch.cat([nothing, _weighted_gaps(x).cumsum(1)], 1)
    at = torch.searchsorted(passed, (2 * torch.arange(entries, device=passed.device) + 1) * passed[:, -1:] / (2 * entries))
    levels = x.gather(1, at.clamp(max=x.shape[1] - 1))
    first, last = (torch.full((len(x), 1), end, dtype=torch.int64, device=x.device) for end in (0, x.shape[1]))
    for _ in range(ROUNDS):
        ends = torch.cat([first, torch.searchsorted(x, _middles(levels), right=True), last], 1)
        total, weights = sums.gather(1, ends).diff(), counts.gather(1, ends).diff()
        moved = torch.where(weights > 0, total / weights, levels)
        if torch.equal(moved, levels):
            break
        levels = moved
    place = torch.cat([first, (x[:, 1:] != x[:, :-1]).cumsum(1)], 1)
    few = place[:, -1:] < entries
    different = x[:, -1:].repeat(1, entries).scatter_(1, place.clamp(max=entries - 1), x)
    return torch.where(few, different, levels)


def _weighted_gaps(x: Tensor) -> Tensor:
    """Gaps between sorted weights to the power 5/8, by roots that every machine rounds alike.

    The best levels are as dense as the cube root of the weights' density (Panter and Dite).  So are sums of gaps ** (2/3).
    """
    roots = x.diff().sqrt_()
    return roots * roots.sqrt().sqrt_()


def _cast_levels(levels: Tensor, kind: str, across: int) -> Tensor:
    """Levels [blocks, entries] in their type, rising.  across: blocks along K.  Raises UnrepresentableValue."""
    stored = levels.float().to(FLOATS[kind]).sort(1).values
    bad = torch.nonzero(~torch.isfinite(stored))
    if bad.numel():
        block = int(bad[0, 0])
        value = float(levels[block].abs().max())
        raise UnrepresentableValue(f"the level {value:g} of block {{row}} does not fit {kind}", block // across)
    return stored
