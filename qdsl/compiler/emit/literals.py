"""Values of a spec as Python's literals."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from qdsl.compiler.spec.model import Data


def literal(value: str | int | float) -> str:
    if value in ("true", "false"):
        return str(value == "true")
    return quoted(value) if isinstance(value, str) else repr(value)


def quoted(word: str) -> str:
    return f'"{word}"'


def tupled(values: Sequence[int | str]) -> str:
    shown = ", ".join(quoted(value) if isinstance(value, str) else str(value) for value in values)
    return f"({shown},)" if len(values) == 1 else f"({shown})"


def bare_tuple(texts: Iterable[str]) -> str:
    """Expressions as a tuple is returned or unpacked, without brackets."""
    items = list(texts)
    return ", ".join(items) + ("," if len(items) == 1 else "")


def data(value: Data) -> str:
    """Detection rules as literals."""
    if isinstance(value, list):
        return f"[{', '.join(map(data, value))}]"
    if not isinstance(value, dict):
        return quoted(value) if isinstance(value, str) else str(value)
    return "{" + ", ".join(f'"{key}": {data(item)}' for key, item in value.items()) + "}"
