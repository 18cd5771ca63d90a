"""From records to strided bit layouts, the normal form that every later step reads.

Does: gathers the pieces of each field into slices.  Does not: choose anything; the layout is what the record says.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache

from qdsl.compiler.ir.program import Placement, Program, Tensor
from qdsl.compiler.spec.source import Problems
from qdsl.core.layout import BYTE, Line, Slice, gather, split, walk


def infer_layouts(program: Program, problems: Problems) -> Program:
    """The program with slices, the strided layouts of every field's bits."""
    return replace(program, tensors=tuple(_infer(tensor, problems) for tensor in program.tensors))


def _infer(tensor: Tensor, problems: Problems) -> Tensor:
    pieces = list(walk(tensor.lines))
    if (bit := next((piece.at for piece in pieces if piece.place is not None and piece.at % BYTE), None)) is not None:
        problems.add(tensor.record_span, f"a byte of digits in '{tensor.name}' begins at bit {bit} of the record, which is no "
                                         "whole byte")
        return tensor
    placements: list[Placement] = []
    for placement in tensor.placements:
        slices, copies = _slices(tensor.lines, placement.field)
        if slices is None or copies is None:
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
                split(part, tensor.element.bits) is None for part in slices):
            problems.add(tensor.record_span, f"'stored' changes words of '{tensor.name}', and its elements cross words",
                         "give the change of a field instead")
        placements.append(replace(placement, slices=slices, copies=copies))
    return replace(tensor, placements=tuple(placements))


@lru_cache(maxsize=256)                                          # choices of parameters share the records of a storage
def _slices(lines: tuple[Line, ...], field: str) -> tuple[tuple[Slice, ...] | None, tuple[Slice, ...] | None]:
    """The bits of a field, and their copies; None where they are not strided."""
    copies = [replace(piece, field=field) for piece in walk(lines) if piece.again == field]
    return gather([piece for piece in walk(lines) if piece.field == field]), gather(copies) if copies else ()
