"""AMD kernels as assembly text: instructions, loops, execution units, and the time of a wave.

The counterpart of sass.py, pipes.py and chains.py for the output of Triton's AMD backend.  Names of pipes are those of pipes.py:
`alu` is the vector unit, `uniform` the scalar unit, `tensor` the matrix unit (MFMA, WMMA), `memory` all of LDS, global and scalar
loads.

Rates are those of the CDNA3, CDNA4 and RDNA4 instruction set guides and AMD's data sheets; none was measured.  All four SIMDs
share the units for LDS (128 bytes a clock) and global memory (64 bytes, or 16 addresses, a clock).
"""

from __future__ import annotations

import math
import re
from collections import deque
from collections.abc import Sequence

from qdsl.analyze import sass
from qdsl.analyze.chains import ChainCycles, chains_of
from qdsl.analyze.gpus import SCHEDULERS, arch_of
from qdsl.analyze.sass import Code

_LINE = re.compile(r"\s+(?P<opcode>[a-z]\w*)(?:\s+(?P<operands>[^;]*?))?\s*(?:;.*)?\Z")
_LABEL = re.compile(r"(?P<name>\.LBB\d+_\d+):")
_SIZES = {"ubyte": 1, "sbyte": 1, "u8": 1, "i8": 1, "ushort": 2, "sshort": 2, "short": 2, "u16": 2, "b16": 2, "d16": 2,
          "dwordx2": 8, "b64": 8, "dwordx3": 12, "b96": 12, "dwordx4": 16, "b128": 16}
_GLOBAL = ("global_load", "buffer_load", "flat_load")
_CONTROL = ("s_branch", "s_cbranch", "s_barrier", "s_wait", "s_nop", "s_endpgm", "s_delay", "s_sleep", "s_set", "s_clause",
            "s_sendmsg", "s_code_end", "s_inst_prefetch", "s_sched")
_SLOW = re.compile(r"v_(?:exp|log|rcp|rsq|sqrt|sin|cos|mul_lo_u32|mul_hi|mad_u64)")       # a quarter of the rate
_SHAPE = re.compile(r"_(\d+)x(\d+)x(\d+)_?(\w*)")
_MADDS = {"gfx942": 256.0, "gfx950": 512.0, "gfx1201": 256.0}    # multiply-adds of 16-bit floats, per SIMD and clock
LDS_BYTES, GLOBAL_BYTES, ADDRESSES = 128, 64, 16                 # of a compute unit, per clock
LDS_CYCLES, BARRIER, MATRIX = 64, 30, 16                         # latency of an LDS read, of a barrier, of an MFMA's result
WARM, TRIPS = 2, 6                                               # loop iterations until steady state; iterations to count


class Instruction(sass.Instruction):
    """One instruction; the text has no address and no guard."""

    __slots__ = ()

    @property
    def base(self) -> str:
        """The opcode: it has no modifiers."""
        return self.opcode

    @property
    def loaded(self) -> int:
        """Bytes that a thread loads from global memory."""
        return self.width if self.opcode.startswith(_GLOBAL) else 0

    @property
    def width(self) -> int:
        """Bytes that a thread loads or stores."""
        size = next((_SIZES[part] for part in reversed(self.opcode.split("_")) if part in _SIZES), 4)
        is_pair = self.opcode.startswith(("ds_read2", "ds_write2", "ds_load_2", "ds_store_2"))
        return 2 * size if is_pair else size

    @property
    def is_spill(self) -> bool:
        return self.opcode.startswith("scratch_")

    @property
    def is_jump(self) -> bool:
        return self.opcode.startswith(("s_branch", "s_cbranch"))

    @property
    def target(self) -> str | None:
        """The label that a branch jumps to."""
        return self.operands[0] if self.is_jump else None


def parse(text: str) -> Code:
    """The instructions of a kernel's assembly, and its labels."""
    instructions: list[sass.Instruction] = []
    labels: dict[str, int] = {}
    for line in text.partition("\t.end_amdhsa_kernel")[0].splitlines():
        if label := _LABEL.match(line):
            labels[label["name"]] = len(instructions)
        elif (match := _LINE.match(line)) and "_" in match["opcode"]:
            operands = tuple(part.strip() for part in (match["operands"] or "").split(",")) if match["operands"] else ()
            instructions.append(Instruction(0, "", match["opcode"], operands, line.strip()))
    return Code(tuple(instructions), labels)


def pipe_of(instruction: sass.Instruction) -> str:
    """The execution unit of an instruction, one of pipes.PIPES."""
    opcode = instruction.opcode
    if "mfma" in opcode or "wmma" in opcode:
        return "tensor"
    if opcode.startswith(_CONTROL):
        return "control"
    return "alu" if opcode.startswith("v_") else "uniform" if opcode.startswith("s_") and "load" not in opcode else "memory"


def busy_cycles(instruction: sass.Instruction, arch: str) -> dict[str, float]:
    """Cycles for which an instruction of a wave occupies its SIMD's share of a unit."""
    pipe, warp = pipe_of(instruction), arch_of(arch).warp
    turn = warp / (16 if warp == 64 else 32)                     # a SIMD of CDNA has 16 lanes
    if pipe == "alu":
        return {"alu": turn * (4 if _SLOW.match(instruction.opcode) else 1)}
    if pipe == "tensor":
        return {"tensor": _matrix_cycles(instruction, arch)}
    if instruction.opcode.startswith("ds_"):
        return {"memory": SCHEDULERS * max(4, instruction.width) * warp / LDS_BYTES}
    if pipe == "memory" and not instruction.opcode.startswith("s_"):
        return {"memory": SCHEDULERS * max(warp / ADDRESSES, instruction.width * warp / GLOBAL_BYTES)}
    return {pipe: turn} if pipe != "control" else {}


def _matrix_cycles(instruction: sass.Instruction, arch: str) -> float:
    shape = _SHAPE.search(instruction.opcode)
    if shape is None:
        return float(MATRIX)
    narrow = 2 if re.search(r"8|f6|f4", shape[4].replace("f16", "")) else 1
    return math.prod(int(shape[i]) for i in (1, 2, 3)) / _MADDS[arch] / narrow


def unroll_factor(code: Code, loop: range, step: int | None) -> int:
    """How many iterations of the source's loop one iteration of the compiled loop does, by the step of its counter."""
    moves: dict[str, int] = {}
    compared: set[str] = set()
    for place in loop:
        instruction = code.instructions[place]
        if instruction.opcode in ("s_add_i32", "s_add_u32", "s_addk_i32", "s_sub_i32", "s_add_co_i32"):
            number, register = instruction.operands[-1], instruction.operands[0]
            if register in instruction.operands[1:] or len(instruction.operands) == 2:
                moves[register] = abs(int(number, 0)) if re.fullmatch(r"-?(?:0x)?[0-9a-f]+", number) else 0
        elif instruction.opcode.startswith("s_cmp"):
            compared.update(instruction.operands)
    counts = [moves[register] // step for register in compared & moves.keys() if step and moves[register] % step == 0]
    return max([1, *counts])


def dependence_chains(code: Code, loop: range | None, arch: str, x: int | None = None) -> tuple[ChainCycles, ChainCycles]:
    """The time of a wave that runs alone, outside of its hot loop and per iteration.

    Instructions issue in order, and wait at s_waitcnt.  Every global load takes the latency of memory.  x: unused here; the text
    does not show arguments.
    """
    return chains_of(lambda latency: _WaveSimulator(arch, latency).run, code.instructions, loop, WARM, TRIPS)


class _WaveSimulator:
    """A wave that runs alone."""

    def __init__(self, arch: str, latency: int) -> None:
        self.arch, self.latency, self.now = arch, latency, 0.0
        self.loads: deque[float] = deque()                       # end times of global loads in flight
        self.local: deque[float] = deque()                       # the same of LDS and scalar loads

    def run(self, instructions: Sequence[sass.Instruction]) -> float:
        """Issue instructions; returns the first cycle at which the next one can issue."""
        for instruction in instructions:
            self._issue(instruction)
        return self.now

    def _issue(self, instruction: sass.Instruction) -> None:
        opcode = instruction.opcode
        if opcode.startswith("s_wait"):
            self._wait(instruction)
        if opcode.startswith("s_barrier"):
            self.now += BARRIER
        cycles = busy_cycles(instruction, self.arch)
        self.now += max(cycles.get("alu", 0.0), cycles.get("tensor", 0.0), cycles.get("uniform", 0.0), 1.0)
        if instruction.loaded:
            self.loads.append(self.now + self.latency)
        elif opcode.startswith("ds_"):
            self.local.append(self.now + LDS_CYCLES)
        elif opcode.startswith("s_") and "load" in opcode:
            self.local.append(self.now + self.latency)

    def _wait(self, instruction: sass.Instruction) -> None:
        """Handles s_waitcnt vmcnt(2) lgkmcnt(0), or from RDNA4 on s_wait_loadcnt 0x2 and the like, of up to two counters."""
        text = instruction.line.partition(";")[0]
        for queue, words in ((self.loads, ("vmcnt", "loadcnt")), (self.local, ("lgkmcnt", "dscnt", "kmcnt"))):
            for word in words:
                if match := re.search(rf"{word}(?:_\w+)?[( ]+(0x[0-9a-f]+|\d+)", text):
                    while len(queue) > int(match[1], 0):
                        self.now = max(self.now, queue.popleft())
