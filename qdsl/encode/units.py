"""Codes in units of the largest magnitude of a block, or into levels up to it, as bitsandbytes chooses them."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.encode.blocks import cast_scale, cut_blocks, join_blocks, per_field
from qdsl.encode.blocks import codes as to_codes
from qdsl.encode.scheme import scheme
from qdsl.runtime.weight.tables import Table


@scheme
def unit_level(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, level: Table,
               ) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = scale * level[code]: codes of w * (1 / scale) in float32, by the middles between levels.

    A weight on a middle has the lower level, of levels that are equal the first up to their number and the last above it.
    """
    blocks = cut_blocks(weight.float(), rows, columns)
    scales = blocks.abs().amax((1, 3), keepdim=True)
    codes = join_blocks(_nearest_codes(blocks * torch.where(scales > 0, 1 / scales, 0), level), *weight.shape)
    return codes, per_field(cast_scale(scales, scale), axes).contiguous()


@scheme
def unit_level_nested(weight: Tensor, *, code: str, scale: str, super_scale: str, offset: str, rows: int, columns: int,
                      axes: int, super_columns: int, level: Table, entry: Table) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes, scales, super-scales, offset) of w = level[code] * (entry[scale] * super_scale + offset).

    Codes are those of unit_level.  The offset is the mean of its scales, and what they differ by is coded in the same way.
    bitsandbytes sums in float32, in an order of torch's own, and may have another last bit in the offset.
    """
    codes, scales = unit_level(weight, code=code, scale=super_scale, rows=rows, columns=columns, axes=axes, level=level)
    mean = scales.mean(dtype=torch.float64).float()
    small, large = unit_level(scales - mean, code=scale, scale=super_scale, rows=1, columns=super_columns // columns, axes=2,
                              level=entry)
    return codes, small, large, mean


def _nearest_codes(values: Tensor, level: Table) -> Tensor:
    """Codes of the nearest levels, of two the lower."""
    order = sorted(range(len(level.numbers)), key=lambda i: level.numbers[i])
    rising = torch.tensor([level.numbers[i] for i in order], dtype=torch.float64, device="cpu")
    middles = ((rising[1:] + rising[:-1]) / 2).float().to(values.device)
    place = torch.bucketize(values, middles, out_int32=True)
    return torch.tensor(order, dtype=torch.uint8, device=values.device).index_select(0, place.flatten()).view(values.shape)


@scheme
def unit_absmax(weight: Tensor, *, code: str, scale: str, rows: int, columns: int, axes: int, divisor: int,
                ) -> tuple[Tensor, Tensor]:
    """(codes, scales) of w = code * scale / divisor: scale = the largest magnitude of a block (bitsandbytes' LLM.int8).

    Codes are w * (divisor / largest) in float32, and no larger than divisor; those of a block of zeros are 0.
    """
    blocks = cut_blocks(weight.float(), rows, columns)
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scaled = torch.where(blocks == 0, 0, blocks * (divisor / largest)).clamp_(-divisor, divisor)
    return join_blocks(to_codes(scaled, code, "even"), *weight.shape), per_field(cast_scale(largest, scale), axes).contiguous()
