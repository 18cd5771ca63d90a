"""The bit picture of a weight's storage, drawn by the compiler from the spec if both are here."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module


def picture_of(format: str, key: str, path: str, storage: str, params: Mapping[str, int | str]) -> str:
    """The SVG of where every bit of a storage lies, or '' without the compiler or without the format's spec.

    The compiler is imported by name: a weight needs it only for a notebook's output.
    """
    try:
        drawing: str = import_module("qdsl.compiler.emit.show.storage").drawing(
            format, key.rpartition("@")[2], path, storage, params)
    except (ImportError, OSError, ValueError):                   # no jinja2, no file, or another spec of that name by now
        return ""
    return drawing
