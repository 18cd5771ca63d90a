"""Kernels examined without a GPU: disassembly is read, instructions are counted, speeds predicted as the formulas say."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from qdsl.analyze import ARCHS, GPUS, AnalyzeError, Report, compile, launches, pipes, predict, report, sass, survey, text
from qdsl.analyze.chains import ChainCycles, dependence_chains
from qdsl.analyze.compile import Compiled, argument_offset, hot_loop_step, most_loop_loads
from qdsl.analyze.counts import count_instructions
from qdsl.analyze.registers import accessed_registers
from qdsl.analyze.strides import sector_miss_rates
from qdsl.cli import app
from qdsl.runtime.gpu.costs import EXPOSED, LATENCY, LAUNCH, RepeatedWork
from qdsl.runtime.gpu.kernels.dequantize import dequantize
from qdsl.runtime.libraries.call import Call
from tests.support.formats import Case, cases, fixed_shape

# A guard that leaps over everything, a loop of nine instructions, two spills, and what the assembler leaves behind the end.
KERNEL = """
	.section	.text.kernel,"ax",@progbits
kernel:
.text.kernel:
        /*0000*/                   S2R R0, SR_TID.X ;
        /*0010*/                   ISETP.GE.AND P0, PT, R0.reuse, UR4, PT ;
        /*0020*/               @P0 BRA `(.L_x_1) ;
        /*0030*/                   IMAD.MOV.U32 R2, RZ, RZ, RZ ;
        /*0040*/                   STL [R1], R5 ;
.L_x_0:
        /*0050*/               @P1 LDG.E.128 R4, desc[UR6][R8.64] ;
        /*0060*/                   LDG.E.U16 R12, desc[UR6][R8.64+0x10] ;
        /*0070*/                   LDG.E.ENL2.256 R16, R20, desc[UR6][R8.64+0x20] ;
        /*0080*/                   VIADD R2, R2, 0x200 ;
        /*0090*/                   I2F.S16 R3, R4 ;
        /*00a0*/                   FFMA R3, R3, R4, R5 ;
        /*00b0*/                   LOP3.LUT R4, R4, 0xf, RZ, 0xc0, !PT ;
        /*00c0*/                   ISETP.GE.AND P0, PT, R2, UR5, PT ;
        /*00d0*/              @!P0 BRA `(.L_x_0) ;
        /*00e0*/                   LDL R5, [R1] ;
.L_x_1:
        /*00f0*/                   EXIT ;
.L_x_2:
        /*0100*/                   BRA `(.L_x_2);
        /*0110*/                   NOP;
        /*0120*/                   NOP;
"""
# As on sm_80: the loop leaves by a call, its counter is uniform, and an index that moves by 16 is compared for a mask.
UNIFORM = """
.L_x_0:
        /*0000*/                   LDG.E R4, [R2.64] ;
        /*0010*/                   IADD3 R20, P1, R20, 0x10, RZ ;
        /*0020*/                   ISETP.GE.AND P3, PT, R20, R15, PT ;
        /*0030*/                   UIADD3 UR4, UP0, UR4, 0x8, URZ ;
        /*0040*/                   UIADD3.X UR5, URZ, UR5, URZ, UP0, !UPT ;
        /*0050*/                   UISETP.GE.U32.AND UP0, UPT, UR4, UR23, UPT ;
        /*0060*/                   UISETP.GE.U32.AND.EX UP0, UPT, UR5, URZ, UPT, UP0 ;
        /*0070*/                   PLOP3.LUT P0, PT, PT, PT, UP0, 0x80, 0x0 ;
        /*0080*/               @P0 CALL.REL.NOINC `(.L_x_1) ;
        /*0090*/                   BRA `(.L_x_0) ;
.L_x_1:
        /*00a0*/                   EXIT ;
"""
# The counter moves twice, downwards, and is compared after it was copied.
CHAINED = """
.L_x_0:
        /*0000*/                   LDG.E R4, [R2.64] ;
        /*0010*/                   UIADD3 UR9, UPT, UPT, UR4, -0x40, URZ ;
        /*0020*/                   UIADD3 UR4, UPT, UPT, UR9, 0xffffffc0, URZ ;
        /*0030*/                   IMAD.U32 R7, RZ, RZ, UR9 ;
        /*0040*/                   ISETP.GT.AND P2, PT, R7, RZ, PT ;
        /*0050*/               @P2 BRA `(.L_x_0) ;
        /*0060*/                   EXIT ;
"""


def compiled(printed: str = KERNEL, **changes: Any) -> Compiled:
    kernel = Compiled("kernel", warps=4, stages=3, registers=40, stack=8, shared=0, text=printed, step=128, loads=3)
    return replace(kernel, **changes)


def example(**changes: Any) -> Report:
    """The kernel above: 264 programs of 16384 weights at half a byte, 1024 in a trip of the source's loop."""
    counts = count_instructions(compiled(), "sm_90", programs=264, weights=16384, step=1024, traffic=264 * 8192)
    return replace(counts, **changes)


# -- reading ----------------------------------------------------------------------------------------------------------


def test_a_disassembly_is_read() -> None:
    code = sass.parse(KERNEL)
    assert len(code.instructions) == 16 and code.instructions[-1].opcode == "EXIT"
    load = code.instructions[5]
    assert (load.address, load.guard, load.opcode, load.base) == (0x50, "P1", "LDG.E.128", "LDG")
    assert load.operands == ("R4", "desc[UR6][R8.64]")
    assert [instruction.loaded for instruction in code.instructions[4:9]] == [0, 16, 2, 32, 0]
    assert sass.loops(code) == [range(5, 14)] and sass.hot_loop(code) == range(5, 14)


def test_the_hot_loop_loads_most_and_is_the_inner_one() -> None:
    inner = "\n".join([".L_x_9:", "/*0000*/ IADD3 R1, R1, 0x1, RZ ;", UNIFORM.split(".L_x_1:")[0],
                       ".L_x_3:", "/*00b0*/ LDS R4, [R2] ;", "/*00c0*/ BRA `(.L_x_3) ;", "/*00d0*/ BRA `(.L_x_9) ;",
                       ".L_x_1:", "/*00e0*/ EXIT ;"])
    code = sass.parse(inner)
    assert sass.loops(code) == [range(0, 14), range(1, 11), range(11, 13)]
    assert sass.hot_loop(code) == range(1, 11)
    assert sass.hot_loop(sass.parse(UNIFORM.replace("LDG.E", "LDS"))) is None
    trap = sass.parse(".L_x_0:\n/*0000*/ BRA `(.L_x_0) ;\n/*0010*/ EXIT ;")
    assert len(trap.instructions) == 2 and sass.loops(trap) == []


@pytest.mark.parametrize(("printed", "step"), [(KERNEL, 512), (UNIFORM, 8), (CHAINED, -128)], ids=["plain", "uniform", "chained"])
def test_the_counter_of_a_loop_is_found(printed: str, step: int) -> None:
    code = sass.parse(printed)
    loop = sass.hot_loop(code)
    assert loop is not None and sass.loop_counter_steps(code, loop) == {step}


def test_what_is_no_counter_is_none() -> None:
    """A register that is multiplied, moved under a guard or by another register has no step."""
    for change in ("IMAD R2, R2, 0x3, RZ", "@P1 VIADD R2, R2, 0x200", "IADD3 R2, R2, R9, RZ", "IADD3.X R2, R2, 0x200, RZ, P1"):
        code = sass.parse(KERNEL.replace("VIADD R2, R2, 0x200", change))
        assert sass.loop_counter_steps(code, range(5, 14)) == set(), change


@pytest.mark.parametrize(("step", "loads", "unroll"), [(128, 3, 4), (512, 3, 1), (None, 1, 3), (768, 3, 1), (768, 1, 3),
                                                       (None, 0, 1)])
def test_unrolling_is_seen_in_the_counter_or_else_in_the_loads(step: int | None, loads: int, unroll: int) -> None:
    counts = count_instructions(compiled(step=step, loads=loads), "sm_90", 1, weights=1 << 20, step=1024, traffic=1)
    assert (counts.unroll, counts.hot_weights, counts.trips) == (unroll, 1024 * unroll, math.ceil(1024 / unroll))


def test_a_counter_of_trips_says_how_far_a_loop_is_unrolled() -> None:
    printed = KERNEL.replace("VIADD R2, R2, 0x200", "VIADD R2, R2, 0xfffffffe")
    assert count_instructions(compiled(printed), "sm_90", 1, weights=1 << 20, step=1024, traffic=1).unroll == 2


def test_loops_of_the_compilers_texts() -> None:
    ttgir = """
    %0 = scf.for %i = %c0_i32 to %K step %c64_i32_7 iter_args(%a = %b) -> (i32)  : i32 {
      %x = tt.load %p : tensor<4x!tt.ptr<i8>>
    }
    scf.for %j = %c0_i32 to %K step %c256_i32  : i32 {
      %y = tt.load %p : tensor<4x!tt.ptr<i8>>
      %z = ttg.async_copy_global_to_local %p, %s : tensor<4x!tt.ptr<i8>>
    }
    %w = tt.load %p : tensor<4x!tt.ptr<i8>>"""
    assert hot_loop_step(ttgir) == 256
    first = ttgir.replace("      %x =", "      %v = tt.load %p : tensor<4x!tt.ptr<i8>>\n" * 2 + "      %x =")
    assert hot_loop_step(first) == 64
    assert hot_loop_step(ttgir.replace("%c256_i32", "%n")) is None
    assert hot_loop_step("%w = tt.load %p : tensor<4x!tt.ptr<i8>>") is None
    nest = "\n".join(["      scf.for %k = %c0_i32 to %n step %c8_i32 {", *["        %x = tt.load %p"] * 3, "      }", "    }"])
    assert hot_loop_step(ttgir.replace("    }", nest, 1)) == 8       # as in hlane, where it has most of them
    ptx = "\n".join(["ld.global.b32 {%r1}, [%rd1];", "$L__BB0_2: // loop", "@%p1 ld.global.v4.b32 {%r1}, [%rd1];",
                     "cp.async.cg.shared.global [%r1], [%rd2], 16;", "ld.shared.b32 %r3, [%r1];", "@%p5 bra \t$L__BB0_2;",
                     "bra.uni $L__BB0_3;", "$L__BB0_3:"])
    assert most_loop_loads(ptx) == 2
    assert most_loop_loads("ld.global.b32 {%r1}, [%rd1];") == 0


# -- counting ---------------------------------------------------------------------------------------------------------


def test_instructions_per_weight() -> None:
    """Nine in a loop of 4 x 1024 weights, seven outside, 128 threads; by pipe and by cycles as counted by hand."""
    counts = example()
    assert (counts.registers, counts.stack, counts.spills, counts.shared_bytes) == (40, 8, 2, 0)
    assert (counts.unroll, counts.hot_weights, counts.trips, counts.has_loop) == (4, 4096, 4, True)
    assert counts.hot == 9 * 128 / 4096 and counts.whole == (7 + 4 * 9) * 128 / 16384
    per_trip = {"memory": 3, "alu": 3, "convert": 1, "fma": 1, "control": 1}
    assert counts.hot_pipes == {name: count / 32 for name, count in per_trip.items()}
    whole = {"memory": 3 + 12, "alu": 1 + 12, "convert": 4, "fma": 4, "imad": 1, "control": 2 + 4}
    assert counts.whole_pipes == {name: count / 128 for name, count in whole.items()}
    cycles = {"issue": 43, "memory": 4 * 15, "alu": 2 * 13, "convert": 8 * 4, "fma": 4 + 1, "imad": 2}
    assert counts.cycles == {name: count / 128 for name, count in cycles.items()}
    assert counts.loads == {"LDG.E.128": 1, "LDG.E.U16": 1, "LDG.E.ENL2.256": 1} and counts.load_widths == {16: 1, 128: 1, 256: 1}
    assert counts.hot_bytes == (16 + 2 + 32) * 128 and not counts.copied and counts.tensor == {}
    assert counts.opcodes["LDG.E.ENL2.256"] == counts.opcodes["BRA"] == 1 and sum(counts.opcodes.values()) == 9
    assert counts.listing[0].endswith("@P1 LDG.E.128 R4, desc[UR6][R8.64] ;") and len(counts.listing) == 9


def test_a_kernel_without_a_loop_is_hot_as_a_whole() -> None:
    for printed, step in ((KERNEL, 0), (KERNEL.replace("@!P0 BRA `(.L_x_0)", "NOP"), 1024)):
        counts = count_instructions(compiled(printed), "sm_90", 1, weights=2048, step=step, traffic=1)
        assert not counts.has_loop and (counts.hot_weights, counts.trips, counts.unroll) == (2048, 1, 1)
        assert counts.hot == counts.whole == 1.0 and counts.hot_pipes == counts.whole_pipes


def test_bytes_tell_how_far_a_loop_is_unrolled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A counter of multiples may look like an unrolled loop: fewer trips were counted, and fewer bytes than a weight has."""
    kernel = SimpleNamespace(__name__="kernel", arg_names=["w", "w32", "x"])

    def counts(dtype: torch.dtype, step: int) -> Report:
        w = torch.empty(264 * 16384, dtype=dtype, device="meta")
        arguments = (w, w.view(torch.int32), torch.empty(1 << 24, device="meta"))      # a view of w is no second tensor
        monkeypatch.setattr(compile, "compile_launch", lambda call, arch: compiled(step=step))
        return report(Call(kernel, arguments, {}, (264,), {}, 16384, 1024), "sm_90")

    assert counts(torch.uint8, 128).traffic == 264 * 16384 + (1 << 26)
    assert [(counts(dtype, step).unroll, counts(dtype, step).trips) for dtype, step in (
        (torch.uint8, 128), (torch.uint8, 64), (torch.float32, 64), (torch.uint16, 64))] == [(4, 4), (4, 4), (1, 16), (2, 8)]
    with pytest.raises(AnalyzeError, match=r"kernel for sm_90: 0\.78 of the weight's bytes are loaded in 16 trips of the loop, "
                                           "unrolled 1-fold: the loop was misread"):
        counts(torch.float64, 64)


@pytest.mark.parametrize(("columns", "unroll"), [(8, 4), (16, 2), (32, 1), (64, 1)])
def test_products_tell_how_far_a_loop_is_unrolled(columns: int, unroll: int) -> None:
    """Four products of 64 x 16 x 16, which four warps share, are 32 columns of a trip's 2048 weights."""
    lines = KERNEL.replace("FFMA R3, R3, R4, R5 ;", "\n/*00a0*/ ".join(["HGMMA.64x16x16.F32 R24, R40, gdesc[UR4], R24 ;"] * 4))
    counts = count_instructions(compiled(lines), "sm_90", 1, 1 << 20, step=2048, traffic=1, columns=columns)
    assert counts.unroll == unroll


@pytest.mark.parametrize(("copies", "unroll"), [(1, 1), (2, 2), (4, 4)])
def test_loads_tell_it_where_products_do_not(copies: int, unroll: int) -> None:
    """Blackwell's instructions leave their shape to a descriptor, and a counter of bytes moves by more than a trip has."""
    load = "/*0060*/                   LDG.E.U16 R12, desc[UR6][R8.64+0x10] ;\n"
    lines = KERNEL.replace(load, load + load * (3 * copies - 3)).replace("FFMA R3, R3, R4, R5", "UTCHMMA gdesc[UR4], gdesc[UR6]")
    assert count_instructions(compiled(lines), "sm_100", 1, 1 << 20, step=1024, traffic=1).unroll == unroll


def test_text_without_instructions_is_refused() -> None:
    with pytest.raises(AnalyzeError, match="no instruction"):
        count_instructions(compiled("kernel:\n"), "sm_90", 1, weights=1, step=0, traffic=1)


@pytest.mark.parametrize(("opcode", "arch", "pipe", "cycles"), [
    ("FFMA", "sm_80", "fma", {"fma": 2}), ("FFMA", "sm_90", "fma", {"fma": 1}), ("FFMA2", "sm_100", "fma", {"fma": 2}),
    ("IMAD.WIDE.U32", "sm_80", "imad", {"imad": 2, "fma": 2}), ("IMAD.U32", "sm_89", "imad", {"imad": 2, "fma": 1}),
    ("HFMA2", "sm_80", "half", {"half": 1}), ("HFMA2.BF16_V2", "sm_80", "half", {"half": 2}),
    ("HFMA2.BF16_V2", "sm_90", "half", {"half": 1}), ("HADD2.F32", "sm_89", "half", {"half": 2}),
    ("LOP3.LUT", "sm_90", "alu", {"alu": 2}), ("I2FP.F32.S32", "sm_90", "alu", {"alu": 2}),
    ("I2F.S16", "sm_90", "convert", {"convert": 8}), ("LDG.E.128", "sm_90", "memory", {"memory": 4}),
    ("UIADD3", "sm_100", "uniform", {"uniform": 2}), ("BRA", "sm_90", "control", {}),
    ("HMMA.16816.F32", "sm_80", "tensor", {"tensor": 8}), ("HMMA.16816.F32.BF16", "sm_89", "tensor", {"tensor": 32}),
    ("HMMA.16816.F32", "sm_90", "tensor", {"tensor": 2048 / 317.44}), ("IMMA.16832.S8.S8", "sm_80", "tensor", {"tensor": 8}),
    ("HGMMA.64x128x16.F32", "sm_90", "tensor", {"tensor": 64}),
    ("QGMMA.64x128x32.F32.E4M3.E4M3", "sm_90", "tensor", {"tensor": 64}),
])
def test_pipes(opcode: str, arch: str, pipe: str, cycles: dict[str, float]) -> None:
    instruction = sass.Instruction(0, "", opcode, (), "")
    assert pipes.pipe_of(instruction) == pipe
    assert pipes.busy_cycles(instruction, arch) == pytest.approx({"issue": 1, **cycles})


# -- dependence chains ------------------------------------------------------------------------------------------------


def instruction(text: str) -> sass.Instruction:
    return sass.parse(f"/*0000*/ {text} ;").instructions[0]


@pytest.mark.parametrize(("text", "written", "read"), [
    ("@!P1 LDG.E.128 R4, desc[UR6][R8.64+0x10]", "R4 R5 R6 R7", "UR6 R8 R9 P1"),
    ("LDG.E.64 R2, [R2.64]", "R2 R3", "R2 R3"),
    ("IADD3 R4, P0, R2, UR8, RZ", "R4 P0", "R2 UR8"), ("LEA.HI.X R9, R2, UR9, R3, 0x1, P0", "R9", "R2 UR9 R3 P0"),
    ("IMAD.WIDE.U32 R2, R5.reuse, 0x4, R6", "R2 R3", "R5 R6 R7"), ("ISETP.LT.AND P0, PT, R18, UR7, !P0", "P0", "R18 UR7 P0"),
    ("HMMA.16816.F32.BF16 R44, R16, R12, RZ", "R44 R45 R46 R47", "R16 R17 R18 R19 R12 R13"),
    ("HGMMA.64x16x16.F32 R24, R40, gdesc[UR4], R24", " ".join(f"R{n}" for n in range(24, 32)),
     "R40 R41 R42 R43 UR4 UR5 R24 R25 R26 R27"),
    ("LDSM.16.M88.4 R4, [R2]", "R4 R5 R6 R7", "R2"), ("LDSM.16.M88 R4, [R2]", "R4", "R2"),
    ("STG.E.64 desc[UR4][R2.64], R6", "", "UR4 R2 R3 R6 R7"), ("LDGSTS.E.BYPASS.128 [R16], desc[UR20][R2.64], P1", "",
                                                                "R16 UR20 R2 R3 P1"),
    ("WARPGROUP.DEPBAR.LE gsb0, 0x0", "", ""),
])
def test_registers_of_an_instruction(text: str, written: str, read: str) -> None:
    assert [sorted(names) for names in accessed_registers(instruction(text))] == [sorted(written.split()), sorted(read.split())]


def looped(*lines: str) -> tuple[sass.Code, range]:
    """A loop of these instructions, that counts in R0 and leads back to its start."""
    body = (*lines, "VIADD R0, R0, 0x1", "ISETP.GE.AND P0, PT, R0, UR5, PT", "@!P0 BRA `(.L_x_0)")
    code = sass.parse("\n".join([".L_x_0:", *(f"/*{16 * place:04x}*/ {line} ;" for place, line in enumerate(body)),
                                 f"/*{16 * len(body):04x}*/ EXIT ;"]))
    return code, range(len(body))


@pytest.mark.parametrize(("lines", "loads", "cycles"), [
    # Used in the trip that issues it: a latency per trip, 5 + 5 cycles of the two that follow, and 1 to issue.
    (("LDG.E R4, desc[UR6][R8.64]", "FADD R5, R4, R9", "FADD R6, R5, R9", "FADD R7, R6, R9",
      "IADD3 R8, R8, 0x80, RZ"), 1, (8, 30)),
    # Used in the next one, before it is loaded again: the same, for nothing else is there to do.
    (("FADD R5, R4, R9", "LDG.E R4, desc[UR6][R8.64]", "IADD3 R8, R8, 0x80, RZ"), 1, (0, 30)),
    # One load after another, and both at once.
    (("LDG.E R4, desc[UR6][R8.64]", "FADD R5, R4, R9", "LDG.E R6, desc[UR6][R10.64]", "FADD R7, R6, R9", "IADD3 R8, R8, 0x80, RZ",
      "IADD3 R10, R10, 0x80, RZ"), 2, (0, 40)),
    (("LDG.E R4, desc[UR6][R8.64]", "LDG.E R6, desc[UR6][R10.64]", "FADD R5, R4, R9", "FADD R7, R6, R9", "IADD3 R8, R8, 0x80, RZ",
      "IADD3 R10, R10, 0x80, RZ"), 1, (0, 40)),
    # An address that moves by 8 bytes: one trip of four fetches a sector.  One that stays: none.
    (("LDG.E R4, desc[UR6][R8.64]", "FADD R5, R4, R9", "IADD3 R8, R8, 0x8, RZ"), 0.25, (30, 60)),
    (("LDG.E R4, desc[UR6][R8.64]", "FADD R5, R4, R9"), 0, (40, 60)),
    # A lookup: the second load hits the L1 cache.
    (("LDG.E R4, desc[UR6][R8.64]", "IADD3 R6, R4, R9, RZ", "LDG.E R7, desc[UR6][R6.64]", "FADD R5, R7, R9",
      "IADD3 R8, R8, 0x80, RZ"), 1, (40, 80)),
    # A copy to shared memory of which two groups may be under way: a third of the latency in a trip.
    (("LDGSTS.E.128 [R3], desc[UR6][R8.64]", "LDGDEPBAR", "DEPBAR.LE SB0, 0x2", "IADD3 R8, R8, 0x80, RZ"), 1 / 3, (0, 40)),
    # A warp group's product, waited for: 64 cycles of the matrix unit and its latency.
    (("HGMMA.64x128x16.F32.BF16 R24, R40, gdesc[UR4], R24, gsb0", "WARPGROUP.DEPBAR.LE gsb0, 0x0"), 0, (97, 110)),
], ids=["used", "next", "two", "both", "sector", "fixed", "lookup", "copy", "group"])
def test_the_dependence_chain_of_a_trip(lines: tuple[str, ...], loads: float, cycles: tuple[float, float]) -> None:
    _, trip = dependence_chains(*looped(*lines), "sm_90")
    assert trip.loads == pytest.approx(loads, abs=0.05) and cycles[0] <= trip.cycles <= cycles[1]


def test_x_comes_from_the_l2_cache() -> None:
    """Which load is one of x is told by the argument that its address was made of."""
    code, loop = looped("LEA R8, P1, R0, UR4, 0x2", "LDG.E R4, desc[UR6][R8.64]", "FADD R5, R4, R9")
    code = sass.parse("/*0000*/ ULDC.64 UR4, c[0x0][0x220] ;\n.L_x_0:\n" + "\n".join(op.line for op in code.instructions)
                      .replace("0x2 ;", "0x5 ;"))
    loop = range(1, 7)
    trips = [dependence_chains(code, loop, "sm_90", x)[1] for x in (0x218, 0x220)]
    assert [round(trip.loads, 2) for trip in trips] == [1, 0] and 270 <= trips[1].cycles < 320


def test_where_an_argument_lies() -> None:
    types = {"q": "*i32", "B": "constexpr", "n": "i32", "x": "*bf16", "out": "*bf16"}
    assert argument_offset(types, "x", ARCHS["sm_90"]) == 0x210 + 16 and argument_offset(types, "x", ARCHS["sm_80"]) == 0x160 + 16
    assert argument_offset({"tensors": ("*i32", "*fp16", "constexpr"), **types}, "x", ARCHS["sm_120"]) == 0x380 + 32
    assert argument_offset(types, "bias", ARCHS["sm_90"]) is None


def test_a_load_from_the_sector_of_another_one_fetches_nothing() -> None:
    code, loop = looped("LDG.E.U16 R4, desc[UR6][R8.64]", "LDG.E.U16 R5, desc[UR6][R8.64+0x6]",
                        "LDG.E.U16 R6, desc[UR6][R8.64+0x40]", "IADD3 R8, P1, R8, 0x10, RZ",
                        "IADD3.X R9, R9, RZ, RZ, P1, !PT", "LDG.E.U16 R7, desc[UR6][R8.64]",
                        "LEA R10, P1, R0, R2, 0x3", "LDG.E R11, desc[UR6][R10.64]", "LDG.E R12, desc[UR6][R4.64]")
    assert sector_miss_rates([code.instructions[place] for place in loop]) == [0.5, 0, 0.5, 1, 1, 0.5, 1, 0.25, 1, 1, 1, 1]


# -- predicting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("arch", "registers", "shared", "warps", "programs"), [
    ("sm_90", 40, 0, 4, 12),                                     # 16384 registers of a scheduler: 12 warps of 40 x 32
    ("sm_90", 41, 0, 4, 10),                                     # 41 is 48
    ("sm_90", 255, 0, 4, 2), ("sm_90", 255, 0, 16, 0), ("sm_90", 32, 0, 1, 32), ("sm_90", 32, 0, 4, 16), ("sm_89", 32, 0, 4, 12),
    ("sm_90", 32, 100 << 10, 4, 2), ("sm_80", 32, 100 << 10, 4, 1), ("sm_89", 32, 100 << 10, 4, 0), ("sm_89", 32, 99 << 10, 4, 1),
])
def test_programs_on_a_multiprocessor(arch: str, registers: int, shared: int, warps: int, programs: int) -> None:
    assert ARCHS[arch].resident_programs(registers, shared, warps) == programs


def test_a_kernel_whose_programs_wait_for_their_loads() -> None:
    """All 264 programs run at once, four trips each: four latencies of memory, and nothing else to wait for."""
    estimate = predict(example(hot_chain=ChainCycles(0, 1), outside_chain=ChainCycles(0, 0)), GPUS["h200"])
    assert (estimate.gpu, estimate.resident, estimate.occupancy) == ("h200", 12, 0.75)
    assert estimate.chain == pytest.approx(4 * LATENCY) and estimate.start == pytest.approx(LAUNCH + LATENCY)
    work = estimate.busy + 3 * LATENCY
    assert estimate.seconds == pytest.approx(LAUNCH + LATENCY + work + EXPOSED * estimate.memory) and estimate.limit == "start"
    longer = predict(example(trips=40, hot_chain=ChainCycles(0, 1), outside_chain=ChainCycles(198, 0)), GPUS["h200"])
    assert longer.limit == "chain" and longer.chain == pytest.approx(40 * LATENCY + 198 / 1.98e9)


def test_programs_that_do_not_run_at_once_follow_each_other() -> None:
    """An SM holds 12, but 10 are counted: programs may need 8 registers more."""
    chain = ChainCycles(0, 1)
    times = [predict(example(programs=132 * count, hot_chain=chain), GPUS["h200"]).chain for count in (10, 12, 20, 21)]
    assert times[1:] == pytest.approx([2 * times[0], 2 * times[0], 3 * times[0]])


def test_a_kernel_that_is_busy_and_one_that_is_fast_enough() -> None:
    """What does not overlap is added: the launch and the first loads; programs come whole, 265 in three turns."""
    still = {"hot_chain": ChainCycles(0, 0), "outside_chain": ChainCycles(0, 0)}
    many = example(programs=132 * 1000, traffic=132 * 1000 * 8192, **still)
    estimate = predict(many, GPUS["h200"])
    assert estimate.limit == "memory" and estimate.start == LAUNCH and 0.84 < estimate.share < 0.9
    memory = 132 * 1000 * 8192 / 3.35e12 / 0.9
    assert predict(many, GPUS["h100"]).seconds == pytest.approx(LAUNCH + memory + EXPOSED * estimate.busy)
    slow = replace(many, cycles={"convert": 8.0, "alu": 6.0}, hot_cycles={"convert": 900.0, "alu": 9.0},
                   outside_cycles={"convert": 96.0, "alu": 99.0})
    estimate = predict(slow, GPUS["h200"])
    assert estimate.limit == "convert" and estimate.busy == pytest.approx(1000 * (96 + 4 * 900) / 1.98e9)
    turns = [predict(replace(slow, programs=count), GPUS["h200"]).busy for count in (264, 265)]
    assert turns[1] == pytest.approx(turns[0] * 1.5)
    read_often = predict(replace(many, work=RepeatedWork(loaded=1 << 40)), GPUS["h200"])
    assert read_often.limit == "L2" and read_often.cached == pytest.approx((1 << 40) / (132 * 28 * 1.98e9))


def test_a_prediction_is_for_the_architecture_that_was_compiled_for() -> None:
    with pytest.raises(AnalyzeError, match="A100 80 GB SXM runs kernels of sm_80, not of sm_90"):
        predict(example(), GPUS["a100"])


def test_a_program_that_no_multiprocessor_holds_is_not_run() -> None:
    for changes in ({"shared_bytes": 400000}, {"registers": 255, "warps": 16}):
        estimate = predict(example(**changes), GPUS["h200"])
        assert (estimate.share, estimate.limit, estimate.seconds, estimate.resident) == (0, "does not fit", None, 0)
        assert text.prediction_row(example(**changes), estimate)[2:5] == ["-", "0%", "does not fit"]


# -- launches ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", cases(), ids=str)
def test_launches_say_how_many_weights_a_program_takes(case: Case) -> None:
    n, k = fixed_shape(case, (1024, 5120 if case.path.stem != "ranges" else 4608))   # a multiple of 48 columns
    packed = launches.meta_weight(case.module, (n, k), case.storage, case.choice)
    if any(stream.coding == "huffman_windows" for stream in packed.layout.streams.values()):
        [call] = launches.product_calls(packed, "dequantize", 1, torch.bfloat16)[:1]
        assert not call.weights                                  # which is said when it is counted
        return
    for call in launches.product_calls(packed, "linear", 3, torch.bfloat16):
        blocks = call.grid[1]                                    # of rows of x: each takes the whole weight
        taken = call.weights * math.prod(call.grid) / (blocks * n * k)
        assert 1 <= taken < 2 if call.family == "gemm" else taken == 1       # parts of K that its programs share may be uneven
        assert 0 < call.step <= call.weights
    for call in launches.product_calls(packed, "dequantize", 1, torch.bfloat16):
        assert n * k <= call.weights * math.prod(call.grid) < 2 * n * k
        assert (call.step == 0) == (call.kernel is dequantize)        # decoders of streams go along rows


def test_default_flags_show_every_kernel_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hopper may be launched with another kernel, which has blocks and a table of its own."""
    monkeypatch.setattr(survey, "report", lambda call, arch: example(arch=arch))
    shown = CliRunner().invoke(app, ["analyze", "q4_0", "--shape", "64", "64"], catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert re.findall(r"64\], 1 row of x in bf16, (\w+): kernel", shown.stdout) == ["sm_80", "sm_90"]
    assert re.findall(r"^(\S[^\n]*?)  +(sm_\d+) ", shown.stdout, re.MULTILINE) == [
        ("A100 80 GB SXM", "sm_80"), ("RTX 4090", "sm_89"), ("B200", "sm_100"), ("RTX 5090", "sm_120"), ("H100 SXM", "sm_90"),
        ("H200 SXM", "sm_90")]


def test_predictions_stand_with_the_kernel_that_they_are_of() -> None:
    reports = {arch: example(arch=arch) for arch in ("sm_90", "sm_100")}
    predictions = [predict(reports[GPUS[name].arch], GPUS[name]) for name in ("b200", "h100", "h200")]
    rows = list(survey.report_data(survey.ExaminedLaunch("both", reports, predictions), listing=True))
    assert [[estimate["gpu"] for estimate in row["predicted"]] for row in rows] == [["h100", "h200"], ["b200"]]
    assert [(row["what"], row["arch"], len(row["listing"])) for row in rows] == [("both", "sm_90", 9), ("both", "sm_100", 9)]


@pytest.mark.parametrize(("archs", "gpus", "shown", "chosen"), [
    ((), (), ["sm_80", "sm_90"], ["a100", "rtx4090", "h100", "h200", "b200", "rtx5090"]),
    (("sm_89",), (), ["sm_89"], ["rtx4090"]),
    ((), ("H200", "RTX 4090"), ["sm_90", "sm_89"], ["h200", "rtx4090"]), (("sm_80", "sm_80"), ("b200",), ["sm_80"], ["b200"]),
])
def test_architectures_and_gpus_follow_from_each_other(archs: tuple[str, ...], gpus: tuple[str, ...], shown: list[str],
                                                       chosen: list[str]) -> None:
    targets = survey.resolve_targets(archs, gpus)
    assert (targets[0], [gpu.name for gpu in targets[1]]) == (shown, chosen)
