"""Prints the expressions of a trace as lines of C, each expression once."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable
from typing import Any

from qdsl.runtime.cpu.trace import INTEGERS, SIZES, Index, Node, Pointer, Trace, Unsupported

SCALARS = {"float32": "float", "uint32": "uint32_t", "int64": "int64_t"}
VECTORS = {"float32": "vf", "uint32": "vu"}
SHORT = 16                                                       # entries of a table that fit a float vector
CACHE_LINE = 64
AHEAD = 4096                                                     # bytes that a prefetch is ahead of the load
GATHER = 1.5                                                     # instructions per lane of a gather


class Writer:
    """Prints lines of C in one scope, for vectors of `lanes` lanes.

    instructions: estimated instructions of the vector lines.  traces: all traces of a step; their loads tell how many bytes of
    the tensor follow an address.
    """

    def __init__(self, lanes: int, traces: Iterable[Trace] = ()) -> None:
        self.lanes = lanes
        self._spans = _spans(traces)
        self.lines: list[str] = []
        self.instructions = 0.0
        self._names: dict[tuple[str, str], str] = {}
        self._nodes: dict[Node, str] = {}

    def write(self, node: Node, shown: dict[Node, str] | None = None) -> str:
        """The C name of a node's value; shown: names to use for some nodes, to print a copy of the expression."""
        names = self._nodes if shown is None else shown
        if node not in names:
            if shown is not None and not node.has_lanes:
                return self.write(node)
            names[node] = self._line(node, shown)
        return names[node]

    def weight(self, node: Node) -> str:
        """The C name of a weight; if only a 4-bit code differs between weights, all 16 values are computed and looked up."""
        codes = short_codes(node) if self.lanes == SHORT else None
        if not codes or len(codes) > 1 or (code := next(iter(codes))).op == "lanes":
            return self.write(node)
        numbers = ", ".join(map(str, range(SHORT)))
        table = self.write(node, {code: self.name("vi", f"(vi){{{numbers}}}", 0)})
        is_masked = code.op == "&" and code.args[1].op == "number" and code.args[1].args[0] == SHORT - 1
        index = self.write(code.args[0] if is_masked else code)  # a permutation reads the low 4 bits
        return self.name("vf", f"permute({table}, (vi){index})")

    def name(self, kind: str, text: str, cost: float = 1) -> str:
        """The name of an expression, declared in a new line if it has none yet."""
        key = kind, text
        if key not in self._names:
            self._names[key] = f"v{len(self._names)}"
            self.lines.append(f"const {kind} {self._names[key]} = {text};")
            self.instructions += cost if kind.startswith("v") else 0.25
        return self._names[key]

    def flush(self) -> list[str]:
        """The lines since the last call."""
        lines, self.lines = self.lines, []
        return lines

    def _kind(self, node: Node) -> str:
        if not node.has_lanes:
            return SCALARS.get(node.dtype, "int32_t")
        if not node.has_32_bits:
            raise Unsupported("vectors of 64-bit integers")
        return VECTORS.get(node.dtype, "vi")

    def _line(self, node: Node, shown: dict[Node, str] | None) -> str:
        if node.op == "number":
            return _literal(node)
        if node.op == "position":
            return f"(int32_t)({node.args[0]})"
        if node.op == "lanes":
            values = (node.args * self.lanes)[:self.lanes]
            return self.name("vi", f"(vi){{{', '.join(map(str, values))}}}", 0)
        kind = self._kind(node)
        if node.op == "load":
            return self._load(node, kind, shown)
        args = [self.write(arg, shown) if isinstance(arg, Node) else arg for arg in node.args]
        if node.op == "same" and self._kind(node.args[0]) == kind:
            return str(args[0])
        return self.name(kind, self._operation(node, kind, args))

    def _operation(self, node: Node, kind: str, args: list[Any]) -> str:
        """The C expression of an operation on names."""
        op, vector = node.op, node.has_lanes
        if op in ("+", "-", "*", "/", "%", "&", "|", "^", "<<", ">>", "==", "<"):
            left, right = (self._as_operand(arg, name, kind, op) for arg, name in zip(node.args, args, strict=True))
            return f"{left} {op} {right}"
        if op == "choose":
            return f"({args[0]}) ? {args[1]} : {args[2]}"
        if op == "select":
            if not vector:
                return f"{args[0]} ? {args[1]} : {args[2]}"
            helper = "float" if kind == "vf" else "int"
            names = [name if arg.has_lanes else f"all_{helper}({name})" for arg, name in zip(node.args, args, strict=True)]
            return f"select_{helper}({', '.join(names)})"
        if op in ("low", "low_signed"):
            name, bits = args
            return f"{name} & {(1 << bits) - 1}" if op == "low" else f"{name} << {32 - bits} >> {32 - bits}"
        name = args[0]
        if op in ("same", "cast", "bits"):
            return f"({kind}){name}"
        if op == "float":
            return f"to_float((vi){name})" if vector else f"(float){name}"
        if op == "bits_to_float":
            return f"(vf){name}" if vector else f"bits_to_float((uint32_t){name})"
        if op in ("float_to_bits", "round_to_half"):
            return f"({kind}){name}" if vector and kind == "vu" else f"{'v' if vector else ''}{op}({name})"
        helper = {"from_float16": "half", "from_bfloat16": "brain"}[op]
        return f"v{helper}({name})" if vector else f"{helper}((uint16_t){name})"

    def _as_operand(self, node: Node, name: str, kind: str, op: str) -> str:
        """A name as a vector operand; a float constant is cast, because with integers it would make a vector of integers."""
        if kind in ("vf", "vi", "vu") and not node.has_lanes:
            if not node.has_32_bits:
                raise Unsupported("64-bit integers beside vectors")
            if kind == "vf" or node.dtype == "float32":
                return f"all_float({name})"
            return f"({'uint32_t' if kind == 'vu' else 'int32_t'}){name}"
        return f"({kind}){name}" if node.has_lanes and kind != "vf" and op not in ("==", "<") else name

    def _load(self, node: Node, kind: str, shown: dict[Node, str] | None) -> str:
        pointer, dtype, live = node.args[:3]
        if dtype in ("float16", "bfloat16") and node.dtype != "float32":
            raise Unsupported(f"bits of a {dtype}")
        if not node.has_lanes:
            text = f"load_{dtype}({self._address(pointer, pointer.at.text())})"
            return self.name(kind, f"({live}) ? {text} : 0" if live else text)
        if live:
            raise Unsupported("a condition on a vector")
        if pointer.node is not None and pointer.node.has_lanes:
            return self._lookup(pointer, dtype, kind, shown)
        return self._neighbours(pointer, dtype, kind)

    def _address(self, pointer: Pointer, text: str) -> str:
        if pointer.node is not None:
            text += f" + (int64_t){self.write(pointer.node)} * {SIZES[pointer.dtype]}"
        return f"{pointer.name} + {text}"

    def _neighbours(self, pointer: Pointer, dtype: str, kind: str) -> str:
        """A vector of elements at addresses that differ by constants: contiguous, permuted or arbitrary."""
        size, lanes = SIZES[dtype], pointer.at.lanes
        first = min(lanes)
        order = [(lane - first) // size for lane in lanes]
        if sorted(order) == list(range(self.lanes)) and all((lane - first) % size == 0 for lane in lanes):
            start = self._address(pointer, (pointer.at + -1 * Index(pointer.at.trace, (), lanes) + first).text())
            vector = self.name(kind, f"vload_{dtype}({start})", 0.5)
            if order == list(range(self.lanes)):
                return vector
            if self.lanes >= 8:
                permuted = f"permute((vf){vector}, (vi){{{', '.join(map(str, order))}}})"
                return self.name(kind, f"({kind}){permuted}")
        window = self.window(pointer, size * self.lanes) if self.lanes >= 8 else None
        if window is not None:
            places = ", ".join(str((lane - window) // size) for lane in lanes)
            vector = self.name(kind, f"vload_{dtype}({self.start(pointer, window)})", 0.5)
            return self.name(kind, f"({kind})permute((vf){vector}, (vi){{{places}}})")
        if size == 2 and (window := self.window(pointer, 4 * self.lanes)) is not None:
            places = ", ".join(str((lane - window) // size) for lane in lanes)
            return self.name(kind, f"spread_{dtype}({self.start(pointer, window)}, (vc){{{places}}})", 2.5)
        scalar = "float" if kind == "vf" else "uint32_t" if kind == "vu" else "int32_t"
        names = [self.name(scalar, f"load_{dtype}({self._address(pointer, pointer.at.text(i))})") for i in range(self.lanes)]
        return self.name(kind, f"({kind}){{{', '.join(names)}}}", 1 + GATHER * len(set(names)))

    def start(self, pointer: Pointer, start: int) -> str:
        """The C expression of an address, without the offsets of lanes."""
        return self._address(pointer, (pointer.at + -1 * Index(pointer.at.trace, (), pointer.at.lanes) + start).text())

    def window(self, pointer: Pointer, length: int) -> int | None:
        """The start of a window of `length` bytes with all elements of a load, inside the tensor; None if there is none."""
        size, lanes = SIZES[pointer.dtype], pointer.at.lanes
        end = self._spans.get((pointer.name, pointer.at.terms), (0, 0))[1] if pointer.node is None else 0
        for start in (min(lanes) // length * length, min(lanes), end - length):
            inside = 0 <= start <= min(lanes) and max(lanes) + size <= start + length <= end
            if inside and all((lane - start) % size == 0 for lane in lanes):
                return start
        return None

    def _lookup(self, pointer: Pointer, dtype: str, kind: str, shown: dict[Node, str] | None) -> str:
        """Elements at computed indices: by a permutation for a short table, else one by one."""
        assert pointer.node is not None
        index = self.write(pointer.node, shown)
        if 0 < len(pointer.numbers) <= SHORT == self.lanes and pointer.at == Index(pointer.at.trace, ()):
            numbers = [*pointer.numbers, *[0.0] * (SHORT - len(pointer.numbers))]
            table = self.name("vf", f"(vf){{{', '.join(map(_float, numbers))}}}", 0)
            value = self.name("vf", f"permute({table}, (vi){index})")
            return value if kind == "vf" else self.name(kind, f"__builtin_convertvector({value}, {kind})")
        places = self.name("vi", f"(vi){index} * {SIZES[dtype]}", SIZES[dtype] > 1)
        base = pointer.at
        if not base.is_uniform:
            places = self.name("vi", f"{places} + (vi){{{', '.join(map(str, base.lanes))}}}")
            base += -1 * Index(base.trace, (), base.lanes)
        return self.name(kind, f"gather_{dtype}({pointer.name} + {base.text()}, {places})", GATHER * self.lanes)


def _spans(traces: Iterable[Trace]) -> dict[tuple[str, tuple[tuple[str, int], ...]], tuple[int, int]]:
    """The first byte and the end of the bytes that a step loads, by tensor and symbols of the address."""
    spans: dict[tuple[str, tuple[tuple[str, int], ...]], tuple[int, int]] = {}
    for pointer in (pointer for trace in traces for pointer in trace.loads()):
        key, lanes = (pointer.name, pointer.at.terms), pointer.at.lanes
        start, end = spans.get(key, (min(lanes), 0))
        spans[key] = min(start, *lanes), max(end, max(lanes) + SIZES[pointer.dtype])
    return spans


def prefetches(traces: Iterable[Trace]) -> list[str]:
    """Lines that prefetch what a later step loads; hardware prefetches tensors of which a step reads few bytes."""
    lines = []
    for (name, terms), (start, _) in _spans(traces).items():
        place = " + ".join(f"{factor} * {symbol}" for symbol, factor in terms)
        nbytes = dict(terms).get("step", 0)
        lines += [f"__builtin_prefetch({name} + {place} + {start + AHEAD + at}, 0, 0);"
                  for at in range(0, nbytes if nbytes >= CACHE_LINE else 0, CACHE_LINE)]
    return lines


def short_codes(node: Node) -> set[Node]:
    """The 4-bit codes that alone make lanes of a value differ; an empty set if something else differs too."""
    if not node.has_lanes:
        return set()
    if node.dtype in INTEGERS and node.op not in ("lanes", "float") and node.bounds[0] >= 0 and node.bounds[1] < SHORT:
        return {node}
    parts: list[Node] = [arg for arg in node.args if isinstance(arg, Node) and arg.has_lanes]
    if node.op == "load":
        pointer = node.args[0]
        if pointer.node is None or not pointer.at.is_uniform or not pointer.numbers:
            return {node, Node(node.trace, "", (), "", True)}    # two: lanes differ in what they load
        parts = [pointer.node]
    return set().union(*map(short_codes, parts)) if parts else {node, Node(node.trace, "", (), "", True)}


def bare(node: Node) -> Node:
    """The value of a node without type conversions."""
    return bare(node.args[0]) if node.op == "same" else node


def _literal(node: Node) -> str:
    number = node.args[0]
    if node.dtype == "float32":
        return _float(float(number))
    return f"{number}LL" if node.dtype == "int64" else f"{number}u" if node.dtype == "uint32" else str(number)


def _float(number: float) -> str:
    """The nearest float32 as a C literal."""
    if math.isnan(number):
        return '__builtin_nanf("")'
    rounded = struct.unpack("f", struct.pack("f", number))[0]
    return f"{float.hex(rounded)}f"
