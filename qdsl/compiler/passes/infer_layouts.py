"""Strided bit layouts from records: the normal form that every later step reads.

Does: gathers the pieces of each field into slices.  Does not: make choices; the record determines the layout.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from qdsl.compiler.ir.program import Placement, Program, Tensor
from qdsl.compiler.spec.source import Problems
from qdsl.core.layout import BYTE, FieldSlice, RecordLine, RecordPiece, merge_pieces, record_pieces, split_at_words


def infer_layouts(program: Program, problems: Problems) -> Program:
    """The program with slices, the strided layouts of every field's bits.

    Digits of a field's coordinates, their steps in bits, and the first bit, here of d and of q:

    >>> shown(record="d; l<16: q[l] q[l + 16]")
    bits 0..15 at (1):(0)@0
    bits 0..3 at (16,2):(8,4)@16
    >>> shown(record="d; l<32: q[l]")
    bits 0..15 at (1):(0)@0
    bits 0..3 at (32):(4)@16
    """
    return replace(program, tensors=tuple(_infer_placements(tensor, problems) for tensor in program.tensors))


def _infer_placements(tensor: Tensor, problems: Problems) -> Tensor:
    pieces = list(record_pieces(tensor.lines))
    if (bit := next((piece.at for piece in pieces if piece.place is not None and piece.at % BYTE), None)) is not None:
        problems.add(tensor.record_span, f"a byte of digits in '{tensor.name}' begins at bit {bit} of the record, which is no "
                                         "whole byte")
        return tensor
    placements: list[Placement] = []
    for placement in tensor.placements:
        slices, copies = _slices(tensor.lines, placement.field), _copied_slices(tensor.lines, placement.field)
        if copies is None:
            problems.add(tensor.record_span, f"the record of '{tensor.name}' holds bits of some elements of '{placement.field}' "
                                             "again, and not of others", "copies of all elements that a record has are strided")
            return tensor
        if slices is None:
            problems.add(tensor.record_span, f"the bits of '{placement.field}' in '{tensor.name}' are not strided",
                         "each bit of a field lies at offset + sum of digit * stride for digits of its subscripts, of all "
                         "elements or of those that the same lines store")
            return tensor
        shared = Counter(at for part in slices for at in part.bytes)
        if shared and max(shared.values()) > 1:
            problems.add(tensor.record_span, f"the digits of a byte in '{tensor.name}' belong to several ranges of "
                                             f"'{placement.field}'", "lines that share bytes store the same elements")
            return tensor
        if tensor.stored is not None and tensor.stored.field is None and any(
                split_at_words(part, tensor.element.bits) is None for part in slices):
            problems.add(tensor.record_span, f"'stored' changes words of '{tensor.name}', and its elements cross words",
                         "give the change of a field instead")
        placements.append(replace(placement, slices=slices, copies=copies))
    return replace(tensor, placements=tuple(placements))


@lru_cache(maxsize=256)                                          # choices of parameters share the records of a storage
def _slices(lines: tuple[RecordLine, ...], field: str) -> tuple[FieldSlice, ...] | None:
    return merge_pieces([piece for piece in record_pieces(lines) if piece.field == field])


@lru_cache(maxsize=256)
def _copied_slices(lines: tuple[RecordLine, ...], field: str) -> tuple[FieldSlice, ...] | None:
    """The slices of second copies, third copies, and so on; None if some are incomplete or not strided."""
    groups: list[list[RecordPiece]] = []
    count: Counter[tuple[tuple[int, ...], int]] = Counter()
    for piece in record_pieces(lines):
        if piece.again == field:
            number = count[piece.index, piece.lo]
            count[piece.index, piece.lo] += 1
            groups += [[]] if number == len(groups) else []
            groups[number].append(replace(piece, field=field))
    elements = {piece.index for piece in record_pieces(lines) if piece.field == field}
    if any(sum(piece.lo == lo for piece in group) < len(elements) for group in groups for lo in {piece.lo for piece in group}):
        return None
    gathered = [merge_pieces(group) for group in groups]
    return tuple(part for parts in gathered for part in parts or ()) if None not in gathered else None
