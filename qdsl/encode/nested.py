"""Scales in two levels: of a block, in units of a super-scale of the whole weight."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.core.numbers import number
from qdsl.encode.blocks import cast_scale, codes, cut_blocks, join_blocks, per_field, quotients
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import UnrepresentableValue


@scheme
def nested_absmax(weight: Tensor, *, code: str, scale: str, super_scale: str, rows: int, columns: int, axes: int,
                  divisor: float, empty: float, least: float = 0, amax: float | None = None, by: str = "stored",
                  ties: str = "even", zeros: str = "signed", precision: str = "f32", divided: bool = False,
                  ) -> tuple[Tensor, Tensor, Tensor]:
    """(codes, scales, super-scale) of w = scale * super_scale * code, or, `divided`, of w = scale / super_scale * code.

    The super-scale brings the largest magnitude of all, / divisor, to the largest number of the scale's type; a scale is the
    largest magnitude of the block / divisor in its units, not below `least`, and where that is 0 it is `empty`.
    amax: the largest magnitude of all weights that share the super-scale, where others do.  Raises UnrepresentableValue where
    it is too small.
    by 'stored': codes are w / (scale * super_scale) (ModelOpt, compressed-tensors); 'inverse': w * (1 / super_scale / scale),
    and the block's magnitude is divided by the two one after the other (torchao).
    precision 'own': both magnitudes / divisor are found in the weight's own dtype (compressed-tensors), 'f32': in float32.
    A weight of zeros has a super-scale of 0, or, `divided`, of 1.
    """
    kind = number(scale)
    blocks = cut_blocks(weight if precision == "own" else weight.float(), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    whole = largest.amax() if amax is None else largest.new_tensor(amax)
    if amax is not None and bool((largest > whole).any()):
        row, column = (int(i) for i in torch.nonzero((largest > whole)[:, 0, :, 0])[0])
        raise UnrepresentableValue(f"block [{{row}}, {column}] has a magnitude above amax = {amax:g}", row)
    if divided:
        above = (divisor * kind.largest / whole).float()
        above = torch.where(torch.isfinite(above), above, 1)
        exact = above * (largest / divisor).float()
    else:
        above = whole.float() / (divisor * kind.largest)
        exact = largest / divisor / above if by == "inverse" else largest / (divisor * above)
    exact = torch.where(largest > 0, exact.clamp(least, kind.largest), 0)
    stored = exact.to(torch_dtype(scale))
    unit_scale = stored.float()
    unit_scale = torch.where(unit_scale == 0, empty, unit_scale)
    if by == "inverse":
        factor = (above if divided else 1 / above) / unit_scale
        scaled = blocks * torch.where(torch.isfinite(factor), factor, 0)
    else:
        scaled = quotients(blocks, unit_scale / above if divided else unit_scale * above)
    return join_blocks(codes(scaled, code, ties, zeros=zeros), *weight.shape), \
        per_field(unit_scale.to(torch_dtype(scale)), axes).contiguous(), above.to(torch_dtype(super_scale))


@scheme
def progressive(weight: Tensor, *, code: str, scale: str, zero: str, super_scale: str, columns: int, super_columns: int,
                super_axes: int, divisor: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, zeros, super-scales) of w = super_scale * (scale * code + zero), rounded twice (QServe).

    The super-scale brings the largest magnitude of a row, or of super_columns columns, to `divisor`.  In its units weights are
    integers.  A block's scale is the range of these, zero included, / the largest code, rounded to an integer of at least 1;
    its zero is minus the code of zero, times that scale.
    """
    kind, step = number(code), number(scale)
    n, k = weight.shape
    above = cut_blocks(weight.float(), 1, min(super_columns, k))
    supers = cast_scale(above.abs().amax((1, 3), keepdim=True) / divisor, super_scale)
    supers = torch.where(supers == 0, 1, supers)
    whole = (above / supers.float()).round_().clamp_(-divisor, divisor)
    blocks = cut_blocks(join_blocks(whole, n, k), 1, columns)
    low, high = blocks.amin((1, 3), keepdim=True).clamp_(max=0), blocks.amax((1, 3), keepdim=True).clamp_(min=0)
    scales = ((high - low) / kind.high).round_().clamp_(1, step.high)
    points = (-low / scales).round_().clamp_(0, kind.high)
    chosen = join_blocks(codes(blocks / scales + points, code, "even"), n, k)
    zeros = per_field(-points * scales, 2).to(torch_dtype(zero)).contiguous()
    return chosen, per_field(scales, 2).to(torch_dtype(scale)).contiguous(), zeros, per_field(supers, super_axes).contiguous()
