"""Prints values of a spec as Python literals."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from qdsl.compiler.emit.lines import WIDTH


def literal(value: str | int | float) -> str:
    """A word or a number as Python text."""
    return str(value == "true") if value in ("true", "false") else quoted(value) if isinstance(value, str) else repr(value)


def quoted(word: str) -> str:
    """A text in double quotes."""
    return f'"{word}"'


def tupled(values: Sequence[int | str]) -> str:
    """Values as the text of a tuple."""
    shown = ", ".join(quoted(value) if isinstance(value, str) else str(value) for value in values)
    return f"({shown},)" if len(values) == 1 else f"({shown})"


def bare_tuple(texts: Iterable[str]) -> str:
    """Expressions as a tuple without brackets, as returned or unpacked."""
    items = list(texts)
    return ", ".join(items) + ("," if len(items) == 1 else "")


def not_empty(**values: object) -> dict[str, Any]:
    """The values that are not empty, by name."""
    return {key: value for key, value in values.items() if value}


def literal_text(value: object) -> str:
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal_text(key)}: {literal_text(item)}" for key, item in value.items()) + "}"
    if isinstance(value, tuple):
        return f"({', '.join(map(literal_text, value))}{',' * (len(value) == 1)})"
    if isinstance(value, list):
        return f"[{', '.join(map(literal_text, value))}]"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else repr(value)


def literal_lines(value: object, room: int = 0, level: int = 0) -> list[str]:
    """Data as lines of a literal, the first without its margin, and with room for a text before it.

    Mappings that do not fit a line are broken: mappings inside of them have lines of their own.
    """
    line = literal_text(value)
    if len(line) + room + 4 * level < WIDTH or not isinstance(value, Mapping):
        return [line]
    if len(value) == 1:
        (inner,) = value.values()
        first, *others = literal_lines(inner, 0, level)
        *before, last = [f"{{{literal_text(*value)}: {first}", *others]
        return [*before, f"{last}}}"]
    lines = ["{"]
    is_open = False                                              # whether the last line may have further items
    for key, item in value.items():
        first, *others = literal_lines(item, len(literal_text(key)) + 2, level + 1)
        is_short = not others and "{" not in first
        text = f"{literal_text(key)}: {first}"
        if is_open and is_short and len(lines[-1]) + len(text) + 2 <= WIDTH:
            lines[-1] += f" {text},"
        else:
            lines += [*(" " * 4 * (level + 1) + text, *others)[:-1], f"{others[-1] if others else ' ' * 4 * (level + 1) + text},"]
        is_open = is_short
    return [*lines, " " * 4 * level + "}"]
