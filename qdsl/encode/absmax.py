"""Scales from the largest magnitude of a block."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qdsl.encode import search
from qdsl.encode.blocks import arithmetic, codes, cut_blocks, join_blocks, powers, quotients, shaped, stored_scale
from qdsl.encode.rows import ends, searched
from qdsl.encode.search import Floats
from qdsl.numbers import number


def absmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float | None = None,
           offset: int = 0, by: str = "stored", ties: str = "even", lost: str = "least", least: float = 0, power: str = "",
           zeros: str = "signed") -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * (code - offset), with scale = largest magnitude / divisor, and not less than `least`.

    divisor: of codes that are floats the largest, where it is not given.
    rows, columns: the block that shares a scale; axes: how many axes the scale field has.
    by 'stored': codes are w / the stored scale (compressed-tensors); 'exact': w * (1 / the exact scale), in float32 (ggml);
    'inverse': divisor * (1 / largest) comes first, codes are w times it, and its reciprocal is stored (transformers).
    A block of zeros has codes of zero; its scale is the dtype's epsilon ('stored'), 0 or 1.
    lost: the codes of weights so small that 1 / the exact scale overflows, 'least' or 'zero'.
    power: the scale is a power of two, found as `powers` says; of E8M0, by default, one that nothing overflows by.
    ties, zeros: as `codes` says.
    """
    blocks = cut_blocks(weight.float() if by == "exact" else arithmetic(weight, scale), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    divisor = _largest(code) if divisor is None else divisor
    if power or scale == "e8m0":
        scaled, stored = _scaled_by_power(blocks, largest, code, scale, divisor, by, least, power or "up")
    else:
        scaled, stored = _scaled(blocks, largest, scale, divisor, offset, by, lost, least)
    return join_blocks(codes(scaled, code, ties, offset, zeros), *weight.shape), shaped(stored, axes).contiguous()


def signmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float, offset: int = 0,
            by: str = "stored", ties: str = "even", importance: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """As absmax, with scale = the value of largest magnitude, sign and all, / divisor; of equals, the first counts (ggml).

    A block of -0.0 has the extreme value +0.0, as one that nothing was larger than.
    importance [K], for integer codes: the scale is searched for, as `searched` says, and divisor, by and ties have no part.
    """
    if importance is not None:
        least, most = ends(code, offset)

        def fit(x: Floats, counts: Floats) -> tuple[Floats, ...]:
            found, inverse = search.fit_signed(x, counts, least, most)
            return search.signed_or_least(x, inverse, least, most) + np.float32(offset), found

        chosen, exact = searched(weight, importance, rows, columns, code, fit)
        return chosen, shaped(stored_scale(exact, scale), axes).contiguous()
    blocks = cut_blocks(weight.float() if by == "exact" else arithmetic(weight, scale), rows, columns)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    largest = torch.where(-low > high, low, high) + 0.0
    tied = (-low == high) & (high != 0)
    if bool(tied.any()):
        flat = blocks.permute(0, 2, 1, 3).flatten(2)[tied[:, 0, :, 0]]
        largest[tied] = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    scaled, stored = _scaled(blocks, largest, scale, divisor, offset, by)
    return join_blocks(codes(scaled, code, ties, offset), *weight.shape), shaped(stored, axes).contiguous()


def _largest(code: str) -> float:
    kind = number(code)
    assert kind is not None and kind.is_float
    return kind.largest


def _scaled(blocks: Tensor, largest: Tensor, scale: str, divisor: float, offset: int, by: str, lost: str = "least",
            least: float = 0) -> tuple[Tensor, Tensor]:
    """The blocks in units of their scales, and the scales as they are stored."""
    if by == "inverse":
        factor = torch.where(largest == 0, torch.ones_like(largest), divisor / largest)
        factor = factor.clamp(max=1 / least) if least else factor
        return blocks * factor, stored_scale(1 / factor, scale)
    exact = largest / divisor
    exact = exact.clamp_(min=least) if least else exact          # a scale may be negative
    if by == "exact":
        stored = stored_scale(exact, scale)
        factor = torch.where(exact == 0, torch.zeros_like(exact), 1 / exact)
        # A scale whose reciprocal overflows is stored as 0; of most of ggml's types the codes are then 0, offset and all.
        infinite = torch.isinf(factor)
        scaled = blocks * factor
        if bool(infinite.any()):
            scaled.masked_fill_(infinite.expand_as(blocks), -offset if lost == "least" else 0)
        return scaled, stored
    stored = stored_scale(torch.where(exact == 0, torch.full_like(exact, torch.finfo(exact.dtype).eps), exact), scale)
    return quotients(blocks, stored.to(blocks.dtype)), stored


def _scaled_by_power(blocks: Tensor, largest: Tensor, code: str, scale: str, divisor: float, by: str, least: float, power: str,
                     ) -> tuple[Tensor, Tensor]:
    """The same with scales that are powers of two."""
    exact = 1 / (divisor / largest) if by == "inverse" else largest / divisor
    exponents = powers(largest.float(), exact.float(), divisor, code, power)
    exponents = exponents.clamp(min=math.ceil(math.log2(least))) if least else exponents
    stored = stored_scale(torch.ldexp(torch.ones_like(exponents), exponents), scale)
    return quotients(blocks, stored.to(blocks.dtype)), stored
