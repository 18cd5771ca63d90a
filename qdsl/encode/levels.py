"""Codes into a table of levels, with scales that a search chooses: byte for byte what ggml makes of IQ4_NL and IQ4_XS.

Sums are float32, in the order of columns, each product and sum rounded: that is what ggml's bytes depend on.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from qdsl.encode.blocks import stored_scale

BLOCK = 32                                                       # columns that share a scale
TRIES = range(-7, 8)                                             # what the first level is moved by, in steps of the table
SMALLEST = 1e-15                                                 # a block of smaller weights has a scale of 0
CHUNK = 2048                                                     # blocks at a time: what a search reads again stays in a cache


def levels(weight: Tensor, *, table: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(codes u4 [N, K], scales f16 [N, K / 32]) of w = scale * table[code].

    table: 16 increasing integers, f32 [16].  importance: f32 [K], what the square of an error in a column weighs.
    Raises FormatError for a scale that does not fit.
    """
    n, k = weight.shape
    blocks = weight.float().reshape(-1, BLOCK)
    scales = _scales(blocks, table, importance, BLOCK, k)
    stored = stored_scale(scales.view(n, 1, -1, 1), "f16")[:, 0, :, 0]
    codes = _codes(blocks, _reciprocal(scales), table)
    return codes.view(n, k), stored.contiguous()


def scaled_levels(weight: Tensor, *, table: Tensor, importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes u4 [N, K], sub-scales u6 [N, K / 32], scales f16 [N, K / 256]) of w = scale * (sub-scale - 32) * table[code].

    As `levels`; a scale is that of the block whose scale is largest, the first of equals, / -32.
    """
    n, k = weight.shape
    blocks = weight.float().reshape(-1, BLOCK)
    scales = _scales(blocks, table, importance, 8 * BLOCK, k).view(-1, 8)
    stored_scale(scales.view(n, 1, -1, 1), "f32")                # NaN, which the largest would pass over
    exact = scales.gather(1, scales.abs().argmax(1, keepdim=True)) / -32
    stored = stored_scale(exact.view(n, 1, -1, 1), "f16")[:, 0, :, 0]
    steps = _reciprocal(exact) * scales
    # An infinite product is ggml's code of -32, and a NaN its code of 0.
    whole = torch.where(torch.isinf(steps), -32.0, torch.nan_to_num(steps.round(), nan=0.0)).clamp_(-32, 31)
    codes = _codes(blocks, _reciprocal(exact * whole).flatten(), table)
    return codes.view(n, k), (whole + 32).to(torch.uint8).view(n, -1), stored.contiguous()


def _reciprocal(scale: Tensor) -> Tensor:
    return torch.where(scale == 0, torch.zeros_like(scale), 1 / scale)


def _scales(blocks: Tensor, table: Tensor, importance: Tensor | None, spread: int, k: int) -> Tensor:
    """The scale [B] of each block, as ggml's search finds it; `spread` weights share the mean square that weighs errors."""
    found = torch.empty(blocks.shape[0])
    look_up = _lookup(table, table)
    for start in range(0, blocks.shape[0], CHUNK):
        x = blocks[start:start + CHUNK].t().contiguous()
        weights = x * x
        if importance is not None:
            weights = _importance(weights, importance, start, spread, k)
        found[start:start + CHUNK] = _search(x, weights, float(table[0]), look_up)
    return found


def _importance(squares: Tensor, importance: Tensor, start: int, spread: int, k: int) -> Tensor:
    """importance * sqrt(twice the mean square + square), for blocks from `start` on; squares [32, B]."""
    share = spread // BLOCK
    sums = in_order(squares.view(BLOCK, -1, share).permute(2, 0, 1).flatten(0, 1))
    spread_out = (sums * (2 / spread)).repeat_interleave(share)
    places = (torch.arange(start, start + squares.shape[1]) % (k // BLOCK))
    # In float64, and then rounded: torch's square root of float32 is not always the nearest.
    root = (spread_out + squares).double().sqrt_().float()
    return importance.float().view(-1, BLOCK)[places].t() * root


def _search(x: Tensor, weights: Tensor, first: float, look_up: Callable[[Tensor, Tensor], Tensor]) -> Tensor:
    """The scale of each column of x [32, B]: the best fit of 16 ways to put the largest weight on the first level."""
    low, high = x.amin(0), x.amax(0)
    largest = torch.where(-low > high, low, high)
    tied = torch.nonzero(-low == high)[:, 0]
    largest[tied] = x[:, tied].gather(0, x[:, tied].abs().argmax(0, keepdim=True))[0]
    empty = largest.abs() < SMALLEST
    largest.masked_fill_(empty, 1)
    value, room = torch.empty_like(x), torch.empty_like(x)
    best = torch.zeros_like(largest)
    firsts = largest.new_tensor([first + step for step in TRIES])  # torch makes number / tensor two roundings
    scale = torch.zeros_like(largest)
    for target in [None, *firsts]:
        inverse = 1 / (-largest / first) if target is None else target / largest
        look_up(torch.mul(x, inverse, out=room), value)
        part = torch.mul(weights, value, out=room)
        square = in_order(value.mul_(part))
        across = in_order(part.mul_(x))
        fit = across / square
        better = square > 0 if target is None else (square > 0) & (across * across > best * square)
        scale = torch.where(better, fit, scale)
        best = torch.where(better, fit * across, best)
    return scale.masked_fill_(empty, 0)


def _codes(blocks: Tensor, inverse: Tensor, table: Tensor) -> Tensor:
    """The code of each weight of blocks [B, 32] times `inverse` [B]."""
    found = torch.empty(blocks.shape, dtype=torch.uint8)
    look_up = _lookup(table, torch.arange(len(table), dtype=torch.uint8))
    for start in range(0, blocks.shape[0], CHUNK):
        scaled = blocks[start:start + CHUNK] * inverse[start:start + CHUNK, None]
        look_up(torch.nan_to_num_(scaled, nan=torch.inf), found[start:start + CHUNK])
    return found


def _lookup(table: Tensor, results: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function that writes results[the index of the level nearest to each value] to a tensor, ties upward.

    Levels are integers, so a middle between two is a whole number of halves, and floor(2 * value) says on which side of all
    middles a value lies.
    """
    middles = table[:-1] + table[1:]
    low, high = float(middles[0]) - 1, float(middles[-1])
    of_halves = results[torch.bucketize(torch.arange(low, high + 1), middles, right=True)]

    def look_up(values: Tensor, out: Tensor) -> Tensor:
        halves = (values * 2).floor_().clamp_(low, high).sub_(low).to(torch.int64)
        torch.index_select(of_halves, 0, halves.flatten(), out=out.view(-1))
        return out

    return look_up


def in_order(terms: Tensor) -> Tensor:
    """The sum over the first axis, one after another."""
    total = terms[0].clone()
    for term in terms[1:]:
        total += term
    return total
