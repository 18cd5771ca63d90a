"""Prints sections of stored tensors in the torch reference: split before reading, joined after writing."""

from __future__ import annotations

from collections.abc import Sequence

from qdsl.compiler.emit.tensors import strip_parens
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Index
from qdsl.compiler.ir.program import Program, Tensor


def cut_lines(program: Program) -> list[str]:
    """Statements that set every section, in its own axes."""
    return [f"{tensor.name} = {_section_text(tensor, place, len(sections))}"
            for sections in program.stored.values() for place, tensor in enumerate(sections) if tensor.section is not None]


def _section_text(tensor: Tensor, place: int, count: int) -> str:
    section = tensor.section
    assert section is not None
    if section.is_plane:
        return f"{section.holder}[{':, ' if section.by_rows else ''}{place}]"
    extents = _extents(tensor)
    start = "" if section.first == Index(0) else ix.text(section.first)
    stop = "" if place == count - 1 else ix.text(section.first + ix.product_of(extents))
    text = f"{section.holder}[..., {start}:{stop}]"
    if len(extents) == 1:
        return text
    return f"{text}.unflatten(-1, ({', '.join(map(ix.text, extents))}))" if extents else f"{text}.squeeze(-1)"


def join_sections(sections: Sequence[Tensor], texts: Sequence[str]) -> str:
    """The stored tensor from the texts of its sections; a tensor without sections unchanged."""
    section = sections[0].section
    if section is None:
        return texts[0]
    if section.is_plane:
        return f"torch.stack([{', '.join(map(strip_parens, texts))}], {int(section.by_rows)})"
    shown = [_flatten_text(tensor, text) for tensor, text in zip(sections, texts, strict=True)]
    return strip_parens(shown[0]) if len(shown) == 1 else f"torch.cat([{', '.join(map(strip_parens, shown))}], -1)"


def _flatten_text(tensor: Tensor, text: str) -> str:
    """A section with its elements along one axis, after that of the rows."""
    axes = len(_extents(tensor))
    if axes == 1:
        return text
    text = text if text.isidentifier() or (text.endswith((")", "]")) and not text.startswith("(")) else f"({text})"
    first = len(tensor.axes) - axes
    return f"{text}.unsqueeze(-1)" if not axes else f"{text}.flatten({first or ''})"


def _extents(tensor: Tensor) -> list[Index]:
    """The extents of a section's axes, without that of rows."""
    assert tensor.section is not None
    return [tensor.axis_extent(axis) for axis in (tensor.axes[1:] if tensor.section.by_rows else tensor.axes)]
