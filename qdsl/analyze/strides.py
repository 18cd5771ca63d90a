"""How far the address of a load moves in a trip of a loop: loads that move less than a sector mostly hit the L1 cache."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from qdsl.analyze import sass
from qdsl.analyze.registers import accesses
from qdsl.analyze.sass import Instruction

SECTOR = 32                                                      # bytes that the L1 cache fetches at once
_ADDRESS = re.compile(r"\[([^\[\]]*)\]\s*\Z")
_NAME = re.compile(r"\bU?R\d+\b")
_SHIFTS = ("SHF.L.U32", "USHF.L.U32", "IMAD.SHL.U32")


def missed(body: Sequence[Instruction]) -> list[float]:
    """The part of a load's trips in which it fetches a new sector, of every instruction of a loop; 1 where that is unknown.

    A load of an address that another one fetched in the same trip fetches nothing.
    """
    per_trip: dict[str, int | None] = dict(sass.moves(body))
    carried = {name for each in body for name in accesses(each)[0]}
    parts: list[float] = []
    fetched: dict[tuple[str, int], list[int]] = {}
    version: dict[str, int] = {}
    for each in body:
        part = 1.0
        if each.loaded and (address := _ADDRESS.search(each.operands[-1] if each.base == "LDG" else each.operands[1])):
            names = _NAME.findall(address[1])
            moved = _sum([_of(name, per_trip, carried) for name in names])
            part = 1.0 if moved is None else min(1.0, abs(moved) / SECTOR)
            key = (" ".join(sorted(names)), sum(version.get(name, 0) for name in names))
            offset = _offset(address[1])
            if any(abs(offset - other) < SECTOR for other in fetched.get(key, ())):
                part = 0.0
            fetched.setdefault(key, []).append(offset)
        parts.append(part)
        for name in accesses(each)[0]:
            version[name] = version.get(name, 0) + 1
            per_trip[name] = None if each.guard else _moved(each, per_trip, carried)
    return parts


def _offset(address: str) -> int:
    found = re.search(r"\+(-?0x[0-9a-f]+)\Z", address)
    return int(found[1], 16) if found else 0


def _of(name: str, per_trip: Mapping[str, int | None], carried: set[str]) -> int | None:
    """How far a register moves: one that the loop does not write stays."""
    return per_trip.get(name, None if name in carried else 0)


def _sum(moved: Sequence[int | None]) -> int | None:
    known = [each for each in moved if each is not None]
    return sum(known) if len(known) == len(moved) else None


def _moved(each: Instruction, per_trip: Mapping[str, int | None], carried: set[str]) -> int | None:
    """How far the result of an instruction moves in a trip, None where that is unknown."""
    sources = [part.removesuffix(".reuse") for part in each.operands[1:]]
    sources = [part for part in sources if not re.fullmatch(r"!?U?P[\dT]", part)]
    moves = [_sum([_of(name, per_trip, carried) * (-1 if part.startswith("-") else 1)                       # type: ignore[operator]
                   if _of(name, per_trip, carried) is not None else None for name in _NAME.findall(part)]) for part in sources]
    if all(move == 0 for move in moves):
        return 0
    if ".HI" in each.opcode or each.opcode.endswith(".X"):
        return 0                                                 # upper words, which carries alone reach
    if each.base in ("IADD3", "IADD", "VIADD", "UIADD3", "UIADD", "UVIADD", "MOV", "UMOV", "R2UR") or each.opcode in (
            "IMAD.IADD", "IMAD.MOV", "IMAD.MOV.U32", "IMAD.U32", "IMAD.X"):
        return _sum(moves)
    numbers = [int(part, 16) if re.fullmatch(r"-?0x[0-9a-f]+", part) else None for part in sources]
    if each.base in ("LEA", "ULEA") and len(moves) == 3 and moves[0] is not None and numbers[2] is not None:
        return _sum([moves[0] << numbers[2], moves[1]])
    if each.opcode in _SHIFTS and moves[0] is not None and numbers[1] is not None:
        return moves[0] * numbers[1] if each.base == "IMAD" else moves[0] << numbers[1]
    if each.base == "IMAD" and len(moves) == 3 and moves[0] is not None and numbers[1] is not None:
        return _sum([moves[0] * numbers[1], moves[2]])
    return None
