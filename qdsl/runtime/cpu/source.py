"""C source of a storage's loops on a CPU: products with one row of x or with four, and decoded rows.

      x [M, K], columns in the order of use              out [M, N]
        |                                                  ^
        step 0, step 1, ..., then one by one               |
        the units that no whole step has left  ->  sums of row n

A step is so many units that divisions of positions in the decode function come out whole (trace.py): vectors of weights are
decoded in registers, multiplied with x and added to a few sums.  N, K and the units of a row are arguments: one library serves
all shapes.  Where neighbours in memory are neighbours along N, vectors go along N, and a step is so many rows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

from qdsl.runtime.cpu.expressions import Writer, prefetches
from qdsl.runtime.cpu.language import run
from qdsl.runtime.cpu.trace import Index, Indivisible, Pointer, PointerType, Trace, Unsupported, Use
from qdsl.runtime.weight.layout import Kernels

VECTORS = Path(__file__).with_name("vectors.h")
LONGEST = 4096                                                   # units in a step: its lines are compiled one by one
BLOCK = 64                                                       # rows that a step has at least, where vectors go along N
SUMS = 4                                                         # sums of a row of weights: additions take 4 cycles
DECODE = 0                                                       # rows of x of a library that decodes into out
ARRANGE = "void arrange(const float *x, float *ordered, int64_t K)"
SIGNATURE = ("void run(const uint8_t *const *tensors, const float *x, const float *ordered, float *restrict out, int64_t N, "
             "int64_t K, int64_t first, int64_t last, int64_t units)")

T = TypeVar("T")


@dataclass(frozen=True)
class Source:
    """C source, and what it asks of a weight: K is a multiple of `divisor`, and the first row of tiles of `step`.

    arranged: numbers that a column of x has after the source's function `arrange`; 0 where there is none.
    has_vectors: whether weights are decoded many at a time; one by one is no faster than torch.  parts: of the rows, that a
    thread takes on average: many, unless memory is read along rows.
    """

    text: str
    divisor: int
    step: int
    arranged: int
    has_vectors: bool = True
    parts: int = 8


@dataclass(frozen=True)
class Reads:
    """What a decode function reads: dtypes of tensors, None for one that is missing, and size parameters."""

    kernels: Kernels
    dtypes: tuple[str | None, ...]
    sizes: tuple[int, ...] | None

    def pointers(self, trace: Trace) -> list[Pointer | None]:
        """Where the tensors and tables begin, in the order of the function's arguments."""
        zero = Index(trace, ())
        tensors = [None if dtype is None else Pointer(f"t{i}", PointerType(dtype), zero) for i, dtype in enumerate(self.dtypes)]
        tables = [Pointer(f"t{len(tensors) + i}", str(table.values.dtype)[6:], zero, None,
                          (math.floor(min(table.numbers)), math.ceil(max(table.numbers))), table.numbers)
                  for i, table in enumerate(self.kernels.tables)]
        return [*tensors, *tables]

    @property
    def lines(self) -> list[str]:
        """The C lines that name them."""
        return [f"const uint8_t *const t{i} = tensors[{i}];" for i in range(len(self.dtypes) + len(self.kernels.tables))]


def source_of(reads: Reads, rows: int, width: int) -> Source:
    """The C source for `rows` rows of x at a time, DECODE for none, with vectors of at most `width` lanes.

    Of the vectors that the decode function can be run on, those are taken that need the fewest instructions per weight; where
    there are none, weights are decoded one by one.  Raises Unsupported where not even that can be done.
    """
    programs = []
    for lanes in (width, width // 2):
        if lanes >= 4 and (steps := _steps(reads, lanes)) is not None:
            try:
                programs.append(_Program(reads, rows, lanes, steps))
            except Unsupported:
                continue
    program = min(programs, key=lambda program: program.cost) if programs else _Program(reads, rows, 4, None)
    return program.source


class _Steps:
    """The traces of one step, vector by vector."""

    def __init__(self, reads: Reads, lanes: int, length: int) -> None:
        self.lanes, self.length, self.along_rows = lanes, length, reads.kernels.last == "n"
        self.traces: list[Trace] = []
        for start in range(0, length, lanes):
            trace = Trace("step", lanes, True)
            along = trace.symbol("step") * length + Index(trace, (), tuple(range(start, start + lanes)))
            n, u = (along, trace.symbol("u")) if self.along_rows else (trace.symbol("n"), along)
            run(trace, reads.kernels.decode, reads.pointers(trace), n, u, reads.sizes)
            self.traces.append(trace)
        uses = self.traces[0].uses
        self.rows = 1 + max(use.row for use in uses)
        self.per_unit = len(uses) // self.rows
        self.divisor = math.lcm(*(trace.divisor for trace in self.traces), self.per_unit)
        self.tile = self.rows * self.length                      # rows of a step, where vectors go along N
        if not self.along_rows:
            self._check_order()

    def order(self, row: int = 0) -> tuple[int, ...]:
        """The columns of a step in the order of use."""
        return tuple(lane for trace in self.traces for use in trace.uses if use.row == row
                     for lane in (use.columns.lanes * self.lanes)[:self.lanes])

    def _check_order(self) -> None:
        """Raises Unsupported unless every row uses each column of a step once, in one order."""
        count = self.length * self.per_unit
        if any(use.columns.terms != (("step", count),) for trace in self.traces for use in trace.uses):
            raise Unsupported("columns that do not follow the units")
        orders = {self.order(row) for row in range(self.rows)}
        if len(orders) > 1 or sorted(self.order()) != list(range(count)):
            raise Unsupported("columns that are not those of a step")


def _steps(reads: Reads, lanes: int) -> _Steps | None:
    """The traces of the shortest step; None where the decode function cannot be run on so many lanes."""
    try:
        least = BLOCK // reads.kernels.sums if reads.kernels.last == "n" else 0
        return shortest(partial(_Steps, reads, lanes), max(lanes, least))
    except Unsupported:
        return None


def shortest(program: Callable[[int], T], length: int) -> T:
    """`program` of the shortest step, a multiple of `length`, whose divisions leave no remainder.  Raises Unsupported."""
    while length <= LONGEST:
        try:
            return program(length)
        except Indivisible as error:
            length *= error.factor
    raise Unsupported("a step that is too long")


class _Program:
    """A source in the making; rows: of x."""

    def __init__(self, reads: Reads, rows: int, lanes: int, steps: _Steps | None) -> None:
        self.reads, self.rows, self.lanes, self.steps = reads, rows, lanes, steps
        self.writer = Writer(lanes, steps.traces if steps else ())
        self.tiles = reads.kernels.sums
        self.text = self._text()
        self.cost = self.writer.instructions / (steps.length * steps.per_unit * self.tiles) if steps else 0.0    # of a weight

    @property
    def source(self) -> Source:
        steps = self.steps
        if steps is None or steps.along_rows:
            return Source(self.text, 1 if steps is None else steps.divisor, 1 if steps is None else steps.length, 0,
                          steps is not None)
        return Source(self.text, steps.divisor, 1, int(" arrange(" in self.text))

    def _text(self) -> str:
        if self.steps is None:
            body = ["for (int64_t n = first; n < last; n++) {", *one_by_one(self.reads, self.rows, "0"), "}"]
        else:
            body = self._along_rows(self.steps) if self.steps.along_rows else self._along_columns(self.steps)
        head = f"#define LANES {self.lanes}\n{VECTORS.read_text(encoding='utf-8')}\n{self._arrange()}"
        return head + "\n".join([SIGNATURE, "{", *self.reads.lines, *body, "}", ""])

    def _arrange(self) -> str:
        """A function that puts x in the order of use, step by step; none where it is in that order."""
        order = self.steps.order() if self.steps is not None and not self.steps.along_rows and self.rows else ()
        if order == tuple(range(len(order))):
            return ""
        return f"static const int16_t order[] = {{{_commas(order)}}};\n{ARRANGE} {{\n" \
            f"for (int64_t at = 0; at + {len(order)} <= K; at += {len(order)}, x += {len(order)})\n" \
            f"for (int i = 0; i < {len(order)}; i++) ordered[at + i] = x[order[i]];\n}}\n"

    # -- vectors along K -----------------------------------------------------------------------------------------------

    def _along_columns(self, steps: _Steps) -> list[str]:
        columns, body = steps.length * steps.per_unit, list[str]()
        vectors: list[list[str]] = [[] for _ in range(self.tiles)]
        stores = [] if self.rows else self._stores(steps.order())
        for trace in steps.traces:
            for use in trace.uses:
                vectors[use.row].append(self._vector(use))
                body += self.writer.flush() + self._take(use.row, vectors[use.row], columns, stores)
        names = [f"a{row}_{m}_{i}" for row in range(self.tiles) for m in range(self.rows) for i in range(self._sums)]
        start = [f"vf {name} = {{0}};" for name in names]
        lines = ["for (int64_t n = first; n < last; n++) {", *start, f"for (int64_t step = 0; step < K / {columns}; step++) {{",
                 *prefetches(steps.traces)]
        is_buffered = not self.rows and not stores
        lines += [f"const float *xs = ordered + {columns} * step;"] if self.rows else []
        lines += self._buffers(columns) if is_buffered else []
        lines += [*body, *(self._placed(steps.order(), columns) if is_buffered else []), "}"]
        return [*lines, *one_by_one(self.reads, self.rows, f"K / {columns} * {steps.length}", self._totals), "}"]

    @property
    def _sums(self) -> int:
        return SUMS if self.rows * self.tiles < 4 else 1 if self.rows * self.tiles > 8 else 2

    def _vector(self, use: Use) -> str:
        name = self.writer.weight(use.weight)
        return name if use.weight.has_lanes else f"all_float({name})"

    def _take(self, row: int, vectors: Sequence[str], columns: int, stores: Sequence[tuple[int, ...]]) -> list[str]:
        """Lines that use the last of the vectors of weights that a row of a step has so far."""
        place = (len(vectors) - 1) * self.lanes
        if stores:
            lines = []
            for start, places in ((i * self.lanes, places) for i, places in enumerate(stores) if max(places) // self.lanes
                                  == place // self.lanes):
                first, last = vectors[min(places) // self.lanes], vectors[-1]
                lanes = [at % self.lanes + self.lanes * (at >= place and first != last) for at in places]
                value = last if lanes == list(range(self.lanes)) else f"permute_two({first}, {last}, (vi){{{_commas(lanes)}}})"
                lines.append(f"store(out + (n * {self.tiles} + {row}) * K + step * {columns} + {start}, {value});")
            return lines
        if not self.rows:
            return [f"store(w{row} + {place}, {vectors[-1]});"]
        turn = place // self.lanes % self._sums
        sums = [f"a{row}_{m}_{turn}" for m in range(self.rows)]
        return [f"{name} = multiply_add({vectors[-1]}, vload_float32((const uint8_t *)(xs + {m} * K + {place})), {name});"
                for m, name in enumerate(sums)]

    def _stores(self, order: Sequence[int]) -> list[tuple[int, ...]]:
        """For every vector of neighbours in memory the places in the order of use; none if one comes from over two vectors."""
        place_of = {column: place for place, column in enumerate(order)}
        stores = [tuple(place_of[column + i] for i in range(self.lanes)) for column in range(0, len(order), self.lanes)]
        return stores if all(len({place // self.lanes for place in places}) <= 2 for places in stores) else []

    def _buffers(self, columns: int) -> list[str]:
        return [f"float w{row}[{columns}];" for row in range(self.tiles)]

    def _placed(self, order: Sequence[int], columns: int) -> list[str]:
        """Lines that copy a step of decoded weights to its columns."""
        return [f"static const int16_t order[] = {{{_commas(order)}}};",
                *(f"for (int i = 0; i < {columns}; i++) (out + (n * {self.tiles} + {row}) * K + step * {columns})[order[i]] = "
                  f"w{row}[i];" for row in range(self.tiles))]

    def _totals(self, row: int, m: int) -> str:
        sums = [f"a{row}_{m}_{i}" for i in range(self._sums)]
        while len(sums) > 1:
            sums = [f"({a} + {b})" for a, b in zip(sums[::2], sums[1::2], strict=True)]
        return f"sum({sums[0]})"

    # -- vectors along N -----------------------------------------------------------------------------------------------

    def _along_rows(self, steps: _Steps) -> list[str]:
        body, parts = [], range(len(steps.traces))
        for part, trace in enumerate(steps.traces):
            for use in trace.uses:
                weight, column = self._vector(use), use.columns.text()
                body += self.writer.flush()
                for m in range(self.rows):
                    name = f"a{part}_{use.row}_{m}"
                    body.append(f"{name} = multiply_add({weight}, all_float(x[{m} * K + {column}]), {name});")
                if not self.rows:
                    row = use.row * steps.length + part * self.lanes
                    body.append(f"store(tile + (({column}) - {steps.per_unit} * start) * {steps.tile} + {row}, {weight});")
        names = [(part, row, m) for part in parts for row in range(self.tiles) for m in range(self.rows)]
        begin = [f"vf a{part}_{row}_{m} = {{0}};" for part, row, m in names]
        stores = [f"for (int i = 0; i < LANES; i++) out[{m} * N + {self._row(part, row)}] = a{part}_{row}_{m}[i];"
                  for part, row, m in names]
        loop = [*begin, "for (int64_t u = 0; u < units; u++) {", *body, "}", *stores] if self.rows else \
            self._row_tiles(steps, body)
        return [f"for (int64_t step = first / {steps.length}; step < last / {steps.length}; step++) {{", *loop, "}",
                *last_rows(self.reads, self.rows, steps.length)]

    def _row_tiles(self, steps: _Steps, body: Sequence[str]) -> list[str]:
        """Lines that decode a step's rows: some units into a tile, a column after the other, then rows out of it."""
        for column in (use.columns for trace in steps.traces for use in trace.uses):
            if column.terms not in ((("u", steps.per_unit),), ()) or not 0 <= column.lanes[0] < steps.per_unit:
                raise Unsupported("columns of a unit that do not lie together")
        count = -(-4 * self.lanes // steps.per_unit)             # units: rows lie pages apart, so each gets a few cache lines
        width, rows = count * steps.per_unit, steps.tile
        row = f"(step * {steps.length} + r % {steps.length}) * {self.tiles} + r / {steps.length}"
        return [f"float tile[{width * rows}];", f"for (int64_t start = 0; start < units; start += {count}) {{",
                f"const int64_t stop = start + {count} < units ? start + {count} : units, at = {steps.per_unit} * start;",
                "for (int64_t u = start; u < stop; u++) {", *body, "}",
                f"const int64_t many = K - at < {width} ? K - at : {width};",
                f"for (int64_t r = 0; r < {rows}; r += LANES) {{",
                f"float *to = out + ({row}) * K + at;", "int64_t c = 0;",
                f"for (; c + LANES <= many; c += LANES) transpose(to + c, {self.tiles} * K, tile + c * {rows} + r, {rows});",
                f"for (; c < many; c++) for (int i = 0; i < LANES; i++) to[i * {self.tiles} * K + c] = tile[c * {rows} + r + i];",
                "}", "}"]

    def _row(self, part: int, row: int) -> str:
        assert self.steps is not None
        return f"(step * {self.steps.length} + {part * self.lanes} + i) * {self.tiles} + {row}"


def one_by_one(reads: Reads, rows: int, start: str, total: Callable[[int, int], str] | None = None, x: str = "x", row: str = "K",
               ) -> list[str]:
    """Lines for the units of row n from `start` on, and that store its sums, which begin with `total`; row: numbers in one."""
    trace, tiles = Trace("", 1, False), reads.kernels.sums
    run(trace, reads.kernels.decode, reads.pointers(trace), trace.symbol("n"), trace.symbol("u"), reads.sizes)
    writer, body = Writer(1), []
    for use in trace.uses:
        weight, column = writer.write(use.weight), use.columns.text()
        body += writer.flush()
        condition = " && ".join(filter(None, (f"{column} < K", use.live.text)))
        takes = [f"s{use.row}_{m} += {weight} * {x}[{m} * {row} + {column}];" for m in range(rows)] or [
            f"out[(n * {tiles} + {use.row}) * K + {column}] = {weight};"]
        body.append(f"if ({condition}) {{ {' '.join(takes)} }}")
    names = [(own, m) for own in range(tiles) for m in range(rows)]
    begin = [f"float s{own}_{m} = {total(own, m) if total else 0};" for own, m in names]
    stores = [f"out[{m} * N + n * {tiles} + {own}] = s{own}_{m};" for own, m in names]
    return [*begin, f"for (int64_t u = {start}; u < units; u++) {{", *body, "}", *stores]


def last_rows(reads: Reads, rows: int, length: int, x: str = "x", row: str = "K") -> list[str]:
    """Lines for the rows that no whole step of `length` has left."""
    whole = f"last / {length} * {length}"
    return [f"for (int64_t n = {whole} > first ? {whole} : first; n < last; n++) {{",
            *one_by_one(reads, rows, "0", None, x, row), "}"]


def _commas(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
