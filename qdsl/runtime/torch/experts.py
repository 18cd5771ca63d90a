"""x @ w.T + bias for mixtures of experts: rows of x are sorted by expert and multiplied by their expert's weight.

    qdsl::grouped_linear       x [M, K], offsets [E + 1], bias [E, N]  ->  [M, N]
    qdsl::grouped_transposed   gradient [M, N], offsets [E + 1]        ->  [M, K], the gradient with respect to x

On a GPU nothing waits for the host: the device computes a map of tiles from the offsets.  One kernel takes few rows per expert.
Otherwise experts that have rows are decoded, some at a time, and one launch multiplies them.  In float64 and for gradients
torch's batched matmul multiplies tiles by the decoded weights of their experts.  On a CPU experts are multiplied one by one, and
the host reads the offsets.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from qdsl.runtime.gpu import launch, plan
from qdsl.runtime.gpu.expert_tiles import ROWS, most_tiles, tile_height, tile_map
from qdsl.runtime.gpu.families import BY_EXPERTS
from qdsl.runtime.gpu.kernels import experts as kernels
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.libraries.triton import on_device, runs_kernels
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.expert_rows import ExpertRows
from qdsl.runtime.torch.linear import FLOATS, MATCH_DENSE, as_stored
from qdsl.runtime.weight import order, stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.routing import Offsets, Routing

MOST = 64                                                        # rows of x per expert up to which tiles decode anew (predicted)
WIDTH = 1024                                                     # columns per program of the weighted sum
DECODED = 1 << 26                                                # weights to decode at a time, at least one expert
FEW = 1 << 14                                                    # pairs that `route` sorts in blocks of 1024; more in 4096


def route(x: Tensor, ids: Tensor, weights: Tensor, experts: int, expert_map: Tensor | None = None) -> Routing | None:
    """The pairs of tokens x [T, K] and their experts, ids [T, k], sorted by one launch; None if torch has to sort them.

    expert_map: the local number of each expert, below 0 for those of other ranks.  weights: those of the pairs.
    """
    pairs, tensors = ids.numel(), (ids, *(() if expert_map is None else (expert_map,)))
    if not is_on_gpu(x, weights, *tensors) or not pairs:
        return None
    height = ROWS if pairs <= experts * MOST else tile_height(pairs, experts)
    count = most_tiles(pairs, experts, height)
    sizes = [experts + 1, -(experts + 1) % 4, pairs, -pairs % 4, pairs, -pairs % 4, 3 * count]     # tensors aligned to 16 bytes
    offsets, _, tokens, _, places, _, tiles = torch.empty(sum(sizes), dtype=torch.int32, device=x.device).split_with_sizes(sizes)
    with torch.no_grad(), on_device(x.device):
        Call(kernels.route, (ids.contiguous(), expert_map, offsets, tokens, places, tiles, pairs, count),
             {"EXPERTS": experts, "TOP": ids.shape[-1], "HEIGHT": height, "BINS": 1 << (experts + 1).bit_length(),
              "BLOCK": 1024 if pairs <= FEW else 4096}, (experts + 1,), {"num_warps": 4}).run()
    return Routing(offsets, tokens, places, tiles.view(count, 3), height)


def linear(x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None = None, partial: bool = False,
           rows: Tensor | None = None, mode: str = "") -> Tensor:
    """Rows [offsets[e], offsets[e + 1]) of x [M, K] times the transpose of rows [e * N, (e + 1) * N) of w, plus bias[e]: [M, N].

    offsets: E + 1 integers from 0 to M, a list or a tensor on any device.  On a GPU they stay there, unchecked.  rows: int64 [M],
    the row of x [T, K] for each of the M rows.  partial: rows after the last offset belong to no expert, and their results are 0.
    mode: '' or MATCH_DENSE.  Differentiable in x and bias.  Raises FormatError if something does not fit.
    """
    if packed.has_branch:
        raise FormatError(f"'{packed.branch_names[0]}' is added to the weight of all experts; multiply each by linear")
    x = ops.autocast(x)
    if rows is not None and (mode or not is_on_gpu(x, bias, *packed.tensors.values())):
        x, rows = x[rows], None
    if ops.is_recorded():
        return _operation(x, packed, offsets, bias, partial, None, mode)
    if ops.is_differentiated(x, bias):
        result: Tensor = _Product.apply(x, bias, device_offsets(offsets, x), packed, partial, False,  # type: ignore[no-untyped-call]
                                       mode)
        return result
    compute = _experts_product if ops.is_plain(x, bias, *packed.tensors.values()) else _operation
    return compute(x, packed, offsets, bias, partial, rows, mode)


@without_autocast
def _experts_product(x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None, partial: bool,
                     rows: Tensor | None = None, mode: str = "") -> Tensor:
    """The product without gradients: one launch for all experts, or expert by expert."""
    experts = len(offsets) - 1
    n = _check_operands(x, packed, experts, bias)
    if mode == MATCH_DENSE:
        return _by_experts(x, packed, offsets, bias, partial, n, mode)
    x, packed = as_stored(x, packed)                         # all experts have the same column order, because there is one index
    if packed.runs_kernels:
        with torch.no_grad(), on_device(x.device):
            if x.dtype == torch.float64:
                return _by_batches(x if rows is None else x[rows], packed, device_offsets(offsets, x), bias)
            return _product_by_tiles(x, packed, offsets, bias, partial, n, rows)
    return _by_experts(x, packed, offsets, bias, partial, n, mode)


def _by_experts(x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None, partial: bool, n: int, mode: str,
                ) -> Tensor:
    """The product expert by expert, for which the host waits; n: rows of w per expert."""
    packed = packed if x.device.type == "cpu" else packed.decode_streams()
    borders = host_borders(offsets, x.shape[0], partial)
    experts = None if mode or packed.layout.streams or x.device.type != "cpu" else ExpertRows.of(packed, len(borders) - 1)
    if experts is not None:
        parts = [experts.product(x[start:stop], packed, e, None if bias is None else bias[e])
                 for e, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    else:
        parts = [ops.compute_product(x[start:stop], weight, None if bias is None else bias[e], False, mode)
                 for e, start, stop, weight in _used_experts(packed, borders)]
    if borders[-1] < x.shape[0] or not parts:
        parts.append(x.new_zeros(x.shape[0] - borders[-1], n))
    return torch.cat(parts)


@without_autocast
def _computed_gradient(gradient: Tensor, packed: PackedWeight, offsets: Offsets, mode: str = "") -> Tensor:
    """Gradients [M, N] times the weights of their experts: [M, K], without gradients; rows of no expert are 0."""
    if packed.runs_kernels and mode != MATCH_DENSE:
        with torch.no_grad(), on_device(gradient.device):
            stored = packed if packed.order is None else packed.as_stored()
            out = _by_batches(gradient, stored, device_offsets(offsets, gradient), None, transposed=True)
            return out if packed.order is None else out.index_select(1, order.inverse_order(packed.order))
    packed = packed.decode_streams()
    borders = host_borders(offsets, gradient.shape[0], True)
    out = gradient.new_zeros(gradient.shape[0], packed.shape[1])
    for _, start, stop, expert in _used_experts(packed, borders):
        out[start:stop] = ops.compute_product(gradient[start:stop], expert, None, True, mode)
    return out


def device_offsets(offsets: Offsets, like: Tensor) -> Tensor:
    """Offsets as a tensor on the device of x."""
    offsets = offsets.offsets if isinstance(offsets, Routing) else offsets
    if isinstance(offsets, Tensor):
        return offsets.to(like.device)
    return torch.tensor([*offsets], dtype=torch.int64, device=like.device)


def host_borders(offsets: Offsets, rows: int, partial: bool) -> list[int]:
    """Offsets as integers, for which the host waits.  Raises FormatError if they do not divide the rows of x."""
    offsets = offsets.offsets if isinstance(offsets, Routing) else offsets
    borders = [int(border) for border in (offsets.tolist() if isinstance(offsets, Tensor) else offsets)]
    if borders[0] != 0 or borders[-1] > rows or (borders[-1] != rows and not partial) or any(a > b for a, b in pairwise(borders)):
        raise FormatError(f"offsets {borders} do not divide {rows} rows of x among {len(borders) - 1} experts")
    return borders


def _used_experts(packed: PackedWeight, borders: Sequence[int]) -> Iterator[tuple[int, int, int, PackedWeight]]:
    """Experts that have rows of x: number, first row, end, weight.  Rows of other experts stay encoded."""
    chosen = [e for e, (start, stop) in enumerate(pairwise(borders)) if start < stop]
    n = packed.shape[0] // (len(borders) - 1)
    places = dict(zip(chosen, chosen, strict=True))
    if packed.layout.streams:
        rows = torch.arange(packed.shape[0], device="cpu").view(-1, n)[chosen].flatten()
        decoded = packed.decode_rows(rows) if 0 < len(chosen) < len(borders) - 1 else None
        places = places if decoded is None else {e: at for at, e in enumerate(chosen)}
        packed = packed.decode_streams() if decoded is None else decoded
    for e in chosen:
        yield e, borders[e], borders[e + 1], packed.cut("N", places[e] * n, (places[e] + 1) * n)


def _check_operands(x: Tensor, packed: PackedWeight, experts: int, bias: Tensor | None) -> int:
    """Validate the arguments and return the rows of w per expert."""
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


# -- on a GPU ----------------------------------------------------------------------------------------------------------


def is_on_gpu(x: Tensor, other: Tensor | None, *tensors: Tensor) -> bool:
    """Whether kernels multiply for all experts: on a GPU, floats of up to 32 bits, without gradients, tracing or transforms.

    other: the bias, or another tensor that may need gradients.
    """
    return runs_kernels(x.device) and x.dtype != torch.float64 and ops.is_plain(x, other, *tensors) and \
        not ops.is_differentiated(x, other)


def _product_by_tiles(x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None, partial: bool, n: int,
                      rows: Tensor | None) -> Tensor:
    """The product by kernels whose tiles follow the offsets on the device."""
    x, bias = x.contiguous(), None if bias is None else bias.contiguous()
    m, experts = x.shape[0] if rows is None else rows.shape[0], len(offsets) - 1
    out = x.new_zeros(m, n) if partial else x.new_empty(m, n)
    if _is_fused(x, m, packed, experts):
        launch.grouped(x, packed.decode_streams(), _tiles(offsets, x, m, ROWS), bias, out, rows)
    elif m:
        if packed.layout.streams and not stream_kernels.can_decode_rows(packed, n):
            packed = packed.decode_streams()
        chosen = None
        if m < experts:
            chosen, offsets = experts_with_rows(device_offsets(offsets, x), m)
            bias = None if bias is None else bias[chosen]

        def decode(start: int, stop: int) -> Tensor:
            if chosen is None and not packed.layout.streams:
                part = packed.cut("N", start * n, stop * n) if stop - start < experts else packed
            elif chosen is None:
                part = select_experts(packed, n, torch.arange(start, stop, device=x.device)) if stop - start < experts else packed
            else:
                part = select_experts(packed, n, chosen[start:stop])
            weight = x.new_empty(part.shape)
            launch.dequantize(part, weight)
            return weight

        matmul(x, decode, offsets, bias, rows, out)
    return out


def _tiles(offsets: Offsets, x: Tensor, rows: int, height: int) -> Tensor:
    """The tiles of `height` rows of x: those of the router's launch where they have that height."""
    if isinstance(offsets, Routing) and offsets.height == height:
        return offsets.tiles
    return tile_map(device_offsets(offsets, x), rows, height)


def _is_fused(x: Tensor, m: int, packed: PackedWeight, experts: int) -> bool:
    """Whether one launch decodes and multiplies m rows: few rows per expert, and a kernel for matrix units."""
    if m > experts * MOST or cdiv(m, ROWS) + experts > launch.SECOND_AXIS or packed.layout.streams or \
            not launch.fits_experts(x, packed):
        return False
    options = plan.choice(packed, cdiv(m, experts), x.dtype, x.device).options
    fused = BY_EXPERTS.name
    return next(option.candidate.kind for option in options if option.candidate.kind in (fused, "decode")) == fused


def matmul(x: Tensor, decode: Callable[[int, int], Tensor], offsets: Offsets, bias: Tensor | None, rows: Tensor | None,
           out: Tensor) -> None:
    """Multiply rows of x by the weights of their experts, plus bias [E, N], into out [M, N], on a GPU.

    decode(start, stop): returns the weights [(stop - start) * N, K] of these experts in x's dtype; about DECODED weights are
    decoded at a time.  rows: int64 [M], the row of x for each row of out, if different.
    """
    (m, n), k, experts = out.shape, x.shape[1], len(offsets) - 1
    size = max(1, DECODED // max(1, n * k))
    height = tile_height(m, experts)
    tiles = _tiles(offsets, x, m, height)
    for start in range(0, experts, size):
        matmul_call(x, decode(start, min(start + size, experts)), bias, rows, tiles, out, height, start).run()


def matmul_call(x: Tensor, weight: Tensor, bias: Tensor | None, rows: Tensor | None, tiles: Tensor, out: Tensor, height: int,
                first: int = 0) -> Call:
    """The launch that multiplies rows of x by decoded weights [E * N, K] of experts from `first` on; tiles: of `height` rows."""
    (n, k), wide = (out.shape[1], x.shape[1]), x.dtype == torch.float32
    bn, bk = (64, 32) if wide else (128, 64)
    return Call(kernels.matmul, (x, weight, bias, rows, tiles, out, n, k, first, weight.shape[0] // n),
                {"BM": height, "BN": bn, "BK": bk}, (tiles.shape[0], cdiv(n, bn)), {"num_warps": 4, "num_stages": 3},
                weights=bn * k, step=bn * bk)


def _by_batches(x: Tensor, packed: PackedWeight, offsets: Tensor, bias: Tensor | None, transposed: bool = False) -> Tensor:
    """The product by torch, in float32 or wider: batches of tiles times the weights decoded for them.

    x: [M, K], or [M, N] if transposed: then weights are not transposed.  bias: [E, N].  Rows of no expert are 0.  Batch sizes
    follow from M and E; the host reads no offset.
    """
    (m, k), experts = (x.shape[0], packed.shape[1]), offsets.shape[0] - 1
    n, wide = packed.shape[0] // experts, torch.promote_types(x.dtype, torch.float32)
    width = k if transposed else n
    if not m:
        return x.new_zeros(0, width)
    if packed.layout.streams and not stream_kernels.can_decode_rows(packed, n):
        packed = packed.decode_streams()
    height = tile_height(m, experts)
    chosen, offsets = experts_with_rows(offsets, min(m, experts))
    tiles = tile_map(offsets, m, height)
    expert, rows = chosen[tiles[:, 0]], tiles[:, 1:2] + torch.arange(height, device=x.device)            # [T], [T, height]
    products = x.new_empty(*rows.shape, width, dtype=wide)
    size = max(1, 2 * DECODED // wide.itemsize // max(1, n * k))
    for start in range(0, len(tiles), size):
        part = slice(start, start + size)
        decoded = select_experts(packed, n, expert[part])
        weight = x.new_empty(decoded.shape, dtype=wide)
        launch.dequantize(decoded, weight)
        weight = weight.view(-1, n, k)
        torch.bmm(x[rows[part].clamp(max=m - 1)].to(wide), weight if transposed else weight.transpose(1, 2), out=products[part])
    if bias is not None:
        products += bias[expert].to(wide)[:, None]
    last = torch.where(rows < tiles[:, 2:], rows, m).flatten()   # padding rows of a tile go to one extra row
    places = chosen.new_zeros(m + 1).scatter_(0, last, torch.arange(len(last), device=x.device))
    is_counted = torch.arange(m, device=x.device) < offsets[-1]
    return torch.where(is_counted[:, None], products.flatten(0, 1)[places[:m]], 0).to(x.dtype)


def experts_with_rows(offsets: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """The experts [count] that have rows, in order, padded with experts that have none; and their offsets [count + 1].

    offsets: integers [E + 1], rising from 0.  count: at least the number of experts with rows.  Nothing waits for the host.
    """
    needed = offsets.diff()
    if count == needed.shape[0]:
        return torch.arange(count, device=offsets.device), offsets
    chosen = (needed == 0).to(torch.uint8).argsort(stable=True)[:count]
    return chosen, torch.cat((offsets[:1], offsets[:1] + needed[chosen].cumsum(0)))


def select_experts(packed: PackedWeight, n: int, experts: Tensor) -> PackedWeight:
    """The weight of some experts, by numbers int64 [C], of n rows each; gathered on the device, with streams decoded."""
    if packed.layout.streams:
        rows = (experts[:, None] * n + torch.arange(n, device=experts.device)).flatten()
        plain, calls = stream_kernels.decode_calls(packed, rows)
        for call in calls:
            call.run()
        return packed.with_plain(plain, rows)
    one, tensors = packed.cut("N", 0, n), dict(packed.tensors)
    for name, tensor in packed.tensors.items():
        for place in range(tensor.dim()):
            if tensor.shape[place] != one.tensors[name].shape[place]:
                shape = list(tensor.shape)
                shape[place:place + 1] = [-1, one.tensors[name].shape[place]]
                tensors[name] = tensor.reshape(shape).index_select(place, experts).flatten(place, place + 1)
    return packed.derive(tensors, (len(experts) * n, packed.shape[1]))


def weighted_sum(rows: Tensor, places: Tensor, weights: Tensor, offsets: Tensor) -> Tensor:
    """The weighted sum of each token's expert results, added in the order of weights: [T, N], rounded once on a GPU.

    rows: results [T * k, N], sorted by expert; those after the last offset count as 0.  places: integers [T * k], the result for
    each of the weights [T, k].  offsets: integers [E + 1].
    """
    (tokens, chosen), n = weights.shape, rows.shape[1]
    if not is_on_gpu(rows, weights):
        is_counted = (places < offsets[-1])[:, None]
        return torch.where(is_counted, rows[places] * weights.reshape(-1, 1), 0).view(tokens, chosen, n).sum(1)
    out = rows.new_empty(tokens, n)
    if out.numel():
        with on_device(rows.device):
            Call(kernels.weighted_sum, (rows.contiguous(), places, weights.contiguous(), out, offsets, len(offsets) - 1, n),
                 {"TOP": chosen, "BN": WIDTH}, (tokens, cdiv(n, WIDTH)), {"num_warps": 4}).run()
    return out


# -- gradients ---------------------------------------------------------------------------------------------------------


class _Product(torch.autograd.Function):
    """The product as an autograd function; it is linear in x, so its gradient is the transposed product and vice versa."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, offsets: Tensor, packed: PackedWeight, partial: bool, transposed: bool, mode: str,
                ) -> Tensor:
        is_plain = ops.is_plain(x, bias, *packed.tensors.values())
        if transposed:
            return (_computed_gradient if is_plain else _gradient_operation)(x, packed, offsets, mode)
        return (_experts_product if is_plain else _operation)(x, packed, offsets, bias, partial, None, mode)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, bias, offsets, ctx.packed, _, ctx.transposed, ctx.mode = inputs
        ctx.save_for_backward(offsets)
        ctx.save_for_forward(offsets)
        ctx.bias = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (offsets,), to_x, to_bias = ctx.saved_tensors, None, None
        if ctx.needs_input_grad[0]:
            to_x = _Product.apply(gradients[0], None, offsets, ctx.packed, True,  # type: ignore[no-untyped-call]
                                  not ctx.transposed, ctx.mode)
        if ctx.needs_input_grad[1]:
            to_bias = _bias_gradient(gradients[0], offsets, ctx.bias)
        return to_x, to_bias, None, None, None, None, None

    @staticmethod
    def jvp(ctx: Any, x: Tensor, bias: Tensor | None, *_: None) -> Tensor:
        [offsets] = ctx.saved_tensors
        out: Tensor = _Product.apply(x, None, offsets, ctx.packed, True, ctx.transposed,  # type: ignore[no-untyped-call]
                                     ctx.mode)
        return out if bias is None else out + _bias_rows(bias.to(out.dtype), offsets, len(out))

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, ...], x: Tensor, bias: Tensor | None, offsets: Tensor, packed: PackedWeight,
             partial: bool, transposed: bool, mode: str) -> tuple[Tensor, int]:
        """A batch of x multiplies the rows per expert; a batch of biases is added afterwards."""
        of_x, of_bias, of_offsets, *_ = in_dims
        if of_offsets is not None:
            raise FormatError("offsets are the same for all of a batch; multiply by other offsets one by one")
        size = info.batch_size
        x = x.unsqueeze(1).expand(-1, size, -1) if of_x is None else x.movedim(of_x, 1)              # [M, B, K]
        own = bias if of_bias is None else None
        out: Tensor = _Product.apply(x.flatten(0, 1), own, size * offsets, packed, partial,  # type: ignore[no-untyped-call]
                                     transposed, mode)
        out = out.view(-1, size, out.shape[1])
        if bias is None or of_bias is None:
            return out, 1
        return out + _bias_rows(bias.movedim(of_bias, 1).to(out.dtype), offsets, len(out)), 1


def _bias_rows(bias: Tensor, offsets: Tensor, rows: int) -> Tensor:
    """The bias [E, ...] of each row's expert: [rows, ...], 0 for rows of no expert."""
    return torch.cat((bias, torch.zeros_like(bias[:1])))[_experts_of(offsets, rows)]


def _experts_of(offsets: Tensor, rows: int) -> Tensor:
    """The expert of each row: int64 [rows], E for rows of no expert."""
    return torch.searchsorted(offsets[1:], torch.arange(rows, device=offsets.device, dtype=offsets.dtype), right=True)


def _bias_gradient(gradient: Tensor, offsets: Tensor, dtype: torch.dtype) -> Tensor:
    """The sums of the gradients [M, N] over each expert's rows: [E, N]."""
    wide = gradient.to(torch.promote_types(gradient.dtype, torch.float32))
    experts = _experts_of(offsets, gradient.shape[0])
    return wide.new_zeros(offsets.shape[0], gradient.shape[1]).index_add(0, experts, wide)[:-1].to(dtype)


# -- operations --------------------------------------------------------------------------------------------------------


def _operation(x: Tensor, packed: PackedWeight, offsets: Offsets, bias: Tensor | None, partial: bool, rows: Tensor | None = None,
               mode: str = "") -> Tensor:
    tensors, weight = ops.operation_arguments(packed)
    x = x if rows is None else x[rows]
    result: Tensor = _grouped_linear(x, tensors, device_offsets(offsets, x), bias, weight, partial, mode)
    return result


def _gradient_operation(gradient: Tensor, packed: PackedWeight, offsets: Tensor, mode: str) -> Tensor:
    tensors, weight = ops.operation_arguments(packed)
    result: Tensor = _grouped_transposed(gradient, tensors, offsets, weight, mode)
    return result


def _computed_linear(x: Tensor, tensors: Sequence[Tensor], offsets: Tensor, bias: Tensor | None, weight: str, partial: bool,
                     mode: str) -> Tensor:
    return _experts_product(x, ops.packed_weight(tensors, weight), offsets, bias, partial, None, mode)


def _computed_transposed(gradient: Tensor, tensors: Sequence[Tensor], offsets: Tensor, weight: str, mode: str) -> Tensor:
    return _computed_gradient(gradient, ops.packed_weight(tensors, weight), offsets, mode)



def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save the packed tensors and their key for gradients, never the dense weight."""
    _, tensors, offsets, bias, ctx.weight, _, ctx.mode = inputs
    ctx.bias = None if bias is None else bias.dtype
    ctx.save_for_backward(offsets, *tensors)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    offsets, *tensors = ctx.saved_tensors
    to_x = _grouped_transposed(gradient, tensors, offsets, ctx.weight, ctx.mode) if ctx.needs_input_grad[0] else None
    to_bias = _bias_gradient(gradient, offsets, ctx.bias) if ctx.needs_input_grad[3] else None
    return to_x, [None] * len(tensors), None, to_bias, None, None, None


def _keep_transposed(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, tensors, offsets, ctx.weight, ctx.mode = inputs
    ctx.save_for_backward(offsets, *tensors)


def _gradients_of_transposed(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
    offsets, *tensors = ctx.saved_tensors
    to_gradient = _grouped_linear(gradient, tensors, offsets, None, ctx.weight, True, ctx.mode)
    return to_gradient, [None] * len(tensors), None, None, None


_grouped_linear = ops.define_operation(
    "grouped_linear", _computed_linear, lambda x, tensors, offsets, bias, weight, partial, mode: x.new_empty(
        x.shape[0], ops.read_key(weight).n // (offsets.shape[0] - 1)), _gradients, _keep, bias=3)
_grouped_transposed = ops.define_operation(
    "grouped_transposed", _computed_transposed, lambda gradient, tensors, offsets, weight, mode: gradient.new_empty(
        gradient.shape[0], ops.read_key(weight).k), _gradients_of_transposed, _keep_transposed)
