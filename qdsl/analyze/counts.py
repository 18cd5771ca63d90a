"""What a kernel's instructions come to per weight, by the pipe that executes them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from torch import Tensor

from qdsl.analyze import amdgcn, chains, pipes, sass
from qdsl.analyze.chains import ChainCycles
from qdsl.analyze.gpus import AnalyzeError, arch_of
from qdsl.analyze.registers import uses_argument_address
from qdsl.analyze.sass import Code, Instruction
from qdsl.runtime.gpu.costs import RepeatedWork
from qdsl.runtime.libraries.private_apis import allocation

if TYPE_CHECKING:
    from qdsl.analyze.compile import Compiled
    from qdsl.runtime.libraries.call import Call

MOST_UNROLLED = 64
ACTIVATIONS = ("x", "bias", "out", "tiles", "parts", "arrivals")       # arguments of kernels that are no part of a weight
MATRIX_COLUMNS = 8                                               # of x, the fewest that a matrix instruction has
LEAST_LOADED = 0.9                                               # of a weight's bytes that every kernel has to load


class Assembly(NamedTuple):
    """How a vendor's kernels are read: text, the pipe of an instruction, its cycles, dependence chains, unrolled loops."""

    parse: Callable[[str], Code]
    pipe_of: Callable[[Instruction], str]
    busy: Callable[[Instruction, str], dict[str, float]]
    chains: Callable[[Code, range | None, str, int | None], tuple[ChainCycles, ChainCycles]]
    unroll_factor: Callable[[Code, range, Compiled, float, float], int]


@dataclass(frozen=True, slots=True)
class Report:
    """A launch's kernel, compiled for one architecture and counted.

    programs: of the launch.  weights: that one program takes.  traffic: bytes of all tensors of the launch.
    registers, stack: of a thread, stack in bytes.  spills: instructions that move registers to or from local memory.
    shared_bytes: of a program.

    The hot loop is the loop that loads the most bytes from global memory, or the whole kernel where none loads any.
    hot_weights: that a program takes in a trip of it.  unroll: trips of the source's loop in one of its.  trips: of it.
    hot_bytes: that a program's threads load from global memory in a trip, counted once per thread.  copied: whether they go
    to shared memory on their own, stages - 1 trips ahead.  loaded: bytes that all programs load, counted so.  work: what they
    do several times, by the launch.

    hot, whole: instructions of a thread per weight, of the hot loop and of the kernel, where the loop counts `trips` times and
    everything else once.  hot_pipes, whole_pipes: the same by pipe.  cycles: scheduler cycles per weight for which the kernel
    occupies each pipe, times 32, so that an instruction of one cycle counts as it does in `whole`.  hot_cycles, outside_cycles:
    those of a warp, in a trip of the hot loop and outside of it.  hot_chain, outside_chain: how long a warp that runs alone
    takes for the same (chains.py).

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
    hot_cycles: dict[str, float]
    outside_cycles: dict[str, float]
    hot_chain: ChainCycles
    outside_chain: ChainCycles
    loaded: int
    work: RepeatedWork
    opcodes: dict[str, int]
    loads: dict[str, int]
    load_widths: dict[int, int]
    tensor: dict[str, int]
    listing: tuple[str, ...]


def report(call: Call, arch: str) -> Report:
    """Compile a launch for an architecture ('sm_90') and count.  Its tensors may be on the meta device.

    Raises AnalyzeError where the kernel does not compile, Triton interprets, the launch does not say its weights, or fewer
    bytes of the weight are loaded than it has, so that the count must be wrong.
    """
    from qdsl.analyze.compile import compile_launch

    target = arch_of(arch)
    if not call.weights:
        raise AnalyzeError(f"the launch of {call.kernel.__name__} does not say how many weights a program takes")
    programs = 1
    for extent in call.grid:
        programs *= extent
    weight, others = _weight_and_other_bytes(call)
    weight = round(weight * _weight_share(call, programs))
    work = _repeated_work(call, programs, weight)
    compiled = compile_launch(call, target)
    counts = count_instructions(compiled, target.name, programs, call.weights, call.step, weight + others, work,
                                work.passes * weight / (programs * call.weights), call.constants.get("BM", MATRIX_COLUMNS))
    if counts.loaded < LEAST_LOADED * weight:
        raise AnalyzeError(f"{counts.kernel} for {arch}: {counts.loaded / weight:.2f} of the weight's bytes are loaded in "
                           f"{counts.trips} trips of the loop, unrolled {counts.unroll}-fold: the loop was misread")
    return counts


def _repeated_work(call: Call, programs: int, weight: int) -> RepeatedWork:
    """What programs of a launch do several times with so many bytes of a weight, and with x if they multiply."""
    x = dict(zip(call.kernel.arg_names, call.arguments, strict=False)).get("x")
    if not isinstance(x, Tensor):
        return RepeatedWork(weight)
    passes, is_copied = call.grid[1] if len(call.grid) > 1 else 1, "STAGES" in call.constants
    loaded = x.numel() * x.element_size() * (programs // passes) // call.constants.get("SPLIT", 1)
    return RepeatedWork(weight, passes, loaded, is_copied, 128 // call.constants.get("SIZE", 128) - 1 if is_copied else 0)


def _weight_share(call: Call, programs: int) -> float:
    """The share of a weight that a launch takes: less than 1 where it decodes only some blocks of rows."""
    values = dict(zip(call.kernel.arg_names, call.arguments, strict=False))
    if values.get("blocks") is None:
        return 1.0
    n, k = values["N"], values["K"]
    assert isinstance(n, int) and isinstance(k, int)
    return min(1.0, programs * call.weights / (n * k))


def _weight_and_other_bytes(call: Call) -> tuple[int, int]:
    """Bytes of a weight's tensors among a launch's arguments, and of the others; those that share memory count once."""
    sizes: dict[int, tuple[int, bool]] = {}
    for name, value in zip(call.kernel.arg_names, call.arguments, strict=False):
        for tensor in _tensors_in(value):
            sizes.setdefault(allocation(tensor), (tensor.numel() * tensor.element_size(), name in ACTIVATIONS))
    return sum(size for size, other in sizes.values() if not other), sum(size for size, other in sizes.values() if other)


def _tensors_in(value: object) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for element in value:
            yield from _tensors_in(element)


def count_instructions(compiled: Compiled, arch: str, programs: int, weights: int, step: int, traffic: int,
                       work: RepeatedWork | None = None, stored: float = 0.0, columns: int = 1) -> Report:
    """Count a compiled kernel.

    weights: that one program takes.  step: those of one trip of the source's loop, 0 without a loop.  traffic: bytes of the
    launch's tensors.  work: as in Report.  stored, columns: bytes of a weight, and multiply-adds that it takes at least in
    matrix units, to check by them how far a loop is unrolled.
    """
    target = arch_of(arch)
    assembly = NVIDIA if target.is_nvidia else AMD               # of this module's last lines
    code = assembly.parse(compiled.text)
    if not code.instructions:
        raise AnalyzeError(f"no instruction of {compiled.name} can be read")
    loop = sass.hot_loop(code) if step else None
    hot = code.instructions[loop.start:loop.stop] if loop else code.instructions
    threads = compiled.warps * target.warp
    least, products = LEAST_LOADED * stored * step / threads, columns * step / compiled.warps
    unroll = assembly.unroll_factor(code, loop, compiled, least, products) if loop else 1
    hot_weights = min(weights, step * unroll) if loop else weights
    trips = -(-weights // hot_weights)
    outside = [load for place, load in enumerate(code.instructions) if loop and place not in loop]

    def per_weight(counts: Counter[str], taken: int) -> dict[str, float]:
        return {name: count * threads / taken for name, count in counts.items()}

    hot_pipes, whole_pipes = (Counter(map(assembly.pipe_of, part)) for part in (hot, outside))
    hot_cycles = _pipe_cycles(hot if loop else [], assembly, arch)
    outside_cycles = _pipe_cycles(outside if loop else hot, assembly, arch)
    cycles = dict(outside_cycles)
    for name, count in hot_pipes.items():
        whole_pipes[name] += count * trips
    for name, taken in hot_cycles.items():
        cycles[name] = cycles.get(name, 0) + taken * trips
    loads = [load for load in hot if load.loaded]
    outside_chain, hot_chain = assembly.chains(code, loop, arch, compiled.x)
    hot_bytes = sum(load.loaded for load in loads) * threads
    return Report(
        kernel=compiled.name, arch=arch, warps=compiled.warps, stages=compiled.stages, programs=programs, weights=weights,
        traffic=traffic, registers=compiled.registers, stack=compiled.stack,
        spills=sum(load.is_spill for load in code.instructions), shared_bytes=compiled.shared,
        has_loop=loop is not None, hot_weights=hot_weights, unroll=unroll, trips=trips,
        hot_bytes=hot_bytes, copied=any(load.base == "LDGSTS" for load in loads),
        hot=len(hot) * threads / hot_weights, whole=(len(outside) + len(hot) * trips) * threads / weights,
        hot_pipes=per_weight(hot_pipes, hot_weights), whole_pipes=per_weight(whole_pipes, weights),
        cycles={name: taken * threads / weights for name, taken in cycles.items()},
        hot_cycles=hot_cycles, outside_cycles=outside_cycles, hot_chain=hot_chain, outside_chain=outside_chain,
        loaded=programs * (hot_bytes * trips + sum(load.loaded for load in outside) * threads), work=work or RepeatedWork(),
        opcodes=dict(Counter(load.opcode for load in hot).most_common()),
        loads=dict(Counter(load.opcode for load in loads).most_common()),
        load_widths=dict(sorted(Counter(8 * load.loaded for load in loads).items())),
        tensor=dict(Counter(load.opcode for load in code.instructions if assembly.pipe_of(load) == "tensor").most_common()),
        listing=tuple(load.line for load in hot))


def _pipe_cycles(instructions: Iterable[Instruction], assembly: Assembly, arch: str) -> dict[str, float]:
    """Cycles for which one warp occupies each pipe."""
    taken: dict[str, float] = {}
    for instruction in instructions:
        for name, cycles in assembly.busy(instruction, arch).items():
            taken[name] = taken.get(name, 0.0) + cycles
    return taken


def unroll_factor(code: Code, loop: range, compiled: Compiled, least: float = 0.0, products: float = 0.0) -> int:
    """How many trips of the source's loop one trip of the compiled loop makes.

    By how far the counter moves, in the source's units or in trips.  Compilers may count in multiples of them, such as bytes:
    then it is the largest divisor for which enough is loaded and multiplied.  Where no counter is seen, by how often a load
    that ptxas was given stands in the loop; and no more than that where matrix instructions do not say what they multiply.

    least: bytes that a thread has to load in a trip of the source's loop, apart from x.  products: multiply-adds of a warp in
    it, if matrix units make them.
    """
    moves = {abs(move) for move in sass.loop_counter_steps(code, loop)}
    loads = sum(bool(code.instructions[place].loaded) for place in loop)
    copies = max(1, round(loads / compiled.loads)) if compiled.loads else 1
    if compiled.step:
        whole = [move // compiled.step for move in moves if move % compiled.step == 0]
        few = [move for move in moves if move in (1, 2, 4, 8, 16)]
        counts = [count for count in whole or few if count <= MOST_UNROLLED]
        if counts:
            are_of_x = uses_argument_address(code.instructions, compiled.x)
            loaded = sum(code.instructions[place].loaded for place in loop if not are_of_x[place])
            matrices = [code.instructions[place] for place in loop if pipes.pipe_of(code.instructions[place]) == "tensor"]
            multiplied = sum(map(pipes.multiply_adds, matrices)) or math.inf
            most, limit = max(counts), copies if matrices and multiplied == math.inf else MOST_UNROLLED
            return max(count for count in range(1, most + 1) if most % count == 0 and (
                count == 1 or (count <= limit and count * least <= loaded and count * products <= multiplied)))
    return copies



NVIDIA = Assembly(sass.parse, pipes.pipe_of, pipes.busy_cycles, chains.dependence_chains, unroll_factor)
AMD = Assembly(amdgcn.parse, amdgcn.pipe_of, amdgcn.busy_cycles, amdgcn.dependence_chains,
               lambda code, loop, compiled, *_: amdgcn.unroll_factor(code, loop, compiled.step))    # by a scalar register
