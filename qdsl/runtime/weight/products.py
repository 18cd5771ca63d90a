"""Products that are ready to run again, for all weights of one description.

`run_prepared` is every later product of these shapes: it looks up and runs.  A plan holds neither tensors nor addresses: weights
may move, be replaced, freed or offloaded.  It is not pickled.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from typing import Any, Protocol
from weakref import WeakValueDictionary

from torch import Size, Tensor

MOST = 4096                                                      # the most prepared products per plan


class Prepared(Protocol):
    """A product that is ready for other tensors of the same shapes and dtypes.

    run: the product of x, the tensors of plan.names and the bias; None for tensors that do not fit.  reshaped: the same for an x
    with other leading axes, whose product has these sizes.
    """

    run: Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor | None]

    def reshaped(self, sizes: tuple[int, ...]) -> Prepared: ...


class ProductPlan:
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


PLANS: WeakValueDictionary[tuple[Any, ...], ProductPlan] = WeakValueDictionary()


def forget_products() -> None:
    """Forget all choices and prepared products."""
    for plan in list(PLANS.values()):
        plan.choices.clear()
        plan.ready.clear()


def run_prepared(x: Tensor, plan: ProductPlan, tensors: Sequence[Tensor], bias: Tensor | None, mode: str) -> Tensor | None:
    """The product of x [..., K] by a prepared one; None if there is none for these tensors.

    tensors: those of plan.names, on the device of x.  Only products in the same mode may fill plan.ready.  An entry exists only
    for shapes and devices that were checked.
    """
    kind = x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()
    ready = plan.ready.get(kind)
    if ready is None and (ready := _prepared_for_rows(plan, *kind)) is None:
        return None
    return ready.run(x, tensors, bias)


def prepared(plan: ProductPlan, x: Tensor, bias: Tensor | None, mode: str) -> Prepared | None:
    """The prepared product that `run_prepared` runs for an x; None if there is none."""
    kind = x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()
    return plan.ready.get(kind) or _prepared_for_rows(plan, *kind)


def keep(plan: ProductPlan, x: Tensor, bias: Tensor | None, mode: str, ready: Prepared) -> None:
    _keep(plan, (x.shape, x.dtype, None if bias is None else bias.dtype, mode, x.get_device()), ready)


def _prepared_for_rows(plan: ProductPlan, shape: Size, *kind: Any) -> Prepared | None:
    """The prepared product for the number of rows of x [..., K], cached for this shape too; None if there is none."""
    n, k = plan.shape
    if len(shape) == 2 or not shape or shape[-1] != k:
        return None
    ready = plan.ready.get((Size((shape.numel() // max(1, k), k)), *kind))
    if ready is not None:
        ready = ready.reshaped((*shape[:-1], n))
        _keep(plan, (shape, *kind), ready)
    return ready


def _keep(plan: ProductPlan, key: tuple[Any, ...], ready: Prepared) -> None:
    if len(plan.ready) >= MOST:
        plan.ready.clear()
    plan.ready[key] = ready
