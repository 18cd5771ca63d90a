"""Scales from the largest magnitude of a block."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode import search
from qdsl.encode.blocks import arithmetic, codes, cut_blocks, join_blocks, powers, quotients, shaped, stored_scale
from qdsl.encode.rows import ends, searched
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype


@scheme
def absmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float | None = None,
           offset: int = 0, by: str = "stored", ties: str = "even", lost: str = "least", least: float = 0, power: str = "",
           zeros: str = "signed", sums: str = "", sums_columns: int = 0) -> tuple[Tensor, ...]:
    """(codes, scales) of w = scale * (code - offset), with scale = largest magnitude / divisor, and not less than `least`.

    divisor: of codes that are floats the largest, where it is not given.
    rows, columns: the block that shares a scale; axes: how many axes the scale field has.
    by 'stored': codes are w / the stored scale (compressed-tensors); 'exact': w * (1 / the exact scale), in float32 (ggml);
    'inverse': divisor * (1 / largest) comes first, codes are w times it, and its reciprocal is stored (transformers); 'ratio':
    divisor / largest, rounded once, does, and where it overflows codes are of zero (ggml's Q8_K).
    A block of zeros has codes of zero; its scale is the dtype's epsilon ('stored'), 0 ('exact', 'ratio') or 1.
    lost: the codes of weights so small that 1 / the exact scale overflows, 'least' or 'zero'.
    power: the scale is a power of two, found as `powers` says; of E8M0, by default, one that nothing overflows by.
    ties, zeros: as `codes` says.
    sums: the type of a third result, sums of code - offset over `sums_columns` columns; floats are times the scale of `by`.
    """
    blocks = cut_blocks(weight.float() if by == "exact" else arithmetic(weight, scale), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    divisor = _largest(code) if divisor is None else divisor
    if power or scale == "e8m0":
        scaled, used, stored = _scaled_by_power(blocks, largest, code, scale, divisor, by, least, power or "up")
    else:
        scaled, used, stored = _scaled(blocks, largest, scale, divisor, offset, by, lost, least)
    chosen = join_blocks(codes(scaled, code, ties, offset, zeros), *weight.shape)
    return chosen, shaped(stored, axes).contiguous(), *([_sums(chosen, used, offset, sums, sums_columns)] if sums else [])


@scheme
def signmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float, offset: int = 0,
            by: str = "stored", ties: str = "even", sums: str = "", sums_columns: int = 0, importance: Tensor | None = None,
            ) -> tuple[Tensor, ...]:
    """As absmax, with scale = the value of largest magnitude, sign and all, / divisor; of equals, the first counts (ggml).

    A block of -0.0 has the extreme value +0.0, as one that nothing was larger than.
    importance [K], for integer codes: the scale is searched for, as `searched` says, and divisor, by and ties have no part.
    sums: as of absmax.
    """
    if importance is not None:
        least, most = ends(code, offset)

        def fit(x: Floats, counts: Floats) -> tuple[Floats, ...]:
            best, inverse = search.fit_signed(x, counts, least, most)
            return search.signed_or_least(x, inverse, least, most) + np.float32(offset), best

        chosen, exact = searched(weight, importance, rows, columns, code, fit)
        more = [_sums(chosen, exact, offset, sums, sums_columns)] if sums else []
        return chosen, shaped(stored_scale(exact, scale), axes).contiguous(), *more
    blocks = cut_blocks(weight.float() if by == "exact" else arithmetic(weight, scale), rows, columns)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    largest = torch.where(-low > high, low, high) + 0.0
    tied = (-low == high) & (high != 0)
    if bool(tied.any()):
        flat = blocks.permute(0, 2, 1, 3).flatten(2)[tied[:, 0, :, 0]]
        largest[tied] = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    scaled, used, stored = _scaled(blocks, largest, scale, divisor, offset, by)
    chosen = join_blocks(codes(scaled, code, ties, offset), *weight.shape)
    more = [_sums(chosen, used, offset, sums, sums_columns)] if sums else []
    return chosen, shaped(stored, axes).contiguous(), *more


def _sums(codes: Tensor, scales: Tensor, offset: int, kind: str, columns: int) -> Tensor:
    """Sums of codes [N, K] over runs of columns, less an offset each; floats are times scales [N, 1, K / columns, 1]."""
    sums = cut_blocks(codes.to(torch.int32) - offset, 1, columns).sum((1, 3), dtype=torch.int32)
    number_type = number(kind)
    assert number_type is not None
    return (sums * scales[:, 0, :, 0]).to(FLOATS[kind]) if number_type.is_float else sums.to(torch_dtype(kind))


def _largest(code: str) -> float:
    kind = number(code)
    assert kind is not None and kind.is_float
    return kind.largest


def _scaled(blocks: Tensor, largest: Tensor, scale: str, divisor: float, offset: int, by: str, lost: str = "least",
            least: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks in units of their scales, the scales that they are computed with, and as they are stored."""
    most = min(1 / least, torch.finfo(largest.dtype).max) if least else math.inf
    if by == "inverse":
        factor = torch.where(largest == 0, torch.ones_like(largest), divisor / largest).clamp(max=most)
        return blocks * factor, 1 / factor, stored_scale(1 / factor, scale)
    if by == "ratio":
        factor = torch.full_like(largest, divisor) / largest     # a number / a tensor would be rounded twice
        factor = factor.clamp(-most, most)
        scales = torch.where(largest == 0, torch.zeros_like(factor), 1 / factor)
        scaled = (blocks * factor).masked_fill_(torch.isinf(factor).expand_as(blocks), 0)
        return scaled, scales, stored_scale(scales, scale)
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
        return scaled, exact, stored
    stored = stored_scale(torch.where(exact == 0, torch.full_like(exact, torch.finfo(exact.dtype).eps), exact), scale)
    used = stored.to(blocks.dtype)
    return quotients(blocks, used), used, stored


def _scaled_by_power(blocks: Tensor, largest: Tensor, code: str, scale: str, divisor: float, by: str, least: float, power: str,
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """The same with scales that are powers of two."""
    exact = 1 / (divisor / largest) if by == "inverse" else largest / divisor
    exponents = powers(largest.float(), exact.float(), divisor, code, power)
    exponents = exponents.clamp(min=math.ceil(math.log2(least))) if least else exponents
    stored = stored_scale(torch.ldexp(torch.ones_like(exponents), exponents), scale)
    used = stored.to(blocks.dtype)
    return quotients(blocks, used), used, stored
