"""Every kernel compiled for GPUs that are not there: it compiles, and its text keeps what the design promises."""

from __future__ import annotations

import json

import pytest

from tests.kernels.compile_kernels import KINDS, TARGETS, compiled_for
from tests.support import compiling
from tests.support.covering import kernels, lines_of
from tests.support.formats import Case, cases

# Their tensors lie along different axes and their kernels work weight by weight: loads are moved to one layout.
MOVED = {"marlin_tiles.marlin matvec", "planes.rows matvec", "int4pack.torchao-group128-scale_typebf16 matvec",
         *(f"int_group.{storage}-bits4-group128-scale_typef16 matvec" for storage in ("xpu_int4pack", "torchao_plain_int32")),
         "awq_gemv_fast.gemv_fast-group128 matvec",
         *(f"int4pack.cpu_{isa}-group128-scale_type{type} matvec" for isa in ("avx512", "avx2", "rest")
           for type in ("f32", "bf16"))}
# Aligned to more than one word, so that a thread loads several at once.
VECTORS = ("bf16.", "f16.", "fp8_", "int8_", "int_group.gptq")
# A unit has 32 weights, and a thread one unit: each of its three words lies next to those of its neighbours.
ONE_UNIT = {f"int_group.{storage}-bits3-group128-scale_typef16 dequantize" for storage in ("gptq_v1", "gptq_v2", "gptq_p")}


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_compiles(target: str) -> None:
    process = compiling.run("tests.kernels.compile_kernels", target)
    assert process.returncode == 0, process.stderr[-4000:]
    rows = [json.loads(line) for line in process.stdout.splitlines()]
    kernels = {row["kernel"] for row in rows}
    assert kernels == {f"{case} {kind}" for case, kind in compiled_for(target)}
    # No value changes threads inside a loop; that would go through shared memory.
    assert {row["kernel"] for row in rows if row["moves_in_loop"] or row["shared_in_loop"]} == MOVED & kernels
    # A fused multiply-add would skip a rounding that the formula has; AMD's GPUs divide by several, and round once.
    divides = [case for case, _ in compiled_for(target) if "gfx" in target and "/" in case.spec.decode_text]
    fused = {row["kernel"] for row in rows if row["fused"] and row["kernel"].endswith("dequantize")
             and not ("gfx" in target and row["large"])}        # those GPUs divide 64-bit integers by floats
    assert fused <= {f"{case} dequantize" for case in divides}
    if target.startswith("sm_"):
        wide = {row["kernel"] for row in rows if any(".v2." in load or ".v4." in load for load in row["loads"])}
        aligned = {kernel for kernel in kernels if kernel.startswith(VECTORS) and ".planar" not in kernel}
        assert aligned - wide == ONE_UNIT & kernels


def test_every_line_of_every_kernel_is_compiled_for_some_gpu() -> None:
    chosen = {pair for target in TARGETS for pair in compiled_for(target)}
    every = {(case, kind) for case in cases() for kind in KINDS}
    assert lines_of_kernels(chosen) == lines_of_kernels(every)


def lines_of_kernels(pairs: set[tuple[Case, str]]) -> set[str]:
    return {line for pair in pairs for kernel in kernels(*pair) for line in lines_of(kernel)}


def test_a_module_that_fails_says_why() -> None:
    missing, exits = compiling.run("tests.no_module"), compiling.run("qdsl", "build", "no_format")
    assert missing.returncode == 1 and "No module named tests.no_module" in missing.stderr
    assert exits.returncode == 2 and "no_format" in exits.stderr and not exits.stdout
