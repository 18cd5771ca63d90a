"""Which part of a multiprocessor executes an instruction, and for how many cycles it is busy.

A scheduler hands a warp instruction to one of its pipes; a pipe of L lanes takes 32 / L cycles for it.  Lanes are the results
per clock and multiprocessor of the CUDA C++ Programming Guide's table of arithmetic throughput, divided by four schedulers.
Rates that the table does not have, or that were not found again in print, say so; none was measured here.
"""

from __future__ import annotations

import math
import re

from qdsl.analyze.gpus import SCHEDULERS
from qdsl.analyze.sass import Instruction

# Opcodes by the pipe that executes them, without what follows the first dot.  Others: uniform if they begin with U, else alu.
OPCODES = {
    "fma": "FFMA FADD FMUL FFMA32I FADD32I FMUL32I FFMA2 FADD2 FMUL2 FHADD FHFMA",
    "imad": "IMAD IMAD32I IMUL IMUL32I",
    "half": "HFMA2 HADD2 HMUL2 HFMA2_32I HADD2_32I HMUL2_32I",
    "double": "DFMA DADD DMUL DSETP",
    "convert": "MUFU I2F F2I F2F I2I FRND POPC FLO BREV",
    "memory": "LDG STG LDS STS LDSM STSM LD ST LDL STL LDGSTS LDC LDCU ULDC ATOM ATOMS ATOMG RED REDG REDUX SHFL MATCH S2R "
              "MEMBAR CCTL SYNCS UTMALDG UTMASTG UBLKCP QSPC",
    "tensor": "HMMA IMMA BMMA DMMA QMMA OMMA HGMMA IGMMA QGMMA BGMMA UTCHMMA UTCQMMA UTCOMMA UTCIMMA",
    "uniform": "R2UR S2UR",
    "control": "BRA BRX JMP CALL RET EXIT NOP BAR DEPBAR LDGDEPBAR WARPSYNC BSSY BSYNC BREAK BMOV YIELD NANOSLEEP WARPGROUP "
               "WARPGROUPSET FENCE ERRBAR ARRIVES KILL BPT PREEXIT ELECT ACQBULK ENDCOLLECTIVE",
}
PIPES = ("alu", *OPCODES)
_PIPE = {opcode: pipe for pipe, opcodes in OPCODES.items() for opcode in opcodes.split()}

CONVERT = 8                                                      # 16 results a clock; 64 on sm_90 by some readings of the table
MEMORY = 4                                                       # 32 lanes per multiprocessor; wide accesses may take longer
UNIFORM = 2                                                      # not in the table: assumed
TENSOR = 8                                                       # of a matrix instruction whose shape is not read
_FMA = {"sm_80": 2}                                              # 64 float32 results a clock; 128 on the others
_HALF = {"sm_89": 2, "sm_120": 2}                                # 64 packed pairs a clock; 128 on the others
_DOUBLE = {"sm_89": 64, "sm_120": 64}                            # 2 results a clock; 64 on the others
# Multiply-adds of float16 with float32 sums, per scheduler and cycle.  sm_89, sm_120: half of the float16 rate, as on all
# GeForce.  sm_90: 512 for warp groups; a single warp is said to reach 62 % of it.  sm_100: its older instructions, assumed as
# on sm_80.
_WARP_MMA = {"sm_80": 256.0, "sm_89": 64.0, "sm_90": 512 * 0.62, "sm_100": 256.0, "sm_120": 64.0}
_GROUP_MMA = 512.0                                               # float16 on sm_90
_WARP_SHAPE = {"1688": 16 * 8 * 8, "16816": 16 * 8 * 16, "16832": 16 * 8 * 32}


def pipe_of(instruction: Instruction) -> str:
    """The pipe that executes an instruction, one of PIPES."""
    base = instruction.base
    return _PIPE.get(base) or ("uniform" if base.startswith("U") else "alu")


def busy_cycles(instruction: Instruction, arch: str) -> dict[str, float]:
    """Cycles for which a warp's instruction occupies each part of its scheduler, its issue slot among them."""
    pipe = pipe_of(instruction)
    fractions = {"issue": 1.0}
    if pipe == "fma":
        fractions["fma"] = 2.0 if instruction.base.endswith("2") else _FMA.get(arch, 1)
    elif pipe == "imad":
        # By half of the float32 lanes; on sm_80 those are all.
        fractions |= {"imad": 2.0, "fma": _FMA.get(arch, 1)}
    elif pipe == "half":
        paired = 2 if arch == "sm_80" and "BF16" in instruction.opcode else 1
        fractions["half"] = float(max(paired, _HALF.get(arch, 1)))
    elif pipe == "tensor":
        fractions["tensor"] = _matrix_cycles(instruction, arch)
    elif pipe != "control":
        fractions[pipe] = float({"alu": 2, "double": _DOUBLE.get(arch, 2), "convert": CONVERT, "memory": MEMORY,
                             "uniform": UNIFORM}[pipe])
    return fractions


def multiply_adds(instruction: Instruction) -> float:
    """Multiply-adds of a warp's matrix instruction, or of its part of one that four warps share; 0 where no shape is read."""
    if pipe_of(instruction) != "tensor":
        return 0.0
    if warp := re.match(r"\w+\.(\d{4,5})\b", instruction.opcode):
        return float(_WARP_SHAPE.get(warp[1], 0))
    group = re.match(r"\w+\.(\d+)x(\d+)x(\d+)", instruction.opcode)
    return math.prod(map(int, group.groups())) / SCHEDULERS if group else 0.0


def _matrix_cycles(instruction: Instruction, arch: str) -> float:
    """Cycles of a dense matrix instruction; 8-bit inputs at twice the rate of 16-bit ones."""
    narrow = 2 if instruction.base[0] in "IQ" else 1
    work = multiply_adds(instruction)
    rate = _GROUP_MMA if re.match(r"\w+\.\d+x", instruction.opcode) else _WARP_MMA[arch]
    return work / rate / narrow if work else TENSOR
