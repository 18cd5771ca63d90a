"""x @ w.T + bias on a GPU by the kernels that the weight's plan chose, without gradients.

`product` chooses, launches through Triton and prepares the launches for the next call, `quick` of runtime/weight/products.py.  An
act-order weight shares its plan with the same weight in stored order; `product` prepares the launches of the latter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.costs import decoded_tiles
from qdsl.runtime.gpu.placement import storage_advice
from qdsl.runtime.gpu.plan import best, invariant_candidate
from qdsl.runtime.gpu.prepared import multiply_rows, prepare
from qdsl.runtime.gpu.strides import gapless_weight
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import keep
from qdsl.runtime.weight.target import Candidate, plan_of


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None, mode: str, is_invariant: bool) -> Tensor:
    """x [M, K], contiguous, times a weight whose columns are in stored order: [M, N].

    Prepares the launches for the next call in this mode.
    """
    (m, _), (n, _) = x.shape, packed.shape
    if not m or not n:
        return x.new_empty(m, n)
    if (own := plan_of(packed)).note is None:
        own.note = storage_advice(packed, x.device)
    packed = gapless_weight(packed)
    choose = invariant_candidate if is_invariant else best
    return product_by(choose(packed, m, x.dtype, x.device, launch.is_aligned(x, packed)), x, packed, bias, mode)


def quantized_product(x: Tensor, packed: PackedWeight, bias: Tensor | None, scale: float | None, mode: str) -> Tensor:
    """x [M, K], contiguous, times the weight in 8 bits; requires launch.has_quantized.  scale: the static scale of x, or None.

    Prepares the launches for the next call in this mode, unless the scale is static: then torch quantizes x.
    """
    packed = gapless_weight(packed)
    out = x.new_empty(x.shape[0], packed.shape[0])
    _run(list(launch.quantized_calls(x, packed, bias, out, scale)), packed, x, bias, out, mode, False)
    return out


def product_by(candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None = None,
               mode: str | None = None) -> Tensor:
    """The product of x [M, K] by a candidate: [M, N].  mode: prepare the launches for this mode; None: do not."""
    (m, _), (n, k) = x.shape, packed.shape
    if candidate.kind != "decode":
        out = x.new_empty(m, n)
        _run(list(launch.linear_calls(x, packed, bias, out, candidate=candidate)), packed, x, bias, out, mode, False)
        return out
    rounded = None if bias is None else bias.to(x.dtype)
    ranges = decoded_tiles(packed, x.element_size())
    weight = x.new_empty(ranges[0][1], k)                        # the first tile has the most rows
    if len(ranges) == 1:
        _run(list(launch.dequantize_calls(packed, weight)), packed, x, bias, weight, mode, True)
        return linear(x, weight, rounded)
    out, compiled, tiles = x.new_empty(m, n), [], []
    for start, stop in ranges:
        part = [(call, call.run()) for call in launch.dequantize_calls(packed.cut("N", start, stop), weight[:stop - start])]
        multiply_rows(x, weight, rounded, out, start, stop)
        compiled += part
        tiles.append((len(part), start, stop))
    _keep(compiled, packed, x, bias, weight, mode, True, tiles)
    return out


def _run(calls: Sequence[Call], packed: PackedWeight, x: Tensor, bias: Tensor | None, out: Tensor, mode: str | None,
         is_decoded: bool) -> None:
    """Launch, and prepare the launches for the next call.  out: the output of the launches."""
    _keep([(call, call.run()) for call in calls], packed, x, bias, out, mode, is_decoded)


def _keep(compiled: Sequence[tuple[Call, Any]], packed: PackedWeight, x: Tensor, bias: Tensor | None, out: Tensor,
          mode: str | None, is_decoded: bool, tiles: Sequence[tuple[int, int, int]] = ()) -> None:
    """Prepare launches for the next call, unless mode is None.  tiles: as `prepare` takes them."""
    if mode is None:
        return
    plan = plan_of(packed)
    names = plan.names[:-1] if plan.is_permuted else plan.names
    tensors = [x, *(packed.tensors[name] for name in names), bias]
    tables = [table.on(packed.device) for table in packed.layout.kernels.every_table]
    ready = prepare(compiled, tensors, out, tables, is_decoded, plan.is_permuted, tiles)
    if ready is not None:
        keep(plan, x, bias, mode, ready)
