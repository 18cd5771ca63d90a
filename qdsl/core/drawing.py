"""SVG drawings of figures.  The same input gives the same bytes."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape


def drawing(title: str, width: float, height: float, body: Sequence[str]) -> str:
    """The text of an SVG file: a title, and elements on white."""
    head = [f'<svg xmlns="http://www.w3.org/2000/svg" width="{width:.0f}" height="{height:.0f}" font-family="monospace">',
            f"<title>{escape(title)}</title>", f'<rect width="{width:.0f}" height="{height:.0f}" fill="white"/>',
            text(20, 24, title)]
    return "\n".join([*head, *body, "</svg>"]) + "\n"


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    """An element of text; characters that XML has no place for become question marks."""
    plain = "".join(c if c.isprintable() else "?" for c in words)
    return f'<text x="{x:.0f}" y="{y:.0f}" font-size="11" text-anchor="{anchor}">{escape(plain)}</text>'
