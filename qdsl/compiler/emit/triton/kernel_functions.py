"""Prints the short functions of a program that complete kernels: templates of whole lines, filled with bodies."""

from __future__ import annotations

from math import prod

from qdsl.compiler.emit.literals import bare_tuple
from qdsl.compiler.emit.templates import render
from qdsl.compiler.emit.triton.body import KernelBody, print_guarded, print_nested
from qdsl.compiler.emit.triton.kernel import PARAMETERS, Decoder, Tile, arguments, shown, taken_names, tile_of
from qdsl.compiler.emit.triton.matrix_unit import matrix_unit_functions
from qdsl.compiler.emit.triton.pairs import paired_decode
from qdsl.compiler.ir.index import Index, substitute
from qdsl.compiler.ir.program import Program


def kernel_functions(program: Program) -> list[str]:
    """The lines of a storage's functions."""
    pairs = paired_decode(program)
    parts = [_decode_lines(program), *filter(None, (matrix_unit_functions(program),)),
             *([pairs.lines] if pairs is not None else [])]
    return [line for i, part in enumerate(parts) for line in (*(["", ""] if i else []), *part)]


def _decode_lines(program: Program) -> list[str]:
    """The function that decodes the weights of a unit, for kernels that decode any format."""
    at = tile_of(program)
    body = KernelBody(levels=[[] for _ in range(len(at.lanes) + 2)],
                      arguments=frozenset({*PARAMETERS, at.rows, at.unit, *taken_names(program), *program.sizes}))
    body.levels[1] += [("", f"{digit} = {text}") for digit, text in at.digits]
    _mask_lines(at, body)
    decoder = Decoder(program, at, body)
    row = substitute(at.n, {at.rows: Index(0)}, at.domain)
    handed = ["state", "k" if at.unit == "k" else shown(at.k), decoder.weight_text(), decoder.load_condition(len(at.lanes) + 1),
              *([shown(row)] if row != Index(0) else [])]
    count = prod(lane.extent for lane in at.lanes)
    last = f"{'state =' if at.lanes else 'return'} use({', '.join(handed)})"
    return render("decode", storage=program.storage, rows=at.rows, unit=at.unit,
                  weights="The weight in column" if count == 1 else f"The {count} weights of unit",
                  tensors=bare_tuple(arguments(program)), sizes=bare_tuple(program.sizes),
                  body=[*print_guarded(body.levels[0]), *print_nested(body, list(at.lanes), [last]),
                        *(["return state"] if at.lanes else [])])


def _mask_lines(at: Tile, body: KernelBody) -> None:
    """Adds `live` for units, and `inside` for single weights if the last unit may be partial.

    Records may have many padding units, without counterparts in other tensors: then a unit is live if its first column is.
    """
    if at.ragged and at.digits:
        first = substitute(at.k, {lane.name: Index(0) for lane in at.lanes}, at.domain)
        body.levels[1].append(("", f"live = live & ({shown(first)} < K)"))
    if at.ragged and at.lanes:
        row = f" & ({shown(at.n)} < N)" if any(lane.axis == "n" for lane in at.lanes) else ""
        body.levels[-1].append(("", f"inside = live{row} & ({shown(at.k)} < K)"))
