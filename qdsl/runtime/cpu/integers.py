"""C source of products of 8-bit integers: x in blocks of 32 columns with a scale each, weights as codes of 8 bits.

    w = scale * code + offset,  x = d * q     ->     sum of w * x = scale * d * (sum of code * q) + offset * d * (sum of q)

A vector of codes is four times as long as one of floats, and a dot product adds four neighbours to one integer: neighbours share
scale and offset.  They come from the decode function of the kernels, run on three sets of lanes: four neighbours, which say
what the code is; all lanes, for the codes; and every fourth, for scales and offsets.  Where these are the same for a run of many
units, a step of several vectors computes each once, in a lane per run: offsets meet sums of x over runs, scales are spread.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from qdsl.runtime.cpu.expressions import SHORT, Writer
from qdsl.runtime.cpu.language import run
from qdsl.runtime.cpu.merge import merged
from qdsl.runtime.cpu.source import LONGEST, SIGNATURE, VECTORS, Reads, Source
from qdsl.runtime.cpu.trace import INTEGERS, Index, Indivisible, Node, Trace, Unsupported

X_BLOCK = 32                                                     # columns of x that share a scale, as in ggml's Q8_0
ARRANGE = """
/* x [K] as 8-bit integers in the order of use, and after them per four the scale, per four or run scale times sum, and per four
   BASE times the sum. */
void arrange(const float *x, int8_t *codes, int64_t K) {
    float *scales = (float *)(codes + K), *sums = scales + K / 4;
    int32_t *starts = (int32_t *)(sums + K / 4);
    for (int64_t step = 0; step < K / COLUMNS; step++) {
        float d[COLUMNS / 32], inverse[COLUMNS / 32];
        for (int b = 0; b < COLUMNS / 32; b++) {
            float most = 0;
            for (int i = 0; i < 32; i++) most = larger(most, __builtin_fabsf(x[step * COLUMNS + 32 * b + i]));
            d[b] = most / 127;
            inverse[b] = most > 0 ? 127 / most : 0;
        }
        for (int i = 0; i < COLUMNS / 4; i++) sums[step * (COLUMNS / 4) + i] = 0;
        for (int i = 0; i < COLUMNS; i += 4) {
            const int64_t at = step * COLUMNS + i;
            int32_t sum = 0;
            for (int j = 0; j < 4; j++) {
                codes[at + j] = (int8_t)__builtin_rintf(x[step * COLUMNS + order[i + j]] * inverse[order[i] / 32]);
                sum += codes[at + j];
            }
            scales[at / 4] = d[order[i] / 32];
            sums[step * (COLUMNS / 4) + slots[i / 4]] += d[order[i] / 32] * sum;
            starts[at / 4] = -BASE * sum;
        }
    }
}
"""


@dataclass(frozen=True)
class _Weights:
    """Vectors of weights: codes by the lane, scale and offset by four lanes; None for 1 and 0.  sign: of the offset."""

    code: Node
    scale: Node | None
    offset: Node | None
    sign: str = ""


@dataclass(frozen=True)
class _Shared:
    """Scales and offsets of the runs of a step.  vector: which one their sums of x are; lane: where they begin in it."""

    weights: _Weights
    vector: int
    lane: int


def source_of(reads: Reads, rows: int, width: int) -> Source:
    """The C source of the product of 8-bit integers for `rows` rows of x at a time.

    width: floats in a vector.  Raises Unsupported where weights are no codes with a scale per four neighbours.
    """
    if reads.kernels.last == "n" or reads.kernels.sums > 1:
        raise Unsupported("vectors along N")
    length = 4 * width
    while length <= LONGEST:
        try:
            return _Program(reads, rows, width, length).source
        except Indivisible as error:
            length *= error.factor
    raise Unsupported("a step that is too long")


def _trace(reads: Reads, length: int, units: Sequence[int]) -> Trace:
    """The decode function at these units of a step."""
    trace = Trace("step", len(units), True)
    u = trace.symbol("step") * length + Index(trace, (), tuple(units))
    run(trace, reads.kernels.decode, reads.pointers(trace), trace.symbol("n"), u, reads.sizes)
    return trace


def _split(four: Node, wide: Node, coarse: Node) -> _Weights:
    """A weight as code, scale and offset: three traces of it, of which four neighbours say what the code is."""
    if four.op == "float":
        return _Weights(wide.args[0], None, None)
    if four.op == "load" and four.args[0].numbers and all(number == int(number) for number in four.args[0].numbers):
        return _Weights(wide, None, None)
    shared = [not arg.has_lanes for arg in four.args if isinstance(arg, Node)]
    if four.op not in ("*", "+", "-") or sorted(shared) != [False, True]:
        raise Unsupported("a weight that is no code times a scale")
    place = shared.index(False)
    part, other = _split(four.args[place], wide.args[place], coarse.args[place]), coarse.args[1 - place]
    if four.op == "*":
        offset = None if part.offset is None else part.offset * other
        return _Weights(part.code, other if part.scale is None else part.scale * other, offset, part.sign)
    if part.offset is not None or (four.op == "-" and place == 1):
        raise Unsupported("a code that is subtracted, or two offsets")
    return _Weights(part.code, part.scale, other, "-" if four.op == "-" else "")


def _merged(nodes: Sequence[Node | None]) -> Node | None:
    """One vector of scales or offsets; None where no weight has them.  Raises Unsupported."""
    own = [node for node in nodes if node is not None]
    if own and len(own) < len(nodes):
        raise Unsupported("scales or offsets that not all weights have")
    return merged(own) if own else None


class _Program:
    """The source in the making."""

    def __init__(self, reads: Reads, rows: int, width: int, length: int) -> None:
        self.rows, self.width = rows, width
        starts = range(0, length, 4 * width)
        self.traces = [_trace(reads, length, range(start, start + 4 * width)) for start in starts]
        self.writer = Writer(width, self.traces)
        self._bytes: dict[Node, str] = {}
        body: list[str] = []
        order: list[int] = []
        slots: list[int] = []
        bases = set()
        run_length = self._run_length(reads, length) if len(starts) > 1 else 0
        shared = self._shared(reads, length, run_length) if run_length else []
        for start in starts:
            wide = _trace(reads, length, range(start, start + 4 * width))
            four = _trace(reads, length, range(start, start + 4))
            units = [start + 4 * lane for lane in range(width)]
            coarse, last = (_trace(reads, length, [unit + i for unit in units]) for i in (0, 3))
            for place, uses in enumerate(zip(*(trace.uses for trace in (four, wide, coarse, last)), strict=True)):
                weights = _split(*(use.weight for use in uses[:3]))
                base = self._base(weights.code)
                bases.add(base)
                at = len(order)
                order += (uses[1].columns.lanes * (4 * width))[:4 * width]
                if shared:
                    runs = [shared[place].lane + unit // run_length for unit in units]
                    slots += [shared[place].vector * width + run for run in runs]
                    body += self._multiplied(replace(shared[place].weights, code=weights.code), base, at, runs,
                                             shared[place].vector * width if start == shared[place].lane == 0 else -1)
                else:
                    self._check_neighbours(weights, _split(uses[0].weight, uses[1].weight, uses[3].weight))
                    slots += range(at // 4, at // 4 + width)
                    body += self._multiplied(weights, base, at, [], -1)
        count = len(order)
        if sorted(order) != list(range(count)) or len(bases) > 1 or count % X_BLOCK:
            raise Unsupported("columns that are not those of a step")
        if any(len({column // X_BLOCK for column in order[i:i + 4]}) > 1 for i in range(0, count, 4)):
            raise Unsupported("neighbours from several blocks of x")
        self.source = Source(self._text(reads, body, order, slots, bases.pop()), count, 1, ())

    def _run_length(self, reads: Reads, length: int) -> int:
        """Of how many units, at most, scales and offsets are the same, so that a vector has those of a step; 0 for none."""
        for count in (1, 2, 4, 8, 16):
            if count <= self.width and length % (4 * count) == 0 and self._has_runs(reads, length, length // count):
                return length // count
        return 0

    def _has_runs(self, reads: Reads, length: int, run: int) -> bool:
        writer, names = Writer(self.width, self.traces), set()
        four, wide = (_trace(reads, length, range(count)) for count in (4, 4 * self.width))
        for inside in range(run):
            coarse = _trace(reads, length, [(lane * run + inside) % length for lane in range(self.width)])
            parts = [_split(*(use.weight for use in uses)) for uses in zip(four.uses, wide.uses, coarse.uses, strict=True)]
            names.add(tuple(node and writer.write(node) for part in parts for node in (part.scale, part.offset)))
        return len(names) == 1

    def _shared(self, reads: Reads, length: int, run: int) -> list[_Shared]:
        """The scales and offsets of a step, for every weight of a unit: in one vector, where they are computed alike."""
        four, wide = (_trace(reads, length, range(count)) for count in (4, 4 * self.width))
        coarse = _trace(reads, length, [lane * run % length for lane in range(self.width)])
        parts = [_split(*(use.weight for use in uses)) for uses in zip(four.uses, wide.uses, coarse.uses, strict=True)]
        count = len(parts)
        if self.width % count or self.width // count % (length // run):
            return [_Shared(part, place, 0) for place, part in enumerate(parts)]
        try:
            scale, offset = (_merged(own) for own in ([part.scale for part in parts], [part.offset for part in parts]))
        except Unsupported:
            return [_Shared(part, place, 0) for place, part in enumerate(parts)]
        return [_Shared(replace(part, scale=scale, offset=offset), 0, place * self.width // count)
                for place, part in enumerate(parts)]

    def _check_neighbours(self, weights: _Weights, at_end: _Weights) -> None:
        """Raises Unsupported where four neighbours have several scales or offsets."""
        for one, other in ((weights.scale, at_end.scale), (weights.offset, at_end.offset)):
            if one is not None and other is not None and self.writer.write(one) != self.writer.write(other):
                raise Unsupported("neighbours of several scales")

    def _text(self, reads: Reads, body: list[str], order: list[int], slots: list[int], base: int) -> str:
        count = len(order)
        tables = [f"static const int16_t {name}[] = {{{', '.join(map(str, numbers))}}};"
                  for name, numbers in (("order", order), ("slots", slots))]
        head = [f"#define LANES {self.width}", f"#define COLUMNS {count}", f"#define BASE {base}",
                VECTORS.read_text(encoding="utf-8"), *tables, ARRANGE, SIGNATURE, "{"]
        tensors = [f"const uint8_t *const t{i} = tensors[{i}];" for i in range(len(reads.dtypes) + len(reads.kernels.tables))]
        sums = [f"a{m}_{i}" for m in range(self.rows) for i in range(2)]
        loops = ["for (int64_t n = first; n < last; n++) {", *(f"vf {name} = {{0}};" for name in sums),
                 f"for (int64_t step = 0; step < K / {count}; step++) {{"]
        for m in range(self.rows):
            loops += [f"const uint8_t *q{m} = (const uint8_t *)x + {m} * 4 * K + step * {count};",
                      f"const uint8_t *d{m} = (const uint8_t *)x + {m} * 4 * K + K + step * {count};"]
        ends = [f"out[{m} * N + n] = sum(a{m}_0 + a{m}_1);" for m in range(self.rows)]
        return "\n".join([*head, *tensors, *loops, *body, "}", *ends, "}", "}", ""])

    def _multiplied(self, weights: _Weights, base: int, place: int, runs: list[int], sums: int) -> list[str]:
        """Lines that add a vector of weights, times x, to the sums of a row.

        runs: the runs that the lanes' scales belong to; then the sums of x of its runs lie from `sums` on, -1 for done already.
        """
        writer = self.writer
        code = self._byte(weights.code)
        code = writer.name("vb", f"{code} + (uint8_t){base}") if base else code
        scale, offset = ("" if node is None else writer.write(node) if node.has_lanes else f"all_float({writer.write(node)})"
                         for node in (weights.scale, weights.offset))
        if scale and runs:
            scale = writer.name("vf", f"permute({scale}, (vi){{{', '.join(map(str, runs))}}})")
        lines, writer.lines = writer.lines, []
        turn = place // (4 * self.width) % 2
        for m in range(self.rows):
            name = f"a{m}_{turn}"
            dot = f"to_float(dot(vload_int32(d{m} + 2 * K + {place}), {code}, vload_bytes(q{m} + {place})))"
            factor = f"vload_float32(d{m} + {place})"
            lines.append(f"{name} = multiply_add({dot}, {f'{scale} * {factor}' if scale else factor}, {name});")
            if offset and (not runs or sums >= 0):
                at = 4 * sums if runs else place
                lines.append(f"{name} = multiply_add({weights.sign}{offset}, vload_float32(d{m} + K + {at}), {name});")
        return lines

    # -- codes as bytes ------------------------------------------------------------------------------------------------

    @staticmethod
    def _base(code: Node) -> int:
        """What is added to codes, so that none is negative."""
        low, high = code.bounds
        if code.op == "load" and code.args[0].numbers:
            low, high = int(min(code.args[0].numbers)), int(max(code.args[0].numbers))
        if low >= 0 and high <= 255:
            return 0
        if low < -128 or high > 127:
            raise Unsupported("codes of more than 8 bits")
        return -low

    def _byte(self, node: Node) -> str:
        """The C name of integers as bytes: of their values, whatever type they are computed in."""
        if node not in self._bytes:
            self._bytes[node] = self._byte_line(node)
        return self._bytes[node]

    def _byte_line(self, node: Node) -> str:
        name = self.writer.name
        if node.op == "number":
            return f"(uint8_t){int(node.args[0]) & 255}"
        if node.op == "load":
            return self._loaded(node)
        if not node.has_lanes and node.dtype in INTEGERS:
            return f"(uint8_t){self.writer.write(node)}"
        if node.op in ("same", "low", "low_signed", "cast") and (node.op != "low" or node.args[1] == 8):
            return self._byte(node.args[0])
        if node.op == "lanes":
            return name("vb", f"(vb){{{', '.join(str(value & 255) for value in (node.args * 4 * self.width)[:4 * self.width])}}}")
        if node.op not in ("+", "-", "*", "&", "|", "^", "<<", ">>"):
            raise Unsupported(f"{node.op} of bytes")
        left, right = node.args
        if node.op in ("<<", ">>"):
            if right.op != "number" or (node.op == ">>" and (left.bounds[0] < 0 or left.bounds[1] > 255)):
                raise Unsupported("a shift of bytes")
            return name("vb", f"{self._byte(left)} {node.op} {right.args[0]}") if right.args[0] else self._byte(left)
        return name("vb", f"{self._byte(left)} {node.op} {self._byte(right)}")

    def _loaded(self, node: Node) -> str:
        pointer, dtype, live = node.args[:3]
        count = 4 * self.width
        if pointer.numbers and pointer.node is not None and pointer.at == Index(pointer.at.trace, ()):
            if len(pointer.numbers) > SHORT:
                raise Unsupported("a long table")
            numbers = [int(number) & 255 for number in pointer.numbers] + [0] * (SHORT - len(pointer.numbers))
            return self.writer.name("vb", f"lookup((vt){{{', '.join(map(str, numbers))}}}, {self._byte(pointer.node)})")
        if dtype not in ("uint8", "int8") or live or pointer.node is not None:
            raise Unsupported("a load of no bytes")
        if pointer.at.is_uniform:
            return f"(uint8_t){self.writer.write(node)}"
        lanes = pointer.at.lanes
        for parts, function in ((1, "vload_bytes"), (2, "halves"), (4, "quarters")):
            size = count // parts
            starts = lanes[::size]
            if all(lanes[i] == starts[i // size] + i % size for i in range(count)):
                at = pointer.at + -1 * Index(pointer.at.trace, (), lanes)
                return self.writer.name("vb", f"{function}({', '.join(f'{pointer.name} + {(at + i).text()}' for i in starts)})")
        raise Unsupported("bytes that do not lie together")
