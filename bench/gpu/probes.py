"""The launches of the small kernels, with or without data, so that they can be compiled without a GPU."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from bench.gpu import probe_kernels as kernels
from bench.gpu import regimes
from bench.gpu.plan import product_calls
from bench.gpu.weights import DTYPES, Weight
from qdsl.runtime.libraries.call import Call

# Conversions, as PTX on a 32-bit register; in SASS, what each becomes on sm_90.
CONVERSIONS: dict[str, str | None] = {
    "none": None,
    "int32 to float16": "{ .reg .b16 h; cvt.rn.f16.s32 h, $1; cvt.u32.u16 $0, h; }",
    "int8 to float32": "{ .reg .f32 f; cvt.rn.f32.s8 f, $1; mov.b32 $0, f; }",
    "int32 to float32": "{ .reg .f32 f; cvt.rn.f32.s32 f, $1; mov.b32 $0, f; }",
    "two e4m3 to float16": "{ .reg .b16 l, h; mov.b32 {l, h}, $1; cvt.rn.f16x2.e4m3x2 $0, l; }",
    "upper half of a product": "mul.hi.u32 $0, $1, $1;",         # not a conversion: kernels shift by it
}
OPCODES = {"none": "", "int32 to float16": "I2F", "int8 to float32": "I2F", "int32 to float32": "I2F",
           "two e4m3 to float16": "F2FP", "upper half of a product": "IMAD.HI"}
MATRIX_UNITS = {"mma.sync": (16, 16, 64, 1), "wgmma": (64, 16, 64, 4)}                   # M, N, K and warps


class Subnormal(NamedTuple):
    """Subnormal numbers of a type: how many bits they have, and their unit; and what whole numbers are multiplied by."""

    bits: int
    unit: float
    factor: float


SUBNORMAL = {torch.float16: Subnormal(10, 2.0 ** -24, 1.0), torch.bfloat16: Subnormal(7, 2.0 ** -133, 2.0 ** 120)}
PROGRAMS = 8                                                     # per multiprocessor, of four warps: each scheduler has eight
PER_TRIP = 8
WARPS_ALONG_K = (2, 4, 8, 16)
READ_WARPS = 8


@dataclass(frozen=True)
class Probes:
    """All small kernels, to be compiled ahead."""

    def calls(self) -> Iterator[Call]:
        for unit, dtype in itertools.product(MATRIX_UNITS, SUBNORMAL):
            yield multiply_call(unit, dtype, "meta")
        for name in CONVERSIONS:
            yield convert_call(name, 1024, 1000, "meta")
        for columns in (1, 8):
            yield matrix_call(columns, 1024, 1000, "meta")
        for tiled in (False, True):
            yield read_call(torch.empty(16 * 256, 64 * 16, dtype=torch.int32, device="meta"), tiled)


def multiply_call(unit: str, dtype: torch.dtype, device: str, codes: torch.Tensor | None = None,
                  factors: torch.Tensor | None = None, out: torch.Tensor | None = None) -> Call:
    """The product of subnormals with multiples of a power of two."""
    m, n, k, warps = MATRIX_UNITS[unit]
    codes = torch.empty(m, k, dtype=torch.int16, device=device) if codes is None else codes
    factors = torch.empty(k, n, dtype=dtype, device=device) if factors is None else factors
    out = torch.empty(m, n, dtype=torch.float32, device=device) if out is None else out
    return Call(kernels.multiply, (codes, factors, out), {"M": m, "N": n, "K": k}, (1,), {"num_warps": warps})


def convert_call(name: str, programs: int, trips: int, device: str) -> Call:
    out = torch.empty(1024 * programs, dtype=torch.int32, device=device)
    return Call(kernels.convert, (out, trips), {"ASM": CONVERSIONS[name], "PER": PER_TRIP}, (programs,), {"num_warps": 4})


def matrix_call(columns: int, programs: int, trips: int, device: str) -> Call:
    out = torch.empty(512 * programs, dtype=torch.float32, device=device)
    return Call(kernels.matrix, (out, trips), {"COLUMNS": columns}, (programs,), {"num_warps": 4, "num_stages": 1})


def read_call(data: torch.Tensor, tiled: bool) -> Call:
    """data: int32 [rows, words], whole tiles of 16 rows and of 32 * READ_WARPS words."""
    rows, words = data.shape
    out = torch.empty(rows // 16, dtype=torch.int32, device=data.device)
    return Call(kernels.read, (data, out, words // 16), {"W": READ_WARPS, "TILED": tiled}, (rows // 16,),
                {"num_warps": READ_WARPS, "num_stages": 1})


# -- kernels of a format, launched otherwise than the runtime would ----------------------------------------------------


def along_k(call: Call, warps: int) -> Call:
    """A launch of the kernel for one or few rows with another number of warps that share K."""
    k = int(call.arguments[call.kernel.arg_names.index("K")])
    constants = {**call.constants, "WK": warps, "EVEN": k % (256 * warps) == 0}
    step = call.step // call.constants["WK"] * warps
    return replace(call, constants=constants, options={**call.options, "num_warps": call.constants["WN"] * warps}, step=step)


def staged(call: Call, stages: int, r: int | None = None) -> Call:
    """A launch of the kernel for many rows with another depth of its pipeline, and R tiles of 64 rows per program."""
    r = r or call.constants["R"]
    n = int(call.arguments[call.kernel.arg_names.index("N")])
    rows = 16 * call.constants["W"] * r
    return replace(call, constants={**call.constants, "STAGES": stages, "R": r}, grid=(-(-n // rows), *call.grid[1:]),
                   options={**call.options, "num_stages": stages}, weights=min(rows, n) * (call.weights // min(
                       16 * call.constants["W"] * call.constants["R"], n)), step=rows * 128)


@dataclass(frozen=True)
class Launched:
    """A format's linear as the runtime launches it, or with overridden constants, to be compiled ahead.

    warps: along K, of the kernel for one row.  stages: (STAGES, R) of the kernel for many.
    """

    weight: Weight
    rows: int
    x: str
    warps: tuple[int, ...] = ()
    stages: tuple[tuple[int, int], ...] = ()

    def calls(self) -> Iterator[Call]:
        packed = self.weight.meta()
        x = torch.empty(self.rows, packed.shape[1], dtype=DTYPES[self.x], device="meta")
        candidate = regimes.candidate(x, packed) if self.stages else None
        launches = list(product_calls(packed, self.rows, x.dtype, candidate=candidate))
        yield from launches
        yield from (along_k(launches[0], warps) for warps in self.warps)
        yield from (staged(launches[0], stages, r) for stages, r in self.stages)
