"""The bit picture of a record: the field at each bit, as rows for a terminal and as SVG.

Consecutive bytes with the same contents share a row.  The most significant bit is on the left, as in a hex dump.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from html import escape

from qdsl.compiler.ir.program import Program, Tensor
from qdsl.core.layout import BASE, RecordBit, record_bits
from qdsl.core.text import counted

Elements = tuple[tuple[int, ...], ...]
MOST_ROWS, MOST_CELLS = 10, 32                                   # rows of bytes to draw; elements in a line of a grid
LIGHT, DARK = "--paper:#ffffff;--ink:#1f2328", "--paper:#0d1117;--ink:#e6edf3"
STYLE = (f".qdsl-bits{{{LIGHT}}}.qdsl-bits .paper{{fill:var(--paper,#ffffff)}}.qdsl-bits text{{fill:var(--ink,#1f2328)}}"
         f"@media (prefers-color-scheme:dark){{.qdsl-bits{{{DARK}}}}}"
         f"[data-md-color-scheme=default] .qdsl-bits{{{LIGHT}}}[data-md-color-scheme=slate] .qdsl-bits{{{DARK}}}")
WIDTH = 900                                                      # of a picture
COLOURS = ("#4e79a7", "#f28e2b", "#59a14f", "#e15759", "#b07aa1", "#76b7b2", "#edc948", "#9c755f")


@dataclass(frozen=True, slots=True)
class Cell:
    """Adjacent bits of one element in one byte; `field` '' is padding.  many: which subscripts vary in the record.

    first, last: the element in the first and last byte of a row; for a byte of base-3 digits, its range of elements.
    """

    field: str
    first: Elements
    last: Elements
    lo: int
    width: int
    digits: bool = False
    many: tuple[bool, ...] = ()

    def label(self) -> str:
        """`q[0]..q[15]`, without subscripts that are constant in the record."""
        return "..".join(dict.fromkeys(map(self._text, (self.first, self.last)))) if self.field else "pad"

    def short(self) -> str:
        """`12`, for a cell of a grid; without subscripts that are constant in the record."""
        shown = [str(i) for i, varies in zip(self.first[0], self.many, strict=True) if varies]
        return ",".join(shown) if self.field else "-"

    def _text(self, elements: Elements) -> str:
        shown = [[i for i, varies in zip(index, self.many, strict=True) if varies] for index in elements]
        texts = " ".join(f"{self.field}{index or ''}" for index in shown)
        return f"base3({texts})" if self.digits else texts


@dataclass(frozen=True, slots=True)
class Row:
    """Bytes [first, last] of the record that differ only in element numbers, each by `steps` from the previous one."""

    first: int
    last: int
    cells: tuple[Cell, ...]
    steps: tuple[tuple[int, ...], ...] | None = None


def record_rows(tensor: Tensor) -> list[Row]:
    """The record of a tensor, byte by byte, most significant bits first."""
    bits = record_bits({p.field: (*p.slices, *p.copies) for p in tensor.placements}, tensor.record_bits)
    many = {p.field: tuple(extent > 1 for extent in p.extents) for p in tensor.placements}
    joined_rows: list[Row] = []
    for byte in range(tensor.record_bits // 8):
        cells = tuple(replace(cell, many=many.get(cell.field, ())) for cell in _cells(bits[8 * byte:8 * byte + 8]))
        if not joined_rows or (joined := _extended_row(joined_rows[-1], cells)) is None:
            joined_rows.append(Row(byte, byte, cells))
        else:
            joined_rows[-1] = joined
    return joined_rows


def _extended_row(row: Row, cells: tuple[Cell, ...]) -> Row | None:
    """The row extended by one byte, if that continues it."""
    if _shape(row.cells) != _shape(cells) or row.steps not in (None, steps := _element_steps(row.cells, cells)):
        return None
    merged = tuple(replace(a, last=b.last) for a, b in zip(row.cells, cells, strict=True))
    return Row(row.first, row.last + 1, merged, steps)


def _element_steps(before: Sequence[Cell], after: Sequence[Cell]) -> tuple[tuple[int, ...], ...]:
    """The steps from the elements of one byte to those of the next; elements of several bytes do not count."""
    return tuple(() if a.width == 8 and not a.digits else
                 tuple(j - i for old, new in zip(a.last, b.first, strict=True) for i, j in zip(old, new, strict=True))
                 for a, b in zip(before, after, strict=True))


def _shape(cells: Sequence[Cell]) -> list[tuple[str, int, int, int]]:
    """A key that is equal for bytes that may share a row; the bytes of a wide element count as alike."""
    return [(cell.field, -1 if cell.width == 8 and not cell.digits else cell.lo, cell.width, len(cell.first)) for cell in cells]


def _cells(bits: Sequence[RecordBit | None]) -> Iterator[Cell]:
    """Runs of a byte's bits that are adjacent in one element, from bit 7 down; or the byte of digits."""
    end = 8
    while end:
        start = end - 1
        while start and _continues(bits[start - 1], bits[start]):
            start -= 1
        bit = bits[start]
        if bit is None:
            yield Cell("", ((),), ((),), 0, end - start)
        else:
            yield Cell(bit.field, bit.elements, bit.elements, bit.bit, end - start, bit.digits)
        end = start


def _continues(low: RecordBit | None, high: RecordBit | None) -> bool:
    return low is high if low is None or high is None else replace(low, bit=low.bit + 1) == high


def record_summary(tensor: Tensor) -> str:
    """The contents of one record: `18 bytes hold 1 d, 32 q`."""
    counts = []
    for placement in tensor.placements:
        count = 1
        for extent in placement.extents:
            count *= extent
        counts.append(f"{count} {placement.field}")
    nbytes = tensor.record_bits // 8
    return f"{counted(nbytes, 'byte')} hold{'s' if nbytes == 1 else ''} {', '.join(counts)}"


def terminal_picture(program: Program) -> list[str]:
    """The records of a storage as plain text."""
    lines: list[str] = []
    for tensor in program.tensors:
        lines.append(f"{tensor.name}: {record_summary(tensor)}")
        for row in record_rows(tensor):
            span = f"{row.first}" if row.first == row.last else f"{row.first}..{row.last}"
            cells = [f"{cell.label()} ({_bits_text(program, cell)})" for cell in row.cells]
            lines.append(f"  byte {span:>9}  | {' | '.join(cells)} |")
    return lines


def _bits_text(program: Program, cell: Cell) -> str:
    """The part of its element that a cell holds: `4 bits`, or `bits 4..5`."""
    if cell.digits:
        return f"{len(cell.first)} digits of base {BASE}"
    whole = program.field(cell.field).bits if cell.field else cell.width
    if cell.width == 8 or cell.width == whole:
        return f"{max(whole, cell.width)} bit{'s' if whole > 1 else ''}"
    return f"bits {cell.lo}..{cell.lo + cell.width - 1}" if cell.width > 1 else f"bit {cell.lo}"


def svg_picture(programs: Sequence[Program]) -> str:
    """The records of storages as one drawing, a screen per storage; the same input gives the same bytes.

    programs: the first one of each storage is drawn; its parameters are the defaults.  Colours follow a light or dark theme.
    """
    spec = programs[0].spec
    colours = {field.name: COLOURS[i % len(COLOURS)] for i, field in enumerate(programs[0].fields)}
    first = {program.storage: program for program in reversed(programs)}
    body: list[str] = []
    y = 64
    for program in programs:
        if first[program.storage] is not program:
            continue
        for tensor in program.tensors:
            body.append(_text(20, y, f"{program.storage}.{tensor.name}: {record_summary(tensor)}", 14, bold=True))
            y = _draw_record(program, tensor, colours, body, y + 10) + 30
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" class="qdsl-bits" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
            'font-family="monospace">', f"<title>{escape(spec.name.value)}</title>", f"<style>{STYLE}</style>",
            f'<rect class="paper" width="{WIDTH}" height="{y}"/>',
            _heading(24, f"{spec.name}: {spec.title}", 16, bold=True), _heading(44, f"w = {spec.decode_text}", 14)]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def _draw_record(program: Program, tensor: Tensor, colours: dict[str, str], body: list[str], y: int) -> int:
    """Draw a record from y on, as rows of bytes with repeated ones folded, or as a grid of its elements; returns the end."""
    every = record_rows(tensor)
    folds = list(_repeated_rows(every))
    is_of_words = tensor.element.bits > 8 and len(every) > MOST_ROWS      # codes in the order of a warp's lanes
    if is_of_words or sum(len(fold.rows) for fold in folds) > MOST_ROWS:
        return _draw_grid(tensor, colours, body, y)
    body += [_text(96, y + 10, "byte, bit", 10, "end")]
    body += [_text(152 + 96 * place, y + 10, f"{7 - place}", 10, "middle") for place in range(8)]
    y += 14
    for fold in folds:
        for row in fold.rows:
            body += _draw_row(program, row, colours, y)
            y += 26
        if fold.times > 1:
            body.append(_text(104, y + 12, f"{fold.times - 1} more times up to byte {fold.last}, {fold.change}", 11))
            y += 20
    return y


@dataclass(frozen=True, slots=True)
class _RepeatedRows:
    """Rows that repeat `times` times up to byte `last`, with other elements each time."""

    rows: tuple[Row, ...]
    times: int
    last: int
    change: str


def _repeated_rows(every: Sequence[Row]) -> Iterator[_RepeatedRows]:
    """Rows in order, with the shortest repeating period written once."""
    at = 0
    while at < len(every):
        period, times = max(((period, _count_repeats(every, at, period)) for period in range(1, MOST_ROWS + 1)),
                            key=lambda fold: (fold[0] * (fold[1] - 1), -fold[0]))
        if times < 2:
            period = 1
        part = every[at:at + period]
        change = ", ".join(dict.fromkeys(f"{a.field} {_text_of(_advance(a, b))}" for row, after in zip(
            part, every[at + period:at + 2 * period], strict=False) for a, b in zip(row.cells, after.cells, strict=True)
            if a.field)) if times > 1 else ""
        yield _RepeatedRows(tuple(part), times, every[at + period * times - 1].last, change)
        at += period * times


def _count_repeats(every: Sequence[Row], at: int, period: int) -> int:
    """How often the rows from `at` on repeat with a period and equal steps of their elements."""
    times = 1
    steps: list[tuple[int, ...]] | None = None
    while len(part := every[at + times * period:at + (times + 1) * period]) == period:
        before = every[at + (times - 1) * period:at + times * period]
        if any(_shape(a.cells) != _shape(b.cells) or a.last - a.first != b.last - b.first
               for a, b in zip(before, part, strict=True)):
            break
        moved = [_advance(a, b) for row, after in zip(before, part, strict=True)
                 for a, b in zip(row.cells, after.cells, strict=True)]
        if steps is not None and moved != steps:
            break
        steps = moved
        times += 1
    return times


def _advance(before: Cell, after: Cell) -> tuple[int, ...]:
    """The steps from the first element of one cell to that of another."""
    return tuple(b - a for a, b in zip(before.first[0], after.first[0], strict=True))


def _text_of(steps: tuple[int, ...]) -> str:
    """`+8`, for subscripts that change."""
    return " ".join(f"{step:+}" for step in steps if step) or "the same"


def _draw_grid(tensor: Tensor, colours: dict[str, str], body: list[str], y: int) -> int:
    """Draw a record as a grid of its elements, low bits first; later elements are darker; returns the end."""
    cells = list(_elements(tensor))
    per_word = max(1, len(cells) * 32 // tensor.record_bits)
    per_line = per_word * max(1, MOST_CELLS // per_word)
    most = max(max(cell.first[0], default=0) for cell in cells) or 1
    body.append(_text(104, y + 12, f"elements by subscript, low bits first, {per_word} in 32 bits", 11))
    y += 18
    width = min(760 // per_line, 48)
    size = 9 if 6 * max(len(cell.short()) for cell in cells) <= width else 7
    for begin in range(0, len(cells), per_line):
        body.append(_text(96, y + 13, f"{begin * tensor.record_bits // len(cells) // 8}", 11, "end"))
        for place, cell in enumerate(cells[begin:begin + per_line]):
            shade = 0.15 + 0.6 * max(cell.first[0], default=0) / most
            x = 104 + place * width + 4 * (place // per_word)
            body.append(_box(x, y, width, 18, colours.get(cell.field, "#999999"), f"{shade:.2f}"))
            body.append(_text(x + width // 2, y + 13, cell.short(), size, "middle"))
        y += 20
    return y


def _elements(tensor: Tensor) -> Iterator[Cell]:
    """Runs of a record's bits that are adjacent in one element, low bits first."""
    bits = record_bits({p.field: (*p.slices, *p.copies) for p in tensor.placements}, tensor.record_bits)
    many = {p.field: tuple(extent > 1 for extent in p.extents) for p in tensor.placements}
    start = 0
    while start < len(bits):
        end = start + 1
        while end < len(bits) and _continues(bits[end - 1], bits[end]):
            end += 1
        part = bits[start]
        yield Cell("", ((),), ((),), 0, end - start) if part is None else Cell(
            part.field, part.elements, part.elements, part.bit, end - start, part.digits, many[part.field])
        start = end


def _draw_row(program: Program, row: Row, colours: dict[str, str], y: int) -> list[str]:
    span = f"{row.first}" if row.first == row.last else f"{row.first}..{row.last}"
    drawn = [_text(96, y + 16, span, 12, anchor="end")]
    x = 104
    for cell in row.cells:
        width = 96 * cell.width
        drawn.append(_box(x, y, width, 24, colours.get(cell.field, "#999999"), "0.35"))
        label = cell.label() if width > 200 or len(cell.label()) * 7 < width else cell.field
        note = f" {_bits_text(program, cell)}" if width > 200 else ""
        drawn.append(_text(x + width // 2, y + 16, label + note, 11, "middle"))
        x += width
    return drawn


def _box(x: int, y: int, width: int, height: int, fill: str, opacity: str) -> str:
    return f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}" fill-opacity="{opacity}" stroke="{fill}"/>'


def _heading(y: int, text: str, size: int, bold: bool = False) -> str:
    """A line of text, in smaller letters if it would be wider than the picture; a letter is 0.61 of its size wide."""
    return _text(20, y, text, min(size, int((WIDTH - 40) / 0.61 / max(1, len(text)))), bold=bold)


def _text(x: int, y: int, text: str, size: int, anchor: str = "start", bold: bool = False) -> str:
    weight = ' font-weight="bold"' if bold else ""
    return f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}"{weight}>{escape(text)}</text>'
