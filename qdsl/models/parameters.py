"""The number of a model's parameters as the dense model has them."""

from __future__ import annotations

from collections.abc import Iterable
from math import prod

from torch import nn

from qdsl.models.grouped import HiddenWeight
from qdsl.runtime.torch.distributed import packed_parameters
from qdsl.runtime.torch.layers import QuantizedEmbedding
from qdsl.runtime.torch.module import PackedModule


def num_parameters(model: nn.Module, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
    """How many numbers the dense model has: N * K for a packed weight, where the libraries count its stored elements.

    only_trainable: without packed weights, which are not trained.  exclude_embeddings: without input embeddings, and without a
    head that shares their weight, as transformers and diffusers count.
    """
    modules = dict(model.named_modules())
    stored = {id(parameter) for parameter in packed_parameters(model).values()}
    embeddings = {f"{name}.weight" for name, module in modules.items() if isinstance(module, nn.Embedding)}
    total = sum(parameter.numel() for name, parameter in model.named_parameters()
                if id(parameter) not in stored and (parameter.requires_grad or not only_trainable)
                and not (exclude_embeddings and name in embeddings))
    return total if only_trainable else total + sum(_packed_sizes(modules.values(), exclude_embeddings).values())


def _packed_sizes(modules: Iterable[nn.Module], exclude_embeddings: bool) -> dict[object, int]:
    """The numbers of packed weights and of those that are coded as a group; modules that share a weight have one entry."""
    sizes: dict[object, int] = {}
    for module in modules:
        is_left_out = exclude_embeddings and isinstance(module, nn.Embedding | QuantizedEmbedding)
        if isinstance(module, PackedModule):
            key = tuple(map(id, module.stored_parameters().values()))
            sizes.setdefault(key, 0 if is_left_out else prod(module.packed.shape))
        for value in vars(module).values():
            if isinstance(value, HiddenWeight):
                sizes.setdefault(id(value), 0 if is_left_out else value.shape.numel())
    return sizes
