"""Prints values of a spec as Python literals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdsl.compiler.spec.model import Data


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


def data(value: Data) -> str:
    """Detection rules as literals."""
    if isinstance(value, list):
        return f"[{', '.join(map(data, value))}]"
    if not isinstance(value, dict):
        return quoted(value) if isinstance(value, str) else str(value)
    return "{" + ", ".join(f'"{key}": {data(item)}' for key, item in value.items()) + "}"
