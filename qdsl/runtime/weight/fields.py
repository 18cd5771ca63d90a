"""Unpacks the fields of a weight from the tensors of its storage, and packs them."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from qdsl.core.numbers import find_number
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.weight import bfloat16, branch_pieces, order, streams
from qdsl.runtime.weight.assemble import assemble, check_shape, has_columns_in_order
from qdsl.runtime.weight.defaults import default_field, is_default
from qdsl.runtime.weight.errors import stream_errors
from qdsl.runtime.weight.gather import group_size
from qdsl.runtime.weight.layout import Storage, Variant
from qdsl.runtime.weight.match import stored_dtype, torch_dtype
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat, shape_tensor
from qdsl.runtime.weight.wrap import unfilled_indices


@without_autocast
def unpack(packed: PackedWeight) -> dict[str, Tensor]:
    """The fields by name: uint8 codes up to 8 bits, int32 above, floats in their own dtype; without missing optional ones."""
    if packed.has_branch:
        return {**unpack(packed.base), **branch_pieces.fields(packed)}
    packed = packed.decode_streams()
    stored = packed if packed.order is None else packed.as_stored()
    fields = bfloat16.fields_of(stored, (stored.tensors.get(name) for name in packed.layout.coded))
    if packed.order is None:
        return fields
    fields = _permute_columns(packed.variant, fields, order.inverse_order(packed.order))
    index = order.index_of(packed.order, group_size(packed))
    return {**fields, **{name: index for name, field in packed.variant.fields.items() if field.type == "index"}}


@without_autocast
def pack(format: WeightFormat, fields: Mapping[str, Tensor], storage: str | None, params: Mapping[str, int | str],
         ) -> PackedWeight:
    """The weight that holds these fields in a storage; the inverse of unpack.

    params: those that the fields' dtypes do not determine.  Raises FormatError for fields of the wrong dtype, shape or range, and
    for values that the storage cannot hold.
    """
    present = {key: value for key, value in fields.items() if value is not None}
    for key, field in present.items():
        if not isinstance(field, Tensor):
            raise FormatError(f"{format.name}: field '{key}' is a {type(field).__name__}, not a torch tensor")
    added = {role for branch in next(iter(format.variants.values())).plus for role in branch.tensors} & present.keys()
    if added:
        base = pack(format, {key: value for key, value in present.items() if key not in added}, storage, params)
        packed = branch_pieces.with_branches(base, {key: present[key] for key in added})
        branch_pieces.check_branches(packed)
        return packed
    chosen = format.complete({**_dtype_params(format, present), **params})
    name, layout = format.storage(storage, chosen)
    variant = format.variant(chosen)
    shape = _fields_shape(format, variant, present)
    sizes = format.sizes(chosen, shape)
    for key, field in present.items():
        _check_field(format, variant, key, field, shape, sizes, chosen)
    others = {key: present.pop(key) for key in layout.where if key in present}
    extra: dict[str, Tensor] = {}
    columns: Tensor | None = None
    for key, field in others.items():
        if not is_default(variant, key, field, sizes):
            extra = _order_from_index(format, layout, name, key, field, shape, chosen)
            columns = order.columns(extra[layout.order])
            present = _permute_columns(variant, present, columns)
    present |= {key: default_field(format.description, variant, key, shape, chosen, next(iter(present.values())).device)
             for key in layout.always if key not in present}
    stored = [key for key in variant.fields if key not in layout.where]
    missing = [key for key in stored if key not in present and key not in variant.defaults]
    if missing:
        raise FormatError(f"{format.name}: field '{missing[0]}' is missing; given are {', '.join(fields)}")
    check_shape(format, name, layout.decoded, shape, sizes, present)
    extents = {**sizes, "N": shape[0], "K": shape[1]}
    arranged = bfloat16.tensors_of(variant, layout, {key: present.get(key) for key in stored}, extents)
    places = order.inverse_order(columns) if columns is not None and layout.unordered else None
    tensors = {key: (arranged[key] if places is None or key not in layout.unordered else arranged[key][places]).contiguous()
               for key in layout.decoded.tensors if key in arranged}
    with stream_errors(format.name):
        tensors = streams.encode(layout, tensors, shape) if layout.streams else tensors
    if layout.shape:
        extra[layout.shape] = shape_tensor(shape, next(iter(tensors.values())).device)
    packed = assemble(format, name, {**tensors, **extra}, shape, chosen)
    for key in unfilled_indices(format, packed):
        raise FormatError(f"{format.name}.{name}: '{key}' would have one value for all columns, which readers take for missing")
    return packed


def _order_from_index(format: WeightFormat, layout: Storage, storage: str, name: str, field: Tensor, shape: tuple[int, int],
                      params: Mapping[str, int | str]) -> dict[str, Tensor]:
    """The order of columns that replaces an index which a storage does not store.  Raises FormatError for other fields."""
    variant = format.variant(params)
    default = variant.defaults[name]
    if default is not None or not layout.order:
        raise FormatError(f"{format.name}.{storage} cannot hold '{name}': it has its default there "
                          f"({'columns in order' if default is None else default})")
    has_columns_in_order(format, name, field, False, shape, params)
    assert variant.index_groups is not None
    if why := order.why_uneven_groups(field, variant.index_groups.by(format.sizes(params, shape))):
        raise FormatError(f"{format.name}.{storage} cannot hold '{name}', because it stores columns by groups: {why}")
    return {layout.order: order.by_groups(field).to(stored_dtype(layout.tensors[layout.order].dtype))}


def _dtype_params(format: WeightFormat, fields: Mapping[str, Tensor]) -> dict[str, int | str]:
    """Type parameters, as the fields' dtypes determine them."""
    params: dict[str, int | str] = {}
    for name, field in next(iter(format.variants.values())).fields.items():
        if field.type in format.params and name in fields:
            fit = [v for v in format.params[field.type] if torch_dtype(str(v)) == fields[name].dtype]
            params.update({field.type: fit[0]} if fit else {})
    return params


def _fields_shape(format: WeightFormat, variant: Variant, fields: Mapping[str, Tensor]) -> tuple[int, int]:
    """(N, K) from the field with a value per weight, or per run of columns that divides K."""
    telling = {name: field.axes for name, field in variant.fields.items() if [axis.dim for axis in field.axes] == ["N", "K"]
               and all(axis.solve(axis.words) is not None for axis in field.axes)}
    full = min(telling, key=lambda name: telling[name][1].by({}))
    if full in fields and fields[full].dim() == 2:
        n, k = (axis.solve(extent) for axis, extent in zip(telling[full], fields[full].shape, strict=True))
        if n is not None and k is not None:
            return n, k
    shown = ", ".join(axis.text for axis in telling[full])
    raise FormatError(f"{format.name}: field '{full}' [{shown}] is missing; given are {', '.join(fields) or 'none'}")


def _check_field(format: WeightFormat, variant: Variant, name: str, value: Tensor, shape: tuple[int, int],
                 sizes: Mapping[str, int], params: Mapping[str, int | str]) -> None:
    if name not in variant.fields:
        raise FormatError(f"{format.name} has no field '{name}'; it has {', '.join(variant.fields)}")
    field = variant.fields[name]
    kind = str(params.get(field.type, field.type))
    wanted = tuple(axis.rounded(*shape, sizes) for axis in field.axes)
    if value.dtype != torch_dtype(kind) or tuple(value.shape) != wanted:
        raise FormatError(f"{format.name}: field '{name}' is {str(value.dtype)[6:]} {list(value.shape)}; the format needs "
                          f"{str(torch_dtype(kind))[6:]} {list(wanted)}")
    scalar = find_number(kind)
    if scalar is not None and scalar.bits < 8 * value.element_size() and value.numel():
        low, high = (0, (1 << scalar.bits) - 1) if scalar.is_float else (scalar.low, scalar.high)
        most = int(value.max())
        if most > high or (value.dtype.is_signed and int(value.min()) < low):
            raise FormatError(f"{format.name}: field '{name}' has values from {int(value.min())} to {most}; {kind} holds {low} "
                              f"to {high}")


def _permute_columns(variant: Variant, fields: Mapping[str, Tensor], columns: Tensor) -> dict[str, Tensor]:
    """Fields of the weight with column j = old column columns[j]; fields of groups do not move."""
    moved = dict(fields)
    for name, field in fields.items():
        for place, axis in enumerate(variant.fields[name].axes):
            moved[name] = field.index_select(place, columns) if axis.text == "K" else moved[name]
    return moved
