"""Prints how Triton kernels load and decode a tile of weights, from the bit layouts.

A kernel works on a two-dimensional tile of units (see passes/choose_units).  Every load is a whole tile of one shape, so that no
value changes threads inside the loop.  Lanes are unrolled by `tl.static_range`.  A value is computed in the outermost loop in
which it is constant: a word is loaded once and split once per lane.  Without units, a unit is one weight.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

from qdsl.compiler.emit.formula import TRITON, formula, integer_fields, step_name, table_types
from qdsl.compiler.emit.tensors import is_read_by_dtype
from qdsl.compiler.emit.triton.addresses import address, index_digits, is_aligned, pointer, word_step
from qdsl.compiler.emit.triton.body import KernelBody, both
from qdsl.compiler.ir import index as ix
from qdsl.compiler.ir.index import Domain, Index, name
from qdsl.compiler.ir.program import Field, IterationUnits, Placement, Program, Tensor, UnrolledDigit, Value
from qdsl.compiler.passes.samples import axis_divisor
from qdsl.core.layout import FieldSlice, Layout, split_at_words

PARAMETERS = ("tensors", "live", "N", "K", "sizes", "use", "state")
TRITON_FLOATS = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


@dataclass(frozen=True, slots=True)
class Tile:
    """The coordinates of a kernel: n and k in terms of its variables."""

    last: str
    rows: str
    unit: str
    n: Index
    k: Index
    digits: tuple[tuple[str, str], ...]
    lanes: tuple[UnrolledDigit, ...]
    row_count: Index
    unit_count: Index
    ragged: bool
    domain: Domain


def tile_of(program: Program) -> Tile:
    """Names and coordinates of a program's kernels."""
    units = program.units or IterationUnits("", "k", {"n": 1, "k": 1}, (("k", 1, None),), (), False)     # weight by weight
    taken = {*PARAMETERS, "n", "k", "inside", *program.sizes, *taken_names(program), *(f.name for f in program.fields)}
    fresh = (letter for letter in "hijcbaefopvyz" if letter not in taken)
    lanes = tuple(replace(lane, name=next(fresh)) for lane in units.lanes)
    rows_lanes = [lane for lane in lanes if lane.axis == "n"]
    column_lanes = [lane for lane in lanes if lane.axis == "k"]
    per_record = prod(extent for _, _, extent in units.digits if extent)
    natural = not column_lanes
    rows = "n" if units.tiles["n"] == 1 else _free("r", taken, fresh)
    record = "k" if units.tiles["k"] == 1 else _free("t", taken, fresh)
    names = [record, *(next(fresh) for _ in units.digits[1:])]
    unit = "k" if natural else record if per_record == 1 else _free("u", taken, fresh)
    digits: list[tuple[str, str]] = []
    if unit != record:
        digits.append((record, f"{unit} // {per_record}"))
        below = per_record
        for digit, (_, _, extent) in zip(names[1:], units.digits[1:], strict=True):
            below //= extent or 1
            digits.append((digit, f"{unit} // {below} % {extent}" if below > 1 else f"{unit} % {extent}"))
    bounds: dict[str, tuple[int, int | None]] = {lane.name: (0, lane.extent - 1) for lane in lanes}
    bounds |= {digit: (0, (extent or 1) - 1) for digit, (_, _, extent) in zip(names[1:], units.digits[1:], strict=True)}
    domain = replace(program.domain, bounds={**program.domain.bounds, **bounds})
    k = ix.combine([(name(digit), weight) for digit, (_, weight, _) in zip(names, units.digits, strict=True)]
             + [(name(lane.name), lane.weight) for lane in column_lanes])
    n = ix.combine([(name(rows), units.tiles["n"])] + [(name(lane.name), lane.weight) for lane in rows_lanes])
    row_count, row_exact = _tile_records(program, units, "n")
    records, exact = _tile_records(program, units, "k")
    return Tile(units.last, rows, unit, n, k, tuple(digits), lanes, row_count,
                _units_per(records, per_record), not (exact and row_exact), domain)


def arguments(program: Program) -> list[str]:
    """The memory that a kernel reads weights from: the storage's tensors, and the lookup tables of decode."""
    return [*program.stored, *table_types(program)]


def taken_names(program: Program) -> list[str]:
    """The same, and the names of pointers to regions of tensors."""
    return list(dict.fromkeys([*arguments(program), *map(pointer, program.tensors)]))



def _free(wanted: str, taken: set[str], fresh: Iterator[str]) -> str:
    return next(fresh) if wanted in taken else wanted


def _tile_records(program: Program, units: IterationUnits, axis: str) -> tuple[Index, bool]:
    """The number of records along an axis, and whether they hold whole tiles."""
    size = units.tiles[axis]
    whole = name({"n": "N", "k": "K"}[axis])
    if size == 1:
        return whole, True
    if not units.tensor:                                         # rows that share a code
        whole_rows = axis_divisor("N", [var.extent for tensor in program.tensors for var in tensor.vars]) % size == 0
        return (ix.exact if whole_rows else ix.ceil)(whole, Index(size)), whole_rows
    tensor = program.tensor(units.tensor)
    var = next(tensor.var(v) for placement in tensor.placements if placement.extents == (units.tiles["n"], units.tiles["k"])
               for v, extent in placement.tiles if extent == size and v)
    return var.extent, var.exact


def _units_per(records: Index, count: int) -> Index:
    """records * count, where records is K // R and count divides R as K // (R // count)."""
    atom = records.terms[0][0] if len(records.terms) == 1 else None
    if count > 1 and atom is not None and atom.op == "exact" and atom.args[1].is_const and atom.args[1].const % count == 0:
        return ix.exact(atom.args[0], atom.args[1].const // count)
    return records * count


def shown(index: Index, tight: int = 0) -> str:
    """An index as Triton text."""
    return ix.text(index, tight, "tl.cdiv")


def _default(field: Field, value: Index) -> str:
    """The value of a field that is not stored, as Triton text; floats have a decimal point, since div_rn takes no integer."""
    is_float = field.groups is None and (field.number is None or field.number.is_float)
    return shown(value) + (".0" if is_float and not value.terms else "")


class Decoder:
    """Fills a Body with the loads and shifts that compute the fields of one weight.

    A weight that is one field keeps its type, if Triton supports it.
    """

    def __init__(self, program: Program, tile: Tile, body: KernelBody) -> None:
        self.copies = len(program.values) == 1
        self.program = program
        self.tile = tile
        self.body = body
        self.lanes = [lane.name for lane in tile.lanes]
        self.whole: dict[str, str] = {}

    def weight_text(self) -> str:
        """The formula over the variables that hold the fields."""
        names = {field.name: self.field_variable(field) for field in self.program.fields
                 if any(value.op == "field" and value.name == field.name for value in self.program.values)}
        for value in self.program.values:
            if value.op == "table" and len(shape := self.program.spec.table(value.name).shape) > 1:
                names[f"k % {shape[1]}"] = self.column(shape[1])
        computed = {arg for value in self.program.values if value.op != "entry" for arg in value.args}
        for number, value in enumerate(self.program.values):
            if value.op == "digit" and number in computed:
                index = self.digit(value)
                names[step_name(number)] = self.body.add(self.innermost_level(index), "digit", shown(index))
            elif value.op in ("entry", "row"):
                names[step_name(number)] = self.load_entry(value, names)
        return formula(self.program, TRITON, names, 0)

    def digit(self, value: Value) -> Index:
        assert value.range is not None
        return ix.mod(ix.div(self.coordinate("k"), int(value.const), self.tile.domain), value.range[1] + 1, self.tile.domain)

    def column(self, columns: int, axis: str = "k") -> str:
        """A variable that holds k, or n, modulo the length of a table's row."""
        index = ix.mod(self.coordinate(axis), columns, self.tile.domain)
        return self.body.add(self.innermost_level(index), "column", shown(index))

    def load_entry(self, value: Value, names: Mapping[str, str]) -> str:
        """A variable that holds a stored table's number, at decode's entry or row."""
        field = self.program.field(value.name)
        at = [self.substitute(i, {"n": self.coordinate("n"), "k": self.coordinate("k")}) for i in field.index]
        columns = field.table[-1:] if value.op == "row" else ()
        before = field.table[:-1 - len(columns)]
        at += [Index(int(value.const) // prod(before[i + 1:]) % extent) for i, extent in enumerate(before)]
        row = self.program.values[value.args[0]]
        at += [self.digit(row) if row.op == "digit" else name(self.step_variable(value.args[0], names))]
        at += [name(self.column(length, self.program.row_axis(value))) for length in columns]
        return self.load_at(field, at, "")

    def step_variable(self, step: int, names: Mapping[str, str]) -> str:
        """A variable that holds the integer of a step of decode."""
        if self.program.values[step].op == "field":
            return names[self.program.values[step].name]
        text = formula(self.program, TRITON, names, step=step)
        return self.body.add(max(map(self.body.level, re.findall(r"\w+", text))), "place", text)

    def coordinate(self, axis: str) -> Index:
        """The row ('n') or column ('k') of a weight in the loops of a unit."""
        return self.tile.n if axis == "n" else self.tile.k

    def innermost_level(self, *indices: Index, guard: str = "") -> int:
        """The innermost loop with a lane or variable that an expression reads."""
        read = set().union(*(index.names() for index in indices))
        outside = {self.tile.rows, "N", "K", *self.program.sizes, *self.lanes} | {v for v, _ in self.body.at}
        depth = max([i + 2 for i, lane in enumerate(self.lanes) if lane in read] + ([1] if read - outside else [])
                    + [self.body.level(variable, guard) for variable in read if self.body.sees(variable, guard)], default=0)
        return len(self.lanes) + 1 if depth > 1 and self.tile.ragged else depth

    def load_condition(self, level: int) -> str:
        """The condition for loading a value of this level."""
        if level == 0:
            return f"{self.tile.rows} < {shown(self.tile.row_count)}"
        return "inside" if self.tile.ragged and level == len(self.lanes) + 1 and self.lanes else "live"

    # -- fields -------------------------------------------------------------------------------------------------------

    def field_variable(self, field: Field) -> str:
        """The variable with a field's value, under both conditions if it reads an optional tensor."""
        program = self.program
        coordinates: dict[str, Index] = {"n": self.coordinate("n"), "k": self.coordinate("k")}
        gathers = [by for index in field.index if (by := ix.gathered_by(index)) is not None]
        if field.name in program.where:
            default = ix.substitute(program.where[field.name], coordinates, self.tile.domain)
            return self.body.add(self.innermost_level(default), field.name, shown(default))
        stored = {p.field: t for t in program.tensors for p in t.placements}
        alternative = ""
        if field.name in program.defaults:
            tensor = stored[field.name].name
            default = ix.substitute(program.defaults[field.name], coordinates, self.tile.domain)
            self.body.add(self.innermost_level(default), field.name, _default(field, default), f"{tensor} is None")
            alternative = f"{tensor} is not None"
        if not gathers:
            return self.load_field(field, coordinates, alternative)
        index = gathers[0]
        if index in program.where:
            gathered = self.group(index, program.where[index], coordinates, "")
            return self.load_field(field, coordinates | {index: gathered}, alternative)
        guard = ""
        if index in program.defaults:
            tensor = stored[index].name
            guard = f"{tensor} is not None"
            gathered = self.group(index, program.defaults[index], coordinates, f"{tensor} is None")
            self.load_field(field, coordinates | {index: gathered}, both(alternative, f"{tensor} is None"))
        stored_group = name(self.load_field(program.field(index), coordinates, guard))
        return self.load_field(field, coordinates | {index: stored_group}, both(alternative, guard))

    def group(self, index: str, value: Index, coordinates: Mapping[str, Index], guard: str) -> Index:
        """The group of a column, if it is computed and not stored."""
        text = ix.substitute(value, coordinates, self.tile.domain)
        return name(self.body.add(self.innermost_level(text), index, shown(text), guard))

    def load_field(self, field: Field, coordinates: Mapping[str, Index], guard: str) -> str:
        """The value of a field for the weight at these coordinates."""
        return self.load_at(field, [self.substitute(i, coordinates) for i in field.index], guard)

    def load_at(self, field: Field, at: list[Index], guard: str) -> str:
        """Loads and extracts all slices of an element of a field."""
        parts: list[tuple[int, int, str]] = []
        for tensor in self.program.tensors:
            for placement in tensor.placements:
                if placement.field == field.name:
                    index = [at[0] * name("K") + at[1]] if placement.flat else at
                    for ranges in placement.cuts:
                        level, text = self.load_slice(field, tensor, placement, ranges, index, guard)
                        parts.append((ranges[0].lo, level, text))
        level = max(level for _, level, _ in parts)
        if len(parts) == 1:
            text = parts[0][2]
        else:
            cast = "({}).to(tl.int32)" if field.bits > 8 else "{}"      # so that the shift below keeps every bit
            halves = [(lo, self.body.add(own, f"{field.name}_{'high' if lo else 'low'}", cast.format(text), guard))
                      for lo, own, text in sorted(parts)]
            text = " | ".join(f"{part} << {lo}" if lo else part for lo, part in halves)
        return self.body.add(level, field.name, self.cast_field(field, text, len(parts) > 1), guard)

    def cast_field(self, field: Field, text: str, joined: bool) -> str:
        """Bits as a value for the formula."""
        number = field.number
        if number is None:
            return text
        if is_read_by_dtype(self.program, field):
            return f"device.scale({text})"
        if number.name in TRITON_FLOATS:
            if joined or text.startswith("device."):
                text = f"({text}).to(tl.uint{number.bits}).to(tl.{TRITON_FLOATS[number.name]}, bitcast=True)"
            return text if self.copies or number.name == field.kind == "f32" else f"{text}.to(tl.float32)"
        if number.is_float:
            return f"device.{number.name}({text})"
        call = text if text.endswith(")") and text.startswith(("tl.load(", "device.")) else f"({text})"
        is_whole = self.elements(field) <= {f"i{number.bits}", f"u{number.bits}"} and not any(
            tensor.stored and field.name in [placed.field for placed in tensor.placements] for tensor in self.program.tensors)
        if number.kind == "signed" and not joined and is_whole:
            text = f"{call}.to(tl.int{number.bits}, bitcast=True)" if f"u{number.bits}" in self.elements(field) else text
            call = text
        elif number.kind == "signed" and number.bits < 32:
            half = 1 << number.bits - 1
            return f"({call}.to(tl.int32) ^ {half}) - {half}"
        return f"{call}.to(tl.int32)" if field.name in integer_fields(self.program) else text

    def elements(self, field: Field) -> set[str]:
        """The element types of the tensors that hold the field."""
        return {t.element.name for t in self.program.tensors for p in t.placements if p.field == field.name}

    def substitute(self, index: Index, coordinates: Mapping[str, Index]) -> Index:
        """A subscript for the kernel's coordinates; blocks of the flat position become blocks of rows if rows hold whole ones."""
        atom = ix.flat_of(index)
        if atom is not None and atom.op == "div":
            whole = ix.exact(name("K"), atom.args[1])
            if any(var.extent == whole for tensor in self.program.tensors for var in tensor.vars):
                return coordinates["n"] * whole + ix.div(coordinates["k"], atom.args[1], self.tile.domain)
        return ix.substitute(index, coordinates, self.tile.domain)

    # -- slices -------------------------------------------------------------------------------------------------------

    def load_slice(self, field: Field, tensor: Tensor, placement: Placement, ranges: Sequence[FieldSlice], index: list[Index],
                   guard: str) -> tuple[int, str]:
        """(loop, text) of a slice's bits, or digit; `ranges` are the slices of the same bits for all ranges of elements."""
        domain = self.tile.domain
        records: dict[str, Index] = {}
        local: list[Index] = []
        for i, words, size in zip(index, placement.digits, placement.extents, strict=True):
            positions = index_digits(i, [tensor.var(word).extent if word else Index(size) for word in words], domain)
            records |= {word: position for word, position in zip(words, positions, strict=True) if word}
            local.append(positions[words.index("")])
        if not ranges[0].places:
            return self.load_bits(field, tensor, ranges, records, local, guard)
        whole = [replace(part, width=part.room, places=()) for part in ranges]
        level, text = self.load_bits(field, tensor, whole, records, local, guard)
        whole_places = [replace(part, offset=0, dims=part.places) for part in ranges]
        place = self.choose_range(f"{field.name}_place", whole_places, local, guard)
        if self.innermost_level(place, guard=guard) > level:
            text = self.body.add(level, f"{field.name}_byte", text, guard)
        return max(level, self.innermost_level(place, guard=guard)), f"device.trit({text}, {shown(place)})"

    def choose_range(self, target: str, ranges: Sequence[FieldSlice], local: Sequence[Index], guard: str) -> Index:
        """The place of an element by the slice for its range, as an expression or a variable."""
        bits = [self.bit(part, [*local[:-1], *(index - part.start for index in local[-1:])]) for part in ranges]
        if all(bit == bits[0] for bit in bits):
            return bits[0]
        text = shown(bits[-1])
        for part, bit in reversed(list(zip(ranges[1:], bits, strict=False))):
            text = f"tl.where({shown(local[-1])} < {part.start}, {shown(bit)}, {text})"
        return name(self.body.add(self.innermost_level(*bits, *local[-1:], guard=guard), target, text, guard))

    def load_bits(self, field: Field, tensor: Tensor, ranges: Sequence[FieldSlice], records: Mapping[str, Index],
                  local: list[Index],
                  guard: str) -> tuple[int, str]:
        """(loop, text) of the bits of one slice."""
        part = ranges[0]
        number = field.number
        bits = tensor.element.bits
        if number is not None and number.name in TRITON_FLOATS and part.width == number.bits > bits and len(ranges) == 1:
            whole = split_at_words(part, part.width)
            if whole is not None and whole[0].offset == 0 and is_aligned(tensor, part.width // bits):
                return self.load_as_type(tensor, whole[1], records, local, number.name, guard)
        cut = [pair for part in ranges if (pair := split_at_words(part, bits)) is not None]
        if len(cut) < len(ranges):
            bit = self.choose_range(f"{field.name}_bit", ranges, local, guard)
            return self.load_straddling(field, tensor, part, records, bit, guard)
        shift, step = (self.choose_range(f"{field.name}_{what}", sides, local, guard)
                       for what, sides in zip(("shift", "at"), zip(*cut, strict=True), strict=True))
        loaded = self.load_word(tensor, records, step, guard)
        level = self.innermost_level(*records.values(), step, guard=guard)
        if part.width == bits and tensor.stored is None and not _is_in_integer(field, tensor):
            if number is not None and number.kind == "unsigned" and tensor.element.kind == "signed" and bits < 32:
                return level, f"{loaded}.to(tl.uint{bits}, bitcast=True)"
            return level, loaded
        if self.innermost_level(shift, guard=guard) > level or tensor.stored is not None:
            loaded = self.body.add(level, f"{field.name}_word", self.undo_stored_change(tensor, loaded), guard)
            bits = 32 if tensor.stored is not None and tensor.stored.field is None else bits
        text = f"{loaded} >> {shown(shift, 1)}" if shift != Index(0) else loaded
        text = f"{text} & {(1 << part.width) - 1}" if part.width < bits else text
        if tensor.stored is not None and tensor.stored.field == field.name:
            text = self.undo_change(tensor, field, f"({text})")
        if _is_in_integer(field, tensor) and part.width == field.bits:
            text = f"({text}).to(tl.uint{field.bits}).to(tl.{TRITON_FLOATS[field.kind]}, bitcast=True)"
        return max(level, self.innermost_level(shift, guard=guard)), text

    def bit(self, part: FieldSlice, index: Sequence[Index]) -> Index:
        """part.bit(index), as an expression."""
        return ix.combine([(self.layout_index(layout, i), 1) for layout, i in zip(part.dims, index, strict=True)]) + part.offset

    def layout_index(self, layout: Layout, index: Index) -> Index:
        """layout(index), as an expression."""
        total = Index(layout.offset)
        weight = 1
        for extent, stride in layout.modes:
            if stride:
                digit = ix.div(index, weight, self.tile.domain)
                total = total + (ix.mod(digit, extent, self.tile.domain) if weight * extent < layout.size else digit) * stride
            weight *= extent
        return total

    def undo_stored_change(self, tensor: Tensor, text: str) -> str:
        """A stored word as packed; small words are widened, so that sums do not overflow."""
        if tensor.stored is not None and tensor.element.bits < 32:
            text = f"{text}.to(tl.int32)"
        return text if tensor.stored is None or tensor.stored.field is not None else tensor.stored.text(text, -1)

    def load_as_type(self, tensor: Tensor, words: FieldSlice, records: Mapping[str, Index], local: list[Index], kind: str,
                     guard: str) -> tuple[int, str]:
        """A float that fills several elements of the tensor and is aligned to its size, loaded through its own pointer."""
        size = words.width // tensor.element.bits
        step = self.bit(words, local)
        typed = f"{pointer(tensor)}_{kind}"
        rows = self.record_base(tensor, records)
        self.add_once_before_units(tensor, f"{typed} = {pointer(tensor)}.to(tl.pointer_type(tl.{TRITON_FLOATS[kind]}))")
        level = self.innermost_level(*records.values(), step, guard=guard)
        offset = self.offset(tensor, records, step, size, rows)
        place = f"{typed} + {shown(offset)}" if offset != Index(0) else typed
        return level, f"tl.load({place}, {self.load_condition(level)}, 0)"

    def load_straddling(self, field: Field, tensor: Tensor, part: FieldSlice, records: Mapping[str, Index], bit: Index,
                        guard: str) -> tuple[int, str]:
        """Bits across elements: from all words of the record at a constant bit, or from the words around a variable bit."""
        units = self.program.units
        if units is not None and units.whole and bit.names() <= {lane.name for lane in self.tile.lanes}:
            level = self.innermost_level(*records.values(), guard=guard)
            words = [self.body.add(level, f"{field.name}_{i}", self.load_word(tensor, records, Index(i), guard), guard)
                     for i in range(tensor.words)]
            words_name = self.body.add(level, f"{field.name}_words", f"({', '.join(words)})", guard)
            text = f"device.bits({words_name}, {shown(bit)}, {part.width})"
            return self.innermost_level(bit), self.undo_change(tensor, field, text)
        rows = self.record_base(tensor, records)
        level = self.innermost_level(*records.values(), bit, guard=guard)
        start = self.offset(tensor, records, Index(0), 1, rows)
        step = word_step(tensor)
        text = (f"device.stream({pointer(tensor)} + {shown(start)}, {shown(step)}, {shown(bit)}, {part.width}, "
                f"{tensor.element.bits}, {self.load_condition(level)})")
        return level, self.undo_change(tensor, field, text)

    def undo_change(self, tensor: Tensor, field: Field, text: str) -> str:
        """A field's value, from the number that the file stores."""
        if tensor.stored is None or tensor.stored.field != field.name:
            return text
        changed = tensor.stored.text(text, -1, field.bits)
        return f"({changed}) & {(1 << field.bits) - 1}" if tensor.stored.op == "^" else f"{changed} & {(1 << field.bits) - 1}"

    # -- addresses ----------------------------------------------------------------------------------------------------

    def load_word(self, tensor: Tensor, records: Mapping[str, Index], step: Index, guard: str) -> str:
        """The load of an element of a tensor, for these indices of its records."""
        rows = self.record_base(tensor, records)
        offset = self.offset(tensor, records, step, 1, rows)
        level = self.innermost_level(*records.values(), step, guard=guard)
        place = f"{pointer(tensor)} + {shown(offset)}" if offset != Index(0) else pointer(tensor)
        if not tensor.vars:
            return f"tl.load({place})"
        return f"tl.load({place}, {self.load_condition(level)}{self.address_bound(tensor, records, step)}, 0)"

    def address_bound(self, tensor: Tensor, records: Mapping[str, Index], step: Index) -> str:
        """A further condition for words after the first of a record, if the last record may be partial."""
        cut = next((axis for axis in tensor.axes if axis.extent is not None), None)
        if cut is None or cut.extent is None or step == Index(0):
            return ""
        return f" & ({shown(records[cut.digits[0]] * tensor.words + step)} < {shown(cut.extent)})"

    def record_base(self, tensor: Tensor, records: Mapping[str, Index]) -> Index:
        """Advance the tensor's pointer to its rows once, before the loop; regions begin at their holder's rows.

        Returns the distance.
        """
        if (name_here := pointer(tensor)) != tensor.stored_name:
            self.add_once_before_units(tensor, f"{name_here} = {tensor.stored_name}")
        rows = self.rows_part(address(tensor, records, Index(0)))
        if rows != Index(0):
            self.add_once_before_units(tensor, f"{name_here} += {shown(rows)}")
        return rows

    def add_once_before_units(self, tensor: Tensor, line: str) -> None:
        """Add a line before the units, once, under the condition that the tensor exists."""
        entry = (f"{tensor.name} is not None" if tensor.optional else "", line)
        if entry not in self.body.levels[0]:
            self.body.levels[0].append(entry)

    def rows_part(self, position: Index) -> Index:
        """The terms that depend only on the rows of the tile."""
        rows = {self.tile.rows}
        fixed = {"N", "K", *self.program.sizes}
        return Index(0, tuple((atom, c) for atom, c in position.terms
                              if rows <= (read := Index(0, ((atom, 1),)).names()) and read <= rows | fixed))

    def offset(self, tensor: Tensor, records: Mapping[str, Index], step: Index, size: int, rows: Index) -> Index:
        """The rest of the address after its rows, in elements of `size` elements of the tensor."""
        left = address(tensor, records, step * size) - rows
        return ix.exact(left, size) if size > 1 else left


def _is_in_integer(field: Field, tensor: Tensor) -> bool:
    """Whether a float that Triton supports lies in integer elements of at least its size."""
    number = field.number
    return number is not None and number.name in TRITON_FLOATS and not tensor.element.is_float
