"""Weights whose tensors have gaps between rows, such as slices along K, and how kernels read them in place.

Matrix-unit kernels take `pitch`, the columns from one row of the weight to the next; the strides of all planes follow from it.
Kernels that decode unit by unit take `gaps`: per tensor the elements between the end of a row and the start of the next.  Both
are None for a weight without gaps, and the kernels then have no instruction for them.

Other gaps need a copy, made once and not in every product: gaps between other axes than rows, as in bit planes, rows that a unit
of weights shares, or planes whose strides do not follow from one K.
"""

from __future__ import annotations

from torch import Tensor

from qdsl.runtime.weight.matrix_unit import CHUNK
from qdsl.runtime.weight.packed import Dense, PackedWeight


def gapless_weight(packed: PackedWeight) -> PackedWeight:
    """The weight as kernels can read it: itself, or a gapless copy, cached on it until a tensor is changed or replaced."""
    if not why_unreadable(packed):
        return packed
    states = [_state(tensor) for tensor in packed.tensors.values()]
    if packed.dense is None or packed.dense.states != states:
        packed.dense = Dense(packed.apply(Tensor.contiguous), states)
    return packed.dense.packed


def why_unreadable(packed: PackedWeight) -> str:
    """Why kernels cannot read a weight in place; '' if they can."""
    if not has_gaps(packed):
        return ""
    for name, tensor in packed.tensors.items():
        if not tensor.is_contiguous() and _row_gap(packed, name) is None:
            return f"the gaps in '{name}' are not between rows of units"
    if packed.layout.kernels.matrix_unit is not None and packed.shape[1] % CHUNK == 0 and _common_pitch(packed) is None:
        return "the rows of its tensors are not those of one longer weight"
    return ""


def has_gaps(packed: PackedWeight) -> bool:
    """Whether a tensor has gaps: elements of other weights between its own."""
    return not all(tensor.is_contiguous() for tensor in packed.tensors.values())


def pitch(packed: PackedWeight) -> int | None:
    """Columns between rows, for matrix-unit kernels; None without gaps.  Requires that why_unreadable is '' for it."""
    return _common_pitch(packed) if has_gaps(packed) else None


def row_gaps(packed: PackedWeight) -> list[tuple[()] | tuple[int, int]]:
    """Per tensor and table that kernels read: its gap, and how many rows of tiles share one of its rows; () without a gap.

    Requires that why_unreadable(packed) is ''.
    """
    own = [_row_gap(packed, name) if name in packed.tensors else None for name in packed.layout.coded]
    return [gap or () for gap in (*own, *(None for _ in packed.layout.kernels.tables))]


def span(tensor: Tensor) -> int:
    """Elements from the first of a tensor to its last, gaps included."""
    steps = [(extent - 1) * step for extent, step in zip(tensor.shape, tensor.stride(), strict=True)]
    return 1 + sum(steps) if tensor.numel() else 0


def _row_gap(packed: PackedWeight, name: str) -> tuple[int, int] | None:
    """The elements between rows of a tensor, and the rows of tiles per row; None if it has no gaps or other ones."""
    tensor = packed.tensors[name]
    if tensor.is_contiguous():
        return None
    place = next(i for i, extent in enumerate(tensor.shape) if extent > 1)
    axis, rows = packed.layout.tensors[name].axes[place], packed.layout.kernels.sums
    together = axis.by(packed.sizes)
    if axis.dim != "N" or axis.words != 1 or axis.over or together % rows or not tensor[(0,) * (place + 1)].is_contiguous():
        return None
    return tensor.stride(place) - tensor[(0,) * (place + 1)].numel(), together // rows


def _common_pitch(packed: PackedWeight) -> int | None:
    """The one K that explains the strides of all tensors; None if there is none or it has partial chunks."""
    planes = []
    for name, tensor in packed.tensors.items():
        axes = packed.layout.tensors[name].axes
        if [axis.dim for axis in axes] == ["N", "K"] and tensor.shape[0] > 1:
            planes.append((tensor.stride(0), axes[1]))
        elif not tensor.is_contiguous():
            return None
    # The longest K for each stride; the shortest of these must explain all strides.
    columns = min((-(-stride // axis.words) * axis.by(packed.sizes) for stride, axis in planes), default=0)
    fit = all(axis.extent(0, columns, packed.sizes) == stride for stride, axis in planes)
    return columns if fit and columns % CHUNK == 0 else None


def _state(tensor: Tensor) -> tuple[int, int]:
    """A key that changes when a tensor gets other memory or is changed in place; inference mode does not count changes."""
    return tensor.data_ptr(), 0 if tensor.is_inference() else tensor._version
