"""Transforms of inputs and outputs in models: on packed layers, on plain nn.Linear modules, and in decoded weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.transforms import why_not_contained
from qdsl.checkpoint.files.safetensors import shown
from qdsl.core.transforms import INPUT, OUTPUT, Transform
from qdsl.runtime.torch.layers import QuantizedLinear
from qdsl.runtime.torch.products import product_of
from qdsl.runtime.torch.transforms import LayerTransform, layer_transforms, transformed, with_tensors
from qdsl.runtime.weight.transforms import fold_transforms, folded_bias

TRANSFORMS = "transforms"                                        # of a module: its transforms, in order
HOOKS = "transform_hooks"                                        # of a plain module: the handles of hooks that apply them


def place_transforms(module: nn.Module, transforms: Sequence[Transform], tensors: Callable[[str], Tensor],
                     device: torch.device) -> None:
    """Make a layer apply transforms.  tensors: those of the checkpoint, by name."""
    modules = [own.to(device) for own in layer_transforms(transforms, tensors)]
    if isinstance(module, QuantizedLinear):
        module.set_transforms(modules)
    else:
        module.add_module(TRANSFORMS, nn.ModuleList(modules))
        vars(module)[HOOKS] = module.register_forward_pre_hook(_before), module.register_forward_hook(_after)


def transform_problems(plain: Mapping[str, tuple[nn.Module | None, Sequence[Transform]]],
                       decoded: Mapping[str, Sequence[Layer]]) -> list[str]:
    """Problems with transforms that a plain module cannot apply, and those that a decoded weight cannot contain."""
    whys = [(name, f"{own[0].label}: {why}") for name, (module, own) in plain.items() if (why := why_not_placed(module))]
    whys += [(name, why) for name, layers in decoded.items() for why in dict.fromkeys(map(why_not_contained, layers)) if why]
    return [f"{shown(name)}: {why}" for name, why in whys]


def why_not_placed(module: nn.Module | None) -> str:
    """Why a plain module cannot apply transforms; '' where it can."""
    if isinstance(module, QuantizedLinear) or (isinstance(module, nn.Linear) and product_of(module) == "linear"):
        return ""
    return f"{type(module).__name__} is no nn.Linear, whose input could be transformed"


def folded_weight(weight: Tensor, transforms: Sequence[Transform], tensors: Callable[[str], Tensor]) -> Tensor:
    """The weight [N, K] of a layer without transforms that computes what one with them computes, in the dtype of `weight`."""
    return fold_transforms(weight, transforms, tensors).to(weight.dtype) if transforms else weight


def transform_tensors(model: nn.Module) -> dict[str, Tensor]:
    """The tensors of a model's transforms, by their names in the checkpoint; shared ones once."""
    return {full: tensor for module in model.modules() if isinstance(module, LayerTransform)
            for full, tensor in module.stored().items()}


def transforms_of(module: nn.Module) -> list[Transform]:
    """The transforms of a layer, in order."""
    modules: Any = module._modules.get(TRANSFORMS)
    every: list[Any] = [*modules] if isinstance(modules, nn.ModuleList) else []
    return [own.transform for own in every]


def make_plain_dense(model: nn.Module) -> None:
    """Make transforms a part of the weights of plain nn.Linear modules, in place.  Raises FormatError for a norm."""
    for module in model.modules():
        modules: Any = module._modules.get(TRANSFORMS)
        if HOOKS in vars(module) and isinstance(module, nn.Linear):
            weight, bias = fold_transforms(module.weight.detach(), *with_tensors(modules)), module.bias
            module.weight = nn.Parameter(weight.to(module.weight.dtype), module.weight.requires_grad)
            if bias is not None:
                module.bias = nn.Parameter(folded_bias(bias.detach(), *with_tensors(modules)), bias.requires_grad)
            del module._modules[TRANSFORMS]
            for handle in vars(module).pop(HOOKS):
                handle.remove()


def _before(module: Any, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return transformed(module.transforms, args[0], INPUT), *args[1:]


def _after(module: Any, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
    return transformed(module.transforms, out, OUTPUT)
