"""Small packed layers, and whether what they store has changed."""

from __future__ import annotations

import functools
import importlib
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.runtime import PackedWeight
from tests.support.formats import same_bits

CPU = torch.device("cpu")


def module_of(name: str) -> ModuleType:
    return importlib.import_module(f"qdsl.generated.{name}")


def sample(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator(CPU).manual_seed(seed), device=CPU)


@functools.cache
def quantized(name: str, n: int = 64, k: int = 128) -> PackedWeight:
    return module_of(name).quantize(sample(n, k))


def layer_of(name: str, dtype: torch.dtype = torch.float32) -> Any:
    """A layer with memory of its own."""
    return module_of(name).Linear(quantized(name).apply(torch.clone), sample(64).to(dtype))


def stored_bits(layer: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in layer.state_dict().items()}


def is_unchanged(layer: nn.Module, before: dict[str, Tensor]) -> bool:
    return all(same_bits(tensor, before[name]) for name, tensor in layer.state_dict().items())
