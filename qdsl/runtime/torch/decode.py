"""Decodes a packed weight into a dense tensor: by kernels on a GPU, by compiled loops, or by torch."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.gpu import launch
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.libraries.triton import on_device, runs_kernels
from qdsl.runtime.torch.linear import tile_weights
from qdsl.runtime.weight import bfloat16, order, tiles
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.branch_pieces import branch_fields
from qdsl.runtime.weight.fields import unpack
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight


@without_autocast
@torch.no_grad()
def decode_into(packed: PackedWeight, out: Tensor) -> Tensor:
    """Write the weight to out [N, K], of any float dtype, and return it.  Raises FormatError for a damaged stream."""
    return (_decode_sum if packed.has_branch else _decode_base)(packed, out) if out.numel() else out


def _decode_base(packed: PackedWeight, out: Tensor) -> Tensor:
    """The same for a nonempty weight without branches."""
    if packed.layout.streams and runs_kernels(packed.device):
        with on_device(packed.device):
            launch.dequantize(packed, out)
        return out
    packed = packed.decode_streams()
    copied = packed.variant.copies
    if bfloat16.write_decoded(packed, out):
        return out
    if copied is not None and torch_dtype(str(packed.params.get(copied, packed.variant.fields[copied].type))) == out.dtype:
        for start, stop in tiles.row_tiles(packed):
            out[start:stop].copy_(unpack(packed.cut("N", start, stop))[copied])
        return out
    if packed.order is not None:
        return _decode_in_order(packed, order.inverse_order(packed.order), out)
    if packed.runs_kernels:
        with on_device(packed.device):
            launch.dequantize(packed, out)
        return out
    if cpu.decode_into(packed, out):
        return out
    for start, stop in tiles.row_tiles(packed):
        tiles.decode_rows(packed, start, stop, out[start:stop])
    return out


def _decode_sum(packed: PackedWeight, out: Tensor) -> Tensor:
    """Decode tiles of rows in float32, add branches to them, and round once to the dtype of out."""
    for start, stop in tiles.row_tiles(packed, weights=tile_weights(out)):
        part = packed.cut("N", start, stop)
        weight = _decode_base(part.base, empty(part.shape, torch.float32, out.device))
        for branch in part.variant.plus:
            if (fields := branch_fields(branch, part, False)) is not None:
                branch.add(fields, weight)
        out[start:stop].copy_(weight)
    return out


def _decode_in_order(packed: PackedWeight, places: Tensor, out: Tensor) -> Tensor:
    """Decode tiles of rows with columns in stored order, then move each column to its place."""
    stored = packed.as_stored()
    for start, stop in tiles.row_tiles(packed, weights=tile_weights(out)):
        part = empty((stop - start, packed.shape[1]), out.dtype, out.device)
        torch.index_select(decode_into(stored.cut("N", start, stop), part), 1, places, out=out[start:stop])
    return out
