"""Memory positions of a stored tensor's elements, from the digits of its records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index
from qdsl.compiler.ir.program import Axis, Tensor


def pointer(tensor: Tensor) -> str:
    """The kernel's variable for a tensor: sections of a row share one pointer, regions have their own."""
    return tensor.name if tensor.section is not None and not tensor.section.by_rows else tensor.stored_name


def address(tensor: Tensor, records: Mapping[str, Index], step: Index) -> Index:
    """The position of element `step` of a record in the stored tensor.  records: the variables of the record."""
    section = tensor.section
    if section is None:
        return _element_position(tensor, tensor.axes, records, step)
    if not section.by_rows:
        return section.first + _element_position(tensor, tensor.axes, records, step)
    row = _element_position(tensor, tensor.axes[:1], records, step)
    return times(row, section.length) + section.first + _element_position(tensor, tensor.axes[1:], records, step)


def _element_position(tensor: Tensor, axes: Sequence[Axis], records: Mapping[str, Index], step: Index) -> Index:
    """The position along these axes in row-major order."""
    total = Index(0)
    for axis in axes:
        place = Index(0)
        for digit in axis.digits:
            place = times(place, tensor.var(digit).extent if digit else Index(tensor.words)) + (records[digit] if digit else step)
        total = times(total, tensor.axis_extent(axis)) + place
    return total


def word_step(tensor: Tensor) -> Index:
    """The distance between words of a record."""
    first, second = (address(tensor, {var.name: Index(0) for var in tensor.vars}, Index(i)) for i in (0, 1))
    return second - first


def is_aligned(tensor: Tensor, size: int) -> bool:
    """Whether every record of a tensor begins at a multiple of `size` elements."""
    section = tensor.section
    lengths = [Index(tensor.words), *([section.first, section.length] if section is not None else [])]
    return all(ix.divisor(length, Domain()) % size == 0 for length in lengths)


def index_digits(index: Index, extents: Sequence[Index], domain: Domain) -> list[Index]:
    """The digits of a number, slowest first, with these extents; the slowest digit is not reduced."""
    lower: list[Index] = []
    for extent in reversed(extents[1:]):
        high = Index(0, tuple((atom, c) for atom, c in index.terms if atom.op == "mul" and extent in atom.args))
        if high.terms and not extent.is_const:                   # split into a multiple of the extent and the part below it
            lower.insert(0, index - high)
            index = ix.combine([(other, c) for atom, c in high.terms for other in [atom.args[1 - atom.args.index(extent)]]])
        else:
            lower.insert(0, ix.mod(index, extent, domain))
            index = ix.div(index, extent, domain)
    return [index, *lower]


def times(index: Index, extent: Index) -> Index:
    """The product, multiplied out."""
    terms = [(Index(0, ((atom, 1),)) * extent, coefficient) for atom, coefficient in index.terms]
    return ix.combine([*terms, (extent, index.const)])
