"""Codes of rows of a stored table: vectors of neighbouring columns or rows, or sums of two of them, times a scale of the row."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from qdsl.infer.elements import Element
from qdsl.infer.fit import Blocks
from qdsl.infer.labels import TOLERANCE, Values
from qdsl.infer.numbers import Field
from qdsl.infer.solve import Solution
from qdsl.infer.tiles import Labels, Layout, Tile, match_layout

FLOATS = ("f16", "bf16", "f32")
WIDTHS = range(2, 17)                                            # of vectors
MOST_BITS = 16                                                   # of the codes of a vector
TRIED = 1 << 11                                                  # vectors that refuse most tables
CHUNK = 1 << 16                                                  # vectors that are looked up at a time
NEIGHBOURS = range(-3, 3)                                        # that may be as near on a line as the row itself
Places = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Codebook:
    """A stored table: `count` tables of 2**bits rows, of which a vector is the sum of one each."""

    name: str
    kind: str
    table: Values
    axes: tuple[int, ...]
    bits: int

    @property
    def count(self) -> int:
        """How many tables there are."""
        return len(self.table)

    @property
    def rows(self) -> Values:
        """All vectors, those of the last table's rows one after the other."""
        rows = self.table[0] if self.count == 1 else self.table[0][:, None] + self.table[1]
        return np.asarray(rows.reshape(-1, self.table.shape[2]))


def stored_vectors(packed: str, elements: Mapping[str, Element], values: Values) -> Solution | None:
    """The fields and the formula of the first table of rows that all values come from, or None."""
    shape = (values.shape[0], values.shape[1])
    others = {name: element for name, element in elements.items() if name != packed}
    for book in _candidate_codebooks(others):
        width = book.table.shape[2]
        for scale, factor in _row_scales(others, book.name, shape):
            scaled = values if factor is None else values / factor
            for blocks, vectors in _as_vectors(scaled, width):
                codes = nearest_rows(vectors, book.rows)
                if codes is None:
                    continue
                labels = Labels(codes.astype(np.uint16).view(np.int16), book.bits * book.count)
                layout = match_layout([(elements[packed].stored, labels)])
                if layout is not None:
                    return _codebook_solution(packed, book, scale, blocks, layout)
    return None


def _candidate_codebooks(tensors: Mapping[str, Element]) -> Iterator[Codebook]:
    """Tensors that may be tables of rows."""
    for name, element in tensors.items():
        axes = tuple(extent for extent in element.stored.shape if extent != 1)
        if element.kind not in FLOATS or not 2 <= len(axes) <= 3 or axes[-1] not in WIDTHS:
            continue
        count, entries = (axes[0], axes[1]) if len(axes) == 3 else (1, axes[0])
        bits = entries.bit_length() - 1
        if entries == 1 << bits and count <= 2 and 0 < bits * count <= MOST_BITS:
            table = element.numbers(element.kind).astype(np.float32).reshape(count, entries, -1)
            yield Codebook(name, element.kind, table, axes, bits)


def _row_scales(tensors: Mapping[str, Element], book: str, shape: tuple[int, int],
                ) -> Iterator[tuple[Field | None, Values | None]]:
    """No scale, and tensors with a number for every row."""
    yield None, None
    for name, element in tensors.items():
        bits = 8 * element.stored.width
        if name != book and element.kind in FLOATS and 8 * len(element.stored.data) == shape[0] * bits:
            numbers = element.numbers(element.kind).astype(np.float32)
            if numbers.all():
                layout = Layout(Tile(1, 1), bits, np.arange(bits))
                yield Field("scale", element.kind, Blocks(1, shape[1]), name, layout), numbers[:, None]


def _as_vectors(values: Values, width: int) -> Iterator[tuple[Blocks, Values]]:
    """Neighbouring columns, and neighbouring rows, as vectors [rows, columns, width]."""
    n, k = values.shape
    if k % width == 0:
        yield Blocks(1, width), values.reshape(n, -1, width)
    if n % width == 0:
        yield Blocks(width, 1), values.reshape(-1, width, k).transpose(0, 2, 1)


def nearest_rows(vectors: Values, rows: Values) -> Places | None:
    """The row of every vector [rows, columns, width]; None where one is far from all.  Places on a line tell near ones."""
    line = np.random.default_rng(0).standard_normal(rows.shape[1])
    on_line = rows.astype(np.float64) @ line
    order = on_line.argsort(kind="stable")
    flat = vectors.reshape(-1, rows.shape[1])
    slack = TOLERANCE * float(np.abs(rows).max())

    def codes(some: Values) -> Places | None:
        near = np.searchsorted(on_line[order], some.astype(np.float64) @ line)
        options = order[np.clip(near + np.array(NEIGHBOURS)[:, None], 0, len(order) - 1)]
        errors = np.stack([np.abs(rows[option] - some).max(1) for option in options])
        best = errors.argmin(0)[None]
        return None if (np.take_along_axis(errors, best, 0) > slack).any() else np.take_along_axis(options, best, 0)[0]

    if codes(flat[::max(1, len(flat) // TRIED)]) is None:
        return None
    parts = [codes(flat[start:start + CHUNK]) for start in range(0, len(flat), CHUNK)]
    complete = [part for part in parts if part is not None]
    return np.concatenate(complete).reshape(vectors.shape[:2]) if len(complete) == len(parts) else None


def _codebook_solution(packed: str, book: Codebook, scale: Field | None, blocks: Blocks, layout: Layout) -> Solution:
    """Codes of each table, the tables, and the sum of their rows."""
    names = ["q"] if book.count == 1 else ["a", "b"]
    fields = []
    for name, start in zip(names[::-1], range(0, layout.bits, book.bits), strict=True):
        weight, bit = np.divmod(layout.source, layout.bits)
        inside = (layout.source >= 0) & (bit >= start) & (bit < start + book.bits)
        piece = Layout(layout.tile, book.bits, np.where(inside, weight * book.bits + bit - start, -1))
        fields.append(Field(name, f"u{book.bits}", blocks, packed, piece))
    place = f"k % {blocks.columns}" if blocks.rows == 1 else f"n % {blocks.rows}"
    terms = [f"book[{f'{i}, ' if book.count > 1 else ''}{name}, {place}]" for i, name in enumerate(names)]
    total = terms[0] if book.count == 1 else f"({' + '.join(terms)})"
    bits = 32 if book.kind == "f32" else 16
    whole = Layout(Tile(1, book.table.size), bits, np.arange(bits * book.table.size))
    table = Field("book", book.kind, Blocks(1 << 30, 1 << 30), book.name, whole, entries=book.axes)
    return Solution((*fields[::-1], table, *([scale] if scale else [])), f"{total} * scale" if scale else total)
