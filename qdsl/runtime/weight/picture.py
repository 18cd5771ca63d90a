"""The bit picture of a weight's storage, drawn by the compiler from the spec if both are here."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight


def picture_of(packed: PackedWeight) -> str:
    """The SVG of where every bit lies, or '' without the compiler or without the spec.

    The compiler is imported by name: a weight needs it only for a notebook's output.
    """
    try:
        drawing: str = import_module("qdsl.compiler.emit.show.storage").drawing(
            packed.format.name, packed.format.key.rpartition("@")[2], packed.format.path, packed.storage, packed.params)
    except (ImportError, OSError, ValueError):                   # no jinja2, no file, or another spec of that name by now
        return ""
    return drawing
