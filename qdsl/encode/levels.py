"""Codes that index a table of levels, with an 8-bit scale from the largest magnitude of a block."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from qdsl.encode.blocks import cut_blocks, join_blocks, per_field
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.numbers import e8m0h, ue4m3
from qdsl.runtime.weight.tables import Table

VALUES = {"e8m0h": e8m0h, "ue4m3": ue4m3}


@scheme
def absmax_level(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, level: Table,
                 factor: float = 1) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * factor * level[code], each code with the least error, the first among equals.

    A power of two (e8m0h) maps the largest magnitude of a block to between the power of two at or below the largest level and
    twice that; a finer scale (ue4m3) maps it to the largest level, rounded as in ggml.
    """
    blocks = cut_blocks(weight.float(), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    top = max(abs(number) for number in level.numbers) * factor
    stored = _power(largest, top) if scale == "e8m0h" else _ue4m3_codes(largest / top)
    unit = VALUES[scale](stored) * factor
    codes = _nearest_codes(blocks, unit, level)
    # Beyond twice the largest level errors are rounded, and ggml takes the first of equals; a level that overflows is infinitely
    # far.
    reach = top / factor * unit
    far = (largest > 2 * reach) | torch.isinf(reach)
    if bool(far.any()):
        far = far.expand_as(blocks)
        codes[far] = _least_error_codes(blocks[far], unit.expand_as(blocks)[far], level)
    return join_blocks(codes, *weight.shape), per_field(stored, axes).contiguous()


def _power(largest: Tensor, top: float) -> Tensor:
    """Codes of 2^(floor(log2(largest)) - floor(log2(top))), the first logarithm rounded to float32 as ggml's is; 0 for 0."""
    exponent = largest.double().log2().float().floor() - (math.frexp(top)[1] - 1)
    return torch.where(largest > 0, (exponent + 128).clamp_(0, 255), 0).to(torch.uint8)


def _ue4m3_codes(values: Tensor) -> Tensor:
    """Codes of ggml's unsigned E4M3: ties go up, at most to 7 below its normal numbers, and values from 256 on become 448."""
    bits = values.view(torch.int32)
    normal = (bits + (1 << 19) >> 20) - (120 << 3)               # the exponent, biased by 7, and three mantissa bits
    small = (values * 512 + 0.5).to(torch.int32).clamp_(max=7)
    code = torch.where(bits >> 23 <= 120, small, torch.where(normal >= 15 << 3, 126, normal))
    return code.to(torch.uint8)


@np.errstate(over="ignore")
def _nearest_codes(blocks: Tensor, unit: Tensor, level: Table) -> Tensor:
    """Codes by the midpoints between adjacent levels; a weight on a midpoint gets the first such code of the table."""
    first = {number: i for i, number in reversed(list(enumerate(level.numbers)))}
    order = sorted(first)
    values, units = blocks.cpu().numpy(), unit.cpu().numpy()    # numpy's comparisons are more than twice as fast as torch's
    place, above = np.zeros(values.shape, np.uint8), np.empty(values.shape, np.bool_)
    for low, high in pairwise(order):
        compare = np.greater if first[low] < first[high] else np.greater_equal
        place += compare(values, np.float32((low + high) / 2) * units, out=above).view(np.uint8)
    codes = torch.tensor([first[number] for number in order], dtype=torch.uint8, device="cpu")
    return codes.index_select(0, torch.from_numpy(place).flatten().int()).view(blocks.shape).to(blocks.device)


def _least_error_codes(values: Tensor, unit: Tensor, level: Table) -> Tensor:
    """Codes of least error in float32; the first among equals."""
    best, codes = (level.numbers[0] * unit - values).abs(), torch.zeros_like(values, dtype=torch.uint8)
    for code, number in enumerate(level.numbers[1:], 1):
        error = (number * unit - values).abs()
        better = error < best
        best, codes = torch.where(better, error, best), codes.masked_fill(better, code)
    return codes
