"""A PTX module as a typed program: parameters, shared variables, and the instructions of its entry.

The grammar is that of NVIDIA's "Parallel Thread Execution ISA"; what the printers of Triton and LLVM write is covered.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property


class ExecutionError(ValueError):
    """PTX that cannot be read or run, or an access that faults; the message names the line of PTX and of the source."""


@dataclass(frozen=True, slots=True)
class Register:
    """A register by its index among all registers of the program.  bits: 1 for a predicate."""

    slot: int
    bits: int


@dataclass(frozen=True, slots=True)
class Immediate:
    """A constant: an integer or the bits of a float; as a float where the text has it in decimal."""

    value: int | float


@dataclass(frozen=True, slots=True)
class Symbol:
    """A name that is no register: a label, a parameter, a variable in memory, a special register."""

    name: str


@dataclass(frozen=True, slots=True)
class Address:
    """[base + offset], offset in bytes."""

    base: Register | Symbol | Immediate
    offset: int


@dataclass(frozen=True, slots=True)
class Vector:
    """{a, b, ...}."""

    parts: tuple[Operand, ...]


@dataclass(frozen=True, slots=True)
class Negated:
    """!p."""

    register: Register


Operand = Register | Immediate | Symbol | Address | Vector | Negated


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.  line: of the PTX, from 1.  source: file and line of the kernel's source, "" where PTX does not say."""

    opcode: str
    operands: tuple[Operand, ...]
    predicate: Register | None
    negated: bool
    line: int
    source: str
    name: str = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "name", self.opcode.partition(".")[0])

    @property
    def modifiers(self) -> tuple[str, ...]:
        """The parts of the opcode after the name, split at dots."""
        return tuple(re.split(r"\.|::", self.opcode)[1:])

    def __str__(self) -> str:
        where = f" ({self.source})" if self.source else ""
        return f"line {self.line}: {self.opcode}{where}"


@dataclass(frozen=True)
class Program:
    """An entry.  parameters: name to bytes, in order.  shared: places of shared variables; `dynamic` is that of the last."""

    name: str
    parameters: Mapping[str, int]
    shared: Mapping[str, int]
    shared_bytes: int
    registers: tuple[int, ...]
    instructions: tuple[Instruction, ...]
    labels: Mapping[str, int]

    @cached_property
    def touched(self) -> list[frozenset[int]]:
        """Slots of the registers in each instruction."""
        return [_register_slots(instruction.operands) for instruction in self.instructions]

    @cached_property
    def written(self) -> list[frozenset[int]]:
        """Slots of the registers in the first operand of each instruction."""
        return [_register_slots(instruction.operands[:1]) for instruction in self.instructions]

    def instructions_per_thread(self, trips: int) -> int:
        """Instructions per thread if the loop with the most global loads iterates `trips` times, and all others once."""
        is_load = [part.name in ("ld", "cp") and "global" in part.modifiers for part in self.instructions]
        starts = {place: self.labels[part.operands[-1].name] for place, part in enumerate(self.instructions)  # type: ignore[union-attr]
                  if part.name == "bra"}
        loops = [range(start, place + 1) for place, start in starts.items() if start <= place]
        loop = max(loops, key=lambda loop: sum(is_load[loop.start:loop.stop]), default=range(0))
        return len(self.instructions) + len(loop) * (trips - 1) * any(is_load[loop.start:loop.stop])

    @cached_property
    def granules(self) -> dict[str, int]:
        """Per state space, the number of bytes, at most 16, that divides every access."""
        return {space: min((size for instruction in self.instructions if (size := _access_size(instruction, space))), default=16)
                for space in ("shared", "global")}


_STATEMENT = re.compile(r"(?:@(?P<negated>!?)(?P<predicate>%?[\w$]+)\s+)?(?P<opcode>[a-z][\w.:]*)\s*(?P<operands>.*)", re.S)
_LABEL = re.compile(r"([$%]?[\w$]+):(?!:)\s*")
_REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(.*)", re.S)
_PARAMETER = re.compile(r"\.param\s+(?:\.align\s+\d+\s+)?\.(?P<type>\w+)(?:\s+\.ptr(?:\s+\.\w+)*?(?:\s+\.align\s+\d+)?)?\s+"
                        r"(?P<name>[\w$]+)(?:\[(?P<count>\d+)\])?$")
_VARIABLE = re.compile(r"(?:\.\w+\s+)*?\.shared\s+(?:\.align\s+(?P<align>\d+)\s+)?\.(?P<type>\w+)\s+(?P<name>[\w$]+)"
                       r"(?:\[(?P<count>\d*)\])?$")
_FLOAT = {"0f": 32, "0F": 32, "0d": 64, "0D": 64}


def parse(text: str) -> Program:
    """The first entry of a PTX module.  Raises ExecutionError where the text cannot be read or ends early."""
    return _Parser(text).parse_program()


def type_bits(name: str) -> int:
    """Bits of a type such as 'b32', 'f16x2' or 'pred'.  Raises ExecutionError."""
    match = re.fullmatch(r"(?:pred|bf16|bf16x2|[busf](\d+)(?:x(\d))?)", name)
    if not match:
        raise ExecutionError(f"no type '.{name}' is known")
    fixed = {"pred": 1, "bf16": 16, "bf16x2": 32}
    return fixed[name] if name in fixed else int(match[1]) * int(match[2] or 1)


class _Parser:
    """Reads statements one by one; registers are looked up in nested blocks, as inline assembly opens them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.scopes: list[dict[str, Register]] = [{}]
        self.registers: list[int] = []
        self.instructions: list[Instruction] = []
        self.labels: dict[str, int] = {}
        self.parameters: dict[str, int] = {}
        self.shared: dict[str, int] = {}
        self.shared_bytes = 0
        self.files: dict[str, str] = {}
        self.source = ""

    def parse_program(self) -> Program:
        for name, path in re.findall(r'^\s*\.file\s+(\d+)\s+"([^"]*)"(?=\s*$)', self.text, re.M):
            self.files[name] = path.rpartition("/")[2]
        for name, path in re.findall(r'^\s*\.file\s+(\d+)\s+"[^"]*"\s+"([^"]*)"', self.text, re.M):
            self.files[name] = path.rpartition("/")[2]
        self.text = re.sub(r"//[^\n]*|/\*.*?\*/", lambda comment: "\n" * comment[0].count("\n"), self.text, flags=re.S)
        head = re.search(r"\.entry\s+([\w$]+)\s*\((.*?)\)([^{]*)\{", self.text, re.S)
        if not head:
            raise ExecutionError("the PTX has no entry, or ends within its head")
        for variable in re.findall(r"\.shared\b[^;]*(?=;)", self.text[:head.start()]):
            self.parse_variable(" ".join(variable.split()), 1)
        for parameter in filter(None, (part.strip() for part in head[2].split(","))):
            match = _PARAMETER.match(" ".join(parameter.split()))
            if not match:
                raise ExecutionError(f"cannot read the parameter '{parameter}'")
            self.parameters[match["name"]] = type_bits(match["type"]) // 8 * int(match["count"] or 1)
        self.parse_body(head.end())
        for instruction in self.instructions:
            if instruction.name == "bra" and not self.target(instruction):
                raise ExecutionError(f"{instruction}: no label '{instruction.operands[-1]}'")
        return Program(head[1], self.parameters, self.shared, self.shared_bytes, tuple(self.registers),
                       tuple(self.instructions), self.labels)

    def target(self, instruction: Instruction) -> bool:
        label = instruction.operands[-1] if instruction.operands else None
        return isinstance(label, Symbol) and label.name in self.labels

    def parse_body(self, place: int) -> None:
        """Everything between the braces of the entry."""
        line = 1 + self.text.count("\n", 0, place)
        for part, number in self.split_statements(place, line):
            if part == "{":
                self.scopes.append({})
            elif part == "}":
                if len(self.scopes) == 1:
                    return
                self.scopes.pop()
            elif part.endswith(":"):
                self.labels[part[:-1]] = len(self.instructions)
            else:
                self.parse_statement(part, number)
        raise ExecutionError(f"the PTX ends within its entry, after line {1 + self.text.count(chr(10))}")

    def split_statements(self, place: int, line: int) -> Iterator[tuple[str, int]]:
        """Braces, labels with their colon, directives of debugging, and statements without semicolon; each with its line."""
        text = self.text
        while True:
            blank = re.compile(r"\s*").match(text, place)
            assert blank
            line += blank[0].count("\n")
            place = blank.end()
            if place >= len(text):
                return
            if text[place] in "{}":
                yield text[place], line
                place += 1
            elif label := _LABEL.match(text, place):
                yield label[1] + ":", line
                line += label[0].count("\n")
                place = label.end()
            elif text.startswith((".loc", ".file", ".section", ".pragma"), place):
                end = text.find("\n", place)
                if text.startswith(".loc", place):
                    words = text[place:end].split()
                    self.source = f"{self.files.get(words[1], words[1])}:{words[2]}"
                place = len(text) if end < 0 else end
            else:
                end = text.find(";", place)
                if end < 0:
                    return
                yield text[place:end].strip(), line
                line += text.count("\n", place, end)
                place = end + 1

    def parse_statement(self, text: str, line: int) -> None:
        if match := _REGISTERS.match(text):
            bits = type_bits(match[1])
            for name in match[2].split(","):
                if counted := re.match(r"\s*([%\w$]+)<(\d+)>", name):
                    for number in range(int(counted[2])):
                        self.register(f"{counted[1]}{number}", bits)
                else:
                    self.register(name.strip(), bits)
        elif text[0] == ".":
            self.parse_variable(text, line)
        elif match := _STATEMENT.fullmatch(text):
            predicate = self.parse_operand(match["predicate"], line) if match["predicate"] else None
            if predicate is not None and not isinstance(predicate, Register):
                raise ExecutionError(f"line {line}: '{match['predicate']}' is no register")
            operands = tuple(self.parse_operand(operand, line) for operand in _split_operands(match["operands"]))
            negated = match["negated"] == "!"
            self.instructions.append(Instruction(match["opcode"], operands, predicate, negated, line, self.source))
        else:
            raise ExecutionError(f"line {line}: cannot read '{text[:60]}'")

    def register(self, name: str, bits: int) -> None:
        self.scopes[-1][name] = Register(len(self.registers), bits)
        self.registers.append(bits)

    def parse_variable(self, text: str, line: int) -> None:
        match = _VARIABLE.match(text)
        if not match:
            raise ExecutionError(f"line {line}: cannot read '{text[:60]}'")
        align = int(match["align"] or 1)
        place = -(-self.shared_bytes // align) * align
        self.shared[match["name"]] = place
        self.shared_bytes = place + type_bits(match["type"]) // 8 * int(match["count"] or 0 if match["count"] is not None else 1)

    def parse_operand(self, text: str, line: int) -> Operand:
        if text[0] == "{":
            return Vector(tuple(self.parse_operand(part, line) for part in _split_operands(text[1:-1])))
        if text[0] == "[":
            match = re.fullmatch(r"\[\s*([^\s+\-\]]+)\s*([+-]?)\s*(-?\w*)\s*\]", text)
            inner = self.parse_operand(match[1], line) if match else None
            if match is None or not isinstance(inner, Register | Symbol | Immediate):
                raise ExecutionError(f"line {line}: cannot read the address '{text}'")
            return Address(inner, (-1 if match[2] == "-" else 1) * int(match[3] or "0", 0))
        if text[0] == "!":
            inner = self.parse_operand(text[1:], line)
            if not isinstance(inner, Register):
                raise ExecutionError(f"line {line}: '{text}' is no register")
            return Negated(inner)
        for scope in reversed(self.scopes):
            if text in scope:
                return scope[text]
        if "|" in text:                                          # a result, and whether a lane took part
            return Vector(tuple(self.parse_operand(part, line) for part in text.split("|")))
        return Immediate(_parse_number(text, line)) if text[0].isdigit() or text[0] == "-" else Symbol(text)


def _parse_number(text: str, line: int) -> int | float:
    try:
        if text[:2] in _FLOAT:                                   # bits in hexadecimal
            return int(text[2:], 16)
        return float(text) if "." in text else int(text.rstrip("U"), 0)
    except ValueError:
        raise ExecutionError(f"line {line}: cannot read the number '{text}'") from None


def _split_operands(text: str) -> list[str]:
    """Operands at commas that are in no brackets."""
    parts, depth, start = [], 0, 0
    for place, letter in enumerate(text + ","):
        depth += (letter in "{[(") - (letter in "}])")
        if letter == "," and not depth:
            parts.append(text[start:place].strip())
            start = place + 1
    return [part for part in parts if part]


def _register_slots(operands: Sequence[Operand]) -> frozenset[int]:
    """Slots of the registers in operands, also within vectors, addresses and negations."""
    slots: set[int] = set()
    for operand in operands:
        inner = operand.register if isinstance(operand, Negated) else operand.base if isinstance(operand, Address) else operand
        if isinstance(inner, Register):
            slots.add(inner.slot)
        elif isinstance(inner, Vector):
            slots |= _register_slots(inner.parts)
    return frozenset(slots)


def _access_size(instruction: Instruction, space: str) -> int:
    """Bytes that a thread's load, store, atomic or copy accesses; 0 where it accesses another space, or 16 or more."""
    parts = instruction.modifiers
    if instruction.name == "cp" and space in parts and len(instruction.operands) > 2:
        return int(instruction.operands[2].value) if isinstance(instruction.operands[2], Immediate) else 1
    is_access = instruction.name in ("ld", "ldu", "st", "atom", "red") and "param" not in parts
    if not is_access or ("shared" in parts) != (space == "shared"):
        return 0
    vector = next((int(part[1:]) for part in parts if part in ("v2", "v4", "v8")), 1)
    return min(16, type_bits(parts[-1]) // 8 * vector)
