"""The groups of columns, and columns stored by group, for a weight with act-order.

`order`, int32 [K], gives the column stored at each place: columns of group 0 first, ascending within a group.  If every group but
the last has `size` columns, place j belongs to group j // size, so that no index is needed.  The product with a weight whose
columns are permuted equals the product with x permuted alike.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.weight.arrays import cdiv


def columns(tensor: Tensor) -> Tensor:
    """A stored order, int32 or int16 [K], as int32; int16 holds unsigned columns up to 65535."""
    return tensor if tensor.dtype == torch.int32 else tensor.to(torch.int32) & 0xFFFF


def why_uneven_groups(index: Tensor, size: int) -> str:
    """Why columns with this index, int [K], cannot be stored by groups of `size`; '' if they can."""
    if index.is_meta:
        return "its values are not there yet"
    k = index.numel()
    counts = torch.bincount(index, minlength=cdiv(k, size))
    wanted = torch.full_like(counts, size)
    wanted[-1:] = k - size * (len(counts) - 1)
    wrong = torch.nonzero(counts != wanted)
    if not wrong.numel():
        return ""
    group = int(wrong[0, 0])
    return f"group {group} has {int(counts[group])} columns where columns in order would give it {int(wanted[group])}"


def in_order(index: Tensor, size: int) -> Tensor:
    """The index of the same number of columns, in order, in groups of `size`."""
    return torch.arange(index.numel(), dtype=index.dtype, device=index.device) // min(size, max(1, index.numel()))


def by_groups(index: Tensor) -> Tensor:
    """The order of columns with this index: int32 [K]."""
    return index.argsort(stable=True).to(torch.int32)


def inverse_order(order: Tensor) -> Tensor:
    """The place of each column, the inverse of an order: int64 [K]."""
    inverse = torch.empty(order.shape, dtype=torch.int64, device=order.device)
    inverse[order.long()] = torch.arange(order.numel(), device=order.device)
    return inverse


def index_of(order: Tensor, size: int) -> Tensor:
    """The index of columns with this order, in groups of `size`: int32 [K]."""
    return (inverse_order(order) // size).to(torch.int32)


def why_wrong_index(index: Tensor, groups: int) -> str:
    """What is wrong with a checkpoint's index, int [K]; '' if all its groups exist."""
    outside = torch.nonzero((index < 0) | (index >= groups))
    if not outside.numel():
        return ""
    column = int(outside[0, 0])
    return f"puts column {column} into group {int(index[column])}; there are groups 0 to {groups - 1}"


def why_wrong_order(order: Tensor, size: int) -> str:
    """What is wrong with a checkpoint's order, int [K]; '' if it is one of groups of `size`."""
    k = order.numel()
    outside = torch.nonzero((order < 0) | (order >= k))
    if outside.numel():
        place = int(outside[0, 0])
        return f"names column {int(order[place])} at place {place}; there are columns 0 to {k - 1}"
    columns, positions = order.sort(stable=True)
    twice = torch.nonzero(columns[1:] == columns[:-1])
    if twice.numel():
        at = int(twice[0, 0])
        return f"names column {int(columns[at])} at place {int(positions[at])} and again at place {int(positions[at + 1])}"
    group = torch.arange(k, device=order.device) // size
    falls = torch.nonzero((order[1:] < order[:-1]) & (group[1:] == group[:-1]))
    if falls.numel():
        place = int(falls[0, 0]) + 1
        return (f"names column {int(order[place])} at place {place}, after column {int(order[place - 1])} of the same group; "
                "the columns of a group ascend")
    return ""
