"""Tables of plain text, as wide as their cells or as a terminal."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from itertools import zip_longest

GAP = "  "                                                       # between columns
LEAST_NAME, LEAST_PROSE = 20, 24                                 # letters of a shortened name, and of a folded cell
INDENT = "  "                                                    # of the further lines of a wrapped line


def table_lines(heads: Sequence[str], rows: Sequence[Sequence[str]], right: str = "", width: int | None = None) -> list[str]:
    """The lines of a table.  Columns that `right` marks with > are right-aligned.

    Where `width` is not enough, empty columns go, cells fold at words, and names, which are in the first column, lose their
    middles.
    """
    columns, marks = [list(column) for column in zip(heads, *rows, strict=True)], right.ljust(len(heads))
    if _excess([max(map(len, column)) for column in columns], width) > 0:
        kept = [place for place, column in enumerate(columns) if place == 0 or any(column[1:])]
        columns, marks = [columns[place] for place in kept], "".join(marks[place] for place in kept)
    widths, lines = _fitted_widths(columns, width), []
    for name, *others in zip(*columns, strict=True):
        folded = [[_without_middle(name, widths[0])], *map(_folded, others, widths[1:])]
        lines += [GAP.join(part.rjust(size) if mark == ">" else part.ljust(size)
                           for part, size, mark in zip(parts, widths, marks, strict=True)).rstrip()
                  for parts in zip_longest(*folded, fillvalue="")]
    return lines


def wrapped(line: str, width: int | None) -> list[str]:
    """A line folded at words where it is longer than `width`; its further lines are indented."""
    return [line] if width is None or len(line) <= width else textwrap.wrap(
        line, width, subsequent_indent=INDENT, break_on_hyphens=False, replace_whitespace=False)


def _excess(widths: Sequence[int], width: int | None) -> int:
    """By how much a line is too long."""
    return 0 if width is None else sum(widths) + len(GAP) * (len(widths) - 1) - width


def _fitted_widths(columns: Sequence[Sequence[str]], width: int | None) -> list[int]:
    """The widths of columns, of which the widest give way: prose, then names, then other words, each to what can be read."""
    widths = [max(map(len, column)) for column in columns]
    excess = _excess(widths, width)
    if excess <= 0:
        return widths
    words = [max(len(word) for cell in column for word in [*cell.split(), ""]) for column in columns[1:]]
    name, prose = min(widths[0], LEAST_NAME), [max(word, LEAST_PROSE) for word in words]
    for least in ([widths[0], *prose], [name, *prose], [name, *words], [1] * len(widths)):
        while excess > 0 and (wide := [(size, place) for place, size in enumerate(widths) if size > least[place]]):
            widths[max(wide)[1]] -= 1
            excess -= 1
    return widths


def _folded(cell: str, width: int) -> list[str]:
    return [cell] if len(cell) <= width else textwrap.wrap(cell, width, break_on_hyphens=False, replace_whitespace=False)


def _without_middle(name: str, width: int) -> str:
    """A name that fits `width`, with more of its end: 'model....0.mlp.up_proj'."""
    if len(name) <= width:
        return name
    kept = max(width - 3, 0)
    return f"{name[:kept // 3]}...{name[len(name) - (kept - kept // 3):]}"[:width]
