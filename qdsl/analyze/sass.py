"""Disassembled kernels: instructions, loops, and how far a loop's counter moves in one trip.

Reads what `nvdisasm -c` prints for a cubin.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache

_LINE = re.compile(r"\s*/\*(?P<address>[0-9a-f]{4,})\*/\s+(?:@(?P<guard>!?U?P\w+)\s+)?(?P<opcode>[A-Z]\w*(?:\.\w+)*)"
                   r"\s*(?P<operands>[^;]*?)\s*;")
_LABEL = re.compile(r"\s*(?P<name>[.$\w]+):\s*\Z")
_TARGET = re.compile(r"`\((?P<name>[.$\w]+)\)")
_REGISTER = re.compile(r"\bU?R\d+\b")
_PREDICATE = re.compile(r"\bU?P\d\b")
_IMMEDIATE = re.compile(r"-?0x[0-9a-f]+\Z")

WIDTHS = {"U8": 1, "S8": 1, "U16": 2, "S16": 2, "64": 8, "128": 16, "256": 32}
LOADS = ("LDG", "LDGSTS")                                        # from global memory: to registers, to shared memory
SPILLS = ("LDL", "STL")
_ADDS = ("IADD3", "IADD", "VIADD", "UIADD3", "UIADD", "UVIADD")
_MOVES = ("MOV", "UMOV", "IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32", "R2UR")
_COMPARES = ("ISETP", "UISETP", "PLOP3", "UPLOP3")


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction.  guard: the predicate it runs under, as `P0` or `!P0`, or empty.  line: as it was printed."""

    address: int
    guard: str
    opcode: str
    operands: tuple[str, ...]
    line: str

    @property
    def base(self) -> str:
        """The opcode without its modifiers."""
        return _base(self.opcode)

    @property
    def width(self) -> int:
        """Bytes that a thread loads or stores: 4 where no modifier says otherwise."""
        return _width(self.opcode)

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads from global memory; an instruction under a guard counts as if it ran."""
        return self.width if self.base in LOADS else 0

    @property
    def is_spill(self) -> bool:
        """Whether it moves registers to or from memory of the thread."""
        return self.base in SPILLS

    @property
    def is_jump(self) -> bool:
        return self.base == "BRA"

    @property
    def target(self) -> str | None:
        """The label that a branch leads to."""
        match = _TARGET.search(self.line)
        return match["name"] if match else None


@cache
def _base(opcode: str) -> str:
    return opcode.partition(".")[0]


@cache
def _width(opcode: str) -> int:
    return next((WIDTHS[part] for part in opcode.split(".")[1:] if part in WIDTHS), 4)


@dataclass(frozen=True, slots=True)
class Code:
    """A kernel's instructions, and the place among them that each label stands before."""

    instructions: tuple[Instruction, ...]
    labels: dict[str, int]

    def goal(self, instruction: Instruction) -> int | None:
        """The place that a branch leads to."""
        return self.labels.get(instruction.target) if instruction.target else None


def parse(text: str) -> Code:
    """The instructions of a disassembly, without the padding behind the last one."""
    instructions: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in text.splitlines():
        if label := _LABEL.match(line):
            labels[label["name"]] = len(instructions)
        elif match := _LINE.match(line):
            operands = tuple(part.strip() for part in match["operands"].split(",")) if match["operands"] else ()
            instructions.append(Instruction(int(match["address"], 16), match["guard"] or "", match["opcode"], operands,
                                            line.strip()))
    while instructions and _is_padding(instructions[-1], len(instructions) - 1, labels):
        instructions.pop()
    return Code(tuple(instructions), labels)


def _is_padding(instruction: Instruction, place: int, labels: dict[str, int]) -> bool:
    """Behind a kernel's end: a branch to itself, that no thread reaches, and NOPs."""
    return instruction.base == "NOP" or (instruction.base == "BRA" and labels.get(instruction.target or "") == place)


def loops(code: Code) -> list[range]:
    """Places of each loop's instructions, from where a branch leads back to, through the last such branch."""
    ends: dict[int, int] = {}
    for place, instruction in enumerate(code.instructions):
        start = code.goal(instruction) if instruction.is_jump else None
        if start is not None and start < place:
            ends[start] = max(place, ends.get(start, 0))
    return [range(start, end + 1) for start, end in sorted(ends.items())]


def hot_loop(code: Code) -> range | None:
    """The loop that loads the most bytes from global memory, the shortest among equals; None where none loads any.

    Of a loop around another one, that one, where it loads more than half of the bytes.
    """
    def weight(loop: range) -> tuple[int, int]:
        return sum(code.instructions[place].loaded for place in loop), -len(loop)

    candidates = sorted((loop for loop in loops(code) if weight(loop)[0]), key=weight)
    hot = candidates[-1] if candidates else None
    for loop in reversed(candidates):
        if hot is not None and set(loop) < set(hot) and 2 * weight(loop)[0] > weight(hot)[0]:
            hot = loop
    return hot


# -- the counter of a loop --------------------------------------------------------------------------------------------


def loop_counter_steps(code: Code, loop: range) -> set[int]:
    """How far the registers move in one trip whose comparison decides whether there is another."""
    moved, seen = _register_steps([code.instructions[place] for place in loop])
    deciding = {register for place in _loop_branches(code, loop) for register in _deciding_registers(code, loop, place, seen)}
    return {moved[register] for register in deciding if moved.get(register)}


def moves(body: Sequence[Instruction]) -> dict[str, int]:
    """How far each register moves in a trip of a loop that only has constants added to it."""
    return _register_steps(body)[0]


def _loop_branches(code: Code, loop: range) -> Iterator[int]:
    """Places of the branches that lead back to the loop's start, or out of it."""
    for place in loop:
        goal = code.goal(code.instructions[place])
        if code.instructions[place].base == "EXIT" or (goal is not None and (goal == loop.start or goal not in loop)):
            yield place


def _register_steps(body: Sequence[Instruction]) -> tuple[dict[str, int], list[dict[str, str]]]:
    """How far each register moves that only has constants added to it.

    Also, for each instruction, which register's value at the start of the trip each register holds, apart from a constant.
    """
    moves: dict[str, tuple[str, int] | None] = {}
    seen: list[dict[str, str]] = []
    for instruction in body:
        seen.append({name: value[0] for name in _registers(instruction.operands) if (value := moves.get(name, (name, 0)))})
        if instruction.operands and (written := _REGISTER.match(instruction.operands[0])):
            moves[written[0]] = None if instruction.guard else _register_plus_constant(instruction, moves)
    return {name: value[1] for name, value in moves.items() if value and value[0] == name}, seen


def _register_plus_constant(instruction: Instruction, moves: dict[str, tuple[str, int] | None]) -> tuple[str, int] | None:
    """What an instruction writes, if that is a register plus a constant."""
    sources = [part.removesuffix(".reuse") for part in instruction.operands[1:] if not _PREDICATE.fullmatch(part.lstrip("!"))]
    sources = [part for part in sources if part not in ("RZ", "URZ", "PT", "UPT", "!PT", "!UPT")]
    names = [part for part in sources if _REGISTER.fullmatch(part)]
    numbers = [_signed(part) for part in sources if _IMMEDIATE.match(part)]
    adds = instruction.base in _ADDS and ".X" not in instruction.opcode and len(numbers) == 1
    copies = instruction.opcode in _MOVES and not numbers
    if len(names) != 1 or len(names) + len(numbers) != len(sources) or not (adds or copies):
        return None
    value = moves.get(names[0], (names[0], 0))
    return value and (value[0], value[1] + sum(numbers))


def _signed(text: str) -> int:
    """An immediate as a signed number of 32 bits."""
    value = int(text, 16)
    return value - (1 << 32) if value >= 1 << 31 else value


def _deciding_registers(code: Code, loop: range, branch: int, seen: list[dict[str, str]]) -> set[str]:
    """Registers, as they were at the start of the trip, whose comparison decides a branch."""
    instruction = code.instructions[branch]
    wanted = _predicates((instruction.guard, *instruction.operands))
    registers: set[str] = set()
    for place in [*reversed(range(loop.start, branch)), *reversed(range(branch, loop.stop))]:
        writer = code.instructions[place]
        written = _predicates(writer.operands[:2]) if writer.base in _COMPARES else _predicates(writer.operands[1:2])
        if wanted & written:
            wanted -= written
            if writer.base in _COMPARES:
                wanted |= _predicates(writer.operands[2:])
                registers |= {seen[place - loop.start][name] for name in _registers(writer.operands[2:])
                          if name in seen[place - loop.start]}
    return registers


def _registers(operands: Iterable[str]) -> set[str]:
    return {name for part in operands for name in _REGISTER.findall(part)}


def _predicates(operands: Iterable[str]) -> set[str]:
    return {name for part in operands for name in _PREDICATE.findall(part)}
