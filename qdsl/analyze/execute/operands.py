"""Operands as functions that read values of the executing threads, and write them.

Arrays in registers are never changed in place, so that registers may share one.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from qdsl.analyze.execute import ptx
from qdsl.analyze.execute.machine import At, Step, ThreadBatch
from qdsl.analyze.execute.memory import Indices
from qdsl.analyze.execute.numbers import UNSIGNED, Bits

Source = Callable[[ThreadBatch, At], Bits]
Target = Callable[[ThreadBatch, At, Bits], None]
Maker = Callable[["Context"], Step]
_TYPE = re.compile(r"(?:pred|bf16x2|bf16|f16x2|[us]16x2|f32x2|tf32|e4m3x2|e5m2x2|e4m3|e5m2|[busf](?:8|16|32|64|128))")
MAKERS: dict[str, Maker] = {}


def opcode(*names: str) -> Callable[[Maker], Maker]:
    """Registers the function that makes steps of instructions with these names."""
    def add(maker: Maker) -> Maker:
        MAKERS.update(dict.fromkeys(names, maker))
        return maker
    return add


@dataclass(frozen=True)
class Context:
    """An instruction that is being converted to a step, with its program."""

    instruction: ptx.Instruction
    program: ptx.Program
    types: tuple[str, ...] = field(init=False)
    modifiers: frozenset[str] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "types", tuple(part for part in self.instruction.modifiers if _TYPE.fullmatch(part)))
        object.__setattr__(self, "modifiers", frozenset(self.instruction.modifiers))

    @property
    def kind(self) -> str:
        """The last type among the modifiers.  Raises ExecutionError."""
        if not self.types:
            raise self.unknown()
        return self.types[-1]

    @property
    def rounding(self) -> str:
        """The instruction's rounding mode; to nearest even where it names none."""
        return next((part for part in ("rn", "rz", "rm", "rp", "rna") if part in self.modifiers), "rn")

    def operand(self, place: int) -> ptx.Operand:
        """The operand at a place.  Raises ExecutionError where the instruction has fewer."""
        operands = self.instruction.operands
        if place >= len(operands):
            raise self.unknown("it lacks operands")
        return operands[place]

    def only(self, *expected: str) -> None:
        """Raises ExecutionError for modifiers that are neither types nor expected."""
        if strange := self.modifiers - set(self.types) - set(expected):
            raise self.unknown(f"'.{min(strange)}' is not known")

    def unknown(self, why: str = "it is not known") -> ptx.ExecutionError:
        """An error with the instruction and the reason why it cannot be executed."""
        return ptx.ExecutionError(f"{self.instruction}: {why}")

    # -- reading -----------------------------------------------------------------------------------------------------------

    def source(self, place: int | ptx.Operand, bits: int) -> Source:
        """Reads an operand as unsigned integers of `bits` bits, as booleans for 1; constants have one element."""
        operand = self.operand(place) if isinstance(place, int) else place
        if isinstance(operand, ptx.Negated):
            inner = self.source(operand.register, 1)
            return lambda batch, at: ~inner(batch, at)
        if isinstance(operand, ptx.Immediate):
            number = operand.value if isinstance(operand.value, int) else self._bits_of(operand.value, bits)
            number &= (1 << bits) - 1
            constant = np.array([bool(number)] if bits == 1 else [number], bool if bits == 1 else UNSIGNED[bits])
            return lambda batch, at: constant
        if isinstance(operand, ptx.Symbol):
            return self._symbol_source(operand.name, bits)
        if isinstance(operand, ptx.Register):
            slot = operand.slot
            if operand.bits == bits:
                return lambda batch, at: batch.registers[slot] if at is None else batch.registers[slot][at]
            if bits == 1 or operand.bits == 1:
                raise self.unknown("a predicate stands where a number should, or the reverse")
            dtype = UNSIGNED[bits]
            return lambda batch, at: (batch.registers[slot] if at is None else batch.registers[slot][at]).astype(dtype)
        raise self.unknown(f"operand {operand} is of another kind")

    def _bits_of(self, value: float, bits: int) -> int:
        if bits not in (32, 64):
            raise self.unknown(f"{value} stands where a type of {bits} bits should")
        return int.from_bytes(struct.pack("<f" if bits == 32 else "<d", value), "little")

    def _symbol_source(self, name: str, bits: int) -> Source:
        if name.startswith("%"):
            dtype = UNSIGNED[bits]
            return lambda batch, at: batch.special_register(name)[slice(None) if at is None else at].astype(dtype)
        if name in self.program.shared:
            return self.source(ptx.Immediate(self.program.shared[name]), bits)
        if name in ("WARP_SZ",):
            return self.source(ptx.Immediate(32), bits)
        raise self.unknown(f"no variable '{name}' is known")

    def sources(self, place: int, bits: int) -> list[Source]:
        """Those of a vector, or of one operand."""
        operand = self.operand(place)
        return [self.source(part, bits) for part in (operand.parts if isinstance(operand, ptx.Vector) else (operand,))]

    def address(self, place: int) -> Callable[[ThreadBatch, At], Indices]:
        """Reads [base + offset] as int64."""
        operand = self.operand(place)
        if not isinstance(operand, ptx.Address):
            raise self.unknown("an operand is no address")
        base = operand.base
        read = self.source(base, base.bits if isinstance(base, ptx.Register) else 64)
        offset = operand.offset

        def addresses(batch: ThreadBatch, at: At) -> Indices:
            (value,) = broadcast(batch, at, [read(batch, at)])
            return value.astype(np.int64) + offset
        return addresses

    # -- writing -----------------------------------------------------------------------------------------------------------

    def target(self, place: int | ptx.Operand = 0) -> Target:
        """Writes an operand; values of another width are truncated or zero-extended."""
        operand = self.operand(place) if isinstance(place, int) else place
        if isinstance(operand, ptx.Symbol) and operand.name == "_":
            return lambda batch, at, value: None
        if not isinstance(operand, ptx.Register):
            raise self.unknown("the first operand is no register")
        slot, dtype = operand.slot, (np.dtype(bool) if operand.bits == 1 else UNSIGNED[operand.bits])

        def put(batch: ThreadBatch, at: At, value: Bits) -> None:
            if value.dtype != dtype:
                same = value.dtype.itemsize == dtype.itemsize and value.dtype != bool
                value = value.view(dtype) if same else value.astype(dtype)
            if at is None:
                batch.registers[slot] = value if len(value) == batch.count else np.repeat(value, batch.count)
            else:
                register = batch.registers[slot].copy()
                register[at] = value
                batch.registers[slot] = register
        return put

    def targets(self, place: int = 0) -> list[Target]:
        """Registers that an operand, or each part of a vector, is written to."""
        operand = self.operand(place)
        return [self.target(part) for part in (operand.parts if isinstance(operand, ptx.Vector) else (operand,))]


def steps_of(program: ptx.Program) -> list[Step]:
    """A step per instruction.  Raises ExecutionError for an unknown instruction."""
    return [_make_step(instruction, program) for instruction in program.instructions]


def _make_step(instruction: ptx.Instruction, program: ptx.Program) -> Step:
    if instruction.name in ("bra", "ret", "exit", "bar", "barrier") and "warp" not in instruction.modifiers:
        return _scheduled
    context = Context(instruction, program)
    if instruction.name not in MAKERS:
        raise context.unknown()
    return MAKERS[instruction.name](context)


def _scheduled(batch: ThreadBatch, at: At) -> None:
    """Does nothing: the scheduler executes these instructions."""


def split_pairs(value: Bits, kind: str) -> Bits:
    """The parts of packed pairs as [threads, 2]; other values unchanged."""
    if not kind.endswith("x2"):
        return value
    return np.ascontiguousarray(value)[:, None].view(UNSIGNED[ptx.type_bits(kind[:-2]) if not kind.startswith("e") else 8])


def joined(parts: Bits, kind: str) -> Bits:
    """The reverse of `split_pairs`."""
    return np.ascontiguousarray(parts).view(UNSIGNED[2 * 8 * parts.dtype.itemsize])[:, 0] if kind.endswith("x2") else parts


def element(kind: str) -> str:
    """The type of one number of a pair."""
    return kind.removesuffix("x2")


def broadcast(batch: ThreadBatch, at: At, values: Sequence[Bits]) -> list[Bits]:
    """Values of all threads, also where one is a constant."""
    count = batch.count if at is None else len(at)
    return [value if len(value) == count else np.repeat(value, count) for value in values]
