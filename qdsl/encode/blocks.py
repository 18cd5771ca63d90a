"""Splits weights into blocks that share a scale, and rounds values to codes."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.runtime.weight.layout import FLOATS
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.numbers import to_minifloat
from qdsl.runtime.weight.packed import FormatError, UnrepresentableValue

LONGEST_PADDING = 1 << 24                                        # weights


def cut_blocks(weight: Tensor, rows: int, columns: int, filled: str = "zeros") -> Tensor:
    """[N, K] as [N / rows, rows, K / columns, columns].

    Partial last blocks are padded with zeros, or with the last row and column ('edge').  Raises FormatError for blocks that are
    far longer than the weight: padding them would take all memory.
    """
    n, k = weight.shape
    padded = weight
    if n % rows or k % columns:
        amounts = (0, -k % columns, 0, -n % rows)
        if (n + amounts[3]) * (k + amounts[1]) > LONGEST_PADDING + 16 * weight.numel():
            raise FormatError(f"blocks of {rows} x {columns} are too long for a weight of {n} x {k}")
        padded = torch.nn.functional.pad(weight, amounts) if filled == "zeros" else \
            torch.nn.functional.pad(weight[None, None], amounts, mode="replicate")[0, 0]
    return padded.reshape(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def join_blocks(blocks: Tensor, n: int, k: int) -> Tensor:
    """The inverse of cut_blocks, without padding."""
    return blocks.flatten(2).flatten(0, 1)[:n, :k].contiguous()


def in_scale_dtype(weight: Tensor, scale: str) -> Tensor:
    """The weight in the dtype for computing scales: its own if scales are stored in it, else float32."""
    return weight if weight.dtype == FLOATS.get(scale) else weight.float()


def cast_scale(exact: Tensor, scale: str) -> Tensor:
    """A scale in its stored type.  Raises UnrepresentableValue if it becomes infinite."""
    stored = exact.to(FLOATS[scale])
    if scale == "e8m0":
        return stored                                            # exact is one of its powers of two
    bad = ~torch.isfinite(stored)
    if bool(bad.any()):
        where = tuple(int(i) for i in torch.nonzero(bad)[0])
        text = f"the scale {float(exact[where]):g} of block [{{row}}, {where[2]}] does not fit {scale}"
        raise UnrepresentableValue(text, where[0])
    return stored


def power_exponents(largest: Tensor, exact: Tensor, divisor: float, code: str, rule: str) -> Tensor:
    """Exponents, -127 to 127, of power-of-two scales; -127 for blocks of zeros.  All in float32.

    'up': 2^ceil(log2(exact)), which prevents overflow (transformers' ue8m0, ModelOpt's, RCEIL of torchao's MX types).  The other
    rules map the power of two of the largest magnitude to that of the divisor.  'floor' rounds it down (OCP's rule), 'ceil' up;
    'even' rounds the magnitude to the mantissa of a code first, 'half' to one bit of it.
    """
    fraction, exponent = torch.frexp(largest)                    # largest = fraction * 2^exponent, 0.5 <= fraction < 1
    if rule == "up":
        exponents = exact.log2().ceil()
    else:
        bits = 1 if rule == "half" else number(code).mantissa
        more = {"floor": 1.0, "ceil": 0.5 + 2.0 ** -24, "even": 1 - 2.0 ** -(bits + 2), "half": 1 - 2.0 ** -(bits + 2)}[rule]
        exponents = exponent - math.frexp(divisor)[1] + (fraction >= more)
    return torch.where(largest > 0, exponents, -127).clamp_(-127, 127).to(torch.int32)


def quotients(blocks: Tensor, scales: Tensor) -> Tensor:
    """The blocks in units of their scales; 0 for a scale of 0."""
    scaled = blocks / scales
    if bool((scales == 0).any()):
        scaled.masked_fill_((scales == 0).expand_as(blocks), 0)
    return scaled


def per_field(values: Tensor, axes: int) -> Tensor:
    """Per-block values [R, 1, C, 1] in the shape of the field: both axes, only rows, or none."""
    both = values[:, 0, :, 0]
    return both if axes == 2 else both[:, 0] if axes == 1 else both[0, 0]


def codes(values: Tensor, code: str, ties: str, offset: int = 0, zeros: str = "signed") -> Tensor:
    """The codes nearest to values + offset, clamped to the type's range; overwrites the values.

    ties: 'even'; for integers 'away' (from zero) or 'up', for floats 'zero' (towards it).  'up' is floor(value + (offset + 0.5))
    with the sum rounded, as in ggml, so that a value just below a half may go up too.  zeros, for floats: 'signed': a value that
    is or rounds to 0 keeps its sign; 'negative': an exact 0 becomes -0; 'positive': +0.
    """
    kind = number(code)
    if kind.is_float:
        cut = values.clamp_(-kind.largest, kind.largest)
        if zeros != "signed":
            cut.masked_fill_(cut == 0, -0.0 if zeros == "negative" else 0.0)
        return cut.to(FLOATS[code]) if code in FLOATS and ties == "even" else to_minifloat(cut.float(), code, ties)
    values.clamp_(kind.low - offset, kind.high - offset)
    if ties == "even":
        whole = values.round_()
    elif ties == "away":
        whole = _round_away(values)
    else:
        return _cast_codes(values.add_(offset + 0.5).floor_(), code)
    return _cast_codes(whole.add_(offset) if offset else whole, code)


def _cast_codes(whole: Tensor, code: str) -> Tensor:
    """Integers as codes; through int8 for bytes, because torch casts floats to int8 five times as fast as to uint8."""
    kind = number(code)
    if torch_dtype(code) != torch.uint8:
        return whole.to(torch_dtype(code))
    if kind.high < 128:
        return whole.to(torch.int8).view(torch.uint8)
    return whole.sub_(128).to(torch.int8).view(torch.uint8).bitwise_xor_(128)


def _round_away(values: Tensor) -> Tensor:
    """Integers nearest to the values, ties away from zero.

    Adding the largest number below a half reaches the next integer exactly from a half on; smaller values at most double and stay
    below 1.  The cast to int32 then truncates, far faster than torch's trunc.
    """
    below = 0.5 - torch.finfo(values.dtype).eps / 4
    return values.add_(values.clamp(-below, below)).to(torch.int32)
