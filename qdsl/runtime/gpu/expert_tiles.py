"""Tiles of rows of x that have one expert: the map of them that a device computes from the offsets of experts' rows."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.gpu.kernels import experts as kernels
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.arrays import cdiv

ROWS = 8                                                         # rows of x per tile of packed weights


def tile_map(offsets: Tensor, rows: int, height: int = ROWS) -> Tensor:
    """Tiles of rows of x: int32 [T, 3] of (expert, first row, end of the expert's rows), by one launch.

    T: the smaller of rows and cdiv(rows, height) + E, which suffices for any offsets.  height: rows per tile.  offsets: integers
    [E + 1]; expert e has rows [offsets[e], offsets[e + 1]).  Unused tiles have a first row that is not before the end, and so no
    rows.
    """
    call = tile_call(offsets, rows, height)
    call.run()
    tiles: Tensor = call.arguments[1]  # type: ignore[assignment]
    return tiles


def tile_call(offsets: Tensor, rows: int, height: int = ROWS) -> Call:
    """The launch of tile_map; its second argument is the map."""
    experts = offsets.numel() - 1
    count = most_tiles(rows, experts, height)
    tiles = torch.empty(count, 3, dtype=torch.int32, device=offsets.device)
    return Call(kernels.list_tiles, (offsets.contiguous(), tiles, rows, count),
                {"EXPERTS": experts, "HEIGHT": height, "BINS": 1 << experts.bit_length()}, (experts + 1,), {"num_warps": 4})


def most_tiles(rows: int, experts: int, height: int) -> int:
    """The tiles that `rows` rows of x may need, however they are divided among experts."""
    return min(rows, cdiv(rows, height) + experts)


def tile_height(rows: int, experts: int) -> int:
    """The rows of a tile for decoded experts: about the average number of rows per expert."""
    return min(128, max(16, 1 << (cdiv(rows, experts) - 1).bit_length()))
