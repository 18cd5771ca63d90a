"""C of a storage's decode function: its lines one by one, in loops over the digits of a unit's number.

    t = u // 128; i = u // 32 % 4; j = u % 32              for t: for i < 4: for j < 32, LANES at a time {
    word = tl.load(blocks + 144 * t + 32 * i + j)              const vi word = vload_uint8(t0 + 144 * t + 32 * i + j);
    for h in tl.static_range(2):                               USE(0, 0, 256 * t + 64 * i + j, ..., d * (word & 15))
        use(256 * t + 64 * i + 32 * h + j,                     USE(1, 0, 256 * t + 64 * i + j + 32, ..., d * (word >> 4 & 15))
            d * (word >> 4 * h & 15))                      }

A generated `_decode_*` function has assignments, loops over lanes and conditions on missing tensors.  A position is a sum of
digits.  A quotient or remainder that cuts a digit splits it in two, and all lines are printed again.  Loops over lanes, and over
a last digit of few values, are printed value by value.

There are two forms: scalars, of which C compilers make vectors, and explicit vectors (vectors.h).
"""

from __future__ import annotations

import ast
import inspect
import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import product
from typing import Any

from qdsl.core.ops import Op, triton_function
from qdsl.runtime.cpu.positions import ORIGIN, Digit, DigitMustSplit, Position, Positions, Unprintable

TYPES = {"uint8": "u8", "int8": "i8", "uint16": "u16", "int16": "i16", "int32": "i32", "uint32": "u32", "int64": "i64",
         "float16": "f16", "bfloat16": "bf16", "float32": "f32"}
SIZES = {"uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "int32": 4, "uint32": 4, "int64": 8, "float16": 2, "bfloat16": 2,
         "float32": 4}
HALVES = {"float16": "half", "bfloat16": "brain"}
OPERATORS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.FloorDiv: "/", ast.Mod: "%", ast.BitAnd: "&", ast.BitOr: "|",
             ast.BitXor: "^", ast.LShift: "<<", ast.RShift: ">>", ast.Lt: "<", ast.Gt: ">", ast.Eq: "=="}
FEW = {True: 2, False: 4}                                        # values of a last digit that vectors and scalars take singly
SHORT = (16, 32, 64)                                             # lengths of tables that vectors hold
LEAST = 4                                                        # lanes


@dataclass(frozen=True)
class Value:
    """C text of a value, its type as Triton names it, and whether it differs between lanes."""

    text: str
    dtype: str
    lanes: bool = False


@dataclass(frozen=True)
class Pointer:
    """A place: the C name of a tensor, the type of its elements, and a sum of positions and values, in elements of that type.

    length: of a table, whose numbers are padded to one of SHORT.
    """

    name: str
    dtype: str
    at: Position = ORIGIN
    index: Value | None = None
    length: int = 0

    def plus(self, other: Any) -> Pointer:
        """The pointer moved by a position or a value."""
        if isinstance(other, Position):
            return replace(self, at=self.at.plus(other))
        own = self.index
        return replace(self, index=other if own is None else Value(f"({own.text}) + ({other.text})", "int32",
                                                                   own.lanes or other.lanes))


@dataclass(frozen=True)
class DecodeReads:
    """What a decode function reads.  dtypes: of tensors and tables, None for a missing one.  tables: numbers of the last of them.

    tile: rows of a unit.  along_rows: neighbouring rows of tiles are neighbours in memory.
    """

    kernel: Any
    dtypes: tuple[str | None, ...]
    tables: tuple[tuple[float, ...], ...]
    sizes: tuple[int, ...] | None
    tile: int
    along_rows: bool

    @property
    def pointers(self) -> tuple[Pointer | None, ...]:
        """Where the tensors and tables begin, in the order of the function's arguments."""
        first = len(self.dtypes) - len(self.tables)
        return tuple(None if dtype is None else Pointer(f"t{i}", dtype, length=len(self.tables[i - first]) if i >= first else 0)
                     for i, dtype in enumerate(self.dtypes))

    @property
    def lines(self) -> list[str]:
        """Lines that declare them; short tables once more, as vectors hold them."""
        lines = [f"const {TYPES[pointer.dtype]} *const restrict {pointer.name} = (const {TYPES[pointer.dtype]} *)tensors[{i}];"
                 for i, pointer in enumerate(self.pointers) if pointer is not None]
        for numbers, pointer in zip(self.tables, self.pointers[len(self.dtypes) - len(self.tables):], strict=True):
            if pointer is not None and pointer.dtype == "float32" and len(numbers) <= SHORT[-1]:
                length = next(size for size in SHORT if size >= len(numbers))
                shown = ", ".join(map(str, numbers))
                lines.append(f"static const float {pointer.name}_short[{length}] = {{{shown}}};")
        return lines


@dataclass(frozen=True)
class WeightUse:
    """A weight: its row in a tile, its column, and its C text."""

    row: int
    column: Position
    text: str


@dataclass(frozen=True)
class PrintedLoops:
    """C lines.  units: that the outermost loop takes at a time.  loops: extents of the others.  uses: of the innermost loop.

    multiples: numbers that divide K.  is_slow: a digit is divided at run time.
    """

    text: str
    units: int
    loops: tuple[Digit, ...]
    uses: tuple[WeightUse, ...]
    multiples: int
    is_slow: bool

    @cached_property
    def order(self) -> tuple[int, ...]:
        """The columns of a step in the order of use; () if they are not those of a box."""
        per_row = len(self.uses) // (1 + max(use.row for use in self.uses))
        count = per_row * math.prod(digit.extent for digit in self.loops)
        names, orders = {digit.name for digit in self.loops} | {"d0"}, set()
        for row in {use.row for use in self.uses}:
            columns = [use.column for use in self.uses if use.row == row]
            if len(columns) != per_row or any(column.step("d0") != count or {name for name, _ in column.terms} - names
                                           for column in columns):
                return ()
            outer, inner = (list(product(*(range(digit.extent) for digit in loops)))
                            for loops in (self.loops[:-1], self.loops[-1:]))
            places = [(column, (*slow, *fast)) for slow in outer for column in columns for fast in inner]
            orders.add(tuple(column.at({digit.name: value for digit, value in zip(self.loops, values, strict=True)})
                             for column, values in places))
        order = orders.pop()
        return order if not orders and sorted(order) == list(range(count)) else ()


@dataclass
class _Printer:
    """The lines of one print.  lanes: the symbol whose neighbours are lanes; '' for scalars.  names: of the decode function.

    loops: the digits that have loops.  per_row: uses of a row in the innermost loop.
    """

    lanes: str
    loops: Sequence[Digit]
    per_row: int
    positions: Positions
    names: dict[str, Any]
    lines: list[str] = field(default_factory=list)
    uses: list[WeightUse] = field(default_factory=list)
    count: int = 0

    # -- statements ----------------------------------------------------------------------------------------------------

    def run(self, statements: Sequence[ast.stmt]) -> None:
        for statement in statements:
            if isinstance(statement, ast.Assign):
                self.assign(statement.targets[0], self.evaluate(statement.value))
            elif isinstance(statement, ast.AugAssign):
                self.assign(statement.target, self.binary("+", self.evaluate(statement.target), self.evaluate(statement.value))
                            if isinstance(statement.op, ast.Add) else self.evaluate(
                                ast.BinOp(statement.target, statement.op, statement.value)))
            elif isinstance(statement, ast.For):
                assert isinstance(statement.target, ast.Name) and isinstance(statement.iter, ast.Call)
                for i in range(self.evaluate(statement.iter.args[0]).constant):
                    self.names[statement.target.id] = Position((), i)
                    self.run(statement.body)
            elif isinstance(statement, ast.If):                  # whether a tensor is missing
                test = statement.test
                assert isinstance(test, ast.Compare) and isinstance(test.left, ast.Name)
                is_missing = self.names[test.left.id] is None
                self.run(statement.body if is_missing == isinstance(test.ops[0], ast.Is) else statement.orelse)
            elif isinstance(statement, ast.Return):
                assert statement.value is not None
                self.evaluate(statement.value)

    def assign(self, target: ast.expr, value: Any) -> None:
        """Give a value a name; numbers that are computed get a line."""
        if isinstance(target, ast.Tuple):
            for name, own in zip(target.elts, value, strict=True):
                self.assign(name, own)
            return
        assert isinstance(target, ast.Name)
        self.names[target.id] = self.assign_variable(target.id, value) if isinstance(value, Value) else value

    def assign_variable(self, name: str, value: Value) -> Value:
        """The value, computed in a line of its own."""
        if value.text.isidentifier():
            return value
        self.count += 1
        kind = "__auto_type" if not value.lanes else "vf" if value.dtype == "float32" else "vi"
        self.lines.append(f"const {kind} {name}_{self.count} = {value.text};")
        return replace(value, text=f"{name}_{self.count}")

    # -- expressions ---------------------------------------------------------------------------------------------------

    def evaluate(self, node: ast.expr) -> Any:
        """What an expression means: a Position, a Value, a Pointer, a tuple of them, a truth that is known, or None."""
        if isinstance(node, ast.Constant):
            return Position((), node.value) if isinstance(node.value, int) else Value(f"{node.value!r}f", "float32")
        if isinstance(node, ast.Name):
            return self.names[node.id]
        if isinstance(node, ast.Tuple):
            return tuple(map(self.evaluate, node.elts))
        if isinstance(node, ast.UnaryOp):
            operand = self.evaluate(node.operand)
            return operand.times(-1) if isinstance(operand, Position) else replace(operand, text=f"-{_shown(operand)}")
        if isinstance(node, ast.BinOp):
            return self.binary(OPERATORS[type(node.op)], self.evaluate(node.left), self.evaluate(node.right))
        if isinstance(node, ast.Compare):
            return self.compared(OPERATORS[type(node.ops[0])], self.evaluate(node.left), self.evaluate(node.comparators[0]))
        if isinstance(node, ast.Attribute):                      # tl.float16, or the type of a pointer's elements
            return self.evaluate(node.value.value).dtype if isinstance(node.value, ast.Attribute) else node.attr
        if isinstance(node, ast.Call):
            return self.call(node)
        raise Unprintable(ast.dump(node)[:60])

    def as_value(self, position: Any) -> Value:
        """A position as a number."""
        if not isinstance(position, Position):
            assert isinstance(position, Value)
            return position
        step = position.step(self.lanes)
        if not step:
            return Value(str(position.constant) if not position.terms else f"(int32_t)({position.text})", "int32")
        return Value(f"(int32_t)({position.text}) + {step} * IOTA", "int32", True)

    def binary(self, sign: str, left: Any, right: Any) -> Any:
        """An operation on two values."""
        if isinstance(left, Pointer) or isinstance(right, Pointer):
            pointer, other = (left, right) if isinstance(left, Pointer) else (right, left)
            if sign == "-":
                other = other.times(-1) if isinstance(other, Position) else replace(other, text=f"-{_shown(other)}")
            return pointer.plus(other)
        if isinstance(left, bool) or isinstance(right, bool):    # `live` inside of a weight
            return right if left is True else left if right is True else False
        both = isinstance(left, Position) and isinstance(right, Position)
        if both and (result := self.positions.operation(sign, left, right)) is not None:
            return result
        left, right = self.as_value(left), self.as_value(right)
        lanes, kinds = left.lanes or right.lanes, (left.dtype, right.dtype)
        if "bool" in kinds:
            return Value(f"({left.text}) && ({right.text})", "bool")
        dtype = next((kind for kind in ("float32", "uint32") if kind in kinds), "int32")
        if lanes and dtype == "float32":
            left, right = (self.as_float(side) for side in (left, right))
        if lanes and dtype == "uint32" and sign == ">>":         # vectors of words are signed
            return Value(f"(vi)((vu){_shown(left)} >> {_shown(right)})", dtype, True)
        return Value(f"{_shown(left)} {sign} {_shown(right)}", dtype, lanes)

    def compared(self, sign: str, left: Any, right: Any) -> Any:
        """A comparison of positions; one with N or K holds inside of a weight."""
        if isinstance(left, Position) and isinstance(right, Position):
            if right.terms:
                return Value(f"whole || {left.text} {sign} {right.text}", "bool")
            if (truth := self.positions.compared(left, right.constant)) is not None:
                return truth
            if left.step(self.lanes):
                raise Unprintable("a condition that differs between lanes")
            return Value(f"{left.text} {sign} {right.text}", "bool")
        if any(isinstance(side, Value) and side.lanes for side in (left, right)):
            raise Unprintable("a condition on lanes")
        return Value(f"{_shown(self.as_value(left))} {sign} {_shown(self.as_value(right))}", "bool")

    # -- calls ---------------------------------------------------------------------------------------------------------

    def call(self, node: ast.Call) -> Any:
        """A call of a function of Triton, of qdsl's device functions, of a method, or of `use_weight`."""
        called, arguments = node.func, node.args
        if isinstance(called, ast.Name):
            return self.use_weight(*map(self.evaluate, arguments[1:]))
        assert isinstance(called, ast.Attribute)
        values = [self.evaluate(argument) for argument in arguments]
        if called.attr in ("to", "pointer_type"):
            to = values[0]
            return self.convert_type(self.evaluate(called.value), to, bool(node.keywords)) if called.attr == "to" else to
        if called.attr in ("load", "where", "stream"):
            return getattr(self, called.attr)(*values)
        if called.attr == "cdiv":
            return self.positions.operation("/", values[0].plus(values[1]).plus(Position((), -1)), values[1])
        if (op := triton_function(called.attr)) is not None:
            return self.operation(op, values)
        return self.device_function(called.attr, values)

    def operation(self, op: Op, operands: Sequence[Any]) -> Value:
        values = [self.as_value(operand) for operand in operands]
        lanes, is_int = any(value.lanes for value in values), op.bounds is not None and all(v.dtype != "float32" for v in values)
        values = values if is_int else [self.as_float(value) for value in values]
        texts = [_shown(value) if value.lanes or not lanes else f"({_shown(value)} - ({'vi' if is_int else 'vf'}){{0}})"
                 for value in values]
        return Value(op.c_text(is_int, lanes).format(*texts), "int32" if is_int else "float32", lanes)

    def device_function(self, name: str, values: list[Any]) -> Value:
        """A function of runtime/gpu/kernels/device.py: decoded.h has one of that name for scalars, and with 'v' for vectors."""
        if name == "scale":
            return self.function("e8m0", values[0]) if values[0].dtype == "uint8" else self.as_float(values[0])
        if name == "bits":
            words, at, width = values[0], values[1].constant, values[2].constant
            low = self.binary(">>", self.convert_type(words[at // 32], "uint32", True), Position((), at % 32))
            if at % 32 + width > 32:
                high = self.binary("<<", self.convert_type(words[at // 32 + 1], "uint32", True), Position((), 32 - at % 32))
                low = self.binary("|", low, high)
            masked: Value = self.binary("&", low, Position((), (1 << width) - 1))
            return replace(masked, dtype="int32")
        if name == "rounded":
            value = self.as_float(values[0])
            return value if values[1] == "float32" else self.function(f"round_{HALVES[values[1]]}", value)
        if name == "trit":
            both = replace(values[0], text=f"{values[0].text}, {self.as_value(values[1]).text}")
            return replace(self.function(name, both), dtype="int32")
        return self.function(name, values[0])

    def stream(self, pointer: Pointer, step: Position, at: Any, width: Position, word: Position, live: Any) -> Value:
        """Bits from a place in a stream of words."""
        lanes = [isinstance(side, Value) and side.lanes for side in (pointer.index, at)]
        if any(lanes) or pointer.at.step(self.lanes) or (isinstance(at, Position) and at.step(self.lanes)):
            raise Unprintable("a stream for each lane")
        place, sizes = f"{self.address(pointer)}, {step.text}, {at.text}", f"{width.constant}, {word.constant}"
        text = f"stream_{TYPES[pointer.dtype]}({place}, {sizes})"
        return Value(f"{live.text} ? {text} : 0" if isinstance(live, Value) else text, "int32")

    def function(self, name: str, value: Value) -> Value:
        """A function of one value, with float32 results."""
        return Value(f"{'v' * value.lanes}{name}({value.text})", "float32", value.lanes)

    def where(self, condition: Any, yes: Any, no: Any) -> Any:
        if isinstance(condition, bool):
            return yes if condition else no
        left, right = self.as_value(yes), self.as_value(no)
        if left.lanes or right.lanes:
            raise Unprintable("a choice between lanes")
        return Value(f"{condition.text} ? {left.text} : {right.text}", left.dtype)

    def convert_type(self, value: Any, dtype: str, is_bitcast: bool) -> Any:
        """A value in another type, or its bits as one."""
        if isinstance(value, Position):
            return value if dtype != "float32" else self.as_float(value)
        if isinstance(value, Pointer):
            if value.index is None and not value.at.step(self.lanes) and value.at.terms:
                return Pointer(f"({self.address(value)})", dtype)
            return replace(value, dtype=dtype, at=value.at.scaled(SIZES[value.dtype], SIZES[dtype]))
        if dtype in HALVES or (is_bitcast and dtype == "uint32" and value.lanes):
            return replace(value, dtype=dtype)
        if is_bitcast and dtype == "float32":
            return Value(f"(vf)({value.text})" if value.lanes else f"bits_to_float({value.text})", dtype, value.lanes)
        if dtype == "float32":
            return self.as_float(value)
        if not value.lanes:
            return Value(f"({dtype}_t)({value.text})", dtype)
        bits = 8 * SIZES[dtype]
        if bits >= 32 or SIZES[value.dtype] < SIZES[dtype] or value.dtype == dtype:
            return replace(value, dtype=dtype)
        narrow = f"{_shown(value)} << {32 - bits} >> {32 - bits}" if dtype[0] == "i" else f"{_shown(value)} & {(1 << bits) - 1}"
        return Value(narrow, dtype, True)

    def as_float(self, number: Any) -> Value:
        value = self.as_value(number)
        if value.dtype in HALVES:
            return self.function(HALVES[value.dtype] if self.lanes else f"soft_{HALVES[value.dtype]}", value)
        if value.dtype == "float32":
            return value
        return Value(f"to_float({value.text})" if value.lanes else f"(float)({value.text})", "float32", value.lanes)

    def address(self, pointer: Pointer) -> str:
        """The C text of a place, as a pointer to the type of its elements; of the first lane where lanes have neighbours."""
        text = f"(const {TYPES[pointer.dtype]} *){pointer.name} + {pointer.at.text}"
        return text if pointer.index is None or pointer.index.lanes else f"{text} + ({pointer.index.text})"

    def load(self, pointer: Pointer, live: Any = True, _: Any = None) -> Value:
        """An element, for each lane if these have places of their own; 0 where a condition does not hold."""
        step, dtype = pointer.at.step(self.lanes), pointer.dtype
        own = "float32" if dtype in HALVES else dtype
        if pointer.index is not None and pointer.index.lanes:
            return self.lookup(pointer)
        place = self.address(pointer)
        if not step:
            text = f"*({place})"
            return Value(f"{live.text} ? {text} : 0" if isinstance(live, Value) else text, dtype)
        if dtype == "int64":
            raise Unprintable("vectors of 64-bit integers")
        places = "" if step == 1 else f", {step * SIZES[dtype]} * IOTA"
        name = ("vload_" if step == 1 else "gather_") + dtype
        return Value(f"{'(vi)' * (dtype == 'uint32')}{name}((const uint8_t *)({place}){places})", own, True)

    def lookup(self, pointer: Pointer) -> Value:
        """Elements at places of lanes."""
        index, step, dtype = pointer.index, pointer.at.step(self.lanes), pointer.dtype
        assert index is not None
        own = "float32" if dtype in HALVES else dtype
        if dtype == "float32" and 0 < pointer.length <= SHORT[-1] and not pointer.at.terms and not pointer.at.constant:
            length = next(size for size in SHORT if size >= pointer.length)
            return Value(f"lookup_{length}({pointer.name}_short, (vu)({index.text}))", own, True)
        if dtype == "int64":
            raise Unprintable(f"places of {dtype} for each lane")
        places = f"({index.text}) * {SIZES[dtype]}" + (f" + {step * SIZES[dtype]} * IOTA" if step else "")
        cast, place = "(vi)" * (dtype == "uint32"), f"(const uint8_t *)({self.address(pointer)})"
        return Value(f"{cast}gather_{dtype}({place}, {places})", own, True)

    def use_weight(self, column: Position, weight: Any, live: Any, row: Any = None) -> None:
        """A line that uses a weight."""
        value = self.as_float(weight)
        condition = live.text if isinstance(live, Value) else "1"
        own = 0 if row is None else row.constant
        if self.lanes:
            text = value.text if value.lanes else f"all_float({value.text})"
            self.lines.append(f"USE({len(self.uses)}, {own}, {column.text}, {self.next_weight_position(own).text}, {text})")
        else:
            self.lines.append(f"USE_ONE({own}, {column.text}, {value.text}, {condition});")
        self.uses.append(WeightUse(own, column, value.text))

    def next_weight_position(self, row: int) -> Position:
        """The place of the next weight of a row in the order of use."""
        number = sum(use.row == row for use in self.uses)
        place, length = Position((), number * (self.loops[-1].extent or 1)), self.loops[-1].extent or 1
        if len(self.loops) > 1:
            place = place.plus(Position.of(self.loops[-1].name))
        length *= self.per_row
        for digit in reversed(self.loops[:-1]):
            place = place.plus(Position.of(digit.name).times(length))
            length *= digit.extent
        return place


def _shown(value: Value) -> str:
    return value.text if value.text.replace("_", "").replace(".", "").isalnum() else f"({value.text})"


def _source(kernel: Any) -> str:
    """The text of a Triton function, as it was when its module was imported."""
    return str(kernel.src) if hasattr(kernel, "src") else textwrap.dedent(inspect.getsource(kernel.fn))


def print_decode(reads: DecodeReads, has_vectors: bool) -> PrintedLoops:
    """The C lines of a decode function, with explicit vectors or scalars.  Raises Unprintable."""
    function, digits, uses = ast.parse(_source(reads.kernel)).body[0], [Digit("d0")], 1
    assert isinstance(function, ast.FunctionDef)
    if has_vectors and not reads.along_rows:
        digits.append(Digit("d1", 64))
    for _ in range(40):
        try:
            result = _print_digits(function, reads, digits, has_vectors, uses)
        except DigitMustSplit as split:
            digits = split.of(digits)
            continue
        if len(result.uses) == uses * reads.tile:
            return result
        uses = len(result.uses) // reads.tile
    raise Unprintable("too many digits")


def _print_digits(function: ast.FunctionDef, reads: DecodeReads, digits: Sequence[Digit], has_vectors: bool,
                  uses: int) -> PrintedLoops:
    """The lines for these digits.  uses: of a row in the innermost loop."""
    row, unit = (argument.arg for argument in function.args.args[1:3])
    values = [digit for digit in digits[1:] if digit.is_printed or (digit is digits[-1] and digit.extent <= FEW[has_vectors])]
    loops = [digit for digit in digits if digit not in values]
    lanes = "" if not has_vectors else "n" if reads.along_rows else loops[-1].name
    if has_vectors and not reads.along_rows and (len(loops) < 2 or loops[-1].extent % LEAST):
        raise Unprintable("too few neighbours")
    printer = _Printer(lanes, loops, uses, Positions({digit.name: digit.extent for digit in digits}, lanes), {
        "tensors": reads.pointers, "live": True, "use": None, "state": None, row: Position.of("n"), "N": Position.of("N"),
        "K": Position.of("K"), "sizes": reads.sizes and tuple(Position((), size) for size in reads.sizes)})
    names = dict(printer.names)
    steps = {digit.name: math.prod(other.extent for other in digits[i + 1:]) for i, digit in enumerate(digits)}
    for chosen in product(*(range(digit.extent) for digit in values)):
        place = Position(tuple((digit.name, steps[digit.name]) for digit in loops),
                         sum(value * steps[digit.name] for digit, value in zip(values, chosen, strict=True)))
        live = True if has_vectors else printer.assign_variable("live", Value(f"whole || {place.text} < units", "bool"))
        printer.names = {**names, unit: place, "live": live}
        printer.run(function.body[1:])
    lines = list(reads.lines)
    for digit in loops:
        bounds = f"0; {digit.name} < {digit.extent}" if digit.extent else f"first; {digit.name} < last"
        if digit.name == lanes:
            lines += ["#pragma GCC unroll 16", f"for (int64_t {digit.name} = {bounds}; {digit.name} += LANES) {{",
                      f"const int own = {digit.name} / LANES;"]
        else:
            lines.append(f"for (int64_t {digit.name} = {bounds}; {digit.name}++) {{")
    column = printer.uses[0].column
    begin = Position(tuple(term for term in column.terms if term[0] != lanes), min(use.column.constant for use in printer.uses))
    after = [f"AFTER({begin.text})"] * (has_vectors and not reads.along_rows)
    return PrintedLoops("\n".join([*lines, *printer.lines, "}", *after, "}" * (len(loops) - 1)]), steps["d0"], tuple(loops[1:]),
                        tuple(printer.uses), math.lcm(*printer.positions.multiples), printer.positions.is_slow)
