"""Prints lines of Python: nested blocks, and long calls broken at 130 columns."""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain, count

WIDTH = 130
WORD = re.compile(r"(?<![\w\".])[A-Za-z_]\w*(?![\w\"=])")         # no key, attribute or keyword argument
TEXT = re.compile(r'"""[\s\S]*?"""|"[^"\n]*"|#.*')


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    """The lines, indented by four spaces a level."""
    return [" " * 4 * levels + line if line else line for line in lines]


def wrap_items(head: str, items: Iterable[str], tail: str, level: int = 0) -> list[str]:
    """`head` + comma-separated items + `tail`, on as few lines as fit the width."""
    items = list(items)
    one = head + ", ".join(items) + tail
    if len(one) + 4 * level <= WIDTH:
        return [one]
    rows = [head]
    for i, item in enumerate(items):
        part = item + ("," if i < len(items) - 1 else tail)
        if len(rows[-1]) + len(part) + 1 + 4 * level > WIDTH and rows[-1].strip():
            rows.append(" " * (8 if head else 0) + part)
        else:
            rows[-1] += part if not rows[-1] or rows[-1].endswith(("(", "[", "{")) else " " + part
    return rows


def mapping(head: str, entries: list[str]) -> list[str]:
    """`head` and a dict of these entries, which end in commas: on up to three lines, else one entry per line."""
    rows = wrap_items(f"{head}{{", [entry.removesuffix(",") for entry in entries], "}", level=1)
    return rows if len(rows) <= 3 else [f"{head}{{", *indent(entries), "}"]


def names_read(lines: Iterable[str]) -> set[str]:
    """The names that code lines read, outside of strings and comments."""
    return set(WORD.findall(TEXT.sub('""', "\n".join(lines))))


def assign_text(lines: list[str], name: str, text: str, reserved: Iterable[str] = ()) -> str:
    """A variable that holds `text`: an existing one, else a new one called `name`, numbered if the name is taken."""
    if text.isidentifier():
        return text
    for line in lines:
        if line.endswith(f" = {text}") and line.split(" = ", 1)[1] == text:
            return line.split(" = ", 1)[0]
    taken = {line.split(" = ", 1)[0] for line in lines} | set(reserved)
    free = next(word for word in chain([name], (f"{name}{i}" for i in count(2))) if word not in taken)
    lines.append(f"{free} = {text}")
    return free


def fold_line(line: str, open: int = 0) -> list[str]:
    """A long statement over several lines, broken after a comma or before an operator; `open` brackets are open before it.

    A line breaks only inside brackets, at the outermost level possible, preferably before an operator.
    """
    if len(line) <= WIDTH or '"""' in line:
        return [line]
    margin = len(line) - len(line.lstrip(" "))
    depth, quoted, places = open, False, list[tuple[int, bool, int]]()
    for at, letter in enumerate(line[:WIDTH]):
        quoted ^= letter == '"' and line[at - 1] != "\\"
        if quoted:
            continue
        depth += (letter in "([{") - (letter in ")]}")
        if depth and letter == " " and at > margin + 8 and (line[at - 1] == "," or line[at + 1] in "|+-*&<>"):
            places.append((depth, line[at - 1] == ",", -at))
    if not places:
        return [line]
    depth, _, at = min(places)
    return [line[:-at], *fold_line(" " * (margin if open else margin + 4) + line[1 - at:], depth)]
