"""Whether a weight can be converted to planar, the storage for matrix-unit kernels, and at what size."""

from __future__ import annotations

import math

from qdsl.runtime.weight import order
from qdsl.runtime.weight.gather import group_size
from qdsl.runtime.weight.layout import PLANAR
from qdsl.runtime.weight.packed import PackedWeight


def why_not_planar(packed: PackedWeight, larger: bool = False) -> str:
    """Why `planar` returns a weight unchanged; '' if it converts it."""
    packed = packed.base
    if packed.storage == PLANAR or PLANAR not in packed.variant.storages:
        return "it is that already" if packed.storage == PLANAR else "its format has no storage for matrix units"
    if packed.shape[1] % 128:
        return f"{packed.shape[1]} columns are no multiple of 128"
    wide = {key: value for key, value in packed.tensors.items() if key not in packed.in_order}
    name = packed.variant.storages[PLANAR].order
    for key in packed.moved_indices:
        why = order.why_uneven_groups(wide[key], group_size(packed)) if name else "columns are out of order"
        if why:
            return f"'{key}': {why}"
    for stored in packed.variant.storages[PLANAR].tensors.values():
        for axis in stored.axes:
            if axis.extent(*packed.shape, packed.sizes) is None:
                return f"blocks of {axis.by(packed.sizes)} weights go over the ends of rows of {packed.shape[1]}"
    if not planar_template(packed).has_kernels:
        return f"its kernels take no blocks of {', '.join(map(str, packed.sizes.values()))} weights"
    if larger:
        return ""
    size = sum(tensor.nbytes for tensor in wide.values())
    new = planar_template(packed).nbytes
    limit = 1.04 if 8 * size / max(1, math.prod(packed.shape)) >= 4 else 1.12
    return f"{size} bytes would become {new}" if new > size * limit else ""


def planar_template(packed: PackedWeight) -> PackedWeight:
    """The planar form of a weight, on meta: tensors with dtypes and shapes, without numbers."""
    missing = {stored.optional for key, stored in packed.layout.tensors.items() if key not in packed.tensors}
    storage = packed.variant.storages[PLANAR]
    optional = [key for key, stored in storage.tensors.items() if stored.optional and (
        packed.moved_indices if key == storage.order else key not in packed.layout.where and stored.optional not in missing)]
    return packed.format.empty(packed.shape, PLANAR, "meta", optional, **packed.params)
