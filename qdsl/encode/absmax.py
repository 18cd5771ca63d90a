"""Scales from the largest magnitude of a block."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode import native, search
from qdsl.encode.blocks import cast_scale, codes, cut_blocks, in_scale_dtype, join_blocks, per_field, power_exponents, quotients
from qdsl.encode.rows import integer_range, search_blocks
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype


@scheme
def absmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float | None = None,
           offset: int = 0, by: str = "stored", ties: str = "even", lost: str = "least", least: float = 0, power: str = "",
           zeros: str = "signed", sums: str = "", sums_columns: int = 0) -> tuple[Tensor, ...]:
    """(codes, scales) of w = scale * (code - offset), with scale = largest magnitude / divisor, at least `least`.

    divisor: by default the largest number of float codes.  rows, columns: the block that shares a scale; axes: of the scale
    field.  by: how codes are computed.  'stored': w / the stored scale (compressed-tensors).  'exact': w * (1 / the exact scale),
    in float32 (ggml).  'inverse': divisor * (1 / largest) is computed first, multiplies w, and its reciprocal is stored
    (transformers).  'ratio': as 'inverse' with divisor / largest, rounded once; if it overflows, codes are those of zero (ggml's
    Q8_K).  A block of zeros has codes of zero; its scale is the dtype's epsilon ('stored'), 0 ('exact', 'ratio') or 1.  lost: the
    codes of weights so small that 1 / the exact scale overflows, 'least' or 'zero'.  power: the scale is a power of two by a rule
    of `powers`; for E8M0 by default one that prevents overflow.  ties, zeros: as in `codes`.  sums: the type of a third result,
    sums of code - offset over `sums_columns` columns; float sums are times the scale of `by`.
    """
    if by == "exact" and rows == 1 and not (least or power) and divisor is not None:
        compiled = _find_in_c(weight, code, scale, columns, axes, divisor, offset, ties, -offset if lost == "least" else 0, False)
        if compiled is not None:
            return _append_sums(*compiled, axes, offset, sums, sums_columns)
    blocks = cut_blocks(weight.float() if by == "exact" else in_scale_dtype(weight, scale), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    divisor = number(code).largest if divisor is None else divisor
    if power or scale == "e8m0":
        scaled, used, stored = _scale_by_powers(blocks, largest, code, scale, divisor, by, least, power or "up")
    else:
        scaled, used, stored = _scale_blocks(blocks, largest, scale, divisor, offset, by, lost, least)
    chosen = join_blocks(codes(scaled, code, ties, offset, zeros), *weight.shape)
    return _append_sums(chosen, used, stored, axes, offset, sums, sums_columns)


@scheme
def signmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: float, offset: int = 0,
            by: str = "stored", ties: str = "even", sums: str = "", sums_columns: int = 0, importance: Tensor | None = None,
            ) -> tuple[Tensor, ...]:
    """As absmax, with scale = the signed value of largest magnitude / divisor; the first one among equals (ggml).

    For a block of -0.0 that value is +0.0.  importance [K], for integer codes: the scale is searched as in `searched`; divisor,
    by and ties are then unused.  sums: as in absmax.
    """
    if importance is not None:
        least, most = integer_range(code, offset)

        def fit(x: Floats, counts: Floats) -> tuple[Floats, ...]:
            best, inverse = search.fit_signed(x, counts, least, most)
            return search.signed_or_least(x, inverse, least, most) + np.float32(offset), best

        chosen, exact = search_blocks(weight, importance, rows, columns, code, fit)
        return _append_sums(chosen, exact, cast_scale(exact, scale), axes, offset, sums, sums_columns)
    if by == "exact" and rows == 1:
        compiled = _find_in_c(weight, code, scale, columns, axes, divisor, offset, ties, -offset, True)
        if compiled is not None:
            return _append_sums(*compiled, axes, offset, sums, sums_columns)
    blocks = cut_blocks(weight.float() if by == "exact" else in_scale_dtype(weight, scale), rows, columns)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    largest = torch.where(-low > high, low, high) + 0.0
    tied = (-low == high) & (high != 0)
    if bool(tied.any()):
        flat = blocks.permute(0, 2, 1, 3).flatten(2)[tied[:, 0, :, 0]]
        largest[tied] = flat.gather(1, flat.abs().argmax(1, keepdim=True))[:, 0]
    scaled, used, stored = _scale_blocks(blocks, largest, scale, divisor, offset, by)
    chosen = join_blocks(codes(scaled, code, ties, offset), *weight.shape)
    return _append_sums(chosen, used, stored, axes, offset, sums, sums_columns)


def _find_in_c(weight: Tensor, code: str, scale: str, columns: int, axes: int, divisor: float, offset: int, ties: str, lost: int,
               with_sign: bool) -> tuple[Tensor, Tensor, Tensor] | None:
    """(codes, exact scales, stored scales) of whole blocks in a row, by 'exact' scales, in C; None where torch finds them."""
    kind, (n, k) = number(code), weight.shape
    if kind.is_float or kind.high > 255 or k % columns or axes != 2:
        return None
    blocks = native.scaled_codes(weight.float(), columns, divisor, with_sign, offset, (kind.low, kind.high), ties, lost)
    if blocks is None:
        return None
    exact = blocks[1].view(n, 1, k // columns, 1)
    return blocks[0].view(torch_dtype(code)), exact, cast_scale(exact, scale)


def _append_sums(chosen: Tensor, exact: Tensor, stored: Tensor, axes: int, offset: int, sums: str, columns: int,
                 ) -> tuple[Tensor, ...]:
    """Codes and scales, the latter as the field has them; and sums of `columns` codes each, if there are such."""
    more = [_code_sums(chosen, exact, offset, sums, columns)] if sums else []
    return chosen, per_field(stored, axes).contiguous(), *more


def _code_sums(codes: Tensor, scales: Tensor, offset: int, kind: str, columns: int) -> Tensor:
    """Sums of codes [N, K] minus an offset each, over runs of columns; float sums are times scales [N, 1, K / columns, 1]."""
    sums = cut_blocks(codes.to(torch.int32) - offset, 1, columns).sum((1, 3), dtype=torch.int32)
    return (sums * scales[:, 0, :, 0]).to(FLOATS[kind]) if number(kind).is_float else sums.to(torch_dtype(kind))


def _scale_blocks(blocks: Tensor, largest: Tensor, scale: str, divisor: float, offset: int, by: str, lost: str = "least",
                  least: float = 0) -> tuple[Tensor, Tensor, Tensor]:
    """The blocks in units of their scales, the scales for these units, and the scales to store."""
    most = min(1 / least, torch.finfo(largest.dtype).max) if least else math.inf
    if by == "inverse":
        factor = torch.where(largest == 0, torch.ones_like(largest), divisor / largest).clamp(max=most)
        return blocks * factor, 1 / factor, cast_scale(1 / factor, scale)
    if by == "ratio":
        factor = torch.full_like(largest, divisor) / largest     # number / tensor would be rounded twice
        factor = factor.clamp(-most, most)
        scales = torch.where(largest == 0, torch.zeros_like(factor), 1 / factor)
        scaled = (blocks * factor).masked_fill_(torch.isinf(factor).expand_as(blocks), 0)
        return scaled, scales, cast_scale(scales, scale)
    exact = largest / divisor
    exact = exact.clamp_(min=least) if least else exact          # a scale may be negative
    if by == "exact":
        stored = cast_scale(exact, scale)
        factor = torch.where(exact == 0, torch.zeros_like(exact), 1 / exact)
        # If the reciprocal of a scale overflows, the stored scale is 0; most ggml types then have code 0, ignoring the offset.
        infinite = torch.isinf(factor)
        scaled = blocks * factor
        if bool(infinite.any()):
            scaled.masked_fill_(infinite.expand_as(blocks), -offset if lost == "least" else 0)
        return scaled, exact, stored
    stored = cast_scale(torch.where(exact == 0, torch.full_like(exact, torch.finfo(exact.dtype).eps), exact), scale)
    used = stored.to(blocks.dtype)
    return quotients(blocks, used), used, stored


def _scale_by_powers(blocks: Tensor, largest: Tensor, code: str, scale: str, divisor: float, by: str, least: float, power: str,
                     ) -> tuple[Tensor, Tensor, Tensor]:
    """The same with power-of-two scales."""
    exact = 1 / (divisor / largest) if by == "inverse" else largest / divisor
    exponents = power_exponents(largest.float(), exact.float(), divisor, code, power)
    exponents = exponents.clamp(min=math.ceil(math.log2(least))) if least else exponents
    stored = cast_scale(torch.ldexp(torch.ones_like(exponents, dtype=torch.float32), exponents.float()), scale)
    used = stored.to(blocks.dtype)
    return quotients(blocks, used), used, stored
