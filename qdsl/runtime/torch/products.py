"""What modules with a matrix compute, found out by running them: x @ w.T + bias, or x @ w + bias."""

from __future__ import annotations

import copy
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

Product = Literal["", "linear", "transposed"]
N, K = 5, 3                                                      # of the small weights that modules are run with
SCALES = (1.0, 1e-6, 1e6)                                        # of inputs: a module that clamps them differs


def product_of(module: nn.Module) -> Product:
    """What a module computes: 'linear' as nn.Linear, 'transposed' with a weight [K, N], as GPT-2's Conv1D; '' for all others.

    A class with a forward of its own, such as Falcon's, is run with a small random weight in place of its own.  One that scales,
    clamps, rounds or masks differs, and so does one that fails.  MultiheadAttention multiplies by the weight of its projection
    itself, which torch marks by a class of its own.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return ""
    if isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward:
        return "linear"
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    is_bare = not module._modules and not module._buffers and module._parameters.keys() <= {"weight", "bias"}
    if weight is None or weight.dim() != 2 or not is_bare:
        return ""
    candidates: tuple[Product, ...] = ("linear",) if isinstance(module, nn.Linear) else ("transposed",)
    return next((own for own in candidates if _is_product(module, own, tuple(weight.shape), bias is not None)), "")


def _is_product(module: nn.Module, product: Product, shape: tuple[int, ...], has_bias: bool) -> bool:
    """Whether a copy of a module with a small weight computes this product."""
    n, k = shape if product == "linear" else shape[::-1]
    sizes = {n: N, k: N if n == k else K}
    draw = torch.Generator("cpu").manual_seed(0)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float32, device="cpu")

    weight, bias = random(N, sizes[k]), random(N) if has_bias else None
    small: Any = copy.copy(module)
    small.__dict__ = {name: sizes[value] if type(value) is int and value in sizes else value
                      for name, value in vars(module).items()}
    own = weight if product == "linear" else weight.t().contiguous()
    small._parameters = {"weight": nn.Parameter(own), "bias": None if bias is None else nn.Parameter(bias)}
    try:
        with torch.no_grad():
            return all(_is_near(type(module).forward(small, x), nn.functional.linear(x, weight, bias))
                       for scale in SCALES for x in (random(2, weight.shape[1]) * scale, random(1, 2, weight.shape[1]) * scale))
    except Exception:                                            # it needs more than x, or other sizes
        return False


def without_settings(module: nn.Module) -> nn.Module:
    """A copy of a module without its parameters."""
    shell = copy.copy(module)
    shell.__dict__ = {**vars(module), "_parameters": dict.fromkeys(module._parameters)}
    return shell


def replacement_of(shell: nn.Module, dense: nn.Linear, product: Product) -> nn.Module:
    """A module of another class with the weight and the bias of an nn.Linear.  product: what it computes."""
    module, weight = without_settings(shell), nn.Parameter(dense.weight, requires_grad=False)
    if product == "transposed":
        weight = nn.Parameter(weight.detach().t().contiguous(), requires_grad=False)
    module._parameters = {"weight": weight, "bias": dense.bias}
    return module


def _is_near(value: object, wanted: Tensor) -> bool:
    """Whether a result has the wanted numbers, but for the rounding of sums."""
    if not isinstance(value, Tensor) or value.shape != wanted.shape or value.dtype != wanted.dtype:
        return False
    return bool(((value - wanted).abs() <= 1e-5 * wanted.abs().max()).all())
