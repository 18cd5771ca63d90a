"""Compiles and executes a launch: `execute(call, "sm_90")` for any Triton kernel, or `execute_ptx` for PTX."""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from torch import Tensor

from qdsl.analyze.compile import compile_with_triton, runtime_values, specialize_arguments
from qdsl.analyze.execute import async_ops, conversion_ops, memory_ops, thread_ops, warp_ops
from qdsl.analyze.execute.machine import WARP, Finding, Options, RunLog, ThreadBatch
from qdsl.analyze.execute.memory import GlobalMemory
from qdsl.analyze.execute.operands import steps_of
from qdsl.analyze.execute.ptx import ExecutionError, Program, parse
from qdsl.analyze.execute.races import Clocks, ShadowMemory
from qdsl.analyze.gpus import arch_of
from qdsl.runtime.libraries.call import Call

THREADS = 8192                                                   # approximate threads per batch
OPCODES = (memory_ops, conversion_ops, async_ops, thread_ops, warp_ops)         # importing them registers their instructions


@dataclass(frozen=True, slots=True)
class Execution:
    """The result of a launch, whose tensors were changed in place.

    findings: behaviour that hardware does not guarantee.  opcodes, lines: how often threads executed each opcode and PTX line.
    memory: with Options.counts, requests of warps, bytes, 32-byte sectors of global memory, and passes over shared memory.
    issued: instructions times 32 for each warp that reached them, predicated off or not.
    """

    program: Program
    findings: tuple[Finding, ...]
    opcodes: Mapping[str, int]
    lines: Mapping[int, int]
    memory: Mapping[str, int]
    issued: int

    @property
    def name(self) -> str:
        return self.program.name

    @property
    def instructions(self) -> int:
        """Instructions that threads executed."""
        return sum(self.opcodes.values())


def execute(call: Call, arch: str, *, outputs: Sequence[Tensor] = (), workspaces: Sequence[Tensor] = (),
            after: Sequence[Tensor] | None = None, programs: Sequence[int] | None = None,
            options: Options | None = None) -> Execution:
    """Compile a launch for an architecture and run it on its tensors, which are in CPU memory.

    outputs: tensors whose every byte must be stored once.  workspaces: tensors that start as noise; the launch's own is one.
    after: tensors that the previous launch writes, if this one may begin before it ends (launch_pdl).  programs: numbers of the
    grid's programs to run, x first; by default all.  Raises ExecutionError for a fault or an unsupported instruction.
    """
    compiled = compile_with_triton(call, arch_of(arch))
    after = () if after is None and call.options.get("launch_pdl") else after
    metadata = compiled.metadata
    return execute_ptx(compiled.asm["ptx"], flat_arguments(call), call.grid, metadata.num_warps, metadata.shared,
                       outputs=outputs, workspaces=(*workspaces, *call.scratch[:1]), after=after, programs=programs,
                       options=options)


def flat_arguments(call: Call) -> list[tuple[str, Any]]:
    """Names and values of the arguments of the compiled kernel, with tuples flattened."""
    types, _, _ = specialize_arguments(call)
    named = zip((parameter.name for parameter in call.kernel.params), call.arguments, strict=False)
    return [(name, value) for name, argument in named for value in runtime_values(types[name], argument)]


def execute_ptx(ptx: str, arguments: Sequence[tuple[str, Tensor | int | float]], grid: Sequence[int], warps: int, shared: int, *,
                outputs: Sequence[Tensor] = (), workspaces: Sequence[Tensor] = (), after: Sequence[Tensor] | None = None,
                programs: Sequence[int] | None = None, options: Options | None = None) -> Execution:
    """Run the first entry of a PTX module.  arguments: names and values in order; parameters after them are 0.

    warps: of a program.  shared: bytes of dynamic shared memory.  The rest is as for `execute`.
    """
    options = options or Options()
    program = _parsed(ptx)
    steps = steps_of(program)
    memory = GlobalMemory([(name, value) for name, value in arguments if isinstance(value, Tensor)], outputs, workspaces, after)
    values = _parameter_bytes(program, memory, [value for _, value in arguments])
    x, y, z = (*grid, 1, 1)[:3]
    numbers = list(range(x * y * z)) if programs is None else list(programs)
    if options.order == "reverse":
        numbers.reverse()
    elif isinstance(options.order, int):
        np.random.default_rng(options.order).shuffle(numbers)
    log, clocks, state = RunLog(), Clocks(), dict[int, ShadowMemory]()
    size = max(1, THREADS // (WARP * warps))
    for start in range(0, len(numbers), size):
        some = numbers[start:start + size]
        ThreadBatch(program, steps, memory, values, (x, y, z), some, warps, shared, options, clocks, log, state).run()
    if programs is None:
        for name, place, text in memory.badly_stored_outputs():
            log.add(Finding("stores", f"element {place} of '{name}' was {text}", name, ""))
    opcodes, lines = Counter[str](), Counter[int]()
    for place, count in log.executed.items():
        opcodes[program.instructions[place].opcode] += count
        lines[program.instructions[place].line] += count
    return Execution(program, tuple(log.findings.values()), opcodes, lines, log.memory, log.issued)


@lru_cache(maxsize=32)
def _parsed(ptx: str) -> Program:
    return parse(ptx)


def _parameter_bytes(program: Program, memory: GlobalMemory, values: Sequence[Tensor | int | float]) -> dict[str, bytes]:
    """Bytes of each parameter; scratch pointers that Triton adds at the end are null."""
    if len(values) > len(program.parameters):
        raise ExecutionError(f"{program.name} takes {len(program.parameters)} parameters, not {len(values)}")
    coded: dict[str, bytes] = {}
    for place, (name, size) in enumerate(program.parameters.items()):
        value = values[place] if place < len(values) else 0
        number = memory.address(value) if isinstance(value, Tensor) else value
        if isinstance(number, float):
            coded[name] = struct.pack("<f" if size == 4 else "<d", number)
        else:
            coded[name] = (number & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    return coded
