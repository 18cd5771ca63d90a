"""Iterates over a weight in tiles that fit a cache, at borders that its storage and blocks allow."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from qdsl.core.shapes import axis, slicing_step
from qdsl.host.progress import advance_units
from qdsl.runtime.weight import bfloat16
from qdsl.runtime.weight.arrays import cdiv, empty
from qdsl.runtime.weight.layout import Field, Variant
from qdsl.runtime.weight.packed import FormatError, PackedWeight, UnrepresentableValue

TILE = 1 << 20                                                   # weights per tile: they fit a cache, and calls stay few
SEARCHED = 8                                                     # of a tile, the part that a search takes: some seconds
ALIGNED = 128                                                    # rows of w per block of the vendor's matmul


def row_tiles(packed: PackedWeight, weights: int = TILE) -> Iterator[tuple[int, int]]:
    """Row ranges of about `weights` weights, at borders that the storage and its blocks allow."""
    n, k = packed.shape
    least = packed.step("N")
    rows = max(1, weights // max(1, k) // least) * least
    for start in range(0, n, rows):
        yield start, min(n, start + rows)


def balanced_tiles(packed: PackedWeight, weights: int) -> list[tuple[int, int]]:
    """Row ranges of about `weights` weights at most, as equal as possible, for a dense matmul.

    Borders are multiples of ALIGNED rows, for which the vendor's matmul has its fastest kernels, and legal for the storage.
    """
    n, k = packed.shape
    count = cdiv(n * k, weights)
    if count <= 1:
        return [(0, n)]
    step = math.lcm(ALIGNED, packed.step("N"))
    rows = cdiv(cdiv(n, count), step) * step
    return [(start, min(n, start + rows)) for start in range(0, n, rows)]


def decode_rows(packed: PackedWeight, start: int, stop: int, out: Tensor) -> None:
    """Decode rows [start, stop) into out [stop - start, K]."""
    part = packed if (start, stop) == (0, packed.shape[0]) else packed.cut("N", start, stop)
    decode_fields(packed.variant, unpack(part), packed.sizes, out)


def decode_fields(variant: Variant, fields: Mapping[str, Tensor], sizes: Mapping[str, int], out: Tensor) -> None:
    """Decode the fields of a weight into out [N, K], in rectangles in which all blocks are whole or alone.

    A rectangle has about as many weights as a tile, even if the storage has no such borders.
    """
    if axis(variant.cuts[1]).dim in ("N*K", "1"):
        _decode_flat(variant, fields, sizes, out)
        return
    row_cut, column_cut = (axis(text).by(sizes) for text in variant.cuts)
    rows = list(_block_ranges(out.shape[0], row_cut, TILE // max(1, out.shape[1])))
    columns = list(_block_ranges(out.shape[1], column_cut, out.shape[1]))
    if len(rows) == len(columns) == 1 or any(variant.fields[name].type == "index" for name in fields):
        variant.decode(**fields, out=out)
        return
    for r0, r1 in rows:
        for c0, c1 in columns:
            shown = {name: _slice_field(variant, sizes, name, field, (r0, r1), (c0, c1)) for name, field in fields.items()}
            variant.decode(**shown, out=out[r0:r1, c0:c1])


def _decode_flat(variant: Variant, fields: Mapping[str, Tensor], sizes: Mapping[str, int], out: Tensor) -> None:
    """Decode rows one by one: whole blocks, then the partial one; for scattered blocks, some weights of each."""
    target = out if out.is_contiguous() else empty(out.shape, out.dtype, out.device)
    cut = axis(variant.cuts[1])
    shared = {name for name in fields if cut.dim == "1" and len(variant.fields[name].axes) < 2}
    step = max(1, *(fields[name].numel() for name in shared)) if shared else cut.by(sizes)
    pieces = list(_block_ranges(out.numel(), step, TILE))
    for start, stop in pieces:
        if len(pieces) == 1:
            variant.decode(**fields, out=target)
            break
        shown = {name: field if name in shared else _flat_values(variant.fields[name], field, start, stop, sizes)
                 for name, field in fields.items()}
        variant.decode(**shown, out=target.view(-1)[start:stop])
    if target is not out:
        out.copy_(target)


def _flat_values(field: Field, values: Tensor, start: int, stop: int, sizes: Mapping[str, int]) -> Tensor:
    """The values of flat positions [start, stop), which are whole blocks or a single one."""
    if [axis.dim for axis in field.axes] == ["N", "K"]:
        return values.flatten()[start:stop]
    by = [axis.by(sizes) for axis in field.axes if axis.dim == "N*K"]
    return values[start // by[0]:-(-stop // by[0])] if by else values


def encode_rows(variant: Variant, weight: Tensor, sizes: Mapping[str, int], options: Mapping[str, Any], step: int = 1,
                ) -> Iterator[dict[str, Tensor]]:
    """The fields that a variant's encode scheme chooses, by tiles of rows: whole blocks, multiples of `step`.

    Raises FormatError for a weight that is not finite, and if encode does.
    """
    assert variant.encode is not None
    n, k = weight.shape
    at_once = variant.cuts[1] == "1"
    if not weight.numel():
        whole = math.lcm(*(max(1, axis.by(sizes)) for field in variant.fields.values() for axis in field.axes)) if at_once else 1
        zeros = weight.new_zeros((max(n, 1), max(k, 1) * whole), dtype=torch.float32)
        yield _empty_fields(variant, variant.encode(zeros, **options), sizes, (n, k))
        return
    chosen = [field for field in variant.fields.values() if field.type != "index"]
    blocks = [slicing_step(field.axes, "N", sizes, k) if field.axes and field.axes[0].dim in ("N", "N*K") and not at_once else n
              for field in chosen]
    least = max(1, math.lcm(step, *blocks))
    rows = max(1, (TILE // SEARCHED if variant.importance else TILE) // max(1, k) // least) * least
    for start in range(0, n, rows):
        part = weight[start:start + rows]
        part = part.float() if part.element_size() in (1, 8) else part                 # torch does not compute in FP8
        _check_finite(part, start)
        try:
            fields = dict(variant.encode(part, **options))
        except UnrepresentableValue as error:
            if any(field.axes and field.axes[0].dim == "N*K" for field in chosen):
                variant.encode(weight, **options)                # it raises for blocks of the flat position
            raise error.after(start // max(blocks)) from None    # the error counts the longest blocks, which have the scale
        yield fields
        advance_units(part.numel())


def _empty_fields(variant: Variant, fields: Mapping[str, Tensor], sizes: Mapping[str, int], shape: tuple[int, int],
                  ) -> dict[str, Tensor]:
    """Fields of a single zero, sliced to those of an empty weight."""
    empty_fields = dict(fields)
    for name, field in fields.items():
        for place, field_axis in enumerate(variant.fields[name].axes):
            extent = min(field.shape[place], field_axis.extent(*shape, sizes) or 0)
            empty_fields[name] = empty_fields[name].narrow(place, 0, extent)
    return empty_fields


def _check_finite(weight: Tensor, start: int = 0) -> None:
    """Raises FormatError with the first weight that is not finite, with rows counted from `start`."""
    if math.isfinite(float(weight.sum())):                       # one fast pass; a sum that overflows is checked again
        return
    if not bool(torch.isfinite(weight).all()):
        n, k = (int(i) for i in torch.nonzero(~torch.isfinite(weight))[0])
        raise FormatError(f"the weight is {float(weight[n, k])} at row {start + n}, column {k}")


def unpack(packed: PackedWeight) -> dict[str, Tensor]:
    """The fields of a weight, without an index of columns in order, as if it was not stored."""
    layout = packed.layout
    assert packed.order is None, "tiles are decoded with columns as they are stored"
    tensors = [packed.tensors.get(name) if name not in packed.in_order else None for name in layout.coded]
    return bfloat16.fields_of(packed, tensors)



def _block_ranges(length: int, step: int, most: int) -> Iterator[tuple[int, int]]:
    """Ranges of whole blocks, at most `most` long, then the partial block."""
    whole = length // step * step
    by = max(1, most // step) * step
    for start in range(0, whole, by):
        yield start, min(start + by, whole)
    if whole < length:
        yield whole, length


def _slice_field(variant: Variant, sizes: Mapping[str, int], name: str, field: Tensor, rows: tuple[int, int],
                 columns: tuple[int, int]) -> Tensor:
    for place, field_axis in enumerate(variant.fields[name].axes):
        if field_axis.dim == "1":                                # of a stored table
            continue
        start, stop = rows if field_axis.dim == "N" else columns
        by = field_axis.by(sizes)
        field = field.narrow(place, start // by, -(-stop // by) - start // by)
    return field
