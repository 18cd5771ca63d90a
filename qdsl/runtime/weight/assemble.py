"""The tensors of a weight: the ones that a storage has, and the validation of those that form a PackedWeight."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor

from qdsl.core.shapes import extents
from qdsl.runtime.weight import branch_pieces, order, streams
from qdsl.runtime.weight.device_dtypes import dtype_on
from qdsl.runtime.weight.layout import Storage
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat, shape_tensor

LARGEST = 1 << 60                                                # weights, so that counts of bytes and bits fit an int64


def assemble(format: WeightFormat, storage: str, tensors: Mapping[str, Tensor], shape: tuple[int, int],
             params: Mapping[str, int | str], notes: Sequence[str] = (), names: Mapping[str, str] | None = None) -> PackedWeight:
    """A weight of tensors in the storage's own shapes and dtypes; validates its index tensors."""
    layout = format.variant(params).storages[storage]
    sizes = format.sizes(params, shape)
    if why := layout.why_unsupported_shape(shape, sizes):
        raise FormatError(f"{format.name}.{storage}: {why}")
    own = {name: tensor for name, tensor in tensors.items() if name in layout.tensors}
    in_order = {name for name, tensor in own.items() if (name == layout.order or layout.tensors[name].dtype == "index")
                and has_columns_in_order(format, name, tensor, name == layout.order, shape, params)}
    if layout.shape and not tensors[layout.shape].is_meta and tuple(tensors[layout.shape].tolist()) != shape:
        raise FormatError(f"{format.name}.{storage}: '{layout.shape}' says {tensors[layout.shape].tolist()}; the weight is "
                          f"{list(shape)}")
    packed = PackedWeight(format, storage, tensors, shape, params, in_order=frozenset(in_order), notes=notes, names=names,
                          stream_info=streams.stream_info(format.name, layout, own, shape))
    branch_pieces.check_branches(packed)
    return packed


def revalidate(packed: PackedWeight) -> PackedWeight:
    """The same weight with its tensors validated again.

    Raises FormatError for tensors that do not fit, for groups that do not exist, and for an order that is no permutation.
    """
    wanted = dtypes_and_shapes(packed)
    for name, tensor in packed.tensors.items():
        if (tensor.dtype, tuple(tensor.shape)) != wanted[name]:
            dtype, shape = wanted[name]
            raise FormatError(f"{packed.format.name}.{packed.storage}: tensor '{name}' has become {str(tensor.dtype)[6:]} "
                              f"{list(tensor.shape)}; the weight stores {str(dtype)[6:]} {list(shape)}")
    return assemble(packed.format, packed.storage, packed.tensors, packed.shape, packed.params, packed.notes, packed.names)


def has_columns_in_order(format: WeightFormat, name: str, tensor: Tensor, is_order: bool, shape: tuple[int, int],
                         params: Mapping[str, int | str]) -> bool:
    """Whether an index or order says that columns are in order.

    Raises FormatError for groups that do not exist, and for an order that is no permutation.
    """
    if tensor.is_meta:
        return False
    sizes = format.sizes(params, shape)
    groups = format.variant(params).index_groups
    assert groups is not None                                    # a format with an index or an order has groups
    count, size = groups.extent(*shape, sizes) or 0, groups.by(sizes)
    tensor = order.columns(tensor) if is_order else tensor
    if why := order.why_wrong_order(tensor, size) if is_order else order.why_wrong_index(tensor, count):
        raise FormatError(f"{format.name}: '{name}' {why}")
    return torch.equal(tensor, order.in_order(tensor, 1 if is_order else size))


def check_shape(format: WeightFormat, name: str, layout: Storage, shape: tuple[int, int], sizes: Mapping[str, int],
                included: Collection[str]) -> None:
    """Raises FormatError for a shape that the storage does not support.  included: the optional fields that are stored."""
    for stored in layout.tensors.values():
        for axis in stored.axes if not stored.optional or stored.optional in included else ():
            if axis.extent(*shape, sizes) is None:
                raise FormatError(f"{format.name}.{name}: {axis.wrong(*shape, sizes)}")
    if why := layout.why_unsupported_shape(shape, sizes):
        raise FormatError(f"{format.name}.{name}: {why}")


def checked_shape(format: WeightFormat, shape: Sequence[int]) -> tuple[int, int]:
    """A caller's shape as (N, K).  Raises FormatError."""
    try:
        n, k = map(int, shape)
        whole = (n, k) == tuple(shape)
    except (TypeError, ValueError, OverflowError):
        whole = False
    if not whole:
        raise FormatError(f"{format.name}: shape is (N, K), not {shape!r}")
    if min(n, k) < 0 or n * k >= LARGEST:
        raise FormatError(f"{format.name}: shape is (N, K), not {shape!r}: sizes are not negative, and weights fewer than 2^60")
    return n, k


def empty_weight(format: WeightFormat, shape: tuple[int, int], storage: str | None, device: torch.device | str,
                 optional: Sequence[str] | None, params: Mapping[str, int | str]) -> PackedWeight:
    """A weight [N, K] with the uninitialised tensors of a storage, on a device (meta needs no memory).

    optional: the optional tensors to include, by default scales.  Raises FormatError.
    """
    chosen, shape = format.complete(params), checked_shape(format, shape)
    name, layout = format.storage(storage, chosen)
    sizes = format.sizes(chosen, shape)
    field_of = {key: stored.optional for key, stored in format.description.layout(name, chosen).items() if stored.optional}
    scales = [key for key in field_of if key in layout.tensors and layout.tensors[key].dtype in format.params]
    optional = scales if optional is None else optional
    for key in optional:
        if key not in field_of:
            raise FormatError(f"{format.name}.{name} has no optional tensor '{key}'; it has {', '.join(field_of) or 'none'}")
    check_shape(format, name, layout.decoded, shape, sizes, [field_of[key] for key in optional])
    template = PackedWeight(format, name, {}, shape, chosen)
    packed = template.derive({key: torch.empty(whole, dtype=dtype, device=device) for key, (dtype, whole)
                              in dtypes_and_shapes(template, optional).items() if key not in field_of or key in optional})
    if layout.shape and torch.device(device).type != "meta":
        packed.tensors[layout.shape] = shape_tensor(shape, packed.tensors[layout.shape].device)
    return packed


def full_template(format: WeightFormat, storage: str, shape: tuple[int, int], params: Mapping[str, int | str]) -> PackedWeight:
    """A weight on meta with all tensors that a storage can have.  Raises FormatError for a shape that does not fit."""
    layout = format.variant(params).storages[storage]
    check_shape(format, storage, layout.decoded, shape, format.sizes(params, shape), ())
    packed = PackedWeight(format, storage, {}, shape, params)
    packed.tensors = {key: torch.empty(whole, dtype=dtype, device="meta")
                      for key, (dtype, whole) in dtypes_and_shapes(packed).items()}
    return packed


def dtypes_and_shapes(packed: PackedWeight, more: Collection[str] = ()) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """The dtype and shape of every tensor of a weight's storage; extents that depend on the numbers are this weight's.

    more: further tensors of branches to include.
    """
    stored, dtypes = {}, packed.dtypes
    named = {*packed.layout.tensors, *packed.branch_names, *more}
    for name, tensor in packed.described.items() if packed.variant.plus else packed.layout.tensors.items():
        if name not in named:
            continue
        own = packed.tensors[name].shape if name in packed.tensors else ()
        shape = extents(tensor.axes, *packed.shape, packed.sizes, own)
        if shape is None and tensor.optional:
            continue                                         # the weight cannot have it
        assert shape is not None                             # a packed weight has a shape that its storage can hold
        dtype = dtypes[name]
        stored[name] = (dtype_on(packed.tensors[name].device, dtype) if name in packed.tensors else dtype, shape)
    return stored
