"""Kernel `gemm` of every storage, in the interpreter or on a GPU, against float64 products with the rounded weights."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import ANY_GPU
from qdsl.runtime.gpu.families.units import gemm_config
from qdsl.runtime.torch.linear import as_stored
from tests.support import compiling
from tests.support.covering import by_turns, quarter_of
from tests.support.formats import Case, cases, random_packed, shapes, smallest
from tests.support.interpreter import INTERPRETED, guarded, times

DEVICE = "cpu" if INTERPRETED else "cuda"
CASES = cases()
# Rows and columns of w; rows of x; its type; programs that share K.
TURNS = (((20, 200), 2, torch.bfloat16, 1), ((48, 640), 17, torch.float16, 1), ((32, 512), 5, torch.bfloat16, 2),
         ((130, 256), 33, torch.float16, 1), ((16, 1152), 9, torch.bfloat16, 3))


# GPU, format, storage, rows of x, its type, vector instructions per weight at most.
BUDGETS = (
    ("mi300x", "q4_0", "gguf", 16, "bf16", 11.2), ("mi300x", "q4_0", "gguf", 16, "f16", 5.7),
    ("mi300x", "q4_k", "gguf", 64, "bf16", 11.0), ("mi300x", "int_group", "gptq_v2", 64, "bf16", 11.2),
    ("mi300x", "int_group", "awq", 16, "bf16", 14.5),
    ("mi300x", "iq3_xxs", "gguf", 16, "bf16", 16.0), ("mi355x", "q4_0", "gguf", 16, "bf16", 6.7),
    ("rx9070xt", "q4_0", "gguf", 16, "f16", 7.4), ("mi300x", "q4_0", "gguf", 1, "bf16", 8.5),
    ("mi300x", "int_group", "gptq_v2", 1, "bf16", 6.0), ("mi300x", "q4_k", "gguf", 1, "bf16", 14.0),
)
# Architecture, storage, rows of x, its type, programs that share K.
EXECUTED = (("sm_80", "q4_0.gguf", 5, torch.float16, 2), ("sm_90", "int_group.awq-", 17, torch.bfloat16, 1),
            ("sm_80", "int_group.gptq_v2-bits4", 3, torch.bfloat16, 1))


def expected(packed: PackedWeight, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The product in float64 with the weights rounded to the type of x, and by how much a kernel may miss it.

    That is what float32 sums of K terms may lose, and one rounding of the result.
    """
    weight = packed.format.dequantize(packed.to("cpu"), torch.float32).to(x.dtype).double()
    wide, info = x.cpu().double(), torch.finfo(x.dtype)
    added = torch.zeros(len(weight), dtype=torch.float64) if bias is None else bias.cpu().double()
    exact, spread = wide @ weight.t() + added, wide.abs() @ weight.abs().t() + added.abs()
    return exact, exact.abs() * info.eps / 2 + spread * (weight.shape[1] + 2) * 2.0 ** -24 + info.tiny


def gemm(x: torch.Tensor, packed: PackedWeight, split: int) -> Candidate:
    """The configuration for so many rows of x, with K shared by `split` programs as far as it has steps for them."""
    every = [gemm_config(packed, x.shape[0], part, x.device) for part in range(1, split + 1)]
    return ANY_GPU.candidate(packed, x.shape[0], [config for config in every if config][-1])


def product(x: torch.Tensor, packed: PackedWeight, bias: torch.Tensor | None, split: int) -> torch.Tensor:
    """The kernel's product; it touches nothing else, and stores every element once."""
    out = torch.full((x.shape[0], packed.shape[0]), torch.nan, dtype=x.dtype, device=DEVICE)
    [call] = launch.linear_calls(x, packed, bias, out, candidate=gemm(x, packed, split))
    assert call.family == "gemm"
    with guarded(packed, x, bias, out, *call.scratch) as trace:
        call.run()
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    return out.cpu()


@pytest.mark.parametrize(("case", "turn"), quarter_of(by_turns(CASES, TURNS)), ids=str)
def test_the_product_is_that_of_the_weights_rounded_to_the_type_of_x(
        case: Case, turn: tuple[tuple[int, int], int, torch.dtype, int]) -> None:
    (n, k), rows, dtype, split = turn
    shape = next(shapes(case, (n, 16, 32, 64, 128), (k, 512, 256, 1024, 2048, 4096)), smallest(case))
    generator = torch.Generator().manual_seed(rows)
    stored = random_packed(case, shape, seed=rows).decode_streams().to(DEVICE)
    largest = case.module.dequantize(stored, torch.float32).abs().max()
    dtype = dtype if largest <= torch.finfo(dtype).max else torch.bfloat16                 # over small factors of columns
    x = (torch.randn(rows, shape[1], generator=generator) / 256).to(dtype).to(DEVICE)
    x, packed = as_stored(x, stored)
    bias = torch.randn(shape[0], generator=generator).to(dtype).to(DEVICE) if rows % 2 else None
    exact, bound = expected(packed, x, bias)
    assert ((product(x, packed, bias, split).double() - exact).abs() <= bound).all(), (shape, rows, dtype)


def lines(what: str) -> list[dict[str, Any]]:
    """What gemm_kernels prints, in a process in which Triton compiles."""
    done = compiling.run("tests.kernels.gemm_kernels", what)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_amd_kernels_keep_their_budgets() -> None:
    """Vector instructions per weight, matrix instructions, two waves on a SIMD, and programs that fit the LDS without spills."""
    rows = lines("counts")
    assert len(rows) == len(BUDGETS)
    for row in rows:
        assert row["vector"] <= row["limit"] and not row["spills"] and not row["stack"], row
        assert row["registers"] <= 256 and row["shared"] <= 64 << 10, row
        assert row["kernel"] == "matvec" or any("mfma" in opcode or "wmma" in opcode for opcode in row["tensor"]), row


def test_the_compiled_kernel_is_right() -> None:
    """Executed from its PTX: within the bound of float32 sums, and the checkers find nothing."""
    rows = lines("executed")
    assert len(rows) == len(EXECUTED)
    assert [row for row in rows if row["kernel"] != "gemm" or row["findings"] or not row["error"] <= 1] == []
