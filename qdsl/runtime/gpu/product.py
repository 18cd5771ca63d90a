"""x @ w.T + bias on a GPU, by what the plan of the weight chose; without gradients.

`product` chooses, launches through Triton and prepares the launches for the next call.  `quick` is that next call: it looks
a prepared product up, and does nothing else that a call does not need.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Size, Tensor
from torch.nn.functional import linear

from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.costs import DECODED, Candidate
from qdsl.runtime.gpu.dense import dense
from qdsl.runtime.gpu.plan import Plan, best, invariant, plan_of
from qdsl.runtime.gpu.prepared import ALIGNMENT, prepare
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.torch.private_apis import launch_stream
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import row_tiles

MOST = 4096                                                      # prepared products that a plan keeps


def quick(x: Tensor, plan: Plan, tensors: Sequence[Tensor], bias: Tensor | None, mode: str) -> Tensor | None:
    """The product of x [..., K] by launches that are prepared; None without any for these tensors.

    tensors: those of the weight that plan.names says, on the device of x.  Nothing but `product` may fill plan.ready, for the
    same mode.  Shapes and devices are those of a product that was checked, or the answer is None.
    """
    (n, k), shape, device = plan.shape, x.shape, x.get_device()
    if len(shape) != 2:
        if not shape or shape[-1] != k:
            return None
        shape = Size((x.numel() // max(1, k), k))
    ready = plan.ready.get((shape, x.dtype, None if bias is None else bias.dtype, mode, device))
    if ready is None or not x.is_contiguous() or tensors[0].get_device() != device:
        return None
    bits = at = x.data_ptr()
    addresses = [at]
    for tensor in tensors:
        if not tensor.is_contiguous():
            return None
        at = tensor.data_ptr()
        bits |= at
        addresses.append(at)
    if bias is None:
        addresses.append(0)
    elif bias.shape == (n,) and bias.get_device() == device and bias.is_contiguous():
        addresses.append(bias.data_ptr())
    else:
        return None
    stream = launch_stream(device)
    if stream is None or (bits | addresses[-1]) % ALIGNMENT:
        return None
    # Sizes are arguments of their own: torch takes half a microsecond longer for a tuple.
    if ready.is_decoded:
        out = x.new_empty(n, k)
    else:
        out = x.new_empty(shape[0], n) if x.dim() == 2 else x.new_empty(*x.shape[:-1], n)
    addresses.append(out.data_ptr())
    shared = scratch_of(*ready.scratch, x.device, stream) if ready.scratch else ()
    addresses += [tensor.data_ptr() for tensor in shared]
    for launched in ready.launches:
        if launched.hooks:
            return None                                          # what was launched before wrote to its own memory alone
        launched(stream, addresses)
    return linear(x, out, bias if bias is None or bias.dtype == x.dtype else bias.to(x.dtype)) if ready.is_decoded else out


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None, mode: str, is_invariant: bool) -> Tensor:
    """The product of x [M, K], contiguous, with a weight whose columns are as they are stored: [M, N].

    The launches are prepared for the next call in this mode.
    """
    (m, _), (n, _) = x.shape, packed.shape
    if not m or not n:
        return x.new_empty(m, n)
    packed = dense(packed)
    choose = invariant if is_invariant else best
    return by(choose(packed, m, x.dtype, x.device, launch.is_aligned(x, packed)), x, packed, bias, mode)


def by(candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None = None, mode: str | None = None) -> Tensor:
    """The product of x [M, K] by a candidate: [M, N].  mode: what the launches are prepared for, None for nothing."""
    (m, _), (n, k) = x.shape, packed.shape
    if candidate.kind != "decode":
        out = x.new_empty(m, n)
        _run(list(launch.linear_calls(x, packed, bias, out, candidate=candidate)), packed, x, bias, out, mode, False)
        return out
    rounded = None if bias is None else bias.to(x.dtype)
    tiles = [(0, n)] if packed.layout.streams else list(row_tiles(packed, weights=DECODED))
    if len(tiles) == 1:
        weight = x.new_empty(n, k)
        _run(list(launch.dequantize_calls(packed, weight)), packed, x, bias, weight, mode, True)
        return linear(x, weight, rounded)
    out = x.new_empty(m, n)
    for start, stop in tiles:
        weight = x.new_empty(stop - start, k)
        launch.dequantize(packed.cut("N", start, stop), weight)
        out[:, start:stop] = linear(x, weight, None if rounded is None else rounded[start:stop])
    return out


def _run(calls: Sequence[Call], packed: PackedWeight, x: Tensor, bias: Tensor | None, out: Tensor, mode: str | None,
         is_decoded: bool) -> None:
    """Launch, and prepare the same for the next call.  out: what the launches write."""
    compiled = [(call, call.run()) for call in calls]
    if mode is None:
        return
    plan = plan_of(packed)
    tensors = [x, *(packed.tensors[name] for name in plan.names), bias, out, *(each for call in calls for each in call.scratch)]
    tables = [table.on(packed.device) for table in packed.layout.kernels.tables]
    ready = prepare(compiled, tensors, tables, is_decoded)
    if ready is not None:
        if len(plan.ready) >= MOST:
            plan.ready.clear()
        plan.ready[x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()] = ready
