"""The bit picture of a record: which field lies at each bit, as rows for a terminal and as SVG.

Bytes with the same contents one after the other share a row.  The most significant bit is on the left, as in a hex dump.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from qdsl.compiler.ir.program import Program, Tensor
from qdsl.core.layout import BASE, Held, spread

Elements = tuple[tuple[int, ...], ...]
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")


@dataclass(frozen=True, slots=True)
class Cell:
    """Neighbouring bits of one element in one byte; `field` '' is padding.  `many`: which subscripts vary in the record.

    first, last: the element in the first and last byte of a row; of a byte of base-3 digits, all of them.
    """

    field: str
    first: Elements
    last: Elements
    lo: int
    width: int
    digits: bool = False
    many: tuple[bool, ...] = ()

    def label(self) -> str:
        """`q[0]..q[15]`, without subscripts that are the same all over the record."""
        if not self.field:
            return "pad"
        return "..".join(dict.fromkeys(self._text(elements) for elements in (self.first, self.last)))

    def _text(self, elements: Elements) -> str:
        shown = [[i for i, varies in zip(index, self.many, strict=True) if varies] for index in elements]
        texts = " ".join(f"{self.field}{index or ''}" for index in shown)
        return f"base3({texts})" if self.digits else texts


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes [first, last] of the record that differ in their elements' numbers alone, each by `steps` from the one before."""

    first: int
    last: int
    cells: tuple[Cell, ...]
    steps: tuple[tuple[int, ...], ...] | None = None


def rows(tensor: Tensor) -> list[Row]:
    """The record of a tensor, byte by byte, most significant bits first."""
    bits = spread({p.field: p.slices for p in tensor.placements}, tensor.record_bits)
    many = {p.field: tuple(extent > 1 for extent in p.extents) for p in tensor.placements}
    found: list[Row] = []
    for byte in range(tensor.record_bits // 8):
        cells = tuple(replace(cell, many=many.get(cell.field, ())) for cell in _cells(bits[8 * byte:8 * byte + 8]))
        if not found or (joined := _joined(found[-1], cells)) is None:
            found.append(Row(byte, byte, cells))
        else:
            found[-1] = joined
    return found


def _joined(row: Row, cells: tuple[Cell, ...]) -> Row | None:
    """The row with one more byte, where that continues it."""
    if _shape(row.cells) != _shape(cells) or row.steps not in (None, steps := _steps(row.cells, cells)):
        return None
    merged = tuple(replace(a, last=b.last) for a, b in zip(row.cells, cells, strict=True))
    return Row(row.first, row.last + 1, merged, steps)


def _steps(before: Sequence[Cell], after: Sequence[Cell]) -> tuple[tuple[int, ...], ...]:
    """How far the elements of a byte are from those of the one before; those of several bytes do not count."""
    return tuple(() if a.width == 8 and not a.digits else
                 tuple(j - i for old, new in zip(a.last, b.first, strict=True) for i, j in zip(old, new, strict=True))
                 for a, b in zip(before, after, strict=True))


def _shape(cells: Sequence[Cell]) -> list[tuple[str, int, int, int]]:
    """What two bytes must share to share a row; the bytes of a wide element count as alike."""
    return [(cell.field, -1 if cell.width == 8 and not cell.digits else cell.lo, cell.width, len(cell.first)) for cell in cells]


def _cells(bits: Sequence[Held | None]) -> Iterator[Cell]:
    """Runs of a byte's bits that are neighbours in one element, from bit 7 down; or the byte of digits."""
    end = 8
    while end:
        start = end - 1
        while start and _continues(bits[start - 1], bits[start]):
            start -= 1
        held = bits[start]
        if held is None:
            yield Cell("", ((),), ((),), 0, end - start)
        else:
            yield Cell(held.field, held.elements, held.elements, held.bit, end - start, held.digits)
        end = start


def _continues(low: Held | None, high: Held | None) -> bool:
    if low is None or high is None:
        return low is high
    return replace(low, bit=low.bit + 1) == high


def describe(tensor: Tensor) -> str:
    """What one record holds: `18 bytes hold 1 d, 32 q`."""
    held = []
    for placement in tensor.placements:
        count = 1
        for extent in placement.extents:
            count *= extent
        held.append(f"{count} {placement.field}")
    return f"{tensor.record_bits // 8} bytes hold {', '.join(held)}"


def terminal(program: Program) -> list[str]:
    """The records of a storage as plain text."""
    lines: list[str] = []
    for tensor in program.tensors:
        lines.append(f"{tensor.name}: {describe(tensor)}")
        for row in rows(tensor):
            span = f"{row.first}" if row.first == row.last else f"{row.first}..{row.last}"
            cells = [f"{cell.label()} ({_bits(program, cell)})" for cell in row.cells]
            lines.append(f"  byte {span:>9}  | {' | '.join(cells)} |")
    return lines


def _bits(program: Program, cell: Cell) -> str:
    """How much of its element a cell is: `4 bits`, or `bits 4..5`."""
    if cell.digits:
        return f"{len(cell.first)} digits of base {BASE}"
    whole = program.field(cell.field).bits if cell.field else cell.width
    if cell.width == 8 or cell.width == whole:
        return f"{max(whole, cell.width)} bit{'s' if whole > 1 else ''}"
    return f"bits {cell.lo}..{cell.lo + cell.width - 1}" if cell.width > 1 else f"bit {cell.lo}"


def svg(programs: Sequence[Program]) -> str:
    """The records of all storages as one drawing; the same input gives the same bytes."""
    spec = programs[0].spec
    colours = {field.name: COLOURS[i % len(COLOURS)] for i, field in enumerate(programs[0].fields)}
    body: list[str] = []
    y = 64
    for program in programs:
        for tensor in program.tensors:
            body.append(_text(20, y, f"{program.storage}.{tensor.name}: {describe(tensor)}", 14, bold=True))
            y += 12
            for row in rows(tensor):
                body += _draw_row(program, row, colours, y)
                y += 26
            y += 28
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="900" height="{y}" font-family="monospace">',
            f"<title>{escape(spec.name.value)}</title>", f'<rect width="900" height="{y}" fill="white"/>',
            _text(20, 24, f"{spec.name}: {spec.title}", 16, bold=True), _text(20, 44, f"w = {spec.decode_text}", 14)]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _draw_row(program: Program, row: Row, colours: dict[str, str], y: int) -> list[str]:
    span = f"{row.first}" if row.first == row.last else f"{row.first}..{row.last}"
    drawn = [_text(96, y + 16, span, 12, anchor="end")]
    x = 104
    for cell in row.cells:
        width = 96 * cell.width
        fill = colours.get(cell.field, "#dddddd")
        drawn.append(f'<rect x="{x}" y="{y}" width="{width}" height="24" fill="{fill}" fill-opacity="0.35" stroke="{fill}"/>')
        label = cell.label() if width > 200 or len(cell.label()) * 7 < width else cell.field
        note = f" {_bits(program, cell)}" if width > 200 else ""
        drawn.append(_text(x + width // 2, y + 16, label + note, 11, "middle"))
        x += width
    return drawn


def _text(x: int, y: int, text: str, size: int, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
