"""Stored tensors and their parts: rows with a header or a trailer, regions, and planes of bits."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise, product

import numpy as np
import numpy.typing as npt

from qdsl.core.numbers import number
from qdsl.infer.fit import Numbers
from qdsl.infer.tiles import StoredBytes

SMALL = ("e8m0", "e4m3", "e8m0h", "ue4m3")                       # floats that files store as bytes
PLAIN = {"f16": "<f2", "f32": "<f4", "i32": "<i4", "u32": "<u4", "i16": "<i2", "u16": "<u2", "i8": "i1", "u8": "u1"}
ENDS = (2, 4, 6, 8, 12, 16)                                      # bytes of a row's header and trailer together
RECORDS = (256, 128, 64, 32)                                     # columns of a record; its bytes divide a row's


@dataclass(frozen=True, order=True)
class Section:
    """A range of bytes, start to stop, of a tensor, or of each of its rows."""

    by_rows: bool
    start: int
    stop: int


@dataclass(frozen=True)
class Element:
    """A stored tensor, the type of its elements ('f16', 'i32'), and for codes the sections that are not yet explained."""

    kind: str
    stored: StoredBytes

    def kinds(self) -> list[str]:
        """The number types that the elements may have."""
        return [self.kind, *SMALL] if self.kind in ("u8", "i8") else [self.kind]

    def numbers(self, kind: str) -> Numbers:
        """The elements decoded as numbers, in order."""
        return decode_numbers(self.stored.data, kind)

    def cut_section(self, section: Section | None, rows: int) -> Element:
        """The bytes of a section of a tensor with `rows` rows; the tensor itself for None."""
        if section is None:
            return self
        by_rows = self.stored.data.reshape(rows if section.by_rows else 1, -1)[:, section.start:section.stop]
        data = np.ascontiguousarray(by_rows).reshape(-1)
        count = len(data) // self.stored.width
        return Element(self.kind, StoredBytes(data, (rows, count // rows) if section.by_rows else (count,), self.stored.width))


@dataclass(frozen=True)
class CodeSections:
    """Where the bits of codes lie: (tensor, section) of each part in order; and the headers and trailers of rows.

    last: the last axis of a region's elements, which the tensor's shape does not give; 0 for elements with one axis.
    """

    codes: tuple[tuple[str, Section | None], ...]
    ends: tuple[Section, ...] = ()
    last: int = 0

    def join_sections(self, elements: Mapping[str, Element], rows: int) -> StoredBytes:
        """The parts of the codes as one tensor."""
        first, *others = (elements[name].cut_section(section, rows).stored for name, section in self.codes)
        count = len(first.data) // first.width
        return replace(first, others=tuple(others), shape=(count // self.last, self.last) if self.last else first.shape)


def decode_numbers(data: npt.NDArray[np.uint8], kind: str) -> Numbers:
    """Bytes decoded as numbers of a type of 8, 16 or 32 bits; the last axis of `data` holds one number, or several in order."""
    data = np.ascontiguousarray(data)
    with np.errstate(invalid="ignore"):
        if kind in PLAIN:
            return data.view(PLAIN[kind]).astype(np.float64)
        if kind == "bf16":
            return (data.view("<u2").astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    form = number(kind)
    assert form.bits == 8
    return np.array([form.decode(code) for code in range(256)])[data]


def cut_row_ends(name: str, element: Element, shape: tuple[int, int]) -> Iterator[CodeSections]:
    """Yields the ways to cut a tensor of bytes into headers, codes and trailers of rows; plain codes first, then records."""
    n, k = shape
    size = len(element.stored.data) // n
    if element.stored.width > 1 or size * n != len(element.stored.data):
        return
    unit = k // next((columns for columns in RECORDS if k % columns == 0), 8)
    plain = (size - k * bits // 8 for bits in range(8, 1, -1))   # more around plain codes than around records
    sizes = [extra for extra in dict.fromkeys((*ENDS, *(extra for extra in plain if 0 < extra < size // 4)))
             if size > extra and (size - extra) % max(unit, 1) == 0]
    for extra in sorted(sizes, key=lambda extra: 8 * (size - extra) % k != 0):
        for head in dict.fromkeys((0, extra, extra // 2)):
            places = (0, head, size - extra + head, size)
            header, codes, trailer = (Section(True, *ends) for ends in pairwise(places))
            yield CodeSections(((name, codes),), tuple(one for one in (header, trailer) if one.start < one.stop))


def cut_regions(name: str, element: Element, shape: tuple[int, int]) -> Iterator[CodeSections]:
    """Yields the ways to cut a tensor into plain codes and a smaller region of other data before or after them."""
    total = len(element.stored.data)
    for bits in range(8, 1, -1):
        size = shape[0] * shape[1] * bits // 8
        if size < total < 1.25 * size and (total - size) % element.stored.width == 0:
            for start, last in product((0, total - size), (0, *dict.fromkeys(shape))):
                if not last or size % (element.stored.width * last) == 0:
                    yield CodeSections(((name, Section(False, start, start + size)),), last=last)


def cut_planes(name: str, element: Element, shape: tuple[int, int], bits: int) -> Iterator[CodeSections]:
    """Yields the ways to cut a tensor that holds only codes into regions, or parts of rows, with some bits of every code."""
    n, k = shape
    total = len(element.stored.data)
    if bits < 2 or 8 * total != n * k * bits or total % (bits * n):
        return
    for widths in ([1] * bits, *([low, bits - low] for low in range(1, bits) if bits > 2)):
        for by_rows in (False, True):
            size = total // bits // (n if by_rows else 1)
            ends = [size * sum(widths[:count]) for count in range(len(widths) + 1)]
            if not any(end % element.stored.width for end in ends):
                yield CodeSections(tuple((name, Section(by_rows, *pair)) for pair in pairwise(ends)))


def join_tensors(packed: str, elements: Mapping[str, Element], shape: tuple[int, int]) -> Iterator[CodeSections]:
    """Yields the packed tensor joined with all other integer tensors that hold whole bits of every code."""
    n, k = shape
    names = [name for name, element in elements.items() if element.kind in PLAIN and element.kind[0] != "f"
             and 8 * len(element.stored.data) % (n * k) == 0]
    if packed in names and len(names) > 1:
        yield CodeSections(tuple((name, None) for name in names))
