"""Every record bit placed once, every field bit stored once, for every N and K.

Does: walks each record and proves that it holds whole elements; proves that every field's tiles fill the field; compares
extents at sample sizes, which is a proof because a variable's extent is a quotient.
Does not: look for strides (infer_layouts).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

from qdsl.compiler.ir.index import Index, ceil, exact, text
from qdsl.compiler.ir.program import Field, Placement, Program, Tensor
from qdsl.compiler.passes.samples import SampleSizes, distinct_samples, sample_sizes, samples_of
from qdsl.compiler.spec.source import Problems, Span, did_you_mean
from qdsl.core.layout import CoverageClash, RecordLine, find_clash, record_pieces
from qdsl.core.text import counted


def check_coverage(program: Program, problems: Problems) -> Program:
    """The program with variables marked exact or padded; adds a problem for bits that are missing or stored twice.

    >>> shown(record="d; l<16: q[l] q[l]")
    error: bit 0 of q[0, 0] is stored 2 times, at record bits 16 and 20
    >>> shown(record="d; l<15: q[l] q[l + 16]")
    error: no item of the record stores bit 0 of q[0, 15]
    """
    stored: dict[str, set[int]] = {}
    for tensor in program.tensors:
        is_whole = _is_whole_elements(tensor, problems)
        for placement in tensor.placements:
            _check_tile(program, tensor, placement, stored, problems if is_whole else Problems())
    storage = program.authored
    for field in program.fields:
        bits = stored.get(field.name, set())
        if field.name in program.where:
            if bits:
                problems.add(field.span, f"field '{field.name}' is stored by '{program.storage}', which also fixes its value")
        elif not bits:
            problems.add(storage.name.span, f"storage '{program.storage}' does not store field '{field.name}'",
                         "store it, or give its value under where")
        elif missing := sorted(set(range(field.bits)) - bits):
            problems.add(storage.name.span, f"storage '{program.storage}' does not store bit {missing[0]} of '{field.name}'")
    if problems:
        return program
    return replace(program, tensors=tuple(_check_extents(program, tensor, problems) for tensor in program.tensors))


def _is_whole_elements(tensor: Tensor, problems: Problems) -> bool:
    """Whether a record is whole elements; if not, checks of its elements would only repeat the error."""
    span = tensor.record_span
    if tensor.record_bits % tensor.element.bits:
        problems.add(span, f"the record of '{tensor.name}' has {tensor.record_bits} bits, which is not a whole number of "
                           f"{tensor.element.bits}-bit elements",
                     f"add items, or fill it with pad:{-tensor.record_bits % tensor.element.bits}")
    elif tensor.words != 1 and not any("" in axis.digits for axis in tensor.axes):
        problems.add(span, f"the record of '{tensor.name}' has {tensor.record_bits} bits and an element has "
                           f"{tensor.element.bits}: add 'word' to the axis along which its {tensor.words} elements lie")


    for axis in tensor.axes:
        if tensor.words > 1 and "" in axis.digits[:-1]:
            problems.add(tensor.span, f"the {tensor.words} elements of a record of '{tensor.name}' lie together: "
                                      "'word' is the last digit of its axis")
    return not tensor.record_bits % tensor.element.bits


def _check_tile(program: Program, tensor: Tensor, placement: Placement, stored: dict[str, set[int]], problems: Problems) -> None:
    """Adds a problem unless a record holds the same bits of every element of the field's tile, each once."""
    field = program.field(placement.field)
    pieces = [piece for piece in record_pieces(tensor.lines) if piece.field == field.name]
    bits = {bit for piece in pieces for bit in range(piece.lo, piece.lo + piece.width)}
    if outside := [bit for bit in bits if not 0 <= bit < field.bits]:
        problems.add(tensor.record_span, f"'{tensor.name}' stores bit {min(outside)} of '{field.name}', which has "
                                         f"{field.bits} bits")
        return
    unmoved = [var.name for var in tensor.vars if var.name not in placement.vars]
    if unmoved and placement.digits:
        problems.add(tensor.span, f"'{tensor.name}' stores '{field.name}' again for every '{unmoved[0]}', "
                                  f"which no subscript of '{field.name}' has")
        return
    if bits & stored.get(field.name, set()):
        problems.add(tensor.span, f"'{tensor.name}' stores '{field.name}', which another tensor stores already")
        return
    stored.setdefault(field.name, set()).update(bits)
    clash = _clash(tensor.lines, field.name, placement.extents, frozenset(bits))
    if clash is not None:
        remedies = _spacing_note(tensor, placement, field.name)
        problems.add(_line_span(program, tensor, clash), _describe_clash(field, placement, clash), *remedies,
                     *_first_broken_weight(field, placement, clash))


@lru_cache(maxsize=256)                                          # choices of parameters share the records of a storage
def _clash(lines: tuple[RecordLine, ...], field: str, extents: tuple[int, ...], bits: frozenset[int]) -> CoverageClash | None:
    return find_clash([piece for piece in record_pieces(lines) if piece.field == field], extents, bits)


def _describe_clash(field: Field, placement: Placement, clash: CoverageClash) -> str:
    element = f"{field.name}[{', '.join(map(str, clash.index))}]" if clash.index else field.name
    if any(not 0 <= i < extent for i, extent in zip(clash.index, placement.extents, strict=True)):
        box = " x ".join(map(str, placement.extents))
        return f"a record stores {element}, outside its {box} elements of '{field.name}'"
    if not clash.pieces:
        return f"no item of the record stores bit {clash.bit} of {element}"
    places = " and ".join(str(piece.at + clash.bit - piece.lo) for piece in clash.pieces[:3])
    return f"bit {clash.bit} of {element} is stored {len(clash.pieces)} times, at record bits {places}"


def _spacing_note(tensor: Tensor, placement: Placement, field: str) -> list[str]:
    """A note for records that store more elements than they are apart: `32*g` where `64*g` is meant."""
    stored = [piece.index for piece in record_pieces(tensor.lines) if piece.field == field]
    notes = []
    for place, (digits, tile) in enumerate(zip(placement.digits, placement.extents, strict=True)):
        count, variable = 1 + max(index[place] for index in stored), next((name for name in digits if name), "")
        if variable and count > tile:
            spaced = f"{tile}*{variable}" if tile > 1 else variable
            notes.append(f"it stores {count} along '{variable}', and the next record begins {tile} further, at {spaced}: write "
                         f"{count}*{variable}")
    return notes


def _line_span(program: Program, tensor: Tensor, clash: CoverageClash) -> Span:
    """The line of the record with the first piece of a clash; the record's first line if there is none."""
    records = [item.record for item in program.authored.tensors if item.name.value == tensor.name]
    line = clash.pieces[0].line if clash.pieces else 0
    return records[0][line].span if records and len(records[0]) == len(tensor.lines) and clash.pieces else tensor.record_span


def _first_broken_weight(field: Field, placement: Placement, clash: CoverageClash) -> list[str]:
    """Notes on the first weight that the clash affects."""
    if len(clash.index) != len(field.index) or not clash.index or min(clash.index) < 0:
        return []
    shared = [1 if not i.terms or i.terms[0][0].op == "name" else
              i.terms[0][0].args[1].const if i.terms[0][0].args[1].is_const else 0 for i in field.index]
    first = [f"{'n' if 'n' in i.names() else 'k'} = {c * s}"
             for c, s, i in zip(clash.index, shared, field.index, strict=True) if s]
    return [f"it breaks first at {', '.join(first)}, bit {clash.bit}"] if first else []


def _check_extents(program: Program, tensor: Tensor, problems: Problems) -> Tensor:
    """Checks that the digits of a coordinate count its elements, exactly or (ceil) with padding at the end, and no further."""
    used = {name for placement in tensor.placements for name in placement.vars}
    for var in tensor.vars:
        if var.name not in used:
            problems.add(tensor.span, f"variable '{var.name}' of '{tensor.name}' is in no subscript of its record"
                                      f"{did_you_mean(var.name, used)}")
            return tensor
    inexact: set[str] = set()
    spare: set[str] = set()
    for placement in tensor.placements:
        for digits, tile, extent, fit in _coordinate_fits(program, tensor, placement):
            inexact.update(digits if not fit.is_exact else ())
            spare.update(digits if fit.is_spare else ())
            if fit.mismatch is not None:
                _add_mismatch(program, tensor, placement, digits, tile, extent, fit.mismatch, problems)
                return tensor
            if not fit.is_tried:
                problems.add(tensor.span, f"there are no N and K at which the extents of '{program.storage}' divide")
                return tensor
    return replace(tensor, vars=tuple(replace(var, exact=var.name not in inexact, spare=var.name in spare)
                                      for var in tensor.vars))


def _add_mismatch(program: Program, tensor: Tensor, placement: Placement, digits: list[str], tile: int, extent: Index,
                  mismatch: tuple[int, int, Mapping[str, int]], problems: Problems) -> None:
    """Adds a problem for records that are too few or too many for a field, with what to write, at the axis that counts them."""
    records, elements, sample = mismatch
    sizes = ", ".join(f"{size} = {value}" for size, value in sample.items())
    per_record = f"{tile} '{placement.field}'" if tile > 1 else f"one '{placement.field}'"
    along = " ".join(digits) or "its only record"
    counts = f"{counted(records, 'record')} of {per_record} along '{along}'"
    problem = f"'{tensor.name}' has {counts}, but there are {elements} to store"
    remedies = []
    if len(digits) == 1:
        needed = exact(extent, tile) if elements % tile == 0 else ceil(extent, tile)
        remedies = [f"'{placement.field}' has {_as_written(extent)} along it: write {digits[0]}<{_as_written(needed)}"]
    problems.add(_axis_span(program, tensor, digits), problem, *remedies, f"at {sizes}")


def _as_written(index: Index) -> str:
    """An extent as specs have it: K/32, ceil(K/group)."""
    return re.sub(r"cdiv\((.+), (.+)\)", r"ceil(\1/\2)", text(index)).replace(" // ", "/")


def _axis_span(program: Program, tensor: Tensor, digits: list[str]) -> Span:
    """Where the tensor's shape counts with these variables; the tensor itself if nowhere."""
    shapes = [item.shape for item in program.authored.tensors if item.name.value == tensor.name and item.shape is not None]
    loops = (loop for shape in shapes for axis in shape.axes for loop in axis.digits if loop is not None)
    return next((loop.span for loop in loops if loop.name in digits), tensor.span)


def _coordinate_fits(program: Program, tensor: Tensor, placement: Placement) -> Iterator[tuple[list[str], int, Index, CountFit]]:
    """(variables, tile, extent, fit) for each coordinate that has more than one element per record."""
    wanted = list(program.field(placement.field).extents)
    if placement.flat:
        wanted = [wanted[0] * wanted[1]]
    defined = tuple(dict.fromkeys([*(var.extent for t in program.tensors for var in t.vars), *wanted]))
    for digits, tile, extent in zip(placement.digits, placement.extents, wanted, strict=True):
        names = [name for name in digits if name]
        counts = tuple(tensor.var(name).extent for name in names)
        if tile != 1 or counts != (extent,):
            yield names, tile, extent, _count_fit(sample_sizes(program), defined, counts, tile, extent)


@dataclass(frozen=True, slots=True)
class CountFit:
    """How records of a tile count elements.  mismatch: the records, elements and sizes at which they are too few or too many."""

    is_tried: bool = False
    is_exact: bool = True
    is_spare: bool = False
    mismatch: tuple[int, int, Mapping[str, int]] | None = None


@lru_cache(maxsize=1 << 12)                                      # tensors, storages and edited specs repeat the question
def _count_fit(sizes: SampleSizes, defined: tuple[Index, ...], counts: tuple[Index, ...], tile: int, extent: Index) -> CountFit:
    """Compare tile * product of `counts` with `extent`, at sample sizes for which all of `defined` have values."""
    fit = CountFit()
    read = set[str]().union(*(index.names() for index in (*counts, extent)))
    for sample in distinct_samples(samples_of(sizes, defined), sorted(read)):
        numbers, elements = [count(sample) for count in counts], extent(sample)
        records = prod(numbers)
        steps = [_count_step(count, sample) for count in counts]
        less = min((records - records // number * step for number, step in zip(numbers, steps, strict=True) if number), default=0)
        fit = CountFit(True, fit.is_exact and tile * records == elements,
                       fit.is_spare or (max(steps, default=1) > 1 and tile * (records - 1) >= elements))
        if tile * records < elements or (tile * less >= elements and records):
            return replace(fit, mismatch=(records, elements, sample))
    return fit


def _count_step(extent: Index, sample: Mapping[str, int]) -> int:
    """The step of a number of records: 8 for `8 * ceil(K / 1024)` and for `1024 * ceil(K / 1024) / 128`."""
    by = 1
    if len(extent.terms) == 1 and extent.terms[0][0].op == "exact":
        extent, divisor = extent.terms[0][0].args[0] * extent.terms[0][1], extent.terms[0][0].args[1]
        by = divisor(sample)
    return max(1, extent.terms[0][1] // by) if len(extent.terms) == 1 and extent.terms[0][0].op == "ceil" else 1
