"""Legal borders for slicing a weight: ends of blocks and words, and formats with smaller blocks.  No torch.

Rows and columns of a format can be sliced at multiples of a step.  A slice with other borders is extended to the next multiples:
along N the product skips the additional rows, along K x is padded with zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import gcd, lcm, prod

from qdsl.core.shapes import Axis
from qdsl.core.stored import PLANAR, Description

UNITS = {"N": "rows", "K": "columns"}
Params = Mapping[str, int | str]


@dataclass(frozen=True, slots=True)
class StoredSpan:
    """The needed rows (dim 'N') or columns ('K') [start, stop) of a weight, and the stored ones, [first, last)."""

    dim: str
    start: int
    stop: int
    first: int
    last: int

    @property
    def is_padded(self) -> bool:
        """Whether more rows or columns are stored than are needed."""
        return (self.start, self.stop) != (self.first, self.last)

    @property
    def padding(self) -> tuple[int, int]:
        """The numbers of stored rows or columns before and after the needed ones."""
        return self.start - self.first, self.last - self.stop


def span(dim: str, start: int, stop: int, whole: int, step: int) -> StoredSpan:
    """Rows or columns [start, stop) of `whole`, extended to multiples of `step`."""
    return StoredSpan(dim, start, stop, start // step * step, min(whole, -(-stop // step) * step)) if start < stop else \
        StoredSpan(dim, start, stop, start, stop)


def slice_targets(format: Description, storage: str, params: Params, shape: tuple[int, int],
                  ) -> Iterator[tuple[str, dict[str, int | str]]]:
    """The storages and parameters to try for a slice: the weight's own, then smaller blocks, then storage `planar`."""
    names = [name for name in format.sizes if name not in format.by]
    sizes = format.sizes_for(params, shape)
    values = [[params[name], *_smaller(format, params, sizes, name)] for name in names]
    whole = {-1: 1 + max(shape)}                                 # longer than any other block
    choices = sorted(_combinations(values), key=lambda choice: -prod(whole.get(int(value), int(value)) for value in choice))
    planar = [PLANAR] if format.key(params) in format.planar else []
    for name in dict.fromkeys((storage, *planar)):
        for choice in choices:
            yield name, {**params, **dict(zip(names, choice, strict=True))}


def _combinations(values: Sequence[Sequence[int | str]]) -> list[tuple[int | str, ...]]:
    result: list[tuple[int | str, ...]] = [()]
    for several in values:
        result = [(*before, value) for before in result for value in several]
    return result


def _smaller(format: Description, params: Params, sizes: Mapping[str, int], name: str) -> list[int]:
    """Smaller values of a size parameter, or the length of a whole axis that is one block; largest first."""
    most = sizes[name] - (params[name] != -1)
    return sorted((int(value) for value in format.params[name] if 0 < int(value) <= most), reverse=True)


def shard_step(format: Description, storage: str, params: Params, shape: tuple[int, int], dim: str) -> int:
    """The smallest step at whose multiples a weight can be sliced, packed again if necessary; the whole axis if it never can."""
    return min(piece_step(format, params, shape, dim, *target) for target in slice_targets(format, storage, params, shape))


def piece_step(format: Description, params: Params, shape: tuple[int, int], dim: str, storage: str, new: Params) -> int:
    """The same for slices in one storage, with parameters `new`; `params` are the weight's."""
    fields = format.fields.get(format.key(params))
    whole = max(1, shape[dim == "K"])
    if fields is None or dim in format.fixed:                    # scattered blocks, or a fixed extent
        return whole
    old, sizes = format.sizes_for(params, shape), format.sizes_for(new, shape)
    stored = format.variants[format.key(new)].get(storage, {})
    blocks = [axis for axes in fields.values() for axis in axes if not spans_all(axis, new)]
    exact = [term for tensor in stored.values() for axis in tensor.axes for term in axis.terms
             if term.exact and not spans_all(term, new)]
    if any(axis.by(old) % axis.by(sizes) and (axis.extent(*shape, old) or 0) > 1 for axis in blocks):
        return whole                                             # smaller blocks that do not divide the larger ones
    if any(dim == "K" and axis.dim == "N*K" and shape[1] % axis.by(sizes) for axis in blocks):
        return whole                                             # rows do not end with a block
    return min(whole, lcm(*(border_step(axis, sizes, dim, shape) for axis in blocks),
                          *(border_step(axis, sizes, dim, shape, ends_rows=False) for axis in exact)))


def border_step(axis: Axis, sizes: Mapping[str, int], dim: str, shape: tuple[int, int], ends_rows: bool = True) -> int:
    """The step of rows or columns at which blocks end.  ends_rows: along K, blocks of a flat axis must end with each row."""
    by = axis.by(sizes)
    if axis.dim != "N*K":
        return by if axis.dim == dim else 1
    return by if dim == "K" and ends_rows else by // gcd(by, shape[dim == "N"])


def spans_all(axis: Axis, params: Params) -> bool:
    """Whether the axis is one block, however long the weight is."""
    return any(params.get(size) == -1 for size in axis.step if isinstance(size, str))
