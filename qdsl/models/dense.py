"""Decodes the packed weights of a model to plain numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from qdsl.models.experts import Experts
from qdsl.models.grouped import DTYPE, GroupedBlock, HiddenWeight
from qdsl.models.origin import ATTRIBUTE
from qdsl.models.transforms import make_plain_dense
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.torch.distributed import GROUP
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.module import PackedModule
from qdsl.runtime.torch.products import replacement_of


@without_autocast
def make_dense(model: nn.Module, dtype: torch.dtype | None = None) -> None:
    """Decode all packed weights of a model, in place, a layer at a time; layers that share one share the decoded weight.

    dtype: of the decoded weights, by default that of each layer.  The model then has no origin: it is saved as plain numbers.
    """
    shared: dict[tuple[object, ...], nn.Parameter] = {}
    hidden = [value for module in model.modules() for value in vars(module).values() if isinstance(value, HiddenWeight)]
    for group in {id(weight._group): weight._group for weight in hidden}.values():
        _decode_group(group, dtype, shared)
    for name, stack in [(name, module) for name, module in model.named_modules() if isinstance(module, Experts)]:
        owner = model.get_submodule(name.rpartition(".")[0])
        delattr(owner, name.rpartition(".")[2])
        owner.register_parameter(name.rpartition(".")[2], nn.Parameter(stack.dequantize(dtype)))
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if isinstance(module, PackedModule):
            _replace(model, name, module, dtype, shared)
    make_plain_dense(model)
    vars(model).pop(ATTRIBUTE, None)


def embeddings(model: Any) -> list[nn.Module]:
    """The input embedding and the output head of a model of transformers; [] for a model that has none."""
    try:
        ends = [model.get_input_embeddings(), model.get_output_embeddings()]
    except NotImplementedError:
        return []
    return [module for module in ends if module is not None]


def _replace(model: nn.Module, name: str, module: Any, dtype: torch.dtype | None, shared: dict[tuple[object, ...], nn.Parameter],
             ) -> None:
    """Replace a packed layer with a dense one, with its bias, mode and hooks."""
    transforms = module.own_transforms if isinstance(module, QuantizedLinear) else []
    key: tuple[object, ...] = tuple(map(id, (*module._stored_tensors().values(), *transforms)))
    dense = module.dense(dtype)
    if isinstance(module, QuantizedLinear) and module.replaced is not None:
        dense = replacement_of(module.replaced[0], dense, module.replaced[1])
    dense.weight = shared.setdefault(key, dense.weight.requires_grad_())
    dense.train(module.training)
    vars(dense).update({own: value for own, value in vars(module).items() if own.endswith("_hooks")})
    model.set_submodule(name, dense)



def _decode_group(group: GroupedBlock, dtype: torch.dtype | None, shared: dict[tuple[object, ...], nn.Parameter]) -> None:
    """Decode the weights of a group into parameters, but those that another group has decoded."""
    keys = [group.key(member) for member in group.members]
    row = group.decode() if set(keys) - shared.keys() else None
    for key, member in zip(keys, group.members, strict=True):
        if row is not None and key not in shared:
            weight = member.weight(row)
            shared[key] = nn.Parameter(weight.to(dtype or weight.dtype, copy=True))
        delattr(member.module, member.parameter)
        member.module.register_parameter(member.parameter, shared[key])
    vars(group.block).pop("forward", None)
    for own in getattr(group.block, GROUP):
        del group.block._parameters[own]
    delattr(group.block, GROUP)
    del group.block._buffers[DTYPE]
