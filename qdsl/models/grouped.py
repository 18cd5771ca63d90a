"""Weights that are entropy-coded as a group (DF11), decoded for a block of a model each time it runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from qdsl.runtime.torch.distributed import GROUP
from qdsl.runtime.torch.no_weight import NoWeight
from qdsl.runtime.weight.packed import PackedWeight

DTYPE = "decoded_dtype"                                          # a buffer without elements: casts of the module cast it, too


class HiddenWeight(NoWeight):
    """A weight while its block is not running: torch functions that read it decode its group.

    So a layer works outside of its block, and when it is recomputed for gradients.  Writing to the weight is an error.
    """

    def __init__(self, group: GroupedBlock, member: Member) -> None:
        self._group, self._member = group, member
        self._is_overwritten = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HiddenWeight, (self._group, self._member)

    @property
    def shape(self) -> torch.Size:
        return self._member.shape

    @property
    def dtype(self) -> torch.dtype:
        return self._group.dtype

    @property
    def device(self) -> torch.device:
        return self._group.block.get_buffer(DTYPE).device

    @property
    def format(self) -> str:
        """The name of the group's format."""
        return self._group.packed.format.name

    @property
    def key(self) -> tuple[object, ...]:
        """What is equal for weights that are the same numbers of the same tensors."""
        return self._group.key(self._member)

    def decoded(self) -> Tensor:
        """The decoded weight, in memory of its own."""
        return self._member.weight(self._group.decode())

    def __getitem__(self, index: Any) -> Tensor:  # type: ignore[override]
        return self.decoded()[index]

    def __matmul__(self, other: Tensor) -> Tensor:
        return torch.matmul(self.decoded(), other)

    @property
    def _advice(self) -> str:
        return f"it is coded together with other weights of its {type(self._group.block).__name__}"

    @classmethod
    def __torch_function__(cls, function: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        """A torch function of the decoded weight; one that would write to it is an error."""
        name = getattr(function, "__name__", "")
        if (name.endswith("_") and not name.endswith("__")) or name in ("__set__", "__setitem__") or "out" in (kwargs or {}):
            return super().__torch_function__(function, types, args, kwargs)

        def dense(value: Any) -> Any:
            if isinstance(value, (list, tuple)):
                return type(value)(map(dense, value))
            return value.decoded() if isinstance(value, HiddenWeight) else value

        return function(*map(dense, args), **{key: dense(value) for key, value in (kwargs or {}).items()})


@dataclass(frozen=True)
class Member:
    """A parameter of a module whose numbers are part of a group.

    spans: the parts of the group's row that are its numbers, in their order; several where experts lie apart in the row.
    """

    module: nn.Module
    parameter: str
    shape: torch.Size
    spans: tuple[slice, ...]

    def weight(self, row: Tensor) -> Tensor:
        """The weight in the group's decoded row: a view, unless its numbers lie in several places."""
        parts = [row[span] for span in self.spans]
        return (parts[0] if len(parts) == 1 else torch.cat(parts)).view(self.shape)

    def hide(self, group: GroupedBlock) -> None:
        """Replace the module's weight with a HiddenWeight: with a tensor on meta, some of torch's kernels would compute."""
        self.module._parameters.pop(self.parameter, None)
        setattr(self.module, self.parameter, HiddenWeight(group, self))

    def show(self, row: Tensor) -> None:
        """Set the module's weight to its part of the group's decoded row."""
        setattr(self.module, self.parameter, self.weight(row))


class Decoder(Protocol):
    """Decodes blocks in the order in which they run."""

    def row(self, block: GroupedBlock) -> Tensor:
        """All numbers of a block that runs now, in one row."""


class GroupedBlock:
    """Decodes the weights of a group before a module runs, and frees their memory afterwards.

    block: the module that runs with the decoded weights, and whose parameters are the group's tensors (see `hold_group`).
    names: of these parameters, by the format's.  ahead: decodes the next block while this one runs (see `prefetch_`).
    """

    def __init__(self, block: nn.Module, packed: PackedWeight, names: Mapping[str, str], members: Sequence[Member]) -> None:
        self.block = block
        self.ahead: Decoder | None = None
        self.names = dict(names)
        self.members = tuple(members)
        self._packed = packed.derive({})

    @property
    def packed(self) -> PackedWeight:
        """The group as one packed weight [1, numbers]."""
        tensors: dict[str, Any] = {name: self.block._parameters[own] for name, own in self.names.items()}
        return self._packed.derive({name: tensor.data for name, tensor in tensors.items()})

    def key(self, member: Member) -> tuple[object, ...]:
        """What is equal for weights that are the same numbers of the same tensors, in this block or in others."""
        tensors = (self.block._parameters[own] for own in self.names.values())
        return (*map(id, tensors), *((span.start, span.stop) for span in member.spans))

    @staticmethod
    def of(module: nn.Module) -> GroupedBlock | None:
        """The group that a module decodes; None without one."""
        own = getattr(vars(module).get("forward"), "__self__", None)
        return own if isinstance(own, GroupedBlock) else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of decoded weights: the one that the module was last cast to."""
        return self.block.get_buffer(DTYPE).dtype

    def install(self) -> None:
        """Hide the weights, and show them while the block runs.

        The block's `forward` is replaced, as offloading replaces it: hooks would run before that has loaded the tensors.
        """
        self._hide()
        self.block.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the block with decoded weights."""
        row = self.decode() if self.ahead is None else self.ahead.row(self)
        for member in self.members:
            member.show(row)
        try:
            return type(self.block).forward(self.block, *args, **kwargs)
        finally:
            self._hide()

    def decode(self, out: Tensor | None = None) -> Tensor:
        """All numbers of the group in one row.  out: memory for them."""
        packed = self.packed
        if packed.device.type == "meta":                         # torch's CPU kernels compute with tensors on meta, in silence
            raise TypeError(f"the coded weights of this {type(self.block).__name__} are on meta: load them before it runs")
        return packed.format.dequantize(packed, self.dtype, out).view(-1)

    def _hide(self) -> None:
        for member in self.members:
            member.hide(self)


def hold_group(holder: nn.Module, tensors: Mapping[str, nn.Parameter], dtype: torch.dtype) -> None:
    """Register a group's tensors as parameters of a module.  dtype: of decoded weights, until the module is cast."""
    for name, tensor in tensors.items():
        holder.register_parameter(name, tensor)
    setattr(holder, GROUP, tuple(tensors))
    device = next(iter(tensors.values())).device
    holder.register_buffer(DTYPE, torch.empty(0, dtype=dtype, device=device), persistent=False)
