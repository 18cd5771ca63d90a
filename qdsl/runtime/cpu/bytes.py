"""Prints C expressions of 8-bit integers: vectors of bytes, four bytes per lane of a float vector."""

from __future__ import annotations

from collections.abc import Iterable

from qdsl.runtime.cpu.expressions import SHORT, Writer, bare, short_codes
from qdsl.runtime.cpu.merge import are_alike, coarse, merged
from qdsl.runtime.cpu.trace import INTEGERS, Index, Node, Pointer, Unsupported


def range_of(code: Node) -> tuple[int, int]:
    """The least and the largest code.  Raises Unsupported if codes have more than 8 bits."""
    low, high = code.bounds
    if code.op == "load" and code.args[0].numbers:
        low, high = int(min(code.args[0].numbers)), int(max(code.args[0].numbers))
    if low < -128 or high > (255 if low >= 0 else 127):
        raise Unsupported("codes of more than 8 bits")
    return low, high


def _is(node: Node, number: int) -> bool:
    return node.op == "number" and bool(node.args[0] == number)


def _nibble(code: Node) -> tuple[Node, int] | None:
    """The bytes that hold a 4-bit code, and its first bit; None for other nodes."""
    code = bare(code)
    is_masked = code.op == "&" and code.args[1].op == "number" and code.args[1].args[0] == SHORT - 1
    if is_masked:
        code = bare(code.args[0])
    is_shifted = code.op == ">>" and code.args[1].op == "number"
    node, shift = (bare(code.args[0]), int(code.args[1].args[0])) if is_shifted else (code, 0)
    is_nibble = shift == 4 or (is_masked and shift < 4)
    return (node, shift) if node.op == "load" and node.bounds == (0, 255) and is_nibble else None


def braces(numbers: Iterable[object]) -> str:
    """The C text of an array's or vector's numbers."""
    return f"{{{', '.join(map(str, numbers))}}}"


class Bytes:
    """Writes lines of C for codes of a trace in which a lane is a byte."""

    def __init__(self, writer: Writer) -> None:
        self.writer, self.width = writer, writer.lanes
        self._bytes: dict[Node, str] = {}

    def floats(self, code: Node) -> list[str]:
        """The C names of four float vectors, one per byte; 4-bit codes are looked up, whatever their bit position."""
        if code.dtype == "float32" and code.op in ("+", "-"):
            offset, inner = coarse(code.args[1]), code.args[0]
            name = self.writer.write(offset) if offset.has_lanes else f"all_float({self.writer.write(offset)})"
            parts = self.floats(inner.args[0] if inner.op == "float" else inner)
            return [self.writer.name("vf", f"{part} {code.op} {name}") for part in parts]
        low, high = range_of(code)
        leaves = short_codes(code) if self.width == SHORT else set()
        if len(leaves) == 1:
            leaf = leaves.pop()
            table = self.writer.write(code, {leaf: self.writer.name("vi", f"(vi){braces(range(SHORT))}", 0)})
            table = table if code.dtype == "float32" else self.writer.name("vf", f"to_float((vi){table})")
            if (bits := _nibble(leaf)) is not None:
                codes, shift = self._byte(bits[0]), bits[1]
                return [self.writer.name("vf", f"permute({table}, (vi){codes} >> {shift + 8 * byte})") for byte in range(4)]
        function, add = "signed_byte" if low < 0 else "unsigned_byte", max(0, -low)
        if high + add <= 127:
            last = self.writer.name("vf", f"to_float({function}({self.shifted(code, 0)}, 3))")
            small = self.shifted(code, add)
            return [*(self.writer.name("vf", f"small_float({small}, {byte}, {add})") for byte in range(3)), last]
        return [self.writer.name("vf", f"to_float({function}({self.shifted(code, 0)}, {byte}))") for byte in range(4)]

    def shifted(self, code: Node, add: int) -> str:
        """The C name of codes plus a number; the table lookup of codes includes the addition."""
        if code.op == "load" and 0 < len(code.args[0].numbers) <= SHORT:
            return self._loaded(code, add)
        return self.writer.name("vb", f"{self._byte(code)} + (uint8_t){add}") if add else self._byte(code)

    def _byte(self, node: Node) -> str:
        """The C name of integers as bytes, by their values, whatever type the trace computes them in."""
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
            return self._moved(node, 255)
        text = self._signed(left, right) or self._signed(right, left) if node.op == "*" else self._masked(left, right)
        return name("vb", text if text and node.op in "*&" else f"{self._byte(left)} {node.op} {self._byte(right)}")

    def _signed(self, factor: Node, sign: Node) -> str | None:
        """The C expression of bytes times 1 or -1; None for other factors, because processors cannot multiply bytes."""
        negative = self._negative(bare(sign))
        return negative and f"negative_where({negative}, {self._byte(factor)})"

    def _masked(self, left: Node, right: Node) -> str | None:
        """The C expression of one bit of bytes, or of more bits after a shift; None for other operands."""
        if (bit := self._bit(left, right)) is not None:
            return f"{bit} & (uint8_t)1"
        if left.op == ">>" and right.op == left.args[1].op == "number":
            return f"{self._moved(left, right.args[0])} & {self._byte(right)}"
        return None

    def _negative(self, node: Node) -> str | None:
        """The C expression of bytes whose highest bit is set if a node is -1 and clear if it is 1; None for other nodes."""
        if node.op == "load" and set(node.args[0].numbers) == {-1, 1}:
            return self._byte(node)
        if node.op != "-" or not _is(node.args[0], 1) or node.args[1].op != "*" or not _is(node.args[1].args[0], 2):
            return None
        bit = bare(node.args[1].args[1])
        return self._bit(*bit.args) if bit.op == "&" else None

    def _bit(self, left: Node, right: Node) -> str | None:
        """The C name of bytes that are 255 if one bit is set, at a fixed position per lane, else 0; None for other nodes."""
        if not _is(right, 1) or left.op != ">>" or left.args[1].op != "lanes":
            return None
        bits = [1 << bit for bit in (left.args[1].args * 4 * self.width)[:4 * self.width]]
        return self.writer.name("vb", f"(vb)(({self._byte(left.args[0])} & (vb){braces(bits)}) != 0)")

    def _moved(self, node: Node, kept: int) -> str:
        """Bytes shifted, of which only the bits in `kept` are used; two at a time if no kept bit crosses bytes."""
        left, right = node.args
        if right.op != "number" or (node.op == ">>" and (left.bounds[0] < 0 or left.bounds[1] > 255)):
            raise Unsupported("a shift of bytes")
        bytes, count = self._byte(left), int(right.args[0])
        if not count:
            return bytes
        stays = node.bounds[0] >= 0 and node.bounds[1] <= 255 if node.op == "<<" else kept <= 255 >> count
        return self.writer.name("vb", f"(vb)((vs){bytes} {node.op} {count})" if stays else f"{bytes} {node.op} {count}")

    def _loaded(self, node: Node, add: int = 0) -> str:
        pointer, dtype, live = node.args[:3]
        count = 4 * self.width
        if 0 < len(pointer.numbers) <= SHORT and pointer.node is not None and pointer.at == Index(pointer.at.trace, ()):
            numbers = [int(number) + add & 255 for number in pointer.numbers] + [0] * (SHORT - len(pointer.numbers))
            return self.writer.name("vb", f"lookup((vt){{{', '.join(map(str, numbers))}}}, {self._byte(pointer.node)})")
        if dtype not in ("uint8", "int8") or live:
            raise Unsupported("a load of no bytes")
        if pointer.node is not None:
            return self._rows(pointer)
        if pointer.at.is_uniform:
            return f"(uint8_t){self.writer.write(node)}"
        lanes = pointer.at.lanes
        for parts, function in ((1, "vload_bytes"), (2, "halves"), (4, "quarters")):
            size = count // parts
            starts = lanes[::size]
            if all(lanes[i] == starts[i // size] + i % size for i in range(count)):
                at = pointer.at + -1 * Index(pointer.at.trace, (), lanes)
                return self.writer.name("vb", f"{function}({', '.join(f'{pointer.name} + {(at + i).text()}' for i in starts)})")
        if (window := self.writer.window(pointer, SHORT)) is None:
            raise Unsupported("bytes that do not lie together")
        places = braces(lane - window for lane in lanes)
        return self.writer.name("vb", f"lookup(vload_16({self.writer.start(pointer, window)}), (vb){places})")

    def _rows(self, pointer: Pointer) -> str:
        """Bytes of a table, four or eight adjacent ones at a computed index."""
        node = pointer.node
        assert node is not None
        lanes = (pointer.at.lanes * 4 * self.width)[:4 * self.width]
        size = next((size for size in (8, 4) if are_alike(node, size)
                     and all(lane == lanes[i // size * size] + i % size for i, lane in enumerate(lanes))), 0)
        if not size or pointer.at.terms:
            raise Unsupported("bytes of a table that are no neighbours")
        number, index = node.args if node.op == "*" and node.args[0].op == "number" else (None, node)
        factor = f"{number.args[0]}ull * (uint32_t)" if number else ""
        places = (f"{factor}{self.writer.write(merged([index], [at]))} + {lanes[at]}" for at in range(0, len(lanes), size))
        return self.writer.name("vb", f"rows_of_{size}({pointer.name}, (const size_t[]){braces(places)})")
