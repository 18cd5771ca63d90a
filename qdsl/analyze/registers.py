"""Which registers an instruction writes and reads."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import lru_cache

from qdsl.analyze import pipes
from qdsl.analyze.sass import Instruction

_REGISTER = re.compile(r"\b(?P<file>U?)R(?P<number>\d+)(?P<wide>\.64)?")
_PREDICATE = re.compile(r"\bU?P[0-6]\b")
_STORES = ("STG", "STS", "STL", "ST", "RED", "REDG", "LDGSTS", "BAR", "BRA", "EXIT", "DEPBAR", "LDGDEPBAR", "WARPGROUP", "NOP")


@lru_cache(1 << 14)
def accessed_registers(instruction: Instruction) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Registers and predicates that an instruction writes, and that it reads."""
    parts = instruction.operands
    first = 0
    written: list[str] = []
    if instruction.base not in _STORES:
        while first < len(parts) and (_PREDICATE.fullmatch(parts[first]) or parts[first] in ("PT", "UPT")):
            written += _operand_registers(parts[first], 1)
            first += 1
        if not written and first < len(parts) and "[" not in parts[first]:
            written += _operand_registers(parts[first], _result_register_count(instruction))
            first += 1
            while first < len(parts) and _PREDICATE.fullmatch(parts[first]):
                written += _operand_registers(parts[first], 1)               # a carry, or a second result
                first += 1
    read = [name for place, part in enumerate(parts[first:], first)
            for name in _operand_registers(part, _operand_register_count(instruction, place))]
    return tuple(written), (*read, *_operand_registers(instruction.guard, 1))


def uses_argument_address(instructions: Sequence[Instruction], place: int | None) -> list[bool]:
    """Which instructions read an argument's address or what follows from it, apart from loaded data.

    place: of the argument in the constant bank; None gives none.
    """
    text = "" if place is None else f"c[0x0][{place:#x}]"
    names: set[str] = set()
    result = [False] * len(instructions)
    for _ in range(2 if text else 0):                            # a loop carries addresses to its next trip
        for number, instruction in enumerate(instructions):
            written, read = accessed_registers(instruction)
            result[number] = text in instruction.line or not names.isdisjoint(read)
            if result[number] and not instruction.loaded:
                names.update(written)
            else:
                names.difference_update(written)
    return result


@lru_cache(1 << 14)
def _operand_registers(text: str, width: int) -> tuple[str, ...]:
    """Registers of an operand, with those after it that belong to it, and predicates."""
    names: list[str] = _PREDICATE.findall(text)
    for match in _REGISTER.finditer(text):
        first, count = int(match["number"]), 2 if match["wide"] else width
        names += [f"{match['file']}R{number}" for number in range(first, first + count)]
    return tuple(names)


def _result_register_count(instruction: Instruction) -> int:
    if group := re.match(r"[HQI]GMMA\.\d+x(\d+)x", instruction.opcode):
        return int(group[1]) // 2
    if pipes.pipe_of(instruction) == "tensor":
        return 2 if ".F16" in instruction.opcode and ".F32" not in instruction.opcode else 4
    if instruction.base == "LDSM":
        last = instruction.opcode.rpartition(".")[2]             # of LDSM.16.M88.4
        return int(last) if last.isdigit() else 1
    if instruction.base in ("LDG", "LDS", "LDL", "LDC", "LDCU", "ULDC", "LD"):
        return max(1, instruction.width // 4)
    wide = ".WIDE" in instruction.opcode or ".64" in instruction.opcode or instruction.base in ("CS2R", "DFMA", "DADD", "DMUL")
    return 2 if wide else 1


def _operand_register_count(instruction: Instruction, place: int) -> int:
    if pipes.pipe_of(instruction) == "tensor":
        return {1: 4, 2: 2, 3: 4}.get(place, 1)
    if instruction.base in ("STG", "STS", "STL", "ST"):
        return max(1, instruction.width // 4) if "[" not in instruction.operands[place] else 1
    return 2 if ".WIDE" in instruction.opcode and place == len(instruction.operands) - 1 else 1
