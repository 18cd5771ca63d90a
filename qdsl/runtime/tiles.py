"""Walking a weight in tiles that fit a cache, cut where its storage and its blocks allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from qdsl.runtime.layout import Variant
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.shapes import axis

TILE = 1 << 19                                                   # weights per tile: few enough for a cache, many enough per call


def row_tiles(packed: PackedWeight, weights: int = TILE) -> Iterator[tuple[int, int]]:
    """Row ranges of about `weights` weights, where the storage and its blocks can be cut."""
    n, k = packed.shape
    least = packed.step("N")
    rows = max(1, weights // max(1, k) // least) * least
    for start in range(0, n, rows):
        yield start, min(n, start + rows)


def decode_rows(packed: PackedWeight, start: int, stop: int, out: Tensor) -> None:
    """Weights of rows [start, stop) into out [stop - start, K], in rectangles in which all blocks are whole or alone."""
    part = packed if (start, stop) == (0, packed.shape[0]) else packed.cut("N", start, stop)
    variant = packed.variant
    fields = unpack(part)
    row_cut, column_cut = (axis(text).by(packed.sizes) for text in variant.cuts)
    rows, columns = list(_pieces(part.shape[0], row_cut)), list(_pieces(part.shape[1], column_cut))
    if len(rows) == len(columns) == 1 or not fields.keys().isdisjoint(_indices(variant)):
        variant.decode(**fields, out=out)
        return
    for r0, r1 in rows:
        for c0, c1 in columns:
            shown = {name: _rectangle(variant, packed.sizes, name, field, (r0, r1), (c0, c1)) for name, field in fields.items()}
            variant.decode(**shown, out=out[r0:r1, c0:c1])


def unpack(packed: PackedWeight) -> dict[str, Tensor]:
    """The fields of a weight; an index whose columns lie in order is left out, as one that is not stored."""
    layout = packed.layout
    tensors = [packed.tensors.get(name) if name not in packed.in_order else None for name in layout.tensors]
    extra = {"N": packed.shape[0], "K": packed.shape[1]} if layout.needs_shape else {}
    return layout.unpack(*tensors, **extra)


def _indices(variant: Variant) -> set[str]:
    return {name for name, field in variant.fields.items() if field.type == "index"}


def _pieces(length: int, step: int) -> Iterator[tuple[int, int]]:
    """Whole blocks, then the short one that is left."""
    whole = length // step * step
    if whole:
        yield 0, whole
    if whole < length:
        yield whole, length


def _rectangle(variant: Variant, sizes: Mapping[str, int], name: str, field: Tensor, rows: tuple[int, int],
               columns: tuple[int, int]) -> Tensor:
    for place, each in enumerate(variant.fields[name].axes):
        start, stop = rows if each.dim == "N" else columns
        by = each.by(sizes)
        field = field.narrow(place, start // by, -(-stop // by) - start // by)
    return field
