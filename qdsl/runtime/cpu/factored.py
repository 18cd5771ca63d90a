"""C source of products of codes: sums of codes times x, times scales.  x is float32, or has 8 bits and a scale per 32 columns.

    w = scale * code + offset     ->     sum of w * x = scale * (sum of code * x) + offset * (sum of x)

A vector holds codes as bytes, four times as many as floats.  Sums of four neighbours, whose scale and offset are the same, are
one number: floats, or for x = d * q with integers q the sum that one instruction makes of code * q.

Scales and offsets come from the decode function of the kernels, run on three sets of lanes: four neighbours, which say what the
code is; all lanes, for the codes; and a lane per run, for scales and offsets.  A run is as many units as share those, and d.  A
step computes them once, scales and offsets in one vector where they are computed alike:

    lanes     scales of runs | offsets of runs      * d of the run            -> spread over the sums of four, times those
                                                    * sums of x of the run    -> added to the row's sum

An instruction that multiplies integers wants codes that are not negative: with q they are shifted by `base`, whose share,
-base * scale, is a term of the sums of q, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cache, partial
from pathlib import Path

from qdsl.runtime.cpu.bytes import Bytes, braces, range_of
from qdsl.runtime.cpu.expressions import Writer, prefetches
from qdsl.runtime.cpu.language import run
from qdsl.runtime.cpu.merge import merged, parts
from qdsl.runtime.cpu.source import SIGNATURE, VECTORS, Reads, Source, shortest
from qdsl.runtime.cpu.trace import ALWAYS, Index, Node, Trace, Unsupported, Use

X_BLOCK = 32                                                     # columns of x that share a scale, as in ggml's Q8_0
ROW = 12                                                         # bytes that a column of x has after `arrange`
ARRANGE = Path(__file__).with_name("arrange.h")


@dataclass(frozen=True)
class _Weights:
    """Vectors of weights: codes by the lane, scale and offset by four lanes; None for 1 and 0.  sign: of the offset."""

    code: Node
    scale: Node | None
    offset: Node | None
    sign: int = 1


@dataclass(frozen=True, eq=False)
class _Codes:
    """A vector of codes: which weight of a unit they are, the first unit, and their columns.

    code, add, base: as `_unsigned` has them; for sums of floats the code, 0 and 0.
    """

    part: int
    start: int
    code: Node
    add: int
    base: int
    columns: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class _Term:
    """Scales or offsets of runs, a lane each.  value: None for 1.  source: the scale's term that has the sums of an offset."""

    value: Node | None
    blocks: tuple[int, ...]
    factor: int
    source: _Term | None = None


@dataclass
class _Vectors:
    """The vectors of scales and offsets of a step, and by lane what `arrange` puts beside them.

    nodes: their values.  places: where a term's runs begin among all lanes, and how many lanes a run has.
    """

    width: int
    nodes: list[Node | None] = field(default_factory=list)
    places: dict[_Term, tuple[int, int]] = field(default_factory=dict)
    blocks: list[int] = field(default_factory=list)
    factors: list[int] = field(default_factory=list)
    sources: list[int] = field(default_factory=list)

    def place(self, node: Node | None, terms: Sequence[_Term], count: int) -> None:
        """Add a vector of terms that have `count` runs each; one alone has its runs spread over all lanes."""
        first, room = len(self.blocks), self.width // len(terms)
        wide = room // count if len(terms) == 1 else 1
        self.nodes.append(node)
        for at, term in enumerate(terms):
            self.places.setdefault(term, (first + at * room, wide))
            runs = [lane // wide % count for lane in range(room)]
            self.blocks += [term.blocks[run] for run in runs]
            base, apart = self.places[term.source or term]
            is_first = self.places[term] == (first + at * room, wide)
            self.factors += [term.factor * (is_first and lane == run * wide) for lane, run in enumerate(runs)]
            self.sources += [base + apart * run for run in runs]


def source_of(reads: Reads, rows: int, width: int, rounds_x: bool) -> Source:
    """The C source of the product for `rows` rows of x at a time, in 8-bit integers or in floats.

    width: floats in a vector.  Raises Unsupported where weights are no codes with a scale per four neighbours; and for floats
    where scale * code is rounded more than once.
    """
    if reads.kernels.last == "n" or reads.kernels.sums > 1:
        raise Unsupported("vectors along N")
    alone = Trace("", 1, False)
    run(alone, reads.kernels.decode, reads.pointers(alone), alone.symbol("n"), alone.symbol("u"), reads.sizes)
    reason = Unsupported("no weights")
    for count in sorted({1, len(alone.uses)}):
        try:
            return shortest(partial(_Program, reads, rows, width, count=count, rounds_x=rounds_x), 4 * width).source
        except Unsupported as error:
            reason = error
    raise reason


def _trace(reads: Reads, length: int, units: Sequence[int], count: int) -> Trace:
    """The decode function at these units of a step; or, where units have `count` weights, at these weights in their order."""
    trace = Trace("step", len(units), True)
    u = trace.symbol("step") * (length // count) + Index(trace, (), tuple(unit // count for unit in units))
    run(trace, reads.kernels.decode, reads.pointers(trace), trace.symbol("n"), u, reads.sizes)
    if count > 1:
        uses = [trace.uses[unit % count] for unit in units]
        columns = replace(uses[0].columns, lanes=tuple(use.columns.lanes[lane % len(use.columns.lanes)]
                                                       for lane, use in enumerate(uses)))
        trace.uses = [Use(0, columns, merged([use.weight for use in uses], range(len(uses))), ALWAYS)]
    return trace


def _split(splits_sums: bool, four: Node, wide: Node, coarse: Node) -> _Weights:
    """A weight as code, scale and offset: three traces of it; of four neighbours the code differs.  splits_sums: scaled ones."""
    if four.op == "float":
        return _Weights(wide.args[0], None, None)
    if four.op == "load" and four.args[0].numbers and all(number == int(number) for number in four.args[0].numbers):
        return _Weights(wide, None, None)
    shared = [not arg.has_lanes for arg in four.args if isinstance(arg, Node)]
    if four.op not in ("*", "+", "-") or sorted(shared) != [False, True]:
        raise Unsupported("a weight that is no code times a scale")
    place = shared.index(False)
    inner, other = [node.args[place] for node in (four, wide, coarse)], coarse.args[1 - place]
    is_code = four.op == "*" and inner[0].op in ("+", "-") and not splits_sums
    part = _Weights(inner[1], None, None) if is_code else _split(splits_sums, *inner)
    if four.op == "*":
        offset = None if part.offset is None else part.offset * other
        return _Weights(part.code, other if part.scale is None else part.scale * other, offset, part.sign)
    if part.offset is not None or (four.op == "-" and place == 1):
        raise Unsupported("a code that is subtracted, or two offsets")
    return _Weights(part.code, part.scale, other, -1 if four.op == "-" else 1)


def _unsigned(code: Node) -> tuple[Node, int, int]:
    """(node, add, base): node + add are codes from 0 to 255, and less `base` they are the code.  Raises Unsupported."""
    inner, base = code, 0
    while inner.op in ("+", "-") and inner.args[1].op == "number":
        base += int(inner.args[1].args[0]) * (1 if inner.op == "-" else -1)
        inner = inner.args[0]
    if inner.bounds[0] >= 0 and inner.bounds[1] <= 255:
        return inner, 0, base
    add = max(0, -range_of(code)[0])
    return code, add, add


def _roundings(weight: Node) -> int:
    """How often the product of a code, which may be a sum, and its scales is rounded."""
    depth, node = 0, weight
    while node.op == "*" or (node.op in ("+", "-") and not depth and node.dtype == "float32"):
        depth += node.op == "*"
        node = next((arg for arg in node.args if isinstance(arg, Node) and arg.has_lanes), node.args[0])
    return depth


def _merged(terms: Sequence[_Term]) -> Node | None:
    """One vector of terms that are computed alike; None where all are 1.  Raises Unsupported."""
    nodes = [term.value for term in terms if term.value is not None]
    if nodes and len(nodes) < len(terms):
        raise Unsupported("scales that not all weights have")
    return parts(nodes) if nodes else None


def arrange(width: int, order: Sequence[int], tables: dict[str, Sequence[int]], rounds_x: int, is_plain: bool = False,
            ) -> list[str]:
    """C lines that arrange x, by step.  tables: of arrange.h.  rounds_x: 1 to 8 bits, 2 too, and floats of it are kept."""
    return [f"#define LANES {width}", VECTORS.read_text(encoding="utf-8"), f"#define COLUMNS {len(order)}",
            f"#define PLACES {len(tables['blocks'])}", f"#define ROUNDS_X {rounds_x}",
            f"#define SIDE_BY_SIDE {4 if is_plain else 1}",
            *(f"static const int16_t {name}[] = {braces(numbers)};" for name, numbers in ({"order": order} | tables).items()),
            ARRANGE.read_text(encoding="utf-8")]


class _Program:
    """The source in the making."""

    def __init__(self, reads: Reads, rows: int, width: int, length: int, count: int, rounds_x: bool) -> None:
        self.reads, self.rows, self.width, self.length, self.rounds_x = reads, rows, width, length, rounds_x
        self.trace = cache(partial(_trace, reads, length, count=count))
        self.starts = range(0, length, 4 * width)
        traces = [self.trace(range(start, start + 4 * width)) for start in self.starts]
        self.writer = Writer(width, traces)
        self.bytes = Bytes(self.writer)
        self.codes = [codes for start, trace in zip(self.starts, traces, strict=True) for codes in self._codes(start, trace)]
        order = [column for codes in self.codes for column in codes.columns]
        if sorted(order) != list(range(len(order))) or len(order) % X_BLOCK:
            raise Unsupported("columns that are not those of a step")
        if rounds_x and any(len({column // X_BLOCK for column in order[i:i + 4]}) > 1 for i in range(0, len(order), 4)):
            raise Unsupported("neighbours from several blocks of x")
        self._vectors(self.codes[0], Bytes(Writer(width, traces)))             # raises early what it may raise
        self.vectors, self.run = _Vectors(width), 4
        self._scales: dict[tuple[int, int], tuple[_Term, int]] = {}           # by start and part, and the unit of the first run
        self._place_scales()
        if (ROW - 4) * len(order) < 8 * len(self.vectors.blocks):
            raise Unsupported("scales of few columns")
        self.source = Source(self._text(order, prefetches(traces)), len(order), 1, ROW // 4)

    def _codes(self, start: int, trace: Trace) -> list[_Codes]:
        four = self.trace(range(start, start + 4))
        vectors = []
        for part, (one, wide) in enumerate(zip(four.uses, trace.uses, strict=True)):
            columns = (wide.columns.lanes * (4 * self.width))[:4 * self.width]
            weights = _split(self.rounds_x, one.weight, wide.weight, wide.weight)
            if not self.rounds_x and one.weight.op in ("+", "-", "*") and _roundings(one.weight) > 1:
                raise Unsupported("a code times several scales")
            code, add, base = _unsigned(weights.code) if self.rounds_x else (weights.code, 0, 0)
            vectors.append(_Codes(part, start, code, add, base, columns))
        return vectors

    # -- scales and offsets of runs ------------------------------------------------------------------------------------

    def _weights(self, start: int, units: Sequence[int]) -> list[tuple[_Weights, tuple[int, ...]]]:
        """For every weight of a unit its scale and offset at these units of a step, and the blocks of x."""
        four, wide = (self.trace(range(start, start + size)) for size in (4, 4 * self.width))
        coarse = self.trace(tuple(units))
        weights = [_split(self.rounds_x, *(use.weight for use in uses))
                   for uses in zip(four.uses, wide.uses, coarse.uses, strict=True)]
        blocks = [tuple(column // X_BLOCK * self.rounds_x for column in (use.columns.lanes * self.width)[:self.width])
                  for use in coarse.uses]
        return list(zip(weights, blocks, strict=True))

    def _is_run(self, start: int, count: int, size: int) -> bool:
        """Whether `count` runs of `size` units have the same scale, offset and block of x at all their units."""
        writer, first = Writer(self.width), None
        for inside in range(size):
            parts = self._weights(start, [start + lane % count * size + inside for lane in range(self.width)])
            texts = [(blocks, *(node and writer.write(node) for node in (part.scale, part.offset))) for part, blocks in parts]
            first = first or texts
            if texts != first:
                return False
        return True

    def _place_scales(self) -> None:
        """Choose runs, and put their scales and offsets into vectors: of the whole step, or of every vector of codes."""
        counts = [2 ** i for i in range(self.width.bit_length()) if self.length % (4 * 2 ** i) == 0]
        for count in counts:
            if self._is_run(0, count, self.length // count):
                self.run = self.length // count
                self._place(self.starts, count)
                return
        if not all(self._is_run(start, self.width, 4) for start in self.starts):
            raise Unsupported("neighbours of several scales")
        for start in self.starts:
            self._place([start], self.width)

    def _place(self, starts: Sequence[int], count: int) -> None:
        """Put the scales and offsets of `count` runs, which these vectors of codes have, into vectors."""
        unit, lanes = starts[0], range(self.width)
        side_by_side = self._weights(unit, [unit + lane % count * self.run for lane in lanes])
        alone = self._weights(unit, [unit + lane * count // self.width * self.run for lane in lanes])
        bases = {(codes.part, codes.base) for codes in self.codes if codes.start in starts}
        if len(bases) > len(alone):
            raise Unsupported("codes of several ranges")
        terms: dict[tuple[int | tuple[int, ...], ...], _Term] = {}
        scales, offsets = dict[_Term, Node | None](), dict[_Term, Node | None]()
        for (part, base), (weights, blocks), (own, _) in zip(sorted(bases), side_by_side, alone, strict=True):
            key = id(weights.scale), id(weights.offset), weights.sign, base, blocks
            if key not in terms:
                terms[key] = term = _Term(weights.scale, blocks, -base)
                scales[term] = own.scale
                if weights.offset is not None:
                    offsets[_Term(weights.offset, blocks, weights.sign, term)] = own.offset
            self._scales |= {(start, part): (terms[key], unit) for start in starts}
        for node, together in self._together([*scales], [*offsets], count):
            self.vectors.place((scales | offsets)[together[0]] if len(together) == 1 else node, together, count)

    def _together(self, scales: list[_Term], offsets: list[_Term], count: int) -> list[tuple[Node | None, list[_Term]]]:
        """Terms by vector: all in one, scales in one and offsets in another, or each in its own."""
        for groups in ([scales + offsets], [scales, offsets]):
            padded = [group + group[-1:] * ((1 << (len(group) - 1).bit_length()) - len(group)) for group in groups if group]
            if all(len(group) * count <= self.width for group in padded):
                try:
                    return [(_merged(group), group) for group in padded]
                except Unsupported:
                    continue
        return [(term.value, [term]) for term in scales + offsets]

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _text(self, order: list[int], ahead: list[str]) -> str:
        count, vectors, lanes = len(order), self.vectors, range(self.width)
        slots = [self._lane(codes, group) for codes in self.codes for group in lanes]
        is_plain = all(order[i:i + 4] == list(range(order[i], order[i] + 4)) for i in range(0, count, 4))
        if not self.rounds_x:
            order = [order[first + 4 * lane + byte] for first in range(0, count, 4 * self.width) for byte in range(4)
                     for lane in lanes]
        head = arrange(self.width, order, {"slots": slots, "blocks": vectors.blocks, "factors": vectors.factors,
                                           "sources": vectors.sources}, int(self.rounds_x), is_plain)
        sums = [f"a{m}_{i}" for m in range(self.rows) for i in range(2)]
        loops = ["for (int64_t n = first; n < last; n++) {", *(f"vf {name} = {{0}};" for name in sums),
                 *["#pragma GCC unroll 2"] * (self.rows == 1), f"for (int64_t step = 0; step < K / {count}; step++) {{", *ahead]
        size = 1 if self.rounds_x else 4
        loops.append("const uint8_t *bytes = (const uint8_t *)ordered;")
        for m in range(self.rows):
            loops += [f"const uint8_t *q{m} = bytes + {m * ROW} * K + step * {size * count};",
                      f"const uint8_t *d{m} = bytes + {m * ROW + size} * K + step * {8 * len(vectors.blocks)};"]
        ends = [f"out[{m} * N + n] = sum(a{m}_0 + a{m}_1);" for m in range(self.rows)]
        body = [*self.reads.lines, *loops, *self._scaled(), *self._products()]
        return "\n".join([*head, SIGNATURE, "{", *body, "}", *ends, "}", "}", ""])

    def _lane(self, codes: _Codes, group: int) -> int:
        """Among the lanes of all vectors, that of the scale of four neighbours."""
        term, unit = self._scales[codes.start, codes.part]
        first, wide = self.vectors.places[term]
        return first + (codes.start + 4 * group - unit) // self.run * wide

    def _scaled(self) -> list[str]:
        """Lines that multiply scales and offsets with the scales of x, and add their share of the sums."""
        body: list[str] = []
        for at, node in enumerate(self.vectors.nodes):
            name = "" if node is None else self.writer.write(node) if node.has_lanes else f"all_float({self.writer.write(node)})"
            body += self.writer.flush()
            for m in range(self.rows):
                factors = [name] if name else []
                factors += [f"vload_float32(d{m} + {4 * self.width * at})"] if self.rounds_x else []
                body.append(f"const vf s{at}_{m} = {' * '.join(factors) or 'all_float(1)'};")
                if any(self.vectors.factors[at * self.width:(at + 1) * self.width]):
                    sums = f"vload_float32(d{m} + {4 * (len(self.vectors.blocks) + self.width * at)})"
                    body.append(f"a{m}_1 = multiply_add(s{at}_{m}, {sums}, a{m}_1);")
        return body

    def _vectors(self, codes: _Codes, bytes: Bytes) -> list[str]:
        """The C names of codes: a vector of bytes, or four of floats."""
        return [bytes.shifted(codes.code, codes.add)] if self.rounds_x else bytes.floats(codes.code)

    def _products(self) -> list[str]:
        """Lines that add the products of all vectors of codes."""
        body: list[str] = []
        for place, codes in enumerate(self.codes):
            parts = self._vectors(codes, self.bytes)
            lanes = [self._lane(codes, group) for group in range(self.width)]
            at, wide = lanes[0] // self.width, self.vectors.places[self._scales[codes.start, codes.part][0]][1]
            first = at * self.width
            body += self.writer.flush()
            for m in range(self.rows):
                scale = f"s{at}_{m if self.rounds_x else 0}"
                if lanes != [first + group // wide * wide for group in range(self.width)]:
                    scale = self.writer.name("vf", f"permute({scale}, (vi){braces([lane % self.width for lane in lanes])})")
                body += self.writer.flush()
                x = f"q{m} + {(4 if self.rounds_x else 16) * self.width * place}"
                if self.rounds_x:
                    function = "small_dot" if range_of(codes.code)[1] + codes.add <= 127 else "dot"
                    total = f"to_float({function}({parts[0]}, vload_bytes({x})))"
                else:
                    total = f"{parts[0]} * vload_float32({x})"
                    for byte in range(1, 4):
                        total = f"multiply_add({parts[byte]}, vload_float32({x} + {4 * self.width * byte}), {total})"
                body.append(f"a{m}_{place % 2} = multiply_add({total}, {scale}, a{m}_{place % 2});")
        return body
