"""Lines of Python: nested blocks, and long calls broken at 120 columns."""

from __future__ import annotations

from collections.abc import Iterable

WIDTH = 120


def indent(lines: Iterable[str], levels: int = 1) -> list[str]:
    return [" " * 4 * levels + line if line else line for line in lines]


def wrapped(head: str, items: Iterable[str], tail: str, level: int = 0) -> list[str]:
    """`head` + comma-separated items + `tail`, on as few lines as the width allows."""
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


def named(lines: list[str], name: str, text: str, reserved: Iterable[str] = ()) -> str:
    """A variable that holds `text`: an earlier one if there is one, else a new one called `name`, numbered if taken."""
    if text.isidentifier():
        return text
    for line in lines:
        if line.endswith(f" = {text}") and line.split(" = ", 1)[1] == text:
            return line.split(" = ", 1)[0]
    taken = {line.split(" = ", 1)[0] for line in lines} | set(reserved)
    free = next(word for word in (name, *(f"{name}{i}" for i in range(2, 99))) if word not in taken)
    lines.append(f"{free} = {text}")
    return free
