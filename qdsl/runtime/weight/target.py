"""Targets of products, and the plan of a weight's products.

A target is what products run on.  runtime/gpu and runtime/cpu each are one: both list candidates, choose one per number of rows
and dtype of x, and prepare it (products.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch
from torch import Tensor

from qdsl.runtime.weight import streams
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.products import PLANS, ProductPlan


@dataclass(frozen=True, slots=True)
class Candidate:
    """One candidate for computing x @ w.T.

    kind: a kernel family of a GPU (runtime/gpu/families), a way of a CPU (runtime/cpu/linear.py), or 'decode': dequantize and
    torch's matmul.  config: the constants of the launch by name.  grid: of the launch.
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


def plan_of(packed: PackedWeight) -> ProductPlan:
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
        plan = PLANS.get(described)
        if plan is None:
            plan = PLANS.setdefault(described, ProductPlan(names, packed.shape, is_permuted))
        packed.plan = plan
    return packed.plan
