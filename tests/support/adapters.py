"""A small model of packed layers and peft's adapters for it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

from qdsl.runtime import PackedWeight
from tests.support.covering import ALL
from tests.support.formats import SHIPPED
from tests.support.packed_layers import module_of, quantized, sample

FAMILIES = ["q4_0", "fp8_block", "int8_channel", "nf4", "int_group", "hlane", "aqlm_2x8"]
NAMES = [path.stem for path in SHIPPED] if ALL else FAMILIES
IDS = torch.tensor([[1, 63, 7], [0, 5, 200]])
TARGETS = ["words", "first"]


def packed_weight(name: str) -> PackedWeight:
    """A weight [256, 256] with memory of its own; of random codes where the format has no quantizer."""
    format = module_of(name).FORMAT
    if format.variant(format.complete({})).encode is not None:
        return quantized(name, 256, 256).apply(torch.clone)
    empty, draw = format.empty((256, 256), device="cpu"), torch.Generator().manual_seed(0)
    return empty.apply(lambda tensor: torch.randn(tensor.shape, generator=draw, device="cpu").to(tensor.dtype)
                       if tensor.is_floating_point()
                       else torch.randint(0, 100, tensor.shape, generator=draw, device="cpu").to(tensor.dtype))


class Model(nn.Module):
    """Two packed layers and a dense one."""

    def __init__(self, name: str, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        torch.manual_seed(0)
        module = module_of(name)
        self.words = module.Embedding(packed_weight(name), dtype=dtype)
        self.first = module.Linear(packed_weight(name), sample(256).to(dtype))
        self.last = nn.Linear(256, 256, dtype=dtype)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.first(self.words(ids)).tanh())


def dense(model: Any) -> Any:
    """The same model with decoded weights."""
    other = copy.deepcopy(model)
    other.words, other.first = other.words.dense(), other.first.dense()
    return other


def adapted(model: nn.Module, seed: int = 1, **options: Any) -> Any:
    """The model with adapters that change its results."""
    torch.manual_seed(seed)
    options = {"target_modules": [*TARGETS, "last"], "r": 4, "init_lora_weights": False, **options}
    return get_peft_model(model, LoraConfig(**options))


def train(model: nn.Module, steps: int = 4) -> list[float]:
    optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.01)
    losses = []
    for _ in range(steps):
        loss = model(IDS).float().square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses
