"""C source of products with x in 8 bits where neighbours in memory are rows: a lane is a row.

One instruction adds four products of bytes to the sum of each row: codes of four columns, times x there, the same in all lanes.

    a word has columns of one row      k7 k6 k5 k4 k3 k2 k1 k0 & 0x0f0f0f0f       ->  k6 k4 k2 k0  times x of k0, k2, k4, k6
                                                          >> 4 & 0x0f0f0f0f       ->  k7 k5 k3 k1  times x of k1, k3, k5, k7
    a word has rows of one column      bytes of four words, one per column, are transposed; then the same for rows n0, n2, ...

Sums over a block of x are integers, and are scaled after it; scales and zero points of the weight follow after a run of blocks
that share them.  `across_rows.c` has the loops.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from string import Template

from qdsl.runtime.cpu.bytes import braces
from qdsl.runtime.cpu.expressions import CACHE_LINE, Writer, bare
from qdsl.runtime.cpu.factored import X_BLOCK, arrange
from qdsl.runtime.cpu.language import run
from qdsl.runtime.cpu.merge import merged
from qdsl.runtime.cpu.source import SIGNATURE, Reads, Source, last_rows, shortest
from qdsl.runtime.cpu.trace import Index, Node, Pointer, Trace, Unsupported, Use

ROWS = 64                                                        # of a step, at least
RUNS = (128, 64, 32)                                             # columns that share scales of the weight, at most
STRIP = 4096                                                     # rows whose sums wait for scales in a cache
ARRANGED = 2                                                     # floats that a column of x has after `arrange`
LOOPS = Path(__file__).with_name("across_rows.c")


def source_of(reads: Reads, rows: int, width: int) -> Source:
    """The C source of the product for `rows` rows of x at a time; width: lanes.

    Raises Unsupported where weights are no codes of 8 bits, or have no scale that a block of columns shares.
    """
    reason = Unsupported("no runs")
    for columns in RUNS:
        try:
            return shortest(partial(_Program, reads, rows, width, columns), max(width, ROWS // reads.kernels.sums)).source
        except Unsupported as error:
            reason = error
    raise reason


def _split(nodes: Sequence[Node]) -> tuple[list[Node], list[tuple[str, Node]]]:
    """The codes of weights, and what is added to or multiplied with all of them alike, in that order."""
    nodes, steps = [bare(node) for node in nodes], list[tuple[str, Node]]()
    while {node.op for node in nodes} == {"float"}:
        nodes = [bare(node.args[0]) for node in nodes]
    shared = [len({id(node.args[i]) for node in nodes}) == 1 for i in (0, 1)] if len({node.op for node in nodes}) == 1 else []
    if nodes[0].op in ("*", "+", "-") and sorted(shared) == [False, True] and (nodes[0].op != "-" or shared[1]):
        place = shared.index(False)
        codes, steps = _split([node.args[place] for node in nodes])
        return codes, [*steps, (nodes[0].op, nodes[0].args[1 - place])]
    if any(node.dtype == "float32" or node.bounds[0] < 0 or node.bounds[1] > 255 for node in nodes):
        raise Unsupported("a weight that is no code of 8 bits with a scale")
    return list(nodes), steps


def _bits(code: Node) -> tuple[Node, int, int] | None:
    """(word, shift, mask) of codes that are bits of a byte of words; None for other codes."""
    mask, shift, node = code.bounds[1], 0, code
    node = bare(node.args[0]) if node.op == "&" and node.args[1].op == "number" else node
    if node.op == ">>" and node.args[1].op == "number":
        shift, node = int(node.args[1].args[0]), bare(node.args[0])
    if node.op != "load" or node.dtype not in ("int32", "uint32") or mask & mask + 1 or shift % 8 + mask.bit_length() > 8:
        return None
    return node, shift, mask


def _loads(node: Node) -> set[Pointer]:
    """Where the elements lie that a value is computed from."""
    if node.op == "load":
        return {node.args[0]}
    return set[Pointer]().union(*(_loads(arg) for arg in node.args if isinstance(arg, Node)))


class _Program:
    """The source in the making; length: rows of tiles in a step; columns: of a run."""

    def __init__(self, reads: Reads, rows: int, lanes: int, columns: int, length: int) -> None:
        self.reads, self.rows, self.lanes, self.run, self.length = reads, rows, lanes, columns, length
        self.tile = reads.kernels.sums
        alone = Trace("", 1, False)
        run(alone, reads.kernels.decode, reads.pointers(alone), alone.symbol("n"), alone.symbol("u"), reads.sizes)
        self.units = X_BLOCK * self.tile // len(alone.uses)      # of a block
        if length % lanes or not self.units:
            raise Unsupported("steps that are no vectors, or units that are no part of a block")
        self.writer = Writer(lanes)
        self.order: list[int] = []                               # of the columns of a block
        self.places: dict[tuple[int, int], tuple[int, int]] = {}                # of a row: its vector of sums, and the lane there
        self.source = Source(self._text(max(columns, 4 * lanes)), max(columns, 4 * lanes), length, ARRANGED, parts=1)

    def _uses(self, tiles: Sequence[int], units: Sequence[int], block: str = "") -> list[Use]:
        """The weights of units of a run, or from that block of it on, in these rows of tiles, which are lanes."""
        trace = Trace("step", len(tiles), True)
        n = trace.symbol("step") * self.length + Index(trace, (), tuple(tiles))
        start = trace.symbol("g") * (self.run // X_BLOCK * self.units) + (trace.symbol(block) * self.units if block else 0)
        for unit in units:
            run(trace, self.reads.kernels.decode, self.reads.pointers(trace), n, start + unit, self.reads.sizes)
        terms = {"g": self.run} | ({block: X_BLOCK} if block else {})
        if any(dict(use.columns.terms) != terms or use.live.text for use in trace.uses):
            raise Unsupported("columns that do not follow the units")
        return trace.uses

    # -- sums of a block -----------------------------------------------------------------------------------------------

    def _products(self) -> list[str]:
        """Lines that add the products of a block to sums of integers."""
        body, vectors = list[str](), []
        for first in range(0, self.length, self.lanes):
            uses, ahead = (self._uses(range(first, first + self.lanes), range(start, start + self.units), "b")
                           for start in (0, self.units))
            vectors.append((self._row_vectors if self.tile == 1 else self._column_vectors)(first, uses))
            for code in _split([use.weight for use in ahead if use.row == 0])[0] if first * 4 % CACHE_LINE == 0 else ():
                places = [self.writer.start(pointer, min(pointer.at.lanes)) for pointer in _loads(code)]
                body += [f"__builtin_prefetch({place}, 0, 2);" for place in places]
        columns = [use.columns.lanes[0] for use in uses if use.row == 0]
        for sums, four, codes, most in (product for side_by_side in zip(*vectors, strict=True) for product in side_by_side):
            place = self.order.index(columns[four[0]]) if columns[four[0]] in self.order else len(self.order)
            self.order[place:place + 4] = [columns[i] for i in four]
            for m in range(self.rows):
                x = self.writer.name("vi", f"all_int(load_int32(q[{m}] + column + {place}))")
                total, function = f"s[{sums * self.rows + m}]", "add_small_dot" if most <= 127 else "add_dot"
                body += [*self.writer.flush(), f"{total} = {function}({total}, (vb){codes}, (vb){x});"]
        if sorted(self.order) != list(range(X_BLOCK)):
            raise Unsupported("columns that are not those of a block")
        return list(dict.fromkeys(body))

    def _row_vectors(self, first: int, uses: Sequence[Use]) -> Iterator[tuple[int, list[int], str, int]]:
        """Vectors of codes of one row: their sums, the four weights of a unit that they are, their name, and the largest code."""
        codes, sums = _split([use.weight for use in uses])[0], first // self.lanes
        self.places |= {(first + lane, 0): (sums, lane) for lane in range(self.lanes)}
        words: dict[tuple[Node, int, int], dict[int, int]] = {}
        for i, code in enumerate(codes):
            word, shift, mask = _bits(code) or (code, 8 * (i % 4), 0)
            words.setdefault((word, shift % 8, mask), {})[shift // 8] = i
        if any(len(own) < 4 for own in words.values()):          # bits elsewhere in words: bytes are put together
            for i in range(0, len(codes), 4):
                whole = codes[i] | codes[i + 1] << 8 | codes[i + 2] << 16 | codes[i + 3] << 24
                yield sums, [*range(i, i + 4)], self.writer.write(whole), max(code.bounds[1] for code in codes)
            return
        for (word, shift, mask), own in words.items():
            yield sums, [own[byte] for byte in range(4)], self._masked(self.writer.write(word), shift, mask), mask

    def _column_vectors(self, first: int, uses: Sequence[Use]) -> Iterator[tuple[int, list[int], str, int]]:
        """The same of words that hold a column of several rows."""
        rows = [[_bits(code) for code in _split([use.weight for use in uses if use.row == row])[0]] for row in range(self.tile)]
        words = [bits and bits[0] for bits in rows[0]]
        bits = [own[0][1:] for own in rows if own[0] is not None]
        ways = sorted({(shift % 8, mask) for shift, mask in bits})
        if len(words) < X_BLOCK or any(own != [(word, *way) for word in words] for own, way in zip(rows, bits, strict=False)):
            raise Unsupported("rows that are not the same bits of words")
        start = first // self.lanes * 4
        for row, (shift, mask) in enumerate(bits):
            self.places |= {(first + lane, row): ((start + lane % 4) * len(ways) + ways.index((shift % 8, mask)),
                                                  lane // 4 * 4 + shift // 8) for lane in range(self.lanes)}
        for i in range(0, X_BLOCK, 4):
            name = f"c{first}_{i}"
            self.writer.lines += [f"vb {name}[] = {braces(f'(vb){self.writer.write(word)}' for word in words[i:i + 4] if word)};",
                                  f"transpose_bytes({name});"]
            for j in range(4):
                for way, (shift, mask) in enumerate(ways):
                    yield (start + j) * len(ways) + way, [*range(i, i + 4)], self._masked(f"{name}[{j}]", shift, mask), mask

    def _masked(self, word: str, shift: int, mask: int) -> str:
        """The C name of the same bits of all bytes."""
        text = f"(vi){word} >> {shift}" if shift else f"(vi){word}"
        return self.writer.name("vi", f"{text} & 0x{mask:02x}{mask:02x}{mask:02x}{mask:02x}" if mask < 255 else text)

    # -- sums of a run -------------------------------------------------------------------------------------------------

    def _scaled(self) -> list[str]:
        """Lines that scale the sums of a run and add them to those in `out`."""
        body, write = list[str](), Writer(self.lanes)
        for start in range(0, self.length * self.tile, self.lanes):
            rows = range(start, start + self.lanes)
            units = range(1 + self.units // X_BLOCK if start else self.run // X_BLOCK * self.units)     # of two columns, or all
            uses = self._uses([row // self.tile for row in rows], units)
            weights = [[use.weight for use in uses if use.row == row] for row in range(self.tile)]
            steps = [_split(own)[1] for own in weights]
            for m in range(self.rows):
                total = self._in_order(write, [self.places[divmod(row, self.tile)] for row in rows], m)
                for at, (sign, node) in enumerate(steps[0]):
                    node = merged([steps[row % self.tile][at][1] for row in rows], range(self.lanes)) if self.tile > 1 else node
                    name = write.write(node.trace.converted(node, "float32", False))
                    name = name if node.has_lanes else f"all_float({name})"
                    total = write.name("vf", f"{total} {sign} {name}" + ("" if sign == "*" else f" * all_float(sums[{m}])"))
                place = f"out + {m} * N + step * {self.length * self.tile} + {start}"
                body += [*write.flush(), f"store({place}, {total} + vload_float32((const uint8_t *)({place})));"]
        return body

    def _in_order(self, writer: Writer, places: Sequence[tuple[int, int]], m: int) -> str:
        """The C name of sums of neighbouring rows, which lie at these places."""
        parts = [(f"t[{sums * self.rows + m}]", {row: lane for row, (own, lane) in enumerate(places) if own == sums})
                 for sums in sorted({sums for sums, _ in places})]
        while len(parts) > 1 or parts[0][1] != {row: row for row in range(self.lanes)}:
            (first, lanes), (second, others) = parts[0], parts[-1] if len(parts) == 1 else parts[1]
            numbers = [lanes[row] if row in lanes else self.lanes + others.get(row, 0) for row in range(self.lanes)]
            name = writer.name("vf", f"permute_two({first}, {second}, (vi){braces(numbers)})")
            parts = [*parts[2:], (name, {row: row for row in lanes | others})]
        return parts[0][0]

    # -- lines ---------------------------------------------------------------------------------------------------------

    def _text(self, columns: int) -> str:
        products, scaled = self._products(), self._scaled()
        blocks, sums = columns // X_BLOCK, 1 + max(sums for sums, _ in self.places.values())
        sizes = {"RUN": self.run, "STEP": self.length, "TILE": self.tile, "STRIP": STRIP // (self.length * self.tile) or 1,
                 "SUMS": sums, "ROWS": self.rows, "BLOCKS": blocks, "ARRANGED": ARRANGED}
        head = arrange(self.lanes, [block * X_BLOCK + column for block in range(blocks) for column in self.order],
                       {"slots": [i * 4 // X_BLOCK for i in range(columns // 4)], "blocks": range(blocks),
                        "factors": [1] * blocks, "sources": range(blocks)}, 2)
        tail = last_rows(self.reads, self.rows, self.length, "rounded", f"{ARRANGED} * K")
        lines = {"tensors": self.reads.lines, "products": products, "scaled": scaled, "tail": tail}
        text = Template(LOOPS.read_text(encoding="utf-8")).substitute(
            {name: "\n".join(own) for name, own in lines.items()}, signature=SIGNATURE,
            sizes=", ".join(f"{name} = {size}" for name, size in sizes.items()))
        return "\n".join([*head, text])
