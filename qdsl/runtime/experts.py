"""x @ w.T + bias where each row of x meets the weight of its own expert: rows sorted by expert, experts one after the other.

On a GPU few rows per expert go through the fused kernel for few rows, with a map of its tiles that is made on the device;
nothing waits for the host.  In every other case experts are multiplied one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from qdsl.runtime import configure, launch, ops
from qdsl.runtime.arrays import cdiv
from qdsl.runtime.linear import FLOATS
from qdsl.runtime.packed import FormatError, PackedWeight

ROWS = 8                                                         # of x in a tile
MOST = 64                                                        # rows of x per expert up to which tiles decode anew (predicted)


def tile_map(offsets: Tensor, rows: int) -> Tensor:
    """Tiles of up to 8 rows of x: int32 [cdiv(rows, 8) + E, 3] of (expert, first row, one past the expert's last row).

    offsets: integers [E + 1]; expert e has rows [offsets[e], offsets[e + 1]).  There are as many tiles as any offsets can need;
    those that are left over have a first row that is not before the last, and so have no rows.
    """
    count = offsets.numel() - 1
    offsets = offsets.clamp(0, rows).to(torch.int32)
    first, last = offsets[:-1], offsets[1:]
    needed = (last - first).clamp(min=0).add(ROWS - 1).div(ROWS, rounding_mode="floor")
    stop = needed.cumsum(0)
    tiles = torch.arange(cdiv(rows, ROWS) + count, device=offsets.device)
    expert = torch.searchsorted(stop, tiles, right=True).clamp(max=count - 1)
    start = first[expert] + ROWS * (tiles - (stop - needed)[expert])
    return torch.stack((expert, start, last[expert]), 1).to(torch.int32)


def linear(x: Tensor, packed: PackedWeight, offsets: Tensor | Sequence[int], bias: Tensor | None = None) -> Tensor:
    """Rows [offsets[e], offsets[e + 1]) of x [M, K] times the transpose of rows [e * N, (e + 1) * N) of w, plus bias[e]: [M, N].

    offsets: E + 1 integers from 0 to M, a list or a tensor on any device.  On a GPU they stay there, unchecked, where there are
    few rows per expert: rows of x that belong to no expert are then not written.  Differentiable in x and bias, by the products
    of experts one by one.  Raises FormatError where something does not fit.
    """
    experts = len(offsets) - 1
    packed = packed.open()
    n = _checked(x, packed, experts, bias)
    x, packed = ops.as_stored(ops.autocast(x), packed)           # one order for all experts, as there is one index
    if _is_fused(x, packed, bias, experts):
        with torch.no_grad(), ops.on_device(x.device):
            x = x.contiguous()
            out = x.new_empty(x.shape[0], n)
            tiles = tile_map(torch.as_tensor(offsets, device=x.device), x.shape[0])
            launch.grouped(x, packed, tiles, None if bias is None else bias.contiguous(), out)
            return out
    borders = [int(border) for border in (offsets.tolist() if isinstance(offsets, Tensor) else offsets)]
    if borders[0] != 0 or borders[-1] != x.shape[0] or any(a > b for a, b in pairwise(borders)):
        raise FormatError(f"offsets {borders} do not divide {x.shape[0]} rows of x among {experts} experts")
    if x.device.type == "cuda" and ops.is_plain(*packed.tensors.values()):
        packed.known_finite = packed.finite                      # read once for all experts, whose weights inherit it
    parts = [ops.linear(x[start:stop], packed.cut("N", e * n, (e + 1) * n), None if bias is None else bias[e])
             for e, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    return torch.cat(parts) if parts else x.new_empty(0, n)


def _checked(x: Tensor, packed: PackedWeight, experts: int, bias: Tensor | None) -> int:
    """Rows of w per expert."""
    rows, k = packed.shape
    if experts < 1 or rows % experts:
        raise FormatError(f"offsets for {experts} experts do not fit a weight of {rows} rows: expected E + 1 of them")
    n = rows // experts
    if n % packed.step("N") and experts > 1:
        raise FormatError(f"experts of {n} rows cannot be told apart: {packed.format.name}.{packed.storage} can be cut at "
                          f"multiples of {packed.step('N')}")
    if x.dim() != 2 or x.shape[1] != k or x.dtype not in FLOATS or x.device != packed.device:
        raise FormatError(f"x {list(x.shape)} {str(x.dtype)[6:]} on {x.device} does not fit a weight [{rows}, {k}] on "
                          f"{packed.device}: expected floats [M, {k}]")
    if bias is not None and (bias.shape != (experts, n) or bias.dtype not in FLOATS or bias.device != x.device):
        raise FormatError(f"bias {list(bias.shape)} {str(bias.dtype)[6:]} on {bias.device} does not fit {experts} experts of "
                          f"{n} rows: expected floats [{experts}, {n}] on {x.device}")
    return n


def _is_fused(x: Tensor, packed: PackedWeight, bias: Tensor | None, experts: int) -> bool:
    """Whether one launch serves all experts: on a GPU, for rows that few per expert, where nothing watches how."""
    if x.device.type != "cuda" or not ops.is_plain(x, bias, *packed.tensors.values()) or ops.is_differentiated(x, bias):
        return False
    tiles = cdiv(x.shape[0], ROWS) + experts
    return tiles <= launch.ROWS_OF_X and x.shape[0] <= experts * min(MOST, configure.most_rows(packed, x.dtype, x.device)) \
        and launch.has_lanes(x.contiguous(), packed, few=True)
