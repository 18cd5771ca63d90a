"""Tensors with gaps between their rows, as those of a weight that was cut along K, copied once and not in every product.

Kernels take no strides.  A copy moves twice the bytes that a product with one row of x reads, once; loads, instructions and
alignment are then those of a weight that was never cut.  What it costs is memory: the shard's bytes, beside the whole weight,
which the views keep alive.  Loaders copy shards to their rank, and cut nothing that stays.

Strides as arguments would save that copy, and time of no product.  All rows of a weight that was cut along K lie as those of the
whole: one number, its K, says every stride, and could be a constant None for all other weights.  It would be part of a weight's
key in operations, plans and prepared launches, and an argument of all families of kernels.
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
