"""Completes a spec's fields and formula: finds the scales and offsets that decode the codes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from qdsl.core.numbers import round_to_f32
from qdsl.infer.elements import Element
from qdsl.infer.fit import Blocks, CodeMeaning, Numbers
from qdsl.infer.labels import Values
from qdsl.infer.nested import find_nested_scales
from qdsl.infer.numbers import Field, close, fields_in_tensors
from qdsl.infer.records import WHOLE, Record, fields_in_records
from qdsl.infer.tiles import Codes, Labels, Tile, match_layout

HIDDEN, MOST_HIDDEN = 0.1, 0.25                                  # uncertain offsets: of the scale; of all offsets, at most


@dataclass(frozen=True)
class Solution:
    """The fields, the decode formula, and the unexplained rest; tables by name, as numbers or as an expression of a spec."""

    fields: tuple[Field, ...]
    decode: str
    tables: Mapping[str, tuple[float, ...] | str] = field(default_factory=dict)
    problems: tuple[str, ...] = ()


def solve(code: Sequence[Field], meaning: CodeMeaning, codes: Codes, values: Values, tensors: Mapping[str, Element],
          records: Sequence[Record]) -> Solution:
    """The fields and the formula that decode the codes to the values [N, K].  code: its fields, in one tensor or in several."""
    if meaning.choice is not None:
        return _solve_two_tables(code, meaning, values.shape, tensors, records)
    name = code[0].name
    tables: dict[str, tuple[float, ...] | str] = {"levels": exact_levels(meaning, codes, values)} if meaning.is_table else {}
    scale, factor = next(find_scales(meaning, values.shape, tensors, records), ((), ""))
    if not factor and not close(np.ones(1), meaning.scale).all():
        exact = replace(meaning, levels=np.array(tables["levels"])) if tables else meaning
        nested = find_nested_scales(exact, codes, values, tensors)
        if nested is None:
            return Solution(tuple(code), name, problems=("no tensor has the scales of "
                                                         f"{_blocks(meaning.blocks, values.shape)}; --scales names it",))
        scale, factor, tables["steps"] = nested
    fields, start, end, problem = find_offsets(name, meaning, values.shape, tensors, records)
    if meaning.is_table:
        start = f"levels[{name}]"
    for one in tuple(fields):
        for other in scale:
            if one.has_place_of(other):                          # scales and offsets in units of one number
                fields.remove(one)
                end = end.replace(one.name, other.name)
    decode = (factor.format(start) if factor else start) + end
    return Solution((*code, *scale, *fields), decode, tables, (problem,) if problem else ())


def _solve_two_tables(code: Sequence[Field], meaning: CodeMeaning, shape: tuple[int, ...], tensors: Mapping[str, Element],
                      records: Sequence[Record]) -> Solution:
    """As `solve`, if a bit of each block chooses between two tables."""
    assert meaning.choice is not None
    name, levels, size = code[0].name, meaning.levels.reshape(2, -1), meaning.levels.size // 2
    for times in ((1, 1), (1, 2), (2, 1)):                       # a table of multiples of 2 was divided by it
        by = np.array(times, np.float64)
        scale = meaning.scale / by[np.nan_to_num(meaning.choice).astype(np.int16)]
        scale_fields, factor = next(find_scales(replace(meaning, scale=scale), shape, tensors, records), ((), ""))
        chosen = _find_table_choice(meaning, records) if factor else None
        if chosen is not None:
            field, is_swapped = chosen
            pair = (levels * by[:, None])[::-1 if is_swapped else 1].reshape(-1)
            return Solution((*code, *scale_fields, field), factor.format(f"levels[{size} * {field.name} + {name}]"),
                            {"levels": tuple(int(level) for level in pair)})
    return Solution(tuple(code), name, problems=("no tensor has the scales, and the choices of a table, of "
                                                 f"{_blocks(meaning.blocks, shape)}; --scales names it",))


def _find_table_choice(meaning: CodeMeaning, records: Sequence[Record]) -> tuple[Field, bool] | None:
    """The bit of every block that chooses its table, and whether 1 stands for the first table."""
    assert meaning.choice is not None
    certain = ~np.isnan(meaning.choice)
    second = np.nan_to_num(meaning.choice).astype(np.int16)
    for record in records:
        count = record.blocks_per_record(meaning.blocks)
        layout = match_layout([(record.stored, Labels(second, 1, certain))], [Tile(1, count)]) if count else None
        if layout is not None:
            is_swapped = (layout.read_codes(record.stored, second.shape) != second)[certain]   # a match may be the complement
            if is_swapped.all() or not is_swapped.any():
                return Field("table", "u1", meaning.blocks, record.tensor, layout, section=record.section), bool(is_swapped[0])
    return None


def find_scales(meaning: CodeMeaning, shape: tuple[int, ...], tensors: Mapping[str, Element],
                records: Sequence[Record]) -> Iterator[tuple[tuple[Field, ...], str]]:
    """Yields the fields of the scales and their formula with `{}` for the code, the simplest first."""
    blocks, scale = meaning.blocks, meaning.scale
    with np.errstate(divide="ignore", over="ignore"):
        ways = [("{} * scale", scale), ("{} / scale", 1 / scale), ("{} * scale / 127", scale * 127),
                ("{} * scale / 128", scale * 128)]
    for formula, wanted in ways:
        for one in fields_in_tensors("scale", wanted, blocks, tensors):
            yield (one,), formula
    recorded, term = fields_in_records("scale", scale, blocks, records, tensors)
    if recorded:
        yield tuple(recorded), f"{term} * {{}}"
    whole = Blocks(shape[0], shape[1])
    for name, element in tensors.items():
        if element.stored.data.size == element.stored.width and element.kind in ("f16", "bf16", "f32"):
            outer = next(fields_in_tensors("outer", element.numbers(element.kind).reshape(1, 1), whole, {name: element}))
            number = float(element.numbers(element.kind)[0])
            others = {other: tensors[other] for other in tensors if other != name}
            for formula, wanted in (("scale * outer * {}", scale / number), ("scale / outer * {}", scale * number)):
                for one in fields_in_tensors("scale", wanted, blocks, others):
                    yield (one, outer), formula
            recorded, term = fields_in_records("scale", scale / number, blocks, records, others)
            if recorded:
                yield (*recorded, outer), f"{term} * {{}} * outer"


def find_offsets(code: str, meaning: CodeMeaning, shape: tuple[int, ...], tensors: Mapping[str, Element],
                 records: Sequence[Record]) -> tuple[list[Field], str, str, str]:
    """The fields of the offsets; the code as multiplied by the scale; the term that is added; the unexplained rest."""
    if meaning.offset is None:
        return [], code, "", ""
    blocks, offset = meaning.blocks, _mark_uncertain(meaning.offset, meaning.scale)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        zero = -offset / meaning.scale
    zero[~np.isfinite(zero)] = np.nan
    middle = 1 << int(meaning.kind[1:]) - 1
    if (np.isnan(zero) | (np.abs(zero - np.rint(zero)) < WHOLE)).all():
        zero = np.rint(zero)
        if np.nanmin(zero) == np.nanmax(zero):
            same = int(np.nanmin(zero))
            return [], f"({code} {'-' if same > 0 else '+'} {abs(same)})" if same else code, "", ""
        one = find_integer_zeros(zero, blocks, tensors, middle)
        if one:
            return [one], f"({code} - {one.term})", "", ""
    for start, end, wanted in ((code, " + zero", offset), (code, " - zero", -offset), (f"({code} - zero)", "", zero),
                               (f"({code} - {middle})", " + zero", offset + middle * meaning.scale)):
        for one in fields_in_tensors("zero", wanted, blocks, tensors):
            return [one], start, end, ""
    for name, sign, wanted in (("low", "+", offset), ("low", "-", -offset)):
        recorded, term = fields_in_records(name, wanted, blocks, records, tensors)
        if recorded:
            return recorded, code, f" {sign} {term}", ""
    return [], code, "", f"no tensor has the zero points or minima of {_blocks(blocks, shape)}; --zeros names it"


def _mark_uncertain(offset: Numbers, scale: Numbers) -> Numbers:
    """The offsets, with NaN (any) for those so small beside the scale that rounding hides them, if these are few."""
    with np.errstate(invalid="ignore"):
        small = np.abs(offset) < HIDDEN * np.abs(scale)
    return np.where(small, np.nan, offset) if small.mean() < MOST_HIDDEN else offset


def find_integer_zeros(zero: Numbers, blocks: Blocks, tensors: Mapping[str, Element], middle: int) -> Field | None:
    """Integer zero points as a field: elements of a tensor, or packed like codes."""
    for less in (0, middle, 1, -middle):
        wanted = zero - less
        for name, element in tensors.items():
            if element.kind in ("i8", "u8", "i32"):
                for one in fields_in_tensors("zero", wanted, blocks, {name: element}):
                    if one.kind == element.kind:
                        return replace(one, zero=-less)
    known_at = ~np.isnan(zero)
    bits, shape = middle.bit_length(), (zero.shape[0], zero.shape[1])
    for less in (0, 1):
        codes = np.nan_to_num(zero - less).astype(np.int16) & 2 * middle - 1
        for name, element in tensors.items():
            layout = match_layout([(element.stored, Labels(codes, bits, known_at))])
            if layout is not None and (layout.read_codes(element.stored, shape) == codes)[known_at].all():
                return Field("zero", f"u{bits}", blocks, name, layout, -less)
    return None


def exact_levels(meaning: CodeMeaning, codes: Codes, values: Values) -> tuple[float, ...]:
    """The table's numbers in float32 for which the product with the float32 scales is exactly the values."""
    if (meaning.levels == np.rint(meaning.levels)).all():
        return tuple(int(level) for level in meaning.levels)
    levels = []
    for code, level in enumerate(meaning.levels):
        at = np.flatnonzero(codes == code)[:1 << 12]
        used = meaning.blocks.at(meaning.scale, at, (values.shape[0], values.shape[1])).astype(np.float32)
        wanted = values.reshape(-1)[at]
        near = np.float32(round_to_f32(level))
        steps = [near]
        for _ in range(8):
            steps += [np.nextafter(steps[-1], np.float32(np.inf))]
        for _ in range(8):
            steps = [np.nextafter(steps[0], np.float32(-np.inf)), *steps]
        levels.append(float(max(steps, key=lambda step: ((step * used == wanted).mean(), -abs(step - near))) if len(at) else 0.0))
    return tuple(levels)



def _blocks(blocks: Blocks, shape: tuple[int, ...]) -> str:
    if blocks.apart:
        return f"weights that are N*K/{blocks.columns} apart"
    return f"{min(blocks.rows, shape[0])} x {min(blocks.columns, shape[1])} weights"
