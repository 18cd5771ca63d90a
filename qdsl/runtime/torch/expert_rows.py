"""Products with single experts of a stack on a CPU, which share one prepared product."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from qdsl.runtime.torch import ops
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import ProductPlan, run_prepared
from qdsl.runtime.weight.target import plan_of


@dataclass(frozen=True, slots=True)
class ExpertRows:
    """Where tensors of a stack have those of its experts, and the plan that all experts share; for all stacks of one plan.

    spans: name of a tensor, the axis along which it has the experts, -1 for one that all share, and elements per expert.
    """

    plan: ProductPlan
    rows: int
    spans: tuple[tuple[str, int, int], ...]

    @staticmethod
    def of(packed: PackedWeight, count: int) -> ExpertRows | None:
        """For a stack of `count` experts, cached in its plan; None where experts are not laid out alike."""
        choices, key = plan_of(packed).choices, ("experts", count)
        if key not in choices:
            choices[key] = ExpertRows._laid_out(packed, count)
        experts: ExpertRows | None = choices[key]
        return experts

    @staticmethod
    def _laid_out(packed: PackedWeight, count: int) -> ExpertRows | None:
        n = packed.shape[0] // count
        first, last = packed.cut("N", 0, n), packed.cut("N", (count - 1) * n, count * n)
        if plan_of(first) is not plan_of(last):
            return None
        spans = []
        for name in plan_of(first).names:
            whole, part, end = packed.tensors[name], first.tensors[name], last.tensors[name]
            axes = [axis for axis in range(whole.dim()) if whole.shape[axis] != part.shape[axis]]
            axis, size = (axes[0], part.shape[axes[0]]) if axes else (-1, 0)
            shown = whole.narrow(axis, (count - 1) * size, size) if axes else whole
            if len(axes) > 1 or (shown.data_ptr(), shown.shape) != (end.data_ptr(), end.shape):
                return None
            spans.append((name, axis, size))
        return ExpertRows(plan_of(first), n, tuple(spans))

    def product(self, x: Tensor, packed: PackedWeight, e: int, bias: Tensor | None) -> Tensor:
        """x [M, K] times the transpose of expert e's weight, plus bias [N]: by the prepared product, if there is one."""
        tensors = [packed.tensors[name] if axis < 0 else packed.tensors[name].narrow(axis, e * size, size)
                   for name, axis, size in self.spans]
        out = run_prepared(x, self.plan, tensors, bias, "")
        if out is not None:
            return out
        weight = packed.cut("N", e * self.rows, (e + 1) * self.rows)
        weight.plan = self.plan
        return ops.compute_product(x, weight, bias, False)
