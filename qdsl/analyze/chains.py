"""How long a warp takes that has its scheduler to itself: instructions issue in order and wait for what they read.

A scoreboard of registers and pipes.  Branches are not taken and all predicates hold.  A load takes the latency of memory in
the trips in which it fetches a new sector, and that of the L1 cache in the others (strides.py), or where its address depends
on loaded data, as in a lookup.  x, which all programs read, comes from the L2 cache.  Latencies of arithmetic are those that
published microbenchmarks agree on within a few cycles; none was measured here.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

from qdsl.analyze import pipes, strides
from qdsl.analyze.registers import accessed_registers, uses_argument_address
from qdsl.analyze.sass import Code, Instruction

# Cycles from issue to a result that can be read, by pipe; a load's are not among them.
LATENCY = {"alu": 5, "fma": 5, "imad": 5, "half": 5, "double": 16, "convert": 18, "memory": 30, "uniform": 10, "control": 5,
           "tensor": 33}
CACHED = 40                                                      # cycles of a load from the L1 cache
SHARED = 270                                                     # and from the L2 cache
BARRIER = 30                                                     # cycles of a barrier at which no other warp is late
WARM, TRIPS = 4, 12                                              # of a loop: until it repeats itself, and those that are counted
FAST, SLOW = 1000, 1800                                          # cycles of a load between which a chain is a straight line

Step = TypeVar("Step")


@dataclass(frozen=True, slots=True)
class ChainCycles:
    """Cycles of a warp alone, where a load takes `latency` cycles: cycles + loads * latency."""

    cycles: float
    loads: float

    def at(self, latency: float) -> float:
        """Cycles of the chain, at a latency of memory in cycles."""
        return self.cycles + self.loads * latency


def dependence_chains(code: Code, loop: range | None, arch: str, x: int | None = None) -> tuple[ChainCycles, ChainCycles]:
    """The dependence chains of a kernel outside of its hot loop, and of a trip of that loop, which repeats itself.

    x: where the address of x lies in the constant bank of arguments, None where no argument is x.
    """
    hot = loop or range(0)
    parts = dict(zip(hot, strides.sector_miss_rates([code.instructions[place] for place in hot]), strict=True))
    steps = [_timed_instruction(instruction, arch, parts.get(place, 1.0), is_of_x)
             for place, (instruction, is_of_x) in enumerate(
                 zip(code.instructions, uses_argument_address(code.instructions, x), strict=True))]
    return chains_of(lambda latency: _WarpSimulator(latency).run, steps, loop, WARM, TRIPS)


def chains_of(simulator: Callable[[int], Callable[[Sequence[Step]], float]], steps: Sequence[Step], loop: range | None, warm: int,
              trips: int) -> tuple[ChainCycles, ChainCycles]:
    """The dependence chains of steps outside of a loop, and of one trip.

    simulator: for a latency of memory, a function that runs steps and returns the cycle at which the next one may be.  warm,
    trips: trips of the loop until it repeats itself, and those that are counted.
    """
    fast, slow = (_outer_and_loop_cycles(simulator(latency), steps, loop, warm, trips) for latency in (FAST, SLOW))
    outside, trip = (_straight_line(*ends) for ends in zip(fast, slow, strict=True))
    return outside, trip


def _straight_line(fast: float, slow: float) -> ChainCycles:
    """The chain of so many cycles where a load takes FAST cycles, and SLOW cycles."""
    loads = max(0.0, (slow - fast) / (SLOW - FAST))
    return ChainCycles(max(0.0, fast - loads * FAST), loads)


def _outer_and_loop_cycles(run: Callable[[Sequence[Step]], float], steps: Sequence[Step], loop: range | None, warm: int,
                           trips: int) -> tuple[float, float]:
    """Cycles outside of the loop, and of one trip."""
    if loop is None:
        return run(steps), 0.0
    run(steps[:loop.start])
    ends = [run(steps[loop.start:loop.stop]) for _ in range(warm + trips)]
    trip = (ends[-1] - ends[warm - 1]) / trips
    return max(0.0, run(steps[loop.stop:]) - len(ends) * trip), trip


class TimedInstruction(NamedTuple):
    """An instruction: what it writes and reads, for how long it is busy, how often it fetches a sector, whether it follows from
    the address of x.

    latency: cycles until its results can be read; None for loads of global memory and atomics, whose time the warp knows.
    waits: whether it may wait for copies or for the warp group's matrix instructions.
    """

    instruction: Instruction
    base: str
    written: tuple[str, ...]
    read: tuple[str, ...]
    busy: dict[str, float]
    missed: float
    is_of_x: bool
    latency: float | None
    waits: bool


def _timed_instruction(instruction: Instruction, arch: str, missed: float, is_of_x: bool) -> TimedInstruction:
    busy, base, pipe = pipes.busy_cycles(instruction, arch), instruction.base, pipes.pipe_of(instruction)
    latency = LATENCY[pipe] + (busy.get(pipe, 0.0) if pipe == "tensor" else 0.0)
    return TimedInstruction(instruction, base, *accessed_registers(instruction), busy, missed, is_of_x,
                            None if instruction.loaded or base in ("ATOM", "ATOMG") else latency, base in ("DEPBAR", "WARPGROUP"))


@dataclass(slots=True)
class _WarpSimulator:
    """A warp that runs alone.  ready: when registers can be read.  loaded: those that follow from loaded data."""

    latency: int
    now: float = 0.0
    ready: dict[str, float] = field(default_factory=dict)
    loaded: set[str] = field(default_factory=set)
    free: dict[str, float] = field(default_factory=dict)
    copies: deque[float] = field(default_factory=deque)          # ends of the groups of copies that are under way
    copied: float = 0.0                                          # end of the copies that no group has yet
    products: float = 0.0                                        # end of the warp group's matrix instructions

    def run(self, steps: Sequence[TimedInstruction]) -> float:
        """Issue instructions; returns the cycle at which the next one may be."""
        for step in steps:
            self._issue(step)
        return self.now

    def _issue(self, step: TimedInstruction) -> None:
        start = max(self.now, self._barrier_ready(step.instruction)) if step.waits else self.now
        for names, times in ((step.read, self.ready), (step.written, self.ready), (step.busy, self.free)):
            for name in names:
                if name in times and times[name] > start:
                    start = times[name]
        for name, cycles in step.busy.items():
            self.free[name] = start + cycles
        self.now = start + 1 + (BARRIER if step.base == "BAR" else 0)
        is_looked_up = not self.loaded.isdisjoint(step.read)
        end = start + (self._latency(step, is_looked_up) if step.latency is None else step.latency)
        if step.base == "LDGSTS":
            self.copied = max(self.copied, end)
        elif step.base == "LDGDEPBAR":
            self.copies.append(self.copied)
            self.copied = 0.0
        elif "gdesc" in step.instruction.line:
            self.products = max(self.products, end)
        for name in step.written:
            self.ready[name] = end
        if step.base == "LDG" or is_looked_up:
            self.loaded.update(step.written)
        else:
            self.loaded.difference_update(step.written)

    def _barrier_ready(self, instruction: Instruction) -> float:
        """When what a barrier waits for has happened."""
        if instruction.opcode == "DEPBAR.LE" and instruction.operands[0].startswith("SB"):
            left = int(instruction.operands[1], 16) if len(instruction.operands) > 1 else 0
            end = 0.0
            while len(self.copies) > left:
                end = max(end, self.copies.popleft())
            return end
        return self.products if instruction.opcode.startswith("WARPGROUP.DEPBAR") else 0.0

    def _latency(self, step: TimedInstruction, is_looked_up: bool) -> float:
        """Cycles until loaded data, or the result of an atomic, can be read."""
        if step.base in ("ATOM", "ATOMG"):
            return self.latency
        far = SHARED if step.is_of_x else self.latency
        return CACHED if is_looked_up else CACHED + step.missed * (far - CACHED)
