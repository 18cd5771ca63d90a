"""Plans of products: what a target chose for the weights of one description, and the products that are ready to run again.

A target is what products run on.  runtime/gpu and runtime/cpu each are one: both list candidates, choose one per number of rows
and dtype of x, and prepare it.  `quick` is every later product with the same shapes: it looks up and runs.

A plan holds neither tensors nor addresses: weights may move, be replaced, freed or offloaded.  It is not pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakValueDictionary

import torch
from torch import Size, Tensor

from qdsl.runtime.weight import streams

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight

MOST = 4096                                                      # the most prepared products per plan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate for computing x @ w.T.

    kind: a kernel of a GPU ('matvec', 'gemm', 'gemv', 'skinny', 'tile_gemm'), a way of a CPU (runtime/cpu/linear.py), or
    'decode': dequantize and torch's matmul.  config: the constants of the launch by name.  'gemv' and 'skinny' have R, WN, WK and
    EVEN, 'skinny' BM too where it is 16.  'tile_gemm' has R, W, BM, UNROLL and SPLIT.  'matvec' has BN, BK and EVEN, 'gemm' BM
    and SPLIT too.  Entropy codes: R, W, BLOCKS.  Loops of a CPU: ROWS.  grid: of the launch.
    """

    kind: str
    config: Mapping[str, int] = field(default_factory=dict)
    grid: tuple[int, ...] = ()


class Target(Protocol):
    """What a target of the compiler implements, beside printing the functions of a format.

    lower: the source of what a candidate runs; '' if it runs only functions of torch.  candidates: all ways to compute x [rows,
    K] @ w.T for x of a dtype, the chosen one first.  run: x [M, K] @ w.T + bias by one of them.
    """

    def lower(self, candidate: Candidate, packed: PackedWeight) -> str: ...
    def candidates(self, packed: PackedWeight, rows: int, dtype: torch.dtype) -> Sequence[Candidate]: ...
    def run(self, candidate: Candidate, x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor: ...


class Prepared(Protocol):
    """A product that is ready for other tensors of the same shapes and dtypes.

    run: the product of x, the tensors of plan.names and the bias; None for tensors that do not fit.  reshaped: the same for an x
    with other leading axes, whose product has these sizes.
    """

    run: Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor | None]

    def reshaped(self, sizes: tuple[int, ...]) -> Prepared: ...


class Plan:
    """The choices and prepared products for all weights of one description.

    note: advice on the storage, set when a product has run; '' if the storage is the fastest and is read in place.

    names: the tensors that products read, in storage order, then, if is_permuted, the act-order permutation of columns, which is
    applied to x first.  tensors_of: picks them from a weight's tensors.  shape: (N, K).  choices: by rows, dtype of x, GPU and
    alignment.  ready: prepared products by shape and dtype of x, dtype of the bias, mode and GPU index, -1 for a CPU.
    """

    __slots__ = ("__weakref__", "choices", "is_permuted", "names", "note", "ready", "shape", "tensors_of")

    def __init__(self, names: tuple[str, ...], shape: tuple[int, int], is_permuted: bool = False) -> None:
        self.names = names
        self.shape = shape
        self.is_permuted = is_permuted
        self.tensors_of: Callable[[Mapping[str, Tensor]], Sequence[Tensor]] = \
            itemgetter(*names) if len(names) > 1 else lambda tensors: [tensors[name] for name in names]
        self.note: str | None = None
        self.choices: dict[tuple[Any, ...], Any] = {}
        self.ready: dict[tuple[Any, ...], Prepared] = {}


_plans: WeakValueDictionary[tuple[Any, ...], Plan] = WeakValueDictionary()


def plan_of(packed: PackedWeight) -> Plan:
    """The plan of a weight, cached on it; weights with the same description share one."""
    if packed.plan is None:
        is_permuted = packed.order is not None
        names = tuple(name for name in packed.layout.coded if name in packed.tensors and name not in packed.in_order)
        names += (packed.layout.order,) if is_permuted else ()
        shapes = tuple((tensor.shape, None if tensor.is_contiguous() else tensor.stride())
                       for tensor in (packed.tensors[name] for name in names))
        if packed.layout.streams and not packed.stream_info and packed.device.type != "meta":
            packed.stream_info = streams.stream_info(packed.format.name, packed.layout, packed.tensors, packed.shape)
        is_finite = None if packed.device.type == "cpu" else packed.finite         # loops on a CPU keep NaN, and need not know
        described = (packed.format.key, packed.storage, packed.params_text, packed.is_decoded, packed.shape, names, shapes,
                     is_finite, packed.stream_info)
        plan = _plans.get(described)
        if plan is None:
            plan = _plans.setdefault(described, Plan(names, packed.shape, is_permuted))
        packed.plan = plan
    return packed.plan


def forget() -> None:
    """Forget all choices and prepared products."""
    for plan in list(_plans.values()):
        plan.choices.clear()
        plan.ready.clear()


def quick(x: Tensor, plan: Plan, tensors: Sequence[Tensor], bias: Tensor | None, mode: str) -> Tensor | None:
    """The product of x [..., K] by a prepared one; None if there is none for these tensors.

    tensors: those of plan.names, on the device of x.  Only products in the same mode may fill plan.ready.  An entry exists only
    for shapes and devices that were checked.
    """
    kind = x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()
    ready = plan.ready.get(kind)
    if ready is None and (ready := _reshaped(plan, *kind)) is None:
        return None
    return ready.run(x, tensors, bias)


def prepared(plan: Plan, x: Tensor, bias: Tensor | None, mode: str) -> Prepared | None:
    """The prepared product that `quick` runs for an x; None if there is none."""
    kind = x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()
    return plan.ready.get(kind) or _reshaped(plan, *kind)


def keep(plan: Plan, x: Tensor, bias: Tensor | None, mode: str, ready: Prepared) -> None:
    """Keep a prepared product for `quick`."""
    _keep(plan, (x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()), ready)


def _reshaped(plan: Plan, shape: Size, *kind: Any) -> Prepared | None:
    """The prepared product for the number of rows of x [..., K], cached for this shape too; None if there is none."""
    n, k = plan.shape
    if len(shape) == 2 or not shape or shape[-1] != k:
        return None
    ready = plan.ready.get((Size((shape.numel() // max(1, k), k)), *kind))
    if ready is not None:
        ready = ready.reshaped((*shape[:-1], n))
        _keep(plan, (shape, *kind), ready)
    return ready


def _keep(plan: Plan, key: tuple[Any, ...], ready: Prepared) -> None:
    if len(plan.ready) >= MOST:
        plan.ready.clear()
    plan.ready[key] = ready
