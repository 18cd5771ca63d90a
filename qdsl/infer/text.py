"""Writes a spec's text from fields and layouts; each stored tile is one record."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from textwrap import fill

import numpy as np

from qdsl.compiler.spec.reserved import RESERVED
from qdsl.infer.elements import Element, Section
from qdsl.infer.numbers import Field
from qdsl.infer.solve import Solution

LETTERS = "abcefghijlmorv"
MOST_ITEMS = 16                                                  # items in the body of a loop
MOST_WIDTH = 64                                                  # bits of an item
MOST_REPEATED = 64                                               # repetitions of a tile in a record
MOST_FACTOR = 16                                                 # factor of N or K in an axis
LINE = 100                                                       # characters of a line without loops


@dataclass(frozen=True)
class RecordBits:
    """Bits of a record: `width` bits from bit `bit` of the field's element at (part, row, column) of the tile.

    Padding has no field.
    """

    field: str
    bit: int
    width: int
    place: tuple[int, int, int] = (0, 0, 0)

    def follows(self, other: RecordBits) -> bool:
        """Whether the item continues the other one."""
        return (self.field, self.place) == (other.field, other.place) and (not self.field or self.bit == other.bit + other.width)


def spec_text(name: str, solution: Solution, tensors: Mapping[str, Element], shape: tuple[int, int]) -> str:
    """The text of a spec for weights [N, K] of these sizes, and of multiples of them."""
    lines = [f"format: {name}", "weight: [N, K]"]
    if solution.tables:
        lines.append("tables:")
        for table, entries in solution.tables.items():
            lines.append(f'  {table}: "{entries}"' if isinstance(entries, str) else
                         fill(f"{table}: [{', '.join(repr(int(n) if n == int(n) else n) for n in entries)}]", LINE,
                              initial_indent="  ", subsequent_indent="    "))
    lines.append("fields:")
    named = {one.name: one for one in solution.fields}
    lines += [f"  {name}: {one.kind}[{', '.join(_field_subscripts(one, shape))}]" for name, one in named.items()]
    stored: list[str] = []
    unread: dict[str, str] = {}
    for tensor in dict.fromkeys(one.tensor for one in solution.fields):
        stored += tensor_text(tensor, tensors[tensor], [one for one in solution.fields if one.tensor == tensor], shape, unread)
    lines += [f"  {name}: {kind}" for name, kind in unread.items()]
    return "\n".join([*lines, f"decode: {solution.decode}", "storage:", "  file:", *stored]) + "\n"


def _field_subscripts(one: Field, shape: tuple[int, int]) -> list[str]:
    """The subscripts of a field, which say the weights that share a value."""
    if one.blocks.apart:
        return [f"(n*K + k) % (N*K / {one.blocks.columns})"]
    subscripts = []
    for letter, size, extent in (("n", one.blocks.rows, shape[0]), ("k", one.blocks.columns, shape[1])):
        if size < extent:
            subscripts.append(letter if size == 1 else f"{letter} // {size}")
    return [*subscripts, *map(str, one.entries)]


def looked_up(table: Field, code: Field, shape: tuple[int, int]) -> str:
    """The formula that looks a code up in a stored table."""
    return f"{table.name}[{', '.join([*_field_subscripts(table, shape)[:-1], code.name])}]"


def stored_name(name: str) -> str:
    """The spec's name of a tensor in a file: the last part of its name, with the prefix `stored_` if it is a reserved word."""
    last = re.sub(r"\W", "_", name.rpartition(".")[2], flags=re.ASCII)
    return last if last[:1].isalpha() and last not in RESERVED else f"stored_{last}"


def tensor_text(name: str, element: Element, fields: Sequence[Field], shape: tuple[int, int], unread: dict[str, str],
                ) -> list[str]:
    """The lines of a stored tensor.  Adds a field to `unread`, with its type, for every section that decode does not read."""
    last = name.rpartition(".")[2]
    aliases = [f"      aliases: [{last}]"] if last != stored_name(name) and last.isidentifier() else []
    head, sections = f"    {stored_name(name)}:", sorted({one.section for one in fields if one.section})
    if not sections:
        shown, *record = _record_text(element, fields, shape)
        return [head, shown, *aliases, *record]
    by_rows = sections[0].by_rows
    rows = shape[0] if by_rows else 1
    if len(sections) > 1 and (first := _join_planes(fields)) is not None:
        shown, *record = _record_text(element.cut_section(sections[0], rows), [first], shape)
        bits = first.layout.bits
        place = f"[t<N, p<{bits}, " if by_rows else f"[p<{bits}, "
        shown = shown.replace("[t<N, " if by_rows else "[", place, 1)
        at = f".at({bits - 1} - p):1" if (first.layout.source % bits).max() else ".at(p):1"
        return [head, shown, *aliases, *(re.sub(r"\.at\(\d+\):1", at, line) for line in record)]
    seen = [] if by_rows else _file_shape_lines(element, shape)
    lines = [head, *aliases, *seen, f"      {'sections' if by_rows else 'regions'}:"]
    end = len(element.stored.data) // rows
    for number, section in enumerate(_with_gaps(sections, end)):
        inside = [one for one in fields if one.section == section]
        part = element.cut_section(section, rows)
        text = _record_text(part, inside, shape) if inside else _unread_lines(part, by_rows, unread)
        lines += [f"        part{number}:", *(f"    {line}" for line in text)]
    return lines


def _join_planes(fields: Sequence[Field]) -> Field | None:
    """The first of a field's parts, if the parts are its bits in order, from the highest or from the lowest; else None."""
    first, sources = fields[0], [one.layout.source for one in fields]
    bits = first.layout.bits
    if len(fields) != bits or {one.name for one in fields} != {first.name} or min(source.min() for source in sources) < 0:
        return None
    order = [set((source % bits).tolist()) for source in sources]
    up = [{bit} for bit in range(bits)]
    is_alike = all(len(source) == len(sources[0]) and (source // bits == sources[0] // bits).all() for source in sources)
    return first if is_alike and order in (up, up[::-1]) else None


def _with_gaps(sections: Sequence[Section], end: int) -> Iterator[Section]:
    """Yields the sections in order, with the unused ranges between them and up to the end."""
    start = 0
    for section in (*sections, Section(sections[0].by_rows, end, end)):
        if section.start > start:
            yield Section(section.by_rows, start, section.start)
        if section.start < section.stop:
            yield section
        start = section.stop


def _unread_lines(part: Element, by_rows: bool, unread: dict[str, str]) -> list[str]:
    """The lines of a section that decode does not read: one field that keeps its bytes."""
    count, name = part.stored.shape[-1], f"unread{len(unread) or ''}"
    kind = "i32" if part.kind == "u32" else part.kind
    unread[name] = f"{kind}[{'n, ' if by_rows else ''}{count}]"
    axes = f"t<N, u<{count}" if by_rows else f"u<{count}"
    return [f"      tensor: {part.kind}[{axes}]", f"      record: {name}[{'t, ' if by_rows else ''}u]"]


def _file_shape_lines(element: Element, shape: tuple[int, int]) -> list[str]:
    """The shape of a tensor in files, if it has several axes."""
    own = element.stored.shape
    if len(own) < 2:
        return []
    sizes = [("N", shape[0]), ("K", shape[1])]
    texts = (_extent_text(extent, sizes[::1 if axis == 0 else -1]) for axis, extent in enumerate(own))
    return [f"      seen: [{', '.join(texts)}]"]


def _extent_text(extent: int, sizes: Sequence[tuple[str, int]]) -> str:
    """The text of an extent: a simple multiple of N or of K, or the number itself."""
    for name, size in sizes:
        by = math.gcd(extent, size)
        if extent // by <= MOST_FACTOR and size // by & size // by - 1 == 0:
            return f"{f'{extent // by}*' if extent > by else ''}{name}{f'/{size // by}' if size > by else ''}"
    return str(extent)


def _record_text(element: Element, fields: Sequence[Field], shape: tuple[int, int]) -> list[str]:
    """The lines of the type, the axes and the record."""
    fields = _enlarge_records(element, fields, shape)
    main = fields[0]
    if len(main.entries) > 1:                                    # a table of rows, shared by the whole weight
        names = "cij"[-len(main.entries):]
        axes = [f"{name}<{extent}" for name, extent in zip(names, main.entries, strict=True)]
        return [f"      tensor: {element.kind}[{', '.join(axes)}]", f'      record: "{main.name}[{", ".join(names)}]"']
    tile, bits = main.layout.tile, 8 * element.stored.width
    words = len(main.layout.source) // bits
    counts = tile.grid(main.blocks.count(shape))
    axes = [f"{letter}<{extent}" if extent != "1" else "1" for letter, extent in zip("tu", _tile_count(main, shape), strict=True)]
    if tile.across:
        axes, counts = axes[::-1], counts[::-1]
    if words > 1:
        if tile.stacked:
            axes[0] += " word"
        elif element.stored.shape == (counts[0], counts[1] * words):
            axes[1] = f"{axes[1]} word".removeprefix("1 ")
        else:
            axes.append("word")
    axes = [axis for axis in axes if axis != "1"] or ["1"]
    record = record_lines(record_items(fields), {one.name: one for one in fields}, shape)
    head = f"      tensor: {element.kind}[{', '.join(axes)}]"
    if len(record) == 1:
        return [head, f'      record: "{record[0]}"']
    return [head, "      record: |", *(f"        {line}" for line in record)]


def _enlarge_records(element: Element, fields: Sequence[Field], shape: tuple[int, int]) -> Sequence[Field]:
    """Fields in larger records, if rows of the tensor in the file are not rows of tiles: records may have any shape."""
    main = fields[0]
    own = [size for size in element.stored.shape if size != 1]
    count = main.layout.tile.grid(main.blocks.count(shape))
    if len(own) < 2 or tuple(own) == count or main.layout.tile.across or len(main.layout.source) > 8 * element.stored.width:
        return fields
    times = math.gcd(own[-1], count[1])
    while times > MOST_REPEATED and times % 2 == 0:
        times //= 2
    return [replace(one, layout=one.layout.repeat_columns(times)) for one in fields]


def _tile_count(main: Field, shape: tuple[int, int]) -> tuple[str, str]:
    """The numbers of tiles along the field's own rows and columns."""
    tile, blocks = main.layout.tile, main.blocks
    if blocks.apart:
        return "1", _quotient("N*K", shape[0] * shape[1], blocks.columns * tile.columns)
    return ("1" if blocks.rows >= shape[0] > 1 else _quotient("N", shape[0], blocks.rows * tile.rows * tile.parts),
            "1" if main.entries or blocks.columns >= shape[1] > 1 else _quotient("K", shape[1], blocks.columns * tile.columns))


def _quotient(name: str, extent: int, size: int) -> str:
    return name if size == 1 else f"{name}/{size}" if extent % size == 0 else f"ceil({name}/{size})"


def record_items(fields: Sequence[Field]) -> list[RecordBits]:
    result: list[RecordBits] = []
    for bit in range(len(fields[0].layout.source)):
        item = RecordBits("", 0, 1)
        for one in fields:
            source = int(one.layout.source[bit])
            if source >= 0:
                weight, at = divmod(source, one.layout.bits)
                tile = one.layout.tile
                place = np.unravel_index(weight, (tile.parts, tile.rows, tile.columns))
                item = RecordBits(one.name, at, 1, (int(place[0]), int(place[1]), int(place[2])))
        if result and item.follows(result[-1]) and result[-1].width < MOST_WIDTH:
            result[-1] = RecordBits(item.field, result[-1].bit, result[-1].width + 1, item.place)
        else:
            result.append(item)
    return result


def record_lines(record: Sequence[RecordBits], fields: Mapping[str, Field], shape: tuple[int, int]) -> list[str]:
    """The lines of a record's items; each takes the longest run that loops can express."""
    result: list[str] = []
    start, single = 0, False
    while start < len(record):
        runs = [(size, find_loops(record[start:], size)) for size in range(1, min(MOST_ITEMS, len(record) - start) + 1)]
        size, digits = max(runs, key=lambda run: (run[0] * math.prod(extent for extent, _ in run[1]) if run[1] else 1, -run[0]))
        names = dict(zip(LETTERS, digits, strict=False))
        head = " ".join(f"{name}<{extent}" for name, (extent, _) in reversed(names.items()))
        body = " ".join(_item_text(item, names, fields, shape) for item in record[start:start + size])
        if single and not head and len(result[-1]) + len(body) < LINE:
            result[-1] += f" {body}"
        else:
            result.append(f"{head}: {body}" if head else body)
        single = not head
        start += size * math.prod(extent for extent, _ in digits)
    return result


def find_loops(record: Sequence[RecordBits], size: int) -> list[tuple[int, tuple[int, int, int]]]:
    """The loops that repeat the first `size` items, as (extent, step of the position), the fastest first."""
    first = record[:size]
    kinds = [(item.field, item.bit, item.width) for item in first]

    def step(turn: int) -> tuple[int, int, int] | None:
        """The distance of an iteration's items from the first ones; None if they differ in more than position."""
        items = record[turn * size:(turn + 1) * size]
        if [(item.field, item.bit, item.width) for item in items] != kinds:
            return None
        steps = {(b.place[0] - a.place[0], b.place[1] - a.place[1], b.place[2] - a.place[2])
                 for a, b in zip(first, items, strict=True) if a.field}
        return steps.pop() if len(steps) == 1 else None if steps else (0, 0, 0)

    digits: list[tuple[int, tuple[int, int, int]]] = []
    done = 1
    while (by := step(done)) is not None and (any(by) or not first[0].field):
        extent = 1
        while all(step(extent * done + turn) == _iteration_step(digits, by, extent * done + turn, done) for turn in range(done)):
            extent += 1
        if extent == 1:
            break
        digits.append((extent, by))
        done *= extent
    return digits


def _iteration_step(digits: Sequence[tuple[int, tuple[int, int, int]]], by: tuple[int, int, int], turn: int, done: int,
                    ) -> tuple[int, ...]:
    """The step of an iteration, from faster loops and one more with step `by`."""
    total = [turn // done * step for step in by]
    for extent, steps in digits:
        total = [a + turn % extent * b for a, b in zip(total, steps, strict=True)]
        turn //= extent
    return tuple(total)


def _item_text(item: RecordBits, loops: Mapping[str, tuple[int, tuple[int, int, int]]], fields: Mapping[str, Field],
               shape: tuple[int, int]) -> str:
    if not item.field:
        return f"pad:{item.width}"
    one = fields[item.field]
    tile = one.layout.tile
    steps = list(loops.items())[::-1]
    part, row, column = ([(step[axis], name) for name, (_, step) in steps if step[axis]] for axis in range(3))
    apart = f"*(N/{tile.parts})"
    along = [] if one.entries else [(tile.columns, "u")]
    subscripts = {"n": _sum_text([(tile.rows, "t"), *row, (item.place[1], "")], [*part, (item.place[0], "")], apart),
                  "k": _sum_text([*along, *column, (item.place[2], "")])}
    texts = [subscripts["n" if axis[0] == "n" else "k"] for axis in _field_subscripts(one, shape)]
    bits = "" if item.width == one.layout.bits else f".at({item.bit}):{item.width}"
    return f"{item.field}{'[' + ', '.join(texts) + ']' if texts else ''}{bits}"


def _sum_text(terms: Sequence[tuple[int, str]], parts: Sequence[tuple[int, str]] = (), apart: str = "") -> str:
    """The text of a sum of factors times variables, and of `parts` that are multiplied by `apart`."""
    signed = [(factor, f"{abs(factor)}*{name}" if name and abs(factor) != 1 else name or str(abs(factor)))
              for factor, name in terms if factor]
    signed += [(factor, (f"{abs(factor)}*{name}" if name and abs(factor) != 1 else name or str(abs(factor))) + apart)
               for factor, name in parts if factor]
    signed = [(factor, term.removeprefix("1*")) for factor, term in signed]
    return " ".join(f"{'-' if factor < 0 else '+'} {term}" for factor, term in signed).removeprefix("+ ") or "0"
