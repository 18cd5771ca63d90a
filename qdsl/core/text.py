"""Words of messages, and tables of notebooks."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from difflib import get_close_matches
from html import escape

ROWS, LINE = 20, 160                                             # of a table or list that has to fit a screen; letters of a line
SUGGESTED = 6                                                    # the most names in a message
UNITS = ("kB", "MB", "GB", "TB", "PB")


def counted(count: int, noun: str) -> str:
    """A number and what it counts: '1 layer', '2 layers'.  noun: in the singular, with a regular plural of its last word."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def byte_text(count: int) -> str:
    """A number of bytes in four digits at most: '864 bytes', '497.7 kB', '1.235 GB'."""
    size, unit = float(count), "bytes"
    for larger in UNITS:
        if size < 1000:
            break
        size, unit = size / 1000, larger
    return f"{size:.4g} {unit}" if count >= 1000 else counted(count, "byte")


def shortened(lines: Sequence[str]) -> list[str]:
    """The lines, each cut to LINE letters, or the first ones and how many more there are."""
    cut = [line if len(line) <= LINE else f"{line[:LINE - 4]} ..." for line in lines]
    return cut if len(lines) <= ROWS else [*cut[:ROWS - 1], f"  ... and {len(lines) - ROWS + 1} more"]


def html_table(title: str, heads: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A table as notebooks show it, with at most ROWS rows; all text is escaped."""
    cells = ["".join(f"<td>{escape(str(cell))}</td>" for cell in row) for row in rows]
    more = [f'<td colspan="{len(heads)}">and {len(cells) - ROWS} more</td>'] if len(cells) > ROWS else []
    body = "".join(f"<tr>{row}</tr>" for row in [*cells[:ROWS], *more])
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    return (f"<p><b>{escape(title)}</b></p>"
            + (f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>" if cells else ""))


class Displayed:
    """What a prompt prints as its text, cut to a screen, and a notebook as a table."""

    __slots__ = ()

    def table(self) -> tuple[str, Sequence[str], Iterable[Sequence[object]]]:
        """The title, the heads of columns, and the rows."""
        raise NotImplementedError

    def __repr__(self) -> str:
        return "\n".join(shortened(str(self).splitlines()))

    def _repr_html_(self) -> str:
        return html_table(*self.table())


def did_you_mean(word: str, words: Iterable[str]) -> str:
    """The end of a message: the word that is most like another, if one is."""
    near = get_close_matches(word, list(words), n=1)
    return f"; did you mean '{near[0]}'?" if near else ""


def name_key(word: str) -> str:
    """A word as names of formats and storages are written: 'Q6-K' is 'q6_k'."""
    return word.strip().lower().replace("-", "_")


def similar_names(key: str, names: Collection[str]) -> list[str]:
    """The name that has the same letters and digits as a word; or else those that begin with it or contain it, or else those that
    resemble it, best first; none for ''.
    """
    if same := [name for name in names if name.replace("_", "") == key.replace("_", "")]:
        return same
    containing = [name for name in names if key and key in name]
    return sorted(containing, key=lambda name: not name.startswith(key)) or get_close_matches(key, names)


def join_names(names: Sequence[str], word: str = "and") -> str:
    """Names for a message, at most SUGGESTED of them: 'q4_0, q4_1 or q4_k'."""
    more = [f"{len(names) - SUGGESTED} more"] if len(names) > SUGGESTED else []
    *others, last = [*names[:SUGGESTED], *more]
    return f"{', '.join(others)} {word} {last}" if others else last


def nearest_names(name: str, names: Iterable[str], most: int = 3) -> list[str]:
    """The names most like one, best first: a few letters off, or the same last parts behind another beginning."""
    names = list(dict.fromkeys(names))
    leaf = name.rpartition(".")[2]
    alike = [other for other in names if other.endswith(f".{name}") or name.endswith(f".{other}")]
    near = get_close_matches(name, names, n=most, cutoff=0.75)
    same = [other for other in names if leaf in other.split(".")]
    return list(dict.fromkeys([*alike, *near, *same]))[:most]
