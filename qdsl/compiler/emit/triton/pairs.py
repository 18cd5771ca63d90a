"""Prints the function that makes weights from a stream in registers: two adjacent weights at a time, in the halves of a word.

It exists if a weight is one stored 16-bit field: eight bits in the stream, and the other bits of eight columns in two words, with
adjacent weights 16 bits apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from qdsl.compiler.emit.templates import render
from qdsl.compiler.ir.program import Placement, Program, Tensor
from qdsl.core.codecs import CODECS
from qdsl.core.layout import FieldSlice

COLUMNS, WORD, HALF = 8, 32, 16


@dataclass(frozen=True, slots=True)
class PairedDecode:
    """type: of the weights.  stream, uncoded: the tensors.  at: the bit of the field at which symbols begin."""

    type: str
    stream: str
    at: int
    uncoded: str
    lines: tuple[str, ...]


def paired_decode(program: Program) -> PairedDecode | None:
    """The description of such a function; None if it cannot exist."""
    if len(program.values) != 1 or len(program.tensors) != 2 or program.field(program.values[0].name).kind not in ("bf16", "f16"):
        return None
    coded = [tensor for tensor in program.tensors if tensor.stream is not None and not CODECS[tensor.stream.coding].flat]
    others = [tensor for tensor in program.tensors if tensor.stream is None]
    if len(coded) != 1 or len(others) != 1:
        return None
    symbols, uncoded = coded[0], others[0]
    parts = [part for placement in symbols.placements for part in placement.slices]
    if len(parts) != 1 or parts[0].width != symbols.element.bits or not _holds_eight_columns(uncoded):
        return None
    placement = uncoded.placements[0]
    words = [_pair_text(placement, uncoded.name, 2 * j) for j in range(COLUMNS // 2)]
    if None in words:
        return None
    lines = render("pairs", storage=program.storage, field=program.values[0].name, stream=symbols.name, uncoded=uncoded.name,
                   at=parts[0].lo, words=words)
    return PairedDecode(program.field(program.values[0].name).kind, symbols.name, parts[0].lo, uncoded.name, tuple(lines))


def _holds_eight_columns(tensor: Tensor) -> bool:
    """Whether a record of two words holds bits of eight columns of a row, and rows are consecutive."""
    if len(tensor.placements) != 1 or tensor.record_bits != 2 * WORD or len(tensor.axes) != 2 or tensor.stored is not None:
        return False
    placement = tensor.placements[0]
    return placement.plain and placement.extents == (1, COLUMNS) and placement.ranges == 1 and \
        [axis.digits for axis in tensor.axes] == [(placement.tiles[0][0],), (placement.tiles[1][0], "")]


def _pair_text(placement: Placement, name: str, column: int) -> str | None:
    """The bits of two adjacent weights, moved to their place in the field; None if they are not 16 bits apart."""
    terms: list[str] = []
    for part in placement.slices:
        first, second = (part.offset + part.dims[1](k) for k in (column, column + 1))
        if part.places or second - first != HALF or first // WORD != second // WORD or first % WORD + part.width > HALF:
            return None
        terms.append(_moved(f"{name}{first // WORD}", first % WORD, part))
    return " | ".join(terms)


def _moved(word: str, at: int, part: FieldSlice) -> str:
    """A slice of both halves, moved from bit `at` to its place in the field."""
    shift = f"({word} >> {at - part.lo})" if at > part.lo else f"({word} << {part.lo - at})" if at < part.lo else word
    return f"({shift} & {((1 << part.width) - 1 << part.lo) * 0x00010001:#010x})"


