"""Weights that are entropy-coded together, decoded for a block of a model each time that it runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from qdsl.runtime.no_weight import NoWeight
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.scratch import scratch


class HiddenWeight(NoWeight):
    """A weight that is decoded only while its block runs: its shape, dtype and device, without its numbers.

    holder: the module with the coded tensors.
    """

    def __init__(self, holder: nn.Module, shape: torch.Size, dtype: torch.dtype) -> None:
        self._holder, self._shape, self._dtype = holder, shape, dtype
        self._is_overwritten = False

    def __reduce_ex__(self, protocol: Any) -> Any:
        return HiddenWeight, (self._holder, self._shape, self._dtype)

    @property
    def shape(self) -> torch.Size:
        return self._shape

    @property
    def dtype(self) -> torch.dtype:
        return self._dtype

    @property
    def device(self) -> torch.device:
        return next(self._holder.parameters()).device

    def __getitem__(self, index: Any) -> NoWeight:
        return HiddenWeight(self._holder, torch.empty(self._shape, device="meta")[index].shape, self._dtype)

    @property
    def _advice(self) -> str:
        return f"it is coded together with others, and decoded only while their {type(self._holder).__name__} runs"


@dataclass(frozen=True)
class Member:
    """A parameter of a module that is part of a group.  start: its first number in the group's row."""

    module: nn.Module
    parameter: str
    shape: torch.Size
    start: int

    def hide(self, holder: nn.Module, dtype: torch.dtype) -> None:
        """Leave the module without its weight: a tensor on meta would do, but some of torch's kernels compute with it."""
        self.module._parameters.pop(self.parameter, None)
        setattr(self.module, self.parameter, HiddenWeight(holder, self.shape, dtype))

    def show(self, row: Tensor) -> None:
        """Give the module its weight, a view of the group's decoded row."""
        setattr(self.module, self.parameter, row[self.start:self.start + self.shape.numel()].view(self.shape))


class GroupedBlock:
    """Decodes a block's weights before it runs, into memory that the next block takes; installed by `install`.

    holder: the module whose parameters are the group's tensors, under the checkpoint's names.  block: the module that runs with
    the decoded weights.  Where gradients flow, each block is decoded into memory of its own, which autograd keeps.
    """

    def __init__(self, holder: nn.Module, packed: PackedWeight, names: Mapping[str, str], members: Sequence[Member],
                 dtype: torch.dtype) -> None:
        self.holder = holder
        self.names = dict(names)
        self.members = tuple(members)
        self.dtype = dtype
        self._packed = packed.derive({})

    @property
    def packed(self) -> PackedWeight:
        """The group as one weight of one row after the other."""
        tensors: dict[str, Any] = {name: self.holder._parameters[own] for name, own in self.names.items()}
        return self._packed.derive({name: tensor.data for name, tensor in tensors.items()})

    def install(self, block: nn.Module) -> None:
        """Decode before each call of a block, and hide the weights after it."""
        for member in self.members:
            member.hide(self.holder, self.dtype)
        block.register_forward_pre_hook(self._decode, prepend=True)
        block.register_forward_hook(self._hide, always_call=True)

    def row(self) -> Tensor:
        """All numbers of the group, decoded, in one row."""
        packed = self.packed
        fresh = torch.is_grad_enabled() or torch.compiler.is_compiling()
        out = None if fresh else scratch("group of weights", packed.shape, self.dtype, packed.device)
        return packed.format.dequantize(packed, self.dtype, out).view(-1)

    def _decode(self, block: nn.Module, args: Any) -> None:
        row = self.row()
        for member in self.members:
            member.show(row)

    def _hide(self, block: nn.Module, args: Any, output: Any) -> None:
        for member in self.members:
            member.hide(self.holder, self.dtype)
