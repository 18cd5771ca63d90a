"""Default values of optional fields: of an index for columns in order, and of fields whose default the spec states."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qdsl.core.shapes import extents
from qdsl.core.stored import Description
from qdsl.runtime.weight import order
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.match import torch_dtype


def default_field(description: Description, variant: Variant, name: str, shape: tuple[int, int], params: Mapping[str, int | str],
                  device: torch.device) -> Tensor:
    """The field that a missing tensor stands for."""
    field, value = variant.fields[name], variant.defaults[name]
    sizes, type = description.sizes_for(params, shape), str(params.get(field.type, field.type))
    if field.groups is not None:
        return order.in_order(torch.empty(shape[1], dtype=torch.int32, device=device), field.groups.by(sizes))
    whole = extents(field.axes, *shape, sizes)
    assert whole is not None and value is not None
    return torch.full(whole, value, dtype=torch_dtype(type), device=device)


def is_default(variant: Variant, name: str, value: Tensor, sizes: Mapping[str, int]) -> bool:
    """Whether an optional field has its default value everywhere."""
    default = variant.defaults[name]
    if default is not None:
        return bool((value == default).all())
    groups = variant.fields[name].groups
    return groups is not None and torch.equal(value, order.in_order(value, groups.by(sizes)))
