"""Reads layers of safetensors checkpoints as weights of the shipped formats."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from qdsl.checkpoint.detect.descriptions import description_of
from qdsl.checkpoint.detect.groups import Group
from qdsl.checkpoint.detect.layer import Layer, Layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.checkpoint.files.safetensors import CheckpointError, shown
from qdsl.core.stored import Stored, TensorInfo

if TYPE_CHECKING:
    from torch import Tensor

    from qdsl.runtime.weight.packed import PackedWeight


def module_of(layer: Layer) -> ModuleType:
    """The generated module of a layer's format."""
    return import_module(f"qdsl.generated.{layer.format}")


def with_checked_scales(folder: Folder, layers: Layers) -> Layers:
    """The layers of a folder, with scales that are NaN or infinite as contradictions.  Reads all scales."""
    from qdsl.runtime.weight.packed import FormatError

    checked: list[Layer] = []
    for layer in layers.layers:
        try:
            for own in tensors(folder, layer) if layer.format else ():
                wrapped(layer, own)
            checked.append(layer)
        except FormatError as error:
            checked.append(replace(layer, contradictions=(*layer.contradictions, str(error))))
    return replace(layers, layers=checked)


class Tensors(Protocol):
    """Tensors by their names in a checkpoint: a folder, or a loader's tensors."""

    @property
    def path(self) -> Path: ...

    def tensor(self, name: str) -> Tensor:
        """A tensor.  Raises an error for an unknown name."""


def check_recognised(path: Path, layer: Layer) -> None:
    """Raises CheckpointError, with the reason, for a layer whose tensors fit no format."""
    if layer.why:
        raise CheckpointError(f"{path}: layer {shown(layer.name)}: {layer.why}")


def weights(folder: Tensors, layer: Layer) -> list[PackedWeight]:
    """The weights of a layer, one per expert; copied only if the file does not map them.

    Raises CheckpointError if it is not recognised, or its tensors do not fit together.
    """
    return [_wrapped(folder, layer, one) for one in tensors(folder, layer)]


def stacked(folder: Folder, layer: Layer) -> PackedWeight:
    """A layer's weight; for a stack of experts one of E * N rows in order, without copying if the file's layout allows.

    Raises CheckpointError as `weights` does, FormatError if experts do not form one weight.
    """
    from qdsl.runtime.weight.packed import FormatError

    check_recognised(folder.path, layer)
    if layer.experts is None:
        return weights(folder, layer)[0]
    n, k = layer.shape
    if not layer.transposed and all(axis.dim in ("N", "N*K") for stored in layout_of(layer).values() for axis in stored.axes[:1]):
        whole = {name: _read(folder, layer, name) for name in layer.tensors} | _numbers(layer)
        with suppress(FormatError):
            weight = _wrapped_as(layer, whole, (layer.experts * n, k))
            if n % weight.step("N") == 0:
                return weight
    return joined(layer, weights(folder, layer))


def joined(layer: Layer, experts: Sequence[PackedWeight]) -> PackedWeight:
    """The experts as one weight of E * N rows.  Raises FormatError if they do not form one."""
    from qdsl.runtime.weight.packed import FormatError, PackedWeight

    try:
        weight = PackedWeight.join(experts, "N")
    except FormatError as error:
        raise FormatError(f"the {len(experts)} experts of {shown(layer.name)} are no single weight: {error}") from None
    if (weight.format, weight.storage, weight.params) != (experts[0].format, experts[0].storage, experts[0].params) or \
            layer.shape[0] % weight.step("N"):
        raise FormatError(f"the {len(experts)} experts of {shown(layer.name)} cannot be told apart in one {layer.storage} weight")
    return weight


def unread(folder: Folder, layer: Layer) -> list[PackedWeight]:
    """As `weights`, but validates only shapes, indices and scales; `checked` of the format validates the other numbers.

    Raises CheckpointError for invalid shapes and scales.
    """
    from qdsl.runtime.weight.finite_scales import scale_error

    unread_weights = []
    for own in tensors(folder, layer):
        stored = layout_of(layer)
        weight = _wrapped(folder, layer, {name: tensor if stored[name].dtype == "index" else tensor.to("meta")
                                         for name, tensor in own.items()})
        unread_weights.append(weight.derive({name: own[name].view(stored_tensor.dtype).reshape(stored_tensor.shape)
                                   for name, stored_tensor in weight.tensors.items()}))
        if error := scale_error(unread_weights[-1]):
            raise CheckpointError(f"{folder.path}: layer {shown(layer.name)}: {error}")
    return unread_weights


def tensors(folder: Tensors, layer: Layer) -> list[dict[str, Tensor]]:
    """A layer's tensors for each of its experts, with the storage's names.  Raises CheckpointError if it is not recognised."""
    check_recognised(folder.path, layer)
    whole, numbers, layout = {name: _read(folder, layer, name) for name in layer.tensors}, _numbers(layer), layout_of(layer)
    if layer.transposed:
        whole = {name: tensor.transpose(1, 2) if tensor.dim() == 3 else tensor for name, tensor in whole.items()}
    return [{name: _upright(layout[name], _of_one(tensor, layer.experts, expert)) for name, tensor in whole.items()} | numbers
            for expert in range(1 if layer.experts is None else layer.experts)]


def _numbers(layer: Layer) -> dict[str, Tensor]:
    """The one-number tensors that JSON next to a layer states."""
    import torch

    return {name: torch.tensor(number, dtype=torch.float32, device="cpu") for name, number in layer.numbers.items()}


def _upright(stored: Stored, tensor: Tensor) -> Tensor:
    """A tensor with one number per row as [N, 1], where files have [1, N]."""
    return tensor.reshape(-1, 1) if stored.is_column and tensor.dim() == 2 and tensor.shape[0] == 1 else tensor


def _of_one(tensor: Tensor, experts: int | None, expert: int) -> Tensor:
    """An expert's part of a tensor: along a first axis, or a part of the rows; one number may serve all experts."""
    if experts is None or tensor.shape[:1] == (experts,):
        return tensor if experts is None else tensor[expert].contiguous()
    return tensor if tensor.numel() == 1 else tensor.view(experts, -1, *tensor.shape[1:])[expert]


def group_weight(folder: Tensors, group: Group) -> PackedWeight:
    """The weight of a group, with all its numbers in rows of any size.  Raises CheckpointError if the group is invalid."""
    from qdsl.runtime.weight.packed import FormatError

    if wrong := group.errors:
        raise CheckpointError(f"{folder.path}: group {shown(group.name)}: {wrong[0]}")
    module = import_module(f"qdsl.generated.{group.format}")
    columns = math.gcd(group.numbers, 1 << 12)                   # rows of any size, to decode some at a time
    try:
        weight: PackedWeight = module.wrap({leaf: folder.tensor(full) for leaf, full in group.tensors.items()},
                                           (group.numbers // columns, columns))
    except FormatError as error:
        raise CheckpointError(f"{folder.path}: group {shown(group.name)}: {error}") from None
    return weight


def decoded(folder: Tensors, group: Group) -> dict[str, Tensor]:
    """The numbers of a group's weights, one row each, by name.  Raises CheckpointError if the group is invalid."""
    from qdsl.runtime.weight.packed import FormatError

    packed = group_weight(folder, group)
    try:
        row: Any = packed.format.dequantize(packed).view(-1)
        parts = row.split(list(group.parts.values()))
    except FormatError as error:
        raise CheckpointError(f"{folder.path}: group {shown(group.name)}: {error}") from None
    return dict(zip(group.parts, parts, strict=True))


def _read(folder: Tensors, layer: Layer, name: str) -> Tensor:
    return as_stored(layer, name, folder.tensor(layer.tensors[name]))


def as_stored(layer: Layer, name: str, tensor: Tensor) -> Tensor:
    """A file's tensor as the storage has it: unpacked from larger integers, N and K as int64, indices as int32."""
    import torch

    stored, info = layout_of(layer)[name], TensorInfo(str(tensor.dtype)[6:], tuple(tensor.shape))
    kind = stored.dtype
    if kind == "index" and tensor.dtype == torch.int64:          # others than int32 holds are no columns anyway
        return tensor.clamp(-1 << 31, (1 << 31) - 1).int()
    if several := stored.several(info):
        return _joined(tensor, several, stored)
    if (own := stored.elements_of(info)) is not info:
        return tensor.view(getattr(torch, own.dtype))
    if kind == "u8" and tensor.is_floating_point() and tensor.element_size() > 1:
        return tensor.flatten().view(torch.uint8)
    return tensor.long() if kind == "shape" else tensor


def _joined(tensor: Tensor, several: int, stored: Stored) -> Tensor:
    """Words of 32 bits from shorter integers.  What files add to a word they add to each part of it, with its own borrows."""
    import torch

    assert stored.shorter is not None
    part = (1 << 32 // several) - 1
    parts = tensor + (abs(stored.adds) & part) if stored.adds < 0 else tensor - (stored.adds & part)
    words = parts.movedim(stored.shorter, -1).contiguous().view(torch.int32).movedim(-1, stored.shorter)
    return words.contiguous() + stored.adds


def layout_of(layer: Layer) -> Mapping[str, Stored]:
    """The tensors of a layer's storage."""
    return description_of(layer.format).layout(layer.storage, layer.params)


def wrapped(layer: Layer, tensors: Mapping[str, Tensor]) -> PackedWeight:
    """A layer's weight from its storage's tensors.

    Raises FormatError if they do not fit together, and for scales that are NaN or infinite.
    """
    return _wrapped_as(layer, {**tensors, **_numbers(layer)}, layer.shape)


def _wrapped_as(layer: Layer, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> PackedWeight:
    from qdsl.runtime.weight.finite_scales import refuse_special_scales

    return refuse_special_scales(module_of(layer).wrap(tensors, shape, layer.storage, **layer.params))


def _wrapped(folder: Tensors, layer: Layer, tensors: dict[str, Tensor]) -> PackedWeight:
    from qdsl.runtime.weight.packed import FormatError

    try:
        return wrapped(layer, tensors)
    except FormatError as error:
        raise CheckpointError(f"{folder.path}: layer {shown(layer.name)}: {error}") from None
