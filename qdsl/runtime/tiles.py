"""Walking a weight in tiles that fit a cache, cut where its storage and its blocks allow."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from qdsl.runtime.layout import Variant
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.shapes import axis

TILE = 1 << 18                                                   # weights per tile: 1 MB of float32, a second-level cache


def row_tiles(packed: PackedWeight, weights: int = TILE, step: int = 1) -> Iterator[tuple[int, int]]:
    """Row ranges of about `weights` weights, at multiples of `step` and of what the storage can be cut at."""
    n, k = packed.shape
    least = packed.step("N")
    least *= step // _gcd(least, step)
    rows = max(1, weights // max(1, k) // least) * least
    for start in range(0, n, rows):
        yield start, min(n, start + rows)


def decoded(packed: PackedWeight, start: int, stop: int) -> Iterator[tuple[slice, slice, Tensor]]:
    """Float32 weights of rows [start, stop): (rows, columns, weights) per rectangle in which all blocks are whole or alone."""
    part = packed if (start, stop) == (0, packed.shape[0]) else packed.cut("N", start, stop)
    variant = packed.variant
    fields = unpack(part)
    if not fields.keys().isdisjoint(_indices(variant)):
        yield slice(start, stop), slice(0, part.shape[1]), variant.decode(**fields)
        return
    row_cut, column_cut = (axis(text).by(packed.sizes) for text in variant.cuts)
    for r0, r1 in _pieces(part.shape[0], row_cut):
        for c0, c1 in _pieces(part.shape[1], column_cut):
            shown = {name: _rectangle(variant, packed.sizes, name, field, (r0, r1), (c0, c1)) for name, field in fields.items()}
            yield slice(start + r0, start + r1), slice(c0, c1), variant.decode(**shown)


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


def _gcd(a: int, b: int) -> int:
    while b:
        a, b = b, a % b
    return a
