"""Kernels where weights, x and products have more than 2^31 elements: sparse memory, and one program at the end of the grid."""

from __future__ import annotations

import math
import os
import re
import tempfile
from typing import Any

import pytest
import torch

from bench.gpu import regimes
from qdsl.core.shapes import axis
from qdsl.generated import fp8_channel, q4_0
from qdsl.runtime import PackedWeight, cdiv
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.gpu.families import lanes
from qdsl.runtime.libraries.call import Call
from tests.support.covering import ALL, covering, kernels
from tests.support.formats import Case, cases, fixed_shape, random_packed, smallest
from tests.support.interpreter import INTERPRETED, guarded, run_program

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="one program of a launch, in the interpreter")

CASES = cases()
PLACES = re.compile(r"int64|[/%*] \(?[NK]\b|tl\.(load|store|arange|program_id)")
COVERING = covering(CASES, lambda case: kernels(case, "dequantize", "matvec"), PLACES)
FAMILIES = ("gemv", "skinny", "tile_gemm")
LANES = covering([case for case in CASES if kernels(case, "skinny")], lambda case: kernels(case, *FAMILIES), PLACES)
MOST = (1 << 31) - (1 << 24)                                     # positions in tiles past the end have 32 bits too
WEIGHTS = 1 << 34                                                # 2^31 bytes where a weight has one bit


def sparse(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Zeros that take memory only where they are written or read: a hole of a file."""
    size = math.prod(shape) * dtype.itemsize
    with tempfile.NamedTemporaryFile(dir="/dev/shm" if os.path.isdir("/dev/shm") else None) as file:
        return torch.from_file(file.name, shared=True, size=size, dtype=torch.uint8).view(dtype).view(shape)


def sparse_weight(case: Case, weights: int) -> tuple[PackedWeight, PackedWeight]:
    """A weight of up to so many elements, zeros but for its last rows, and these as a weight of their own.

    Where rows do not lie by themselves all is 0.
    """
    n, k = smallest(case)
    n, k = fixed_shape(case, (n * -(-128 // n), k * -(-128 // k)))
    part = random_packed(case, (n, k)).decode_streams()
    rows = weights // k // part.shape[0] * part.shape[0]
    optional = [name for name in part.tensors if part.layout.tensors[name].optional]
    empty = case.module.FORMAT.empty((rows, k), case.storage, optional=optional, **case.choice).decode_streams()
    whole = empty.apply(lambda tensor: sparse(tuple(tensor.shape), tensor.dtype))
    whole.known_finite = part.finite                             # a plan would read all of it to know
    if not whole.layout.whole:
        for name, tensor in whole.cut("N", rows - part.shape[0], rows).tensors.items():
            tensor.copy_(part.tensors[name])
    return whole, part


def run_last(call: Call, packed: PackedWeight, x: torch.Tensor | None, out: torch.Tensor, wanted: torch.Tensor) -> None:
    """Run the last program, which stores what is wanted of the last elements of out, as far as it stores any."""
    tail = out.flatten()[-wanted.numel():].view(wanted.shape)
    tail.fill_(torch.nan)
    with guarded(packed, x, out) as trace:
        run_program(call)
    assert trace.stores
    if not packed.layout.whole:
        live = ~tail.isnan()
        assert live.any() and torch.equal(tail[live], wanted[live])


@pytest.mark.parametrize("case", COVERING, ids=str)
def test_last_program(case: Case) -> None:
    packed, part = sparse_weight(case, WEIGHTS)
    assert has_large_positions(packed)
    run_last_programs(case, packed, part)


@pytest.mark.parametrize("case", COVERING if ALL else COVERING[::3], ids=str)
def test_last_program_with_positions_of_32_bits(case: Case) -> None:
    """In the first weight, of sizes that halve, whose positions and those of its tensors' elements take no more."""
    weights = (sparse_weight(case, MOST >> i) for i in range(4))
    run_last_programs(case, *next(pair for pair in weights if not has_large_positions(pair[0])))


def has_large_positions(packed: PackedWeight) -> bool:
    """Whether kernels compute positions in 64 bits."""
    (call,) = launch.dequantize_calls(packed, torch.empty(packed.shape, device="meta"))
    return bool(call.constants["LARGE"])


def run_last_programs(case: Case, packed: PackedWeight, part: PackedWeight) -> None:
    """Decode and multiply the end of a weight."""
    wanted = case.module.dequantize(part, torch.float32)
    out = sparse(packed.shape, torch.float32)
    (call,) = launch.dequantize_calls(packed, out)
    run_last(call, packed, None, out, wanted)
    x, product = torch.zeros(1, part.shape[1]), sparse((1, packed.shape[0]), torch.float32)
    x[0, -1] = 1
    (call,) = launch.linear_calls(x, packed, None, product)
    run_last(call, packed, x, product, wanted[:, -1])


@pytest.mark.parametrize("rows", [1, 8, 32], ids=["gemv", "skinny", "tile_gemm"])
@pytest.mark.parametrize("case", LANES, ids=str)
def test_last_program_of_matrix_units(case: Case, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """With x one-hot, products are weights, which the types of the products can hold."""
    monkeypatch.setattr(lanes, "target", lambda device: configure.Target(8, 132))
    packed, part = sparse_weight(case, WEIGHTS)
    x, out = torch.zeros(rows, part.shape[1], dtype=torch.float16), sparse((rows, packed.shape[0]), torch.float16)
    x[-1, -1] = 1
    (call,) = launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed))
    run_last(call, packed, x, out, case.module.dequantize(part, torch.float32)[:, -1].half())


def fp8_rows(shape: tuple[int, int]) -> tuple[PackedWeight, torch.Tensor]:
    """Codes of E4M3 with a scale per row, zeros but for the last 16 rows; and these 16 rows [16, K], decoded."""
    case = next(case for case in CASES if str(case).startswith("fp8_channel.safetensors"))
    part = random_packed(case, (16, shape[1]))
    tensors = {name: sparse((shape[0], *tensor.shape[1:]), tensor.dtype) for name, tensor in part.tensors.items()}
    packed = part.derive(tensors, shape)
    for name, tensor in packed.tensors.items():
        tensor[-16:] = part.tensors[name]
    packed.known_finite = True
    return packed, case.module.dequantize(part, torch.float32)


@pytest.mark.parametrize("shape", [(16 * launch.SECOND_AXIS + 1, 16, 128), (65535, 16, 32896), (65, 1 << 25, 128)],
                         ids=["grid", "x", "product"])
@pytest.mark.parametrize("mode", ["plain", "invariant", "quantized"])
def test_last_row_of_x(mode: str, shape: tuple[int, int, int]) -> None:
    """x [M, K] and products [M, N] of more than 2^31 elements, and more rows than a grid's second axis counts."""
    rows, n, k = shape
    packed, weight = fp8_rows((n, k))
    dtype = torch.float32 if mode == "plain" else torch.float16
    x, out = sparse((rows, k), dtype), sparse((rows, n), dtype)
    x[-1, -8:] = 1 / 1024
    calls = [*(launch.quantized_calls(x, packed, None, out) if mode == "quantized" else
               launch.linear_calls(x, packed, None, out, invariant=mode == "invariant"))]
    assert all(call.grid[1:] <= (launch.SECOND_AXIS,) for call in calls)
    for call in calls[-1 - (mode == "quantized"):]:
        with guarded(packed, *call.tensors):
            run_program(call)
    live = out[-1, -16:] != 0
    wanted = (x[-1:].double() @ weight.double().t())[0]
    assert live.any() and torch.allclose(out[-1, -16:][live].double(), wanted[live], rtol=2 ** -9)
    assert mode == "quantized" or not out[0].any()               # of x's codes only the last program's are made


@pytest.mark.parametrize("columns", [1 << 20, 1 << 31])
@pytest.mark.parametrize("format", [q4_0, fp8_channel], ids=["blocks", "rows"])
def test_the_grid_of_a_long_row(format: Any, columns: int) -> None:
    """A grid's second axis does not count the 16 million columns of one tile; tiles become longer."""
    packed = format.FORMAT.empty((4, columns))
    (call,) = launch.dequantize_calls(packed, torch.empty(packed.shape, dtype=torch.bfloat16, device="meta"))
    units = axis(packed.layout.kernels.units).extent(*packed.shape, packed.sizes)
    assert units is not None and call.grid[1] <= launch.SECOND_AXIS and call.grid[1] == cdiv(units, call.constants["BK"])
    assert call.grid[0] == cdiv(4, call.constants["BN"])
