"""Tensors with gaps between their rows, as those of a weight that was cut along K, copied once and not in every product.

Kernels take no strides.  A stride for each plane is an argument of every launch and a register of every thread, also for the
weights without gaps, which are nearly all: a checkpoint's own, and shards, which loaders copy to their rank anyway.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Dense:
    """The weight without gaps, and the states of the tensors that it was copied from."""

    packed: PackedWeight
    states: list[tuple[int, int]]


def dense(packed: PackedWeight) -> PackedWeight:
    """The weight without gaps: itself, or a copy that is kept with it until a tensor is changed or replaced."""
    if all(tensor.is_contiguous() for tensor in packed.tensors.values()):
        return packed
    states = [_state(tensor) for tensor in packed.tensors.values()]
    if packed.dense is None or packed.dense.states != states:
        packed.dense = Dense(packed.apply(Tensor.contiguous), states)
    return packed.dense.packed


def _state(tensor: Tensor) -> tuple[int, int]:
    """What differs once a tensor has other memory, or was changed in place; inference mode does not count changes."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
