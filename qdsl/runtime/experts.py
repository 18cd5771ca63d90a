"""x @ w.T + bias where each row of x meets the weight of its own expert: rows sorted by expert, experts one after the other.

    qdsl::grouped_linear       x [M, K], offsets [E + 1], bias [E, N]  ->  [M, N]
    qdsl::grouped_transposed   gradient [M, N], offsets [E + 1]        ->  [M, K], the gradient with respect to x

On a GPU few rows per expert go through the fused kernel for few rows, with a map of its tiles that is made on the device;
nothing waits for the host.  In every other case experts are multiplied one by one, and the host waits for offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

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


def linear(x: Tensor, packed: PackedWeight, offsets: Tensor | Sequence[int], bias: Tensor | None = None, partial: bool = False,
           ) -> Tensor:
    """Rows [offsets[e], offsets[e + 1]) of x [M, K] times the transpose of rows [e * N, (e + 1) * N) of w, plus bias[e]: [M, N].

    offsets: E + 1 integers from 0 to M, a list or a tensor on any device.  On a GPU they stay there, unchecked, where there are
    few rows per expert.  partial: rows of x behind the last offset belong to no expert, and their results are 0.  Differentiable
    in x and bias.  Raises FormatError where something does not fit.
    """
    x = ops.autocast(x)
    is_watched = ops.is_recorded() or not (ops.is_plain(x, bias, *packed.tensors.values()) or ops.is_differentiated(x, bias))
    if isinstance(offsets, Tensor) and is_watched:
        tensors, described = ops.words(packed)
        result: Tensor = _grouped_linear(x, tensors, offsets, bias, *described, *packed.shape, partial)
        return result
    return _product(x, packed, offsets, bias, partial, ops.linear)


def _product(x: Tensor, packed: PackedWeight, offsets: Tensor | Sequence[int], bias: Tensor | None, partial: bool,
             one_expert: Callable[[Tensor, PackedWeight, Tensor | None], Tensor]) -> Tensor:
    """The product in one launch, or expert by expert with `one_expert`."""
    experts = len(offsets) - 1
    n = _checked(x, packed, experts, bias)
    x, packed = ops.as_stored(x, packed)                         # one order for all experts, as there is one index
    packed = packed if x.device.type == "cpu" else packed.open()
    if _is_fused(x, packed, bias, experts):
        with torch.no_grad(), ops.on_device(x.device):
            x = x.contiguous()
            out = x.new_zeros(x.shape[0], n) if partial else x.new_empty(x.shape[0], n)
            tiles = tile_map(torch.as_tensor(offsets, device=x.device), x.shape[0])
            launch.grouped(x, packed, tiles, None if bias is None else bias.contiguous(), out)
            return out
    if x.device.type == "cuda" and ops.is_plain(*packed.tensors.values()):
        packed.known_finite = packed.finite                      # read once for all experts, whose weights inherit it
    borders = host_borders(offsets, x.shape[0], partial)
    parts = [one_expert(x[start:stop], weight, None if bias is None else bias[e])
             for e, start, stop, weight in _weights(packed, borders)]
    if borders[-1] < x.shape[0] or not parts:
        parts.append(x.new_zeros(x.shape[0] - borders[-1], n))
    return torch.cat(parts)


def host_borders(offsets: Tensor | Sequence[int], rows: int, partial: bool) -> list[int]:
    """Offsets as integers, for which the host waits.  Raises FormatError where they do not divide the rows of x."""
    borders = [int(border) for border in (offsets.tolist() if isinstance(offsets, Tensor) else offsets)]
    if borders[0] != 0 or borders[-1] > rows or (borders[-1] != rows and not partial) or any(a > b for a, b in pairwise(borders)):
        raise FormatError(f"offsets {borders} do not divide {rows} rows of x among {len(borders) - 1} experts")
    return borders


def _weights(packed: PackedWeight, borders: Sequence[int]) -> Iterator[tuple[int, int, int, PackedWeight]]:
    """Experts that have rows of x: number, first row, one past the last, weight.  Of streams, rows of others stay encoded."""
    chosen = [e for e, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    n = packed.shape[0] // (len(borders) - 1)
    places = dict(zip(chosen, chosen, strict=True))
    if packed.layout.streams:
        rows = torch.arange(packed.shape[0]).view(-1, n)[chosen].flatten()
        opened = packed.open_rows(rows) if 0 < len(chosen) < len(borders) - 1 else None
        packed, places = (packed.open(), places) if opened is None else (opened, {e: at for at, e in enumerate(chosen)})
    for e in chosen:
        yield e, borders[e], borders[e + 1], packed.cut("N", places[e] * n, (places[e] + 1) * n)


def _checked(x: Tensor, packed: PackedWeight, experts: int, bias: Tensor | None) -> int:
    """Rows of w per expert."""
    rows, k = packed.shape
    if experts < 1 or rows % experts:
        raise FormatError(f"offsets for {experts} experts do not fit a weight of {rows} rows: expected E + 1 of them")
    n = rows // experts
    if experts > 1 and not packed.layout.streams and n % packed.step("N"):
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
    """Whether one launch serves all experts: on a GPU, for few rows per expert, where nothing watches how.

    In a CUDA graph, in which the host cannot wait for offsets, it serves any number of rows.
    """
    if x.device.type != "cuda" or not ops.is_plain(x, bias, *packed.tensors.values()) or ops.is_differentiated(x, bias):
        return False
    if cdiv(x.shape[0], ROWS) + experts > launch.ROWS_OF_X or not launch.has_lanes(x.contiguous(), packed, few=True):
        return False
    few = experts * min(MOST, configure.most_rows(packed, x.dtype, x.device))
    return x.shape[0] <= few or torch.cuda.is_current_stream_capturing()


# -- operations --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("qdsl::grouped_linear", mutates_args=())
def _grouped_linear(x: Tensor, tensors: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, format: str, storage: str,
                    params: str, names: str, finite: bool, facts: str, n: int, k: int, partial: bool) -> Tensor:
    packed = ops.packed_weight(tensors, ops.Words(format, storage, params, names, finite, facts), n, k)
    return _product(x, packed, offsets, bias, partial, lambda x, packed, bias: ops.computed(x, packed, bias, False))


@torch.library.custom_op("qdsl::grouped_transposed", mutates_args=())
def _grouped_transposed(gradient: Tensor, tensors: Sequence[Tensor], offsets: Tensor, format: str, storage: str, params: str,
                        names: str, finite: bool, facts: str, n: int, k: int) -> Tensor:
    packed = ops.packed_weight(tensors, ops.Words(format, storage, params, names, finite, facts), n, k).open()
    borders = host_borders(offsets, gradient.shape[0], True)
    out = gradient.new_zeros(gradient.shape[0], k)
    for _, start, stop, weight in _weights(packed, borders):
        out[start:stop] = ops.computed(gradient[start:stop], weight, None, turned=True)
    return out


@_grouped_linear.register_fake
def _(x: Tensor, tensors: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, format: str, storage: str, params: str,
      names: str, finite: bool, facts: str, n: int, k: int, partial: bool) -> Tensor:
    return x.new_empty(x.shape[0], n // (offsets.shape[0] - 1))


@_grouped_transposed.register_fake
def _(gradient: Tensor, tensors: Sequence[Tensor], offsets: Tensor, format: str, storage: str, params: str, names: str,
      finite: bool, facts: str, n: int, k: int) -> Tensor:
    return gradient.new_empty(gradient.shape[0], k)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """What the gradients need: the packed tensors and what they are, never the weight."""
    _, tensors, offsets, bias, *ctx.described, _ = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(offsets, *tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    offsets, *tensors = ctx.saved_tensors
    to_x = _grouped_transposed(gradient, tensors, offsets, *ctx.described) if ctx.needs_input_grad[0] else None
    to_bias = _bias_gradient(gradient, offsets, ctx.bias) if ctx.needs_input_grad[3] else None
    return to_x, [None] * len(tensors), None, to_bias, *[None] * (len(ctx.described) + 1)


def _bias_gradient(gradient: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of each expert's rows of gradients [M, N]: [E, N]."""
    experts = torch.searchsorted(offsets, torch.arange(gradient.shape[0], device=offsets.device, dtype=offsets.dtype), right=True)
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    sums = wide.new_zeros(offsets.shape[0] + 1, gradient.shape[1]).index_add(0, experts.to(gradient.device), wide)
    return sums[1:-1].to(dtype)


_grouped_linear.register_autograd(_gradients, setup_context=_keep)
