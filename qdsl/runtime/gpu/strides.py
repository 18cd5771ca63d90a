"""Weights with gaps between the rows of their tensors, as those that were cut along K: kernels read them where they lie.

Kernels for matrix units take `pitch`, the columns from one row of the weight to the next, from which the strides of all planes
follow.  Kernels that decode unit by unit take `gaps`: of each tensor the elements between a row's last and the next one's first.
Both are None for a weight without gaps, whose kernels then have no instruction for them.

A weight is copied once, and not in every product, where its rows have no such place: gaps between other axes than rows, as in
planes of bits, rows that a unit of weights shares, or planes whose strides are those of no one K.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from qdsl.runtime.weight.layout import CHUNK

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight


@dataclass(frozen=True, slots=True)
class Dense:
    """The weight without gaps, and the states of the tensors that it was copied from."""

    packed: PackedWeight
    states: list[tuple[int, int]]


def readable(packed: PackedWeight) -> PackedWeight:
    """The weight as kernels can read it: itself, or a copy without gaps, kept with it until a tensor is changed or replaced."""
    if not why_copied(packed):
        return packed
    states = [_state(tensor) for tensor in packed.tensors.values()]
    if packed.dense is None or packed.dense.states != states:
        packed.dense = Dense(packed.apply(Tensor.contiguous), states)
    return packed.dense.packed


def why_copied(packed: PackedWeight) -> str:
    """Why kernels cannot read a weight where it lies; '' where they can."""
    if not has_gaps(packed):
        return ""
    for name, tensor in packed.tensors.items():
        if not tensor.is_contiguous() and _gap(packed, name) is None:
            return f"the gaps in '{name}' are not between rows of units"
    if packed.layout.kernels.matrix_unit is not None and packed.shape[1] % CHUNK == 0 and _pitch(packed) is None:
        return "the rows of its tensors are not those of one longer weight"
    return ""


def has_gaps(packed: PackedWeight) -> bool:
    """Whether elements of other weights lie between those of a tensor."""
    return not all(tensor.is_contiguous() for tensor in packed.tensors.values())


def pitch(packed: PackedWeight) -> int | None:
    """Columns from a row to the next one for kernels for matrix units; None without gaps.  why_copied(packed) must be ''."""
    return _pitch(packed) if has_gaps(packed) else None


def gaps(packed: PackedWeight) -> list[tuple[()] | tuple[int, int]]:
    """By tensor that kernels read, and table: its gap and how many rows of tiles share a row of it, () without one.

    why_copied(packed) must be ''.
    """
    own = [_gap(packed, name) if name in packed.tensors else None for name in packed.layout.coded]
    return [gap or () for gap in (*own, *(None for _ in packed.layout.kernels.tables))]


def span(tensor: Tensor) -> int:
    """Elements from the first of a tensor to its last, those of gaps too."""
    steps = [(extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(steps) if tensor.numel() else 0


def _gap(packed: PackedWeight, name: str) -> tuple[int, int] | None:
    """The elements between rows of a tensor, and how many rows of tiles share one; None where gaps lie elsewhere, or nowhere."""
    tensor = packed.tensors[name]
    if tensor.is_contiguous():
        return None
    place = next(i for i, extent in enumerate(tensor.shape) if extent > 1)
    axis, rows = packed.layout.tensors[name].axes[place], packed.layout.kernels.sums
    together = axis.by(packed.sizes)
    if axis.dim != "N" or axis.words != 1 or axis.over or together % rows or \
            not tensor[(0,) * (place + 1)].is_contiguous():
        return None
    return tensor.stride(place) - tensor[(0,) * (place + 1)].numel(), together // rows


def _pitch(packed: PackedWeight) -> int | None:
    """The one K of which the strides of all tensors follow; None where there is none, or it is not in whole chunks."""
    planes = []
    for name, tensor in packed.tensors.items():
        axes = packed.layout.tensors[name].axes
        if [axis.dim for axis in axes] == ["N", "K"] and tensor.shape[0] > 1:
            planes.append((tensor.stride(0), axes[1]))
        elif not tensor.is_contiguous():
            return None
    # The longest K that each stride may stand for; the shortest of these has all strides.
    columns = min((-(-stride // axis.words) * axis.by(packed.sizes) for stride, axis in planes), default=0)
    fit = all(axis.extent(0, columns, packed.sizes) == stride for stride, axis in planes)
    return columns if fit and columns % CHUNK == 0 else None


def _state(tensor: Tensor) -> tuple[int, int]:
    """What differs once a tensor has other memory, or was changed in place; inference mode does not count changes."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
