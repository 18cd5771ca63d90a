"""What a kernel's instructions come to per weight, by the pipe that executes them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from qdsl.analyze import pipes, sass
from qdsl.analyze.gpus import WARP, AnalyzeError, arch_of
from qdsl.analyze.sass import Code, Instruction

if TYPE_CHECKING:
    from qdsl.analyze.compile import Compiled
    from qdsl.runtime.call import Call

MOST_UNROLLED = 64


@dataclass(frozen=True, slots=True)
class Report:
    """A launch's kernel, compiled for one architecture and counted.

    programs: of the launch.  weights: that one program takes.  traffic: bytes of all tensors of the launch.
    registers, stack: of a thread, stack in bytes.  spills: instructions that move registers to or from local memory.
    shared_bytes: of a program.

    The hot loop is the loop that loads the most bytes from global memory, or the whole kernel where none loads any.
    hot_weights: that a program takes in a trip of it.  unroll: trips of the source's loop in one of its.  trips: of it.
    hot_bytes: that a program's threads load from global memory in a trip, counted once per thread.  copied: whether they go
    to shared memory on their own, stages - 1 trips ahead.

    hot, whole: instructions of a thread per weight, of the hot loop and of the kernel, where the loop counts `trips` times and
    everything else once.  hot_pipes, whole_pipes: the same by pipe.  cycles: scheduler cycles per weight for which the kernel
    occupies each pipe, times 32, so that an instruction of one cycle counts as it does in `whole`.

    opcodes: of the hot loop, with all modifiers.  loads: those of them that load from global memory.  load_widths: the same
    by bits.  tensor: matrix instructions of the kernel.  listing: the hot loop as it was disassembled.
    """

    kernel: str
    arch: str
    warps: int
    stages: int
    programs: int
    weights: int
    traffic: int
    registers: int
    stack: int
    spills: int
    shared_bytes: int
    has_loop: bool
    hot_weights: int
    unroll: int
    trips: int
    hot_bytes: int
    copied: bool
    hot: float
    whole: float
    hot_pipes: dict[str, float]
    whole_pipes: dict[str, float]
    cycles: dict[str, float]
    opcodes: dict[str, int]
    loads: dict[str, int]
    load_widths: dict[int, int]
    tensor: dict[str, int]
    listing: tuple[str, ...]


def report(call: Call, arch: str) -> Report:
    """Compile a launch for an architecture ('sm_90') and count.  Its tensors may be on the meta device.

    Raises AnalyzeError where the kernel does not compile, Triton interprets, or the launch does not say its weights.
    """
    from qdsl.analyze.compile import compiled

    target = arch_of(arch)
    if not call.weights:
        raise AnalyzeError(f"the launch of {call.kernel.__name__} does not say how many weights a program takes")
    programs = 1
    for extent in call.grid:
        programs *= extent
    traffic = sum(tensor.numel() * tensor.element_size() for tensor in call.tensors)
    return counted(compiled(call, target), target.name, programs, call.weights, call.step, traffic)


def counted(compiled: Compiled, arch: str, programs: int, weights: int, step: int, traffic: int) -> Report:
    """Count a compiled kernel.

    weights: that one program takes.  step: those of one trip of the source's loop, 0 without a loop.  traffic: bytes of the
    launch's tensors.
    """
    code = sass.parse(compiled.text)
    if not code.instructions:
        raise AnalyzeError(f"nvdisasm prints no instruction of {compiled.name} that can be read")
    loop = sass.hot_loop(code) if step else None
    hot = code.instructions[loop.start:loop.stop] if loop else code.instructions
    unroll = unrolled(code, loop, compiled) if loop else 1
    hot_weights = min(weights, step * unroll) if loop else weights
    trips = -(-weights // hot_weights)
    outside = [each for place, each in enumerate(code.instructions) if loop and place not in loop]
    threads = compiled.warps * WARP

    def per_weight(counts: Counter[str], taken: int) -> dict[str, float]:
        return {name: count * threads / taken for name, count in counts.items()}

    hot_pipes, whole_pipes = _pipes(hot), _pipes(outside)
    cycles = _cycles(outside, arch)
    for name, count in hot_pipes.items():
        whole_pipes[name] += count * trips
    for name, taken in _cycles(hot, arch).items():
        cycles[name] = cycles.get(name, 0) + taken * trips
    loads = [each for each in hot if each.loaded]
    return Report(
        kernel=compiled.name, arch=arch, warps=compiled.warps, stages=compiled.stages, programs=programs, weights=weights,
        traffic=traffic, registers=compiled.registers, stack=compiled.stack,
        spills=sum(each.base in sass.SPILLS for each in code.instructions), shared_bytes=compiled.shared,
        has_loop=loop is not None, hot_weights=hot_weights, unroll=unroll, trips=trips,
        hot_bytes=sum(each.loaded for each in loads) * threads, copied=any(each.base == "LDGSTS" for each in loads),
        hot=len(hot) * threads / hot_weights, whole=(len(outside) + len(hot) * trips) * threads / weights,
        hot_pipes=per_weight(hot_pipes, hot_weights), whole_pipes=per_weight(whole_pipes, weights),
        cycles={name: taken * threads / weights for name, taken in cycles.items()},
        opcodes=dict(Counter(each.opcode for each in hot).most_common()),
        loads=dict(Counter(each.opcode for each in loads).most_common()),
        load_widths=dict(sorted(Counter(8 * each.loaded for each in loads).items())),
        tensor=dict(Counter(each.opcode for each in code.instructions if pipes.pipe_of(each) == "tensor").most_common()),
        listing=tuple(each.line for each in hot))


def unrolled(code: Code, loop: range, compiled: Compiled) -> int:
    """How many trips of the source's loop one trip of the compiled loop makes.

    By how far the counter moves, in the source's units or in trips; where no counter is found, by how often a load that
    ptxas was given stands in the loop.
    """
    moves = {abs(move) for move in sass.steps(code, loop)}
    if compiled.step:
        whole = [move // compiled.step for move in moves if move % compiled.step == 0]
        few = [move for move in moves if move in (1, 2, 4, 8, 16)]
        found = max((count for count in whole or few if count <= MOST_UNROLLED), default=0)
        if found:
            return found
    loads = sum(bool(code.instructions[place].loaded) for place in loop)
    return max(1, round(loads / compiled.loads)) if compiled.loads else 1


def _pipes(instructions: Iterable[Instruction]) -> Counter[str]:
    return Counter(pipes.pipe_of(each) for each in instructions)


def _cycles(instructions: Iterable[Instruction], arch: str) -> dict[str, float]:
    """Cycles that one warp occupies each pipe."""
    found: dict[str, float] = {}
    for each in instructions:
        for name, taken in pipes.busy(each, arch).items():
            found[name] = found.get(name, 0.0) + taken
    return found
