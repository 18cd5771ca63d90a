"""Scales from the range of a block, with zero points or minima."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode import search
from qdsl.encode.blocks import cast_scale, codes, cut_blocks, in_scale_dtype, join_blocks, per_field
from qdsl.encode.rows import integer_range, search_blocks
from qdsl.encode.scheme import scheme
from qdsl.encode.search import Floats
from qdsl.runtime.weight.layout import FLOATS

LEAST = 1e-5                                                     # the least range in AWQ
LEAST_STEP = 1e-7                                                # the least step in MLX


@scheme
def minmax(weight: Tensor, *, code: str, scale: str, zero: str, rows: int, columns: int, axes: int, by: str = "stored",
           symmetric: bool = False, rounds: str = "quotient", span: str = "found") -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zero points, scales) of w = (code - zero) * scale, round to nearest as GPTQ's quantizer starts.

    The range from the smallest to the largest weight, zero included, is cut into 2^bits - 1 steps; symmetric makes it
    -largest to largest with the zero point in the middle code.
    by 'stored': codes are w / the stored scale; 'exact': w / the exact one.
    rounds 'quotient': that is rounded, and the zero point added (GPTQ); 'code': their sum is rounded (NNCF); 'sum': the same,
    counted from the middle code (compressed-tensors).
    span 'found': symmetric leaves a block without negative weights its range, and a block of zeros ranges from -1 to 1 (GPTQ);
    'full': symmetric doubles that range, and a scale that is 0 becomes the dtype's epsilon, after zero points are found
    (compressed-tensors).
    'tight': the range need not include zero, nor is it below 0.00001, and symmetric takes the largest for the last code (AWQ).
    'signed': no scale is nearer to 0 than the dtype's epsilon, and symmetric gives the largest magnitude, sign and all, the
    first code, so that a scale may be negative (NNCF).
    """
    kind = number(code)
    blocks = cut_blocks(weight.float() if span == "signed" else in_scale_dtype(weight, scale), rows, columns,
                        "edge" if span == "tight" else "zeros")
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    if span == "tight":
        steps = (kind.high - kind.low) // 2 if symmetric else kind.high - kind.low
        exact = (torch.maximum(high, -low) if symmetric else high - low).clamp(min=LEAST) / steps
    elif span == "signed":
        exact, low = _signed_step(low, high, symmetric, kind.high - kind.low)
    else:
        exact, low = _step_with_zero(low, high, symmetric, span, kind.high - kind.low)
    none = exact == 0
    exact = torch.where(none, torch.finfo(exact.dtype).eps, exact) if span == "full" else exact
    stored = cast_scale(exact, scale)
    used = exact if by == "exact" else stored.to(exact.dtype)
    used = torch.where(used == 0, torch.ones_like(used), used)
    middle = (kind.high - kind.low + 1) // 2 + kind.low
    first = middle if rounds == "sum" else 0                     # where codes are counted from
    zeros = torch.full_like(low, middle - first)
    if not symmetric:
        begin = low / (used.masked_fill(none, 0) if span == "full" else used)
        points = torch.round(kind.low - first - begin).clamp(kind.low - first, kind.high - first)
        zeros = torch.where(points.isnan(), zeros, points)         # of a block of zeros
    scaled = blocks / used
    if rounds == "quotient":
        scaled.round_()
    chosen = codes(scaled.add_(zeros), code, "even", first)
    return join_blocks(chosen, *weight.shape), per_field(codes(zeros, zero, "even", first), axes).contiguous(), \
        per_field(stored, axes).contiguous()


def _step_with_zero(low: Tensor, high: Tensor, symmetric: bool, span: str, steps: int) -> tuple[Tensor, Tensor]:
    """A step of a range with zero in it, and the range's begin."""
    empty = (low == 0) & (high == 0)
    low, high = low.clamp(max=0), high.clamp(min=0)
    if symmetric:
        high = torch.maximum(high, -low)
        low = -high if span == "full" else torch.where(low < 0, -high, low)
    if span == "found":
        low, high = torch.where(empty, -1.0, low), torch.where(empty, 1.0, high)
    return (high - low) / steps, low


def _signed_step(low: Tensor, high: Tensor, symmetric: bool, steps: int) -> tuple[Tensor, Tensor]:
    """The same of a range whose step is at least the dtype's epsilon, and of symmetric codes may be negative."""
    if symmetric:
        step = torch.where(-low >= high, -low, -high) / ((steps + 1) // 2)
    else:
        low, high = low.clamp(max=0), high.clamp(min=0)
        step = (high - low) / steps
    least = torch.finfo(step.dtype).eps
    return torch.where(step.abs() < least, least, step), low


@scheme
def scaled_zero(weight: Tensor, *, code: str, zero: str, scale: str, rows: int, columns: int, axes: int,
                ) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zeros, scales) of w = code * scale + zero, zeros in floats: minus the zero point times the stored scale.

    Codes, zero points and scales are AWQ's: minmax, span 'tight', codes by exact scales.
    """
    chosen, points, scales = minmax(weight, code=code, zero=code, scale=scale, rows=rows, columns=columns, axes=axes, by="exact",
                                    span="tight")
    return chosen, cast_scale(-(scales.float() * points.float()), zero), scales


@scheme
def affine(weight: Tensor, *, code: str, scale: str, min: str, rows: int, columns: int, axes: int,
           importance: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, mins) of w = scale * code + min: the range of a block in 2^bits - 1 steps, codes by the exact scale (ggml).

    importance [K]: scale and min are searched for, as `searched` says.
    """
    _, high = integer_range(code)
    if importance is None:
        blocks = cut_blocks(weight.float(), rows, columns, "edge")
        least = _least_value(blocks)
        exact = (blocks.amax((1, 3), keepdim=True) - least).abs() / high        # of zeros +0, whatever their signs
        inverse = torch.where(exact == 0, torch.zeros_like(exact), 1 / exact)
        # A scale whose reciprocal overflows is stored as 0; ggml's codes are then 0.
        scaled = (blocks - least).mul_(inverse).masked_fill_(torch.isinf(inverse).expand_as(blocks), 0)
        chosen = join_blocks(codes(scaled, code, "up"), *weight.shape)
    else:
        def fit(x: Floats, by: Floats) -> tuple[Floats, ...]:
            scale, least, low, inverse = search.fit_counts(x, by, high, *search.IMPORTANT)
            return search.counts(x, low, inverse, high), scale, least

        chosen, exact, least = search_blocks(weight, importance, rows, columns, code, fit)
    stored, kept = cast_scale(exact, scale), cast_scale(least, min)
    return chosen, per_field(stored, axes).contiguous(), per_field(kept, axes).contiguous()


@scheme
def edge_affine(weight: Tensor, *, code: str, scale: str, min: str, rows: int, columns: int, axes: int,
                ) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, mins) of w = scale * code + min: the end of larger magnitude is exact, and 0 is a code (MLX).

    A scale is negative where that end is the largest weight.  Codes are by the exact scale and min.
    """
    _, highest = integer_range(code)
    blocks = cut_blocks(weight.float(), rows, columns, "edge")
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    is_low = low.abs() > high.abs()
    step = ((high - low) / highest).clamp_(min=LEAST_STEP)
    step = torch.where(is_low, step, -step)
    edge = torch.where(is_low, low, high)
    steps = torch.round(edge / step)                             # from the edge to 0
    exact = torch.where(steps != 0, edge / steps, step)
    least = torch.where(steps != 0, edge, 0)
    chosen = join_blocks(codes((blocks - least) / exact, code, "even"), *weight.shape)
    return chosen, per_field(cast_scale(exact, scale), axes).contiguous(), per_field(cast_scale(least, min), axes).contiguous()


def _least_value(blocks: Tensor) -> Tensor:
    """The least value of every block; of zeros, the first."""
    least = blocks.amin((1, 3), keepdim=True)
    zero = least == 0
    if bool(zero.any()):
        flat = blocks.permute(0, 2, 1, 3).flatten(2)[zero[:, 0, :, 0]]
        least[zero] = flat.gather(1, (flat == 0).byte().argmax(1, keepdim=True))[:, 0]
    return least


@scheme
def float_zero(weight: Tensor, *, code: str, zero: str, scale: str, rows: int, columns: int, axes: int,
               ) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zeros, scales) of w = (code - zero) * scale, zeros in floats: those of the exact zero and the exact inverse scale.

    As HQQ chooses them without its search: the inverse scale is 1 for a range up to 0.0001, and at most 20000.
    """
    blocks = cut_blocks(weight.float(), rows, columns)
    kind = number(code)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    inverse = torch.where(high - low > 1e-4, kind.high / (high - low), 1).clamp_(max=2e4)
    zeros = -low * inverse
    chosen = (blocks * inverse + zeros).round_().clamp_(0, kind.high).to(torch.uint8)
    stored = [per_field(cast_scale(exact, scale), axes).contiguous() for exact in (zeros, 1 / inverse)]
    return join_blocks(chosen, *weight.shape), stored[0], stored[1]


@scheme
def float_middle(weight: Tensor, *, code: str, zero: str, scale: str, rows: int, columns: int, axes: int, offset: int = 0,
                 negated: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, zeros, scales) of w = (code - offset) * scale + zero, zeros in floats: the least weight of a block has code 0.

    As torchao chooses them for tinygemm, and optimum-quanto, in the weight's own dtype where scales are stored in it; no scale is
    below the smallest normal number of its type.  negated: decode subtracts the zero, which has the other sign.
    """
    blocks = cut_blocks(in_scale_dtype(weight, scale), rows, columns, "edge")
    kind = number(code)
    low, high = blocks.amin((1, 3), keepdim=True), blocks.amax((1, 3), keepdim=True)
    exact = ((high - low) / float(kind.high)).clamp_(min=torch.finfo(FLOATS[scale]).smallest_normal)
    stored = cast_scale(exact, scale)
    kept = cast_scale(low + exact * offset, zero)
    by = stored.to(exact.dtype)
    chosen = codes((blocks - (kept.to(exact.dtype) - by * offset)) / by, code, "even")
    kept = -kept if negated else kept
    return join_blocks(chosen, *weight.shape), per_field(kept, axes).contiguous(), per_field(stored, axes).contiguous()
