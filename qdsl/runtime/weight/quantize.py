"""Quantizes float weights: validates options, and packs the fields that the encode scheme chooses, in tiles of rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qdsl.core.options import choose_options
from qdsl.runtime.libraries.private_apis import without_autocast
from qdsl.runtime.weight import convert, tiles
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.assemble import full_template
from qdsl.runtime.weight.defaults import default_field
from qdsl.runtime.weight.fields import pack
from qdsl.runtime.weight.layout import FLOATS, Variant
from qdsl.runtime.weight.packed import FormatError, PackedWeight, WeightFormat, shape_tensor


@without_autocast
def quantize(format: WeightFormat, weight: Tensor, storage: str | None, importance: Tensor | None, options: Mapping[str, Any],
             ) -> PackedWeight:
    """Quantizes a float weight [N, K].

    importance: floats [K], none negative: the weight of each column in the error; schemes that do not use it ignore it.  options:
    parameters of the format and options of its encode scheme.  Raises FormatError, with the row and column of a weight that is
    not finite.
    """
    params, scheme_options, name = choose_options(format.description, {"storage": storage, **options})
    variant = format.variant(params)
    layout = variant.storages[name]
    assert variant.encode is not None
    if not isinstance(weight, Tensor):
        raise FormatError(f"{format.name}: a weight is a torch tensor, not a {type(weight).__name__}")
    if weight.is_meta or weight.layout != torch.strided:
        raise FormatError(f"{format.name}: a weight is dense numbers in memory, not {weight.layout} on {weight.device}")
    if weight.dim() != 2 or not weight.is_floating_point():
        raise FormatError(f"{format.name}: a weight is floats [N, K], not {str(weight.dtype)[6:]} {list(weight.shape)}")
    weight = weight.detach()
    shape = (weight.shape[0], weight.shape[1])
    sizes = format.sizes(params, shape)
    types = {key: value for key, value in params.items() if isinstance(value, str)}
    importances = {} if importance is None else {"importance": _checked_importance(format, importance, weight)}
    chosen = {**layout.options, **scheme_options, **(importances if variant.importance else {})}
    whole = full_template(format, name, shape, params)
    rows = _encoded(whole, weight, sizes, {**sizes, **types, **chosen})
    quantized = _join_rows(whole, (pack(format, fields, name, params) for fields in rows))
    free = "symmetric" in variant.options and not chosen.get("symmetric")   # then all layers have the tensors that any needs
    left = set() if free else convert.omitted_tensors(quantized, layout)
    if not left:
        return quantized
    return quantized.derive({key: tensor for key, tensor in quantized.tensors.items() if key not in left})


def encoded_again(packed: PackedWeight, weight: Tensor, options: Mapping[str, Any]) -> dict[str, Tensor]:
    """The fields that `quantize` would choose for another weight of a quantized one's shape: it packs none.

    options: those of the scheme.
    """
    _, chosen, _ = choose_options(packed.format.description, options)
    types = {key: value for key, value in packed.params.items() if isinstance(value, str)}
    parts = list(_encoded(packed, weight, packed.sizes, {**packed.sizes, **types, **packed.layout.options, **chosen}))
    shared = {name for name in parts[0] if packed.variant.fields[name].groups is not None}
    return {name: parts[0][name] if name in shared or len(parts) == 1 else torch.cat([part[name] for part in parts])
            for name in parts[0]}


def _encoded(packed: PackedWeight, weight: Tensor, sizes: Mapping[str, int], options: Mapping[str, Any],
             ) -> Iterator[dict[str, Tensor]]:
    """All fields of tiles of rows; of the quantized weight only shape and layout count."""
    format, variant, layout, params = packed.format, packed.variant, packed.layout, packed.params
    index = {key: default_field(format.description, variant, key, packed.shape, params, weight.device)
             for key, field in variant.fields.items() if field.type == "index" and key not in (*layout.where, *layout.omits)}
    for fields in tiles.encode_rows(variant, weight, sizes, options, packed.step("N")):
        yield {**fields, **index, **_appended_zeros(variant, fields, params)}


def _appended_zeros(variant: Variant, fields: Mapping[str, Tensor], params: Mapping[str, int | str]) -> dict[str, Tensor]:
    """Zeros for the appended numbers of each row."""
    zeros: dict[str, Tensor] = {}
    for name in variant.appended:
        field, codes = variant.fields[name], fields[variant.roles["code"]]
        dtype = FLOATS[str(params.get(field.type, field.type))]
        zeros[name] = codes.new_zeros(codes.shape[0], field.axes[1].extent(1, 1, {}) or 0, dtype=dtype)
    return zeros


def _join_rows(whole: PackedWeight, parts: Iterable[PackedWeight]) -> PackedWeight:
    """The weight with the rows of all parts, in order.  whole: a weight of the full shape, without numbers."""
    start = 0
    for part in parts:
        if part.shape == whole.shape:
            return part
        if start == 0:
            whole.tensors = {key: empty(whole.tensors[key].shape, tensor.dtype, part.device) if key != whole.layout.shape
                             else shape_tensor(whole.shape, part.device) for key, tensor in part.tensors.items()}
        for key, tensor in whole.cut("N", start, start + part.shape[0]).tensors.items():
            tensor.copy_(part.tensors[key])
        start += part.shape[0]
    return PackedWeight(whole.format, whole.storage, whole.tensors, whole.shape, whole.params, in_order=part.in_order)


def _checked_importance(format: WeightFormat, importance: Tensor, weight: Tensor) -> Tensor:
    """The importance as float32 [K] on the weight's device.  Raises FormatError."""
    if not importance.is_floating_point() or importance.shape != weight.shape[1:]:
        raise FormatError(f"{format.name}: importance is floats [{weight.shape[1]}], one for each column, not "
                          f"{str(importance.dtype)[6:]} {list(importance.shape)}")
    importances = importance.detach().to(weight.device, torch.float32)
    bad = torch.nonzero(~((importances >= 0) & torch.isfinite(importances)))
    if bad.numel():
        raise FormatError(f"{format.name}: the importance of column {int(bad[0])} is {float(importance[int(bad[0])]):g}")
    return importances
