"""Runs a storage's decode function on symbols: the same lines that Triton compiles give the expressions of a CPU loop.

A generated `_decode_*` function has no other language than positions, loads and arithmetic.  Here it is called with symbols in
place of Triton's tensors.  One of its two positions, the unit along K or the row along N, stands for `width` neighbours at
once, the lanes of a vector.  A position is linear in symbols that the loop knows, plus a number per lane, so that every load
is a scalar, a vector, or scalars side by side.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partialmethod
from typing import Any

INTEGERS = {"uint8": (0, 255), "int8": (-128, 127), "uint16": (0, 65535), "int16": (-1 << 15, (1 << 15) - 1),
            "int32": (-1 << 31, (1 << 31) - 1), "uint32": (0, (1 << 32) - 1), "int64": (-1 << 63, (1 << 63) - 1)}
SIZES = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "uint32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
         "float32": 4}
COMPARISONS = ("<", "==")
CORNERS = {"+": operator.add, "-": operator.sub, "*": operator.mul, "<<": operator.lshift, ">>": operator.rshift}
FROM_FLOAT = {("float16", False): "narrow", ("uint32", True): "float_to_bits"}                # by type, and whether bits are kept


class Unsupported(Exception):
    """The decode function has a step that these lanes cannot take."""


class Indivisible(Unsupported):
    """A position is divided by a number that the loop's step is no multiple of; `factor` times the step is one."""

    def __init__(self, factor: int) -> None:
        super().__init__(f"a step that is no multiple of {factor}")
        self.factor = factor


@dataclass(frozen=True)
class Index:
    """A position: symbols by their whole coefficients, C expressions of int64, plus a number per lane.

    lanes: one number for all lanes, or as many as there are lanes.
    """

    trace: Trace
    terms: tuple[tuple[str, int], ...]
    lanes: tuple[int, ...] = (0,)

    @property
    def is_uniform(self) -> bool:
        """Whether all lanes have one position."""
        return len(self.lanes) == 1

    def text(self, lane: int = 0) -> str:
        """The C expression of a lane."""
        parts = [f"{factor} * {name}" if factor != 1 else name for name, factor in self.terms]
        number = self.lanes[lane % len(self.lanes)]
        return " + ".join(parts + [str(number)] * (number != 0 or not parts))

    def _with(self, terms: Mapping[str, int], lanes: Sequence[int]) -> Index:
        alike = (lanes[0],) if len(set(lanes)) == 1 else tuple(lanes)
        return Index(self.trace, tuple((name, factor) for name, factor in terms.items() if factor), alike)

    def _of(self, other: Index | int) -> Index:
        return other if isinstance(other, Index) else Index(self.trace, (), (other,))

    def _lanes(self, other: Index, function: Callable[[int, int], int]) -> list[int]:
        count = max(len(self.lanes), len(other.lanes))
        return [function(self.lanes[i % len(self.lanes)], other.lanes[i % len(other.lanes)]) for i in range(count)]

    def __add__(self, other: Any) -> Any:
        if not isinstance(other, Index | int):
            return NotImplemented
        right, terms = self._of(other), dict(self.terms)
        for name, factor in right.terms:
            terms[name] = terms.get(name, 0) + factor
        return self._with(terms, self._lanes(right, lambda a, b: a + b))

    def __mul__(self, other: Any) -> Any:
        if not isinstance(other, Index | int):
            return NotImplemented
        right = self._of(other)
        if not right.terms and right.is_uniform:
            by = right.lanes[0]
            return self._with({name: factor * by for name, factor in self.terms}, [lane * by for lane in self.lanes])
        if not self.terms and self.is_uniform:
            return right * self.lanes[0]
        if not self.terms and not right.terms:
            return self._with({}, self._lanes(right, lambda a, b: a * b))
        if self.is_uniform and right.is_uniform:
            return self.trace.symbol(f"({self.text()}) * ({right.text()})", self.trace.factors(self) | self.trace.factors(right))
        raise Unsupported("a product of positions that differ by lane")

    __radd__, __rmul__ = __add__, __mul__

    def __sub__(self, other: Any) -> Any:
        return self + -1 * other if isinstance(other, Index | int) else NotImplemented

    def __rsub__(self, other: Any) -> Any:
        return -1 * self + other if isinstance(other, int) else NotImplemented

    def __floordiv__(self, by: Any) -> Index:
        if isinstance(by, Index):
            return self._by_index("/", by)
        whole, left = self._divided(by)
        if self.is_uniform and left:
            unit = math.gcd(by, *(factor for _, factor in self.terms))
            units = self._with({name: factor // unit for name, factor in self.terms}, [self.lanes[0] // unit])
            return self.trace.symbol(f"({units.text()}) / {by // unit}", set())
        return self._with(whole, [lane // by for lane in self.lanes])

    def __mod__(self, by: Any) -> Index:
        if isinstance(by, Index):
            return self._by_index("%", by)
        _, left = self._divided(by)
        if self.is_uniform and left:
            return self.trace.symbol(f"({self.text()}) % {by}", set())
        return self._with({}, [lane % by for lane in self.lanes])

    def __rfloordiv__(self, other: int) -> Index:
        return self._of(other)._by_index("/", self)

    def __rmod__(self, other: int) -> Index:
        return self._of(other)._by_index("%", self)

    def _by_index(self, sign: str, by: Index) -> Index:
        """The quotient or remainder by a position that the loop knows."""
        if not self.is_uniform or not by.is_uniform:
            raise Unsupported("positions that differ by lane, divided")
        return self.trace.symbol(f"({self.text()}) {sign} ({by.text()})")

    def _divided(self, by: int) -> tuple[dict[str, int], bool]:
        """The quotients of all terms, and whether one has none; raises Indivisible for lanes that would then differ."""
        whole = {}
        for name, factor in self.terms:
            if factor % by:
                step = by // math.gcd(by, factor)
                if self.is_uniform:
                    return {}, True
                if name == self.trace.step:
                    raise Indivisible(step)
                if "K" not in self.trace.symbols.get(name, ()):
                    raise Unsupported(f"{name} divided by {by} in lanes")
                self.trace.divisor = math.lcm(self.trace.divisor, step)
                whole[f"({name}) / {step}"] = factor * step // by
            else:
                whole[name] = factor // by
        return whole, False

    def _compared(self, sign: str, other: Index | int) -> Any:
        right = self._of(other)
        if not self.terms and not right.terms:
            return Lanes(tuple(self._lanes(right, (lambda a, b: int(a < b)) if sign == "<" else (lambda a, b: int(a > b)))))
        if self.trace.is_inside and {name for name, _ in right.terms} & {"N", "K"}:
            return ALWAYS
        if self.is_uniform and right.is_uniform:
            return Mask(f"{self.text()} {sign} {right.text()}")
        raise Unsupported("a comparison of positions that differ by lane")

    __lt__, __gt__ = partialmethod(_compared, "<"), partialmethod(_compared, ">")

    def __and__(self, other: Any) -> Any:
        return self._bits(other, lambda a, b: a & b)

    def __rshift__(self, other: Any) -> Any:
        return self._bits(other, lambda a, b: a >> b)

    def _bits(self, other: Any, function: Callable[[int, int], int]) -> Any:
        if isinstance(other, Index | int) and not self.terms and not self._of(other).terms:
            return self._with({}, self._lanes(self._of(other), function))
        return NotImplemented


@dataclass(frozen=True)
class Lanes:
    """Truth per lane, known already."""

    values: tuple[int, ...]


@dataclass(frozen=True)
class Mask:
    """A condition on positions, and one that is known for every lane; '' and () are always true."""

    text: str = ""
    lanes: tuple[int, ...] = ()

    def __and__(self, other: Mask | Lanes | Node | bool) -> Mask:
        if isinstance(other, Node):
            raise Unsupported("a condition on values")
        if isinstance(other, bool):
            return self if other else NEVER
        if isinstance(other, Lanes):
            if self.lanes:
                raise Unsupported("two conditions that differ by lane")
            return Mask(self.text, other.values) if len(set(other.values)) > 1 else self if other.values[0] else NEVER
        return self if self == NEVER else Mask(" && ".join(filter(None, (self.text, other.text))), self.lanes or other.lanes)

    @property
    def by_loop(self) -> str:
        """The C text of a condition that all lanes have.  Raises Unsupported."""
        if self.lanes:
            raise Unsupported("a condition that differs by lane")
        return self.text


ALWAYS, NEVER = Mask(), Mask("0")


class PointerType(str):
    """The name of the type that a pointer's elements have, as Triton's `dtype` of a pointer knows it."""

    @property
    def element_ty(self) -> str:
        """The type of the elements."""
        return str(self)


@dataclass(frozen=True)
class Pointer:
    """A place in a tensor, in bytes; node: a value that is added, in elements; bounds, numbers: of a table."""

    name: str
    dtype: str
    at: Index
    node: Node | None = None
    bounds: tuple[int, int] | None = None
    numbers: tuple[float, ...] = ()

    @property
    def has_lanes(self) -> bool:
        """Whether lanes have places of their own."""
        return not self.at.is_uniform or (self.node is not None and self.node.has_lanes)

    def __add__(self, other: Any) -> Pointer:
        if isinstance(other, Node):
            return replace(self, node=other if self.node is None else self.node + other)
        return replace(self, at=self.at + other * SIZES[self.dtype])

    __radd__ = __add__

    def __sub__(self, other: Any) -> Pointer:
        return self.__add__(-1 * other)

    def to(self, dtype: str) -> Pointer:
        """The same place, read as another type."""
        return replace(self, dtype=dtype)


def _operation(sign: str, is_reflected: bool = False) -> Callable[[Node, Any], Any]:
    """A method for an operator of nodes."""
    return lambda node, other: node.trace.binary(sign, *((other, node) if is_reflected else (node, other)))


@dataclass(frozen=True, eq=False)
class Node:
    """A step of the arithmetic: an operation on nodes and numbers, the type of its result in Triton, whether lanes differ.

    bounds: of integers, the least and the largest that the result can be.
    """

    trace: Trace
    op: str
    args: tuple[Any, ...]
    dtype: str
    has_lanes: bool
    bounds: tuple[int, int] = (0, 0)

    @property
    def has_32_bits(self) -> bool:
        """Whether the value has, whatever type it is computed in."""
        is_far = self.op in (">>", "<<") and self.args[1].bounds[1] > 31            # such a shift has no form in 32 bits
        return self.dtype != "int64" or (self.bounds[0] >= -1 << 31 and self.bounds[1] < 1 << 31 and not is_far)

    __add__, __radd__ = _operation("+"), _operation("+", True)
    __sub__, __rsub__ = _operation("-"), _operation("-", True)
    __mul__, __rmul__ = _operation("*"), _operation("*", True)
    __and__ = __rand__ = _operation("&")
    __or__, __ror__ = _operation("|"), _operation("|", True)
    __lshift__, __rlshift__ = _operation("<<"), _operation("<<", True)
    __xor__, __rshift__, __floordiv__, __mod__ = map(_operation, ("^", ">>", "/", "%"))
    __lt__, __gt__ = _operation("<"), _operation("<", True)
    __eq__ = _operation("==")

    def __neg__(self) -> Any:
        return self.trace.binary("-", 0, self)

    __hash__ = object.__hash__

    def to(self, dtype: str, bitcast: bool = False) -> Node:
        """The value in another type, or its bits as one."""
        return self.trace.converted(self, dtype, bitcast)


@dataclass
class Use:
    """A weight that decode gave: its row in a tile, its columns, its value in float32, and where it is one."""

    row: int
    columns: Index
    weight: Node
    live: Mask


@dataclass(eq=False)
class Trace:
    """The expressions of one call of a decode function.

    step: the symbol of the loop whose positions are lanes.  width: lanes.  is_inside: no position is beyond the weight.
    divisor: what K must be a multiple of.  uses: the weights, in order.
    """

    step: str
    width: int
    is_inside: bool
    divisor: int = 1
    uses: list[Use] = field(default_factory=list)
    symbols: dict[str, frozenset[str]] = field(default_factory=dict)
    _nodes: dict[tuple[Any, ...], Node] = field(default_factory=dict)

    def symbol(self, text: str, factors: set[str] | frozenset[str] = frozenset(), lanes: Sequence[int] = (0,)) -> Index:
        """A position of the loop, by its C expression; factors: of N and K, which it is a multiple of."""
        name = text if text.isidentifier() else f"({text})"
        self.symbols[name] = frozenset(factors)
        return Index(self, ((name, 1),), tuple(lanes))

    def factors(self, index: Index) -> set[str]:
        """Which of N and K a position is a multiple of, where it is one symbol."""
        return set(self.symbols.get(index.terms[0][0], ())) if len(index.terms) == 1 and index.lanes == (0,) else set()

    def use(self, state: None, columns: Index, weight: Node, live: Mask, row: int = 0) -> None:
        """What a decode function calls for each of its weights."""
        self.uses.append(Use(row, columns, self.converted(weight, "float32", False), Mask(live.by_loop)))

    def node(self, op: str, args: tuple[Any, ...], dtype: str, bounds: tuple[int, int] | None = None, has_lanes: bool = False,
             ) -> Node:
        """The node of an operation, the same one for the same arguments."""
        bounds = bounds or INTEGERS.get(dtype, (0, 0))
        key = (op, dtype, bounds, *(id(arg) if isinstance(arg, Node) else (type(arg), arg) for arg in args))
        if key not in self._nodes:
            differs = has_lanes or any(arg.has_lanes for arg in args if isinstance(arg, Node))
            self._nodes[key] = Node(self, op, args, dtype, differs, bounds)
        return self._nodes[key]

    def value(self, number: Any, dtype: str = "int32") -> Node:
        """A number, a position or a node as a node."""
        if isinstance(number, Node):
            return number
        if isinstance(number, Index) and not number.is_uniform:
            if number.terms:
                raise Unsupported("a position that differs by lane as a number")
            lanes = tuple(number.lanes)
            return self.node("lanes", lanes, "int32", (min(lanes), max(lanes)), has_lanes=True)
        if isinstance(number, Index) and number.terms:
            return self.node("position", (number.text(),), "int32")
        number = number.lanes[0] if isinstance(number, Index) else number
        if isinstance(number, float):
            return self.node("number", (number,), "float32")
        return self.node("number", (int(number),), dtype, (int(number), int(number)))

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        """An operation of two, in the type that Triton computes it in."""
        strong = [arg.dtype for arg in (left, right) if isinstance(arg, Node)]
        if any(isinstance(arg, float) for arg in (left, right)) or any(dtype.startswith(("float", "bfloat")) for dtype in strong):
            a, b = (self.converted(self.value(arg), "float32", False) for arg in (left, right))
            return self.node(sign, (a, b), "bool" if sign in COMPARISONS else "float32")
        strong += ["int32" for arg in (left, right) if isinstance(arg, Index)]
        dtype = max(strong, key=lambda name: (SIZES[name], name.startswith("u")))
        a, b = self.value(left, dtype), self.value(right, dtype)
        if sign in COMPARISONS:
            return self.node(sign, (a, b), "bool")
        low, high = _bounds(sign, a.bounds, b.bounds)
        limits = INTEGERS[dtype]
        if sign == "&" and b.op == "number" and a.bounds[0] >= 0 and a.bounds[1] <= b.args[0] and not b.args[0] & b.args[0] + 1:
            return a                                             # the mask keeps all bits
        if limits[0] <= low and high <= limits[1]:
            return self.node(sign, (a, b), dtype, (low, high))
        wide = dtype if SIZES[dtype] >= 4 else "int32"
        result = self.node(sign, (a, b), wide, None if wide == dtype else (low, high))
        return result if wide == dtype else self.wrapped(result, dtype)

    def wrapped(self, node: Node, dtype: str) -> Node:
        """The low bits of an integer as another integer type."""
        low, high = INTEGERS[dtype]
        if (low <= node.bounds[0] and node.bounds[1] <= high) or SIZES[dtype] > SIZES[node.dtype]:
            return self.node("same", (node,), dtype, node.bounds)
        if SIZES[dtype] >= 4:
            return self.node("cast", (node,), dtype)
        return self.node("low" if low == 0 else "low_signed", (node, 8 * SIZES[dtype]), dtype)

    def converted(self, number: Any, dtype: str, bitcast: bool) -> Node:
        """A value as another type."""
        node = self.value(number)
        if node.dtype == dtype:
            return node
        if not bitcast and dtype == "float32":
            return self._as_float(node)
        if node.dtype == "float32" and (dtype, bitcast) in FROM_FLOAT:
            return self.node(FROM_FLOAT[dtype, bitcast], (node,), dtype)
        if dtype == "float32":
            return self.node("bits_to_float", (node,), dtype)
        if dtype in ("float16", "bfloat16") and bitcast:
            return self.node("bits", (node,), dtype)
        if dtype in INTEGERS and node.dtype in INTEGERS:
            if node.op == "load" and SIZES[dtype] == SIZES[node.dtype]:
                return self.node("load", (node.args[0], dtype, *node.args[2:]), dtype, has_lanes=node.has_lanes)
            return self.wrapped(node, dtype)
        raise Unsupported(f"{node.dtype} as {dtype}")

    def _as_float(self, node: Node) -> Node:
        """A value as float32."""
        if node.op == "narrow":
            return self.node("round_to_half", node.args, "float32")
        if node.dtype in ("float16", "bfloat16"):
            return self.node("load", (*node.args, "float32"), "float32", has_lanes=node.has_lanes) if node.op == "load" \
                else self.node(f"from_{node.dtype}", (node.args[0],), "float32")
        return self.node("float", (node,), "float32")

    def load(self, pointer: Pointer, live: Mask = ALWAYS, other: int = 0) -> Node:
        """The elements at a pointer: args are the pointer, the type in memory, and the condition."""
        if live == NEVER and pointer.dtype in INTEGERS:
            return self.value(other, pointer.dtype)
        if live.lanes and pointer.dtype in INTEGERS and not other:
            lanes = pointer.at.lanes * (len(live.lanes) // len(pointer.at.lanes))
            at = lanes[live.lanes.index(1)]                      # what the others would read may not be there
            places = pointer.at._with(dict(pointer.at.terms), [lane if live.lanes[i] else at for i, lane in enumerate(lanes)])
            mask = self.node("lanes", tuple(-is_live for is_live in live.lanes), "int32", (-1, 0), has_lanes=True)
            masked: Node = self.load(replace(pointer, at=places), Mask(live.text)) & mask
            return masked
        return self.node("load", (pointer, pointer.dtype, live.by_loop), pointer.dtype, pointer.bounds, pointer.has_lanes)

    def loads(self) -> list[Pointer]:
        """The pointers of all loads without a condition and without a value in the place."""
        loads = [node.args for node in self._nodes.values() if node.op == "load"]
        return [pointer for pointer, _, live, *_ in loads if not live and pointer.node is None]

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        """One of two values, by a condition that may differ between lanes.  Raises Unsupported."""
        if isinstance(condition, Lanes):
            if not all(isinstance(arg, Index | int) for arg in (yes, no)):
                raise Unsupported("a choice of values by lane")
            chosen = [Index(self, (), (0,)) + arg for arg in (yes, no)]
            if any(arg.terms for arg in chosen):
                raise Unsupported("a choice of positions by lane")
            flags = condition.values
            lanes = [chosen[not flags[i % len(flags)]].lanes for i in range(self.width)]
            return chosen[0]._with({}, [lane[i % len(lane)] for i, lane in enumerate(lanes)])
        a, b = self.value(yes), self.value(no)
        dtype = "float32" if "float32" in (a.dtype, b.dtype) else max(a.dtype, b.dtype, key=lambda name: SIZES[name])
        a, b = (self.converted(arg, dtype, False) for arg in (a, b))
        low, high = min(a.bounds[0], b.bounds[0]), max(a.bounds[1], b.bounds[1])
        if isinstance(condition, Mask):
            return self.node("choose", (condition.by_loop or "1", a, b), dtype, (low, high))
        return self.node("select", (condition, a, b), dtype, (low, high))


def _bounds(sign: str, a: tuple[int, int], b: tuple[int, int]) -> tuple[int, int]:
    """The least and largest result of an operation on integers within bounds; more than 64 bits where it is unknown."""
    corners = [CORNERS[sign](x, y) for x in a for y in b] if sign in CORNERS and (sign in "+-*" or 0 <= b[0] <= b[1] < 64) else []
    if corners:
        return min(corners), max(corners)
    if sign == "&" and max(a[0], b[0]) >= 0:
        return 0, min(high for low, high in (a, b) if low >= 0)
    if sign in ("|", "^"):
        is_signed, bits = a[0] < 0 or b[0] < 0, max(value.bit_length() for value in (*a, *b))
        return -(is_signed << bits), (1 << bits) - 1
    if sign in ("/", "%") and a[0] >= 0 and b[0] > 0:
        return 0, a[1] // b[0] if sign == "/" else b[1] - 1
    return -1 << 80, 1 << 80
