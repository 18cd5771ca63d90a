"""How far the address of a load moves in a trip of a loop: loads that move less than a sector mostly hit the L1 cache."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from qdsl.analyze import sass
from qdsl.analyze.registers import accessed_registers
from qdsl.analyze.sass import Instruction

SECTOR = 32                                                      # bytes that the L1 cache fetches at once
_ADDRESS = re.compile(r"\[([^\[\]]*)\]\s*\Z")
_OFFSET = re.compile(r"\+(-?0x[0-9a-f]+)\Z")
_NAME = re.compile(r"\bU?R\d+\b")
_NUMBER = re.compile(r"-?0x[0-9a-f]+\Z")
_PREDICATE = re.compile(r"!?U?P[\dT]\Z")
_ADDS = ("IADD3", "IADD", "VIADD", "UIADD3", "UIADD", "UVIADD", "MOV", "UMOV", "R2UR")
_IMAD_ADDS = ("IMAD.IADD", "IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32", "IMAD.X")
_SHIFTS = ("SHF.L.U32", "USHF.L.U32", "IMAD.SHL.U32")


def sector_miss_rates(body: Sequence[Instruction]) -> list[float]:
    """The part of its trips in which a load fetches a new sector, for every instruction of a loop; 1 where that is unknown.

    A load of an address that another one fetched in the same trip fetches nothing.
    """
    moves = _RegisterSteps(body)
    parts: list[float] = []
    fetched: dict[tuple[str, int], list[int]] = {}               # offsets by registers and by how often those were written
    writes: dict[str, int] = {}
    for instruction in body:
        part = 1.0
        source = instruction.operands[-1 if instruction.base == "LDG" else 1] if instruction.loaded else ""
        if address := _ADDRESS.search(source):
            moved = moves.of(address[1])
            part = 1.0 if moved is None else min(1.0, abs(moved) / SECTOR)
            names = _NAME.findall(address[1])
            offset = int(last[1], 16) if (last := _OFFSET.search(address[1])) else 0
            offsets = fetched.setdefault((" ".join(sorted(names)), sum(writes.get(name, 0) for name in names)), [])
            if any(abs(offset - other) < SECTOR for other in offsets):
                part = 0.0
            offsets.append(offset)
        parts.append(part)
        written = accessed_registers(instruction)[0]
        writes |= {name: writes.get(name, 0) + 1 for name in written}
        moves.follow(instruction, written)
    return parts


class _RegisterSteps:
    """How far registers move in a trip of a loop; None where that is unknown, 0 for those that the loop does not write."""

    def __init__(self, body: Sequence[Instruction]) -> None:
        self.per_trip: dict[str, int | None] = {name: None for instruction in body for name in accessed_registers(instruction)[0]}
        self.per_trip |= sass.moves(body)

    def of(self, operand: str) -> int | None:
        """How far an operand moves: the sum of its registers, or its negation."""
        moved = _sum_steps(self.per_trip.get(name, 0) for name in _NAME.findall(operand))
        return moved and (-moved if operand.startswith("-") else moved)

    def follow(self, instruction: Instruction, written: Iterable[str]) -> None:
        """Note how far the results of an instruction move."""
        moved = None if instruction.guard else self._result_step(instruction)
        self.per_trip |= dict.fromkeys(written, moved)

    def _result_step(self, instruction: Instruction) -> int | None:
        sources = [part.removesuffix(".reuse") for part in instruction.operands[1:]]
        sources = [part for part in sources if not _PREDICATE.match(part)]
        moves = [self.of(part) for part in sources]
        numbers = [int(part, 16) if _NUMBER.match(part) else None for part in sources]
        opcode, base = instruction.opcode, instruction.base
        if all(move == 0 for move in moves) or ".HI" in opcode or opcode.endswith(".X"):
            return 0                                             # of upper words, too, which only carries reach
        if base in _ADDS or opcode in _IMAD_ADDS:
            return _sum_steps(moves)
        first, factor = moves[0], numbers[1] if len(numbers) > 1 else None
        if base in ("LEA", "ULEA") and len(moves) == 3 and first is not None and numbers[2] is not None:
            return _sum_steps([first << numbers[2], moves[1]])
        if opcode in _SHIFTS and first is not None and factor is not None:
            return first * factor if base == "IMAD" else first << factor
        if base == "IMAD" and len(moves) == 3 and first is not None and factor is not None:
            return _sum_steps([first * factor, moves[2]])
        return None


def _sum_steps(moves: Iterable[int | None]) -> int | None:
    total = 0
    for move in moves:
        if move is None:
            return None
        total += move
    return total
