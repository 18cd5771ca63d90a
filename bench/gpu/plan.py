"""The list of checks: every storage of every format, for every class of rows and on partial tiles, most valuable first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from bench.gpu import regimes
from bench.gpu.weights import DTYPES, Weight, every, fits
from bench.weights import format_of
from qdsl.runtime import MatrixUnitKernels, PackedWeight
from qdsl.runtime.gpu import costs, launch, plan
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.libraries.call import Call

INVARIANT = (1, 3, 8)                                            # rows of x that the kernel for few must not tell apart
# Candidates for N and K; the first pair that a storage can hold is taken.  Tall ones reach tiles of two and eight warps along K.
WHOLE = (64, 96, 128), (512, 1024)                               # the last are for tiles of 128 rows, records of 1024 columns
RAGGED = (40, 33, 56, 72, 24, 96), (384,)                        # N no multiple of 16, K one of 128 but not of 256
RECORDS = RAGGED[0], (768,)                                      # where K is a multiple of 256: N alone is ragged
ODD = (33, 40, 24, 32), (320, 288, 352)                          # K no multiple of 128
OTHERS = (*RAGGED[0], 64, 128), (*RAGGED[1], 4096)               # a block may be as long, a tile as high
TALL = (3208, 3232), (2176, 2304)                                # the second K is for records of 256 columns
WIDE = (12680, 12704), (384, 512)
CODED = ((72,), (2176,)), ((40,), (8320,))                       # four and eight lanes of a row, and chunks that are not even
QUICK_ROWS = (1, 5, 12, 100)


@dataclass(frozen=True)
class Check:
    """One product, or one dequantization with rows = 0; invariant: of several numbers of rows, whose bits must agree.

    tiled: by 'tile_gemm', which takes few rows of x too.
    """

    rows: int
    x: str
    bias: bool = False
    invariant: bool = False
    tiled: bool = False

    def __str__(self) -> str:
        if not self.rows:
            return f"dequantize to {self.x}"
        how = f"{' + bias' * self.bias}{', invariant' * self.invariant}{', in tiles' * self.tiled}"
        return f"{self.rows} rows of x in {self.x}{how}"


@dataclass(frozen=True)
class Case:
    """A weight and what is checked with it: packed once, and its kernels compiled by one process."""

    weight: Weight
    checks: tuple[Check, ...]

    def calls(self) -> Iterator[Call]:
        """The launches of all checks, without data."""
        packed = self.weight.meta()
        for check in self.checks:
            yield from check_calls(packed, check)


def check_calls(packed: PackedWeight, check: Check) -> Iterator[Call]:
    """The launches of one check, for tensors on meta: of the kernel for so many rows, and of what the plan chooses."""
    dtype = DTYPES[check.x]
    for rows in INVARIANT if check.invariant else (check.rows,):
        x = torch.empty(rows, packed.shape[1], dtype=dtype, device="meta")
        chosen = None if check.invariant or not rows else Candidate("decode") if regimes.is_decoded(x, packed) else \
            regimes.candidate(x, packed, check.tiled)
        yield from product_calls(packed, rows, dtype, check.bias, check.invariant, chosen)
        if rows and not check.invariant:
            yield from product_calls(packed, rows, dtype, check.bias)


def product_calls(packed: PackedWeight, rows: int, dtype: torch.dtype, bias: bool = False, invariant: bool = False,
                  candidate: Candidate | None = None) -> Iterator[Call]:
    """The launches of a linear by a candidate, without one as the runtime chooses; of 'decode' those that dequantize tiles.

    rows = 0: those that dequantize.
    """
    n, k = packed.shape
    if not rows:
        yield from launch.dequantize_calls(packed, torch.empty(n, k, dtype=dtype, device="meta"))
        return
    x, out = (torch.empty(rows, columns, dtype=dtype, device="meta") for columns in (k, n))
    candidate = candidate or (None if packed.layout.streams and not regimes.is_decoded(x, packed) else
                              plan.best(packed, rows, dtype, x.device))
    if invariant or candidate is None or candidate.kind != "decode":
        added = torch.empty(n, dtype=dtype, device="meta") if bias else None
        yield from launch.linear_calls(x, packed, added, out, invariant, None if invariant else candidate)
        return
    if packed.layout.streams:
        yield from launch.dequantize_calls(packed, torch.empty(n, k, dtype=dtype, device="meta"))
        return
    for start, stop in costs.decoded_tiles(packed, dtype.itemsize):
        yield from launch.dequantize_calls(packed.cut("N", start, stop), torch.empty(stop - start, k, dtype=dtype, device="meta"))


def cases(quick: bool = False) -> list[Case]:
    """All cases, those first without which nothing is known of a storage."""
    all_cases = [_case(weight, WHOLE, _whole(quick)) for weight in every()]
    all_cases += [_case(weight, RAGGED, _ragged(quick)) or _case(weight, RECORDS, _ragged(quick)) for weight in every()]
    all_cases += [_case(weight, ODD, _odd(quick)) for weight in every()]
    if not quick:
        all_cases += [_case(weight, OTHERS, _others()) for weight in others()]
        lanes = [weight for weight in every() if matrix_unit_of(weight) is not None]
        all_cases += [_case(weight, grid, checks) for grid, checks in ((TALL, _tall()), (WIDE, _wide())) for weight in lanes]
        coded = [weight for weight in every() if format_of(weight.name).storage(weight.storage, weight.chosen)[1].streams]
        all_cases += [_case(weight, grid, _coded()) for grid in CODED for weight in coded]
    return [case for case in all_cases if case is not None]


def left_out() -> list[str]:
    """Shapes that a storage cannot hold, in words."""
    reasons = {"RAGGED": "K = 384", "ODD": "a K that is no multiple of 128"}
    return [f"{weight.name}.{weight.storage}{_bits(weight)} cannot hold {reasons[name]}"
            for name, grid in (("RAGGED", RAGGED), ("ODD", ODD)) for weight in every() if shape_of(weight, grid) is None]


def _bits(weight: Weight) -> str:
    by = format_of(weight.name).by
    return "".join(f" {key}={value}" for key, value in weight.params if key in by)


def shape_of(weight: Weight, grid: tuple[tuple[int, ...], tuple[int, ...]]) -> tuple[int, int] | None:
    """The first shape of a grid that the storage can hold."""
    return next(((n, k) for n in grid[0] for k in grid[1] if fits(replace(weight, shape=(n, k)))), None)


def _case(weight: Weight, grid: tuple[tuple[int, ...], tuple[int, ...]], checks: tuple[Check, ...]) -> Case | None:
    shape = shape_of(weight, grid)
    if shape is None:
        return None
    kernels = format_of(weight.name).storage(weight.storage, weight.chosen)[1].kernels
    few = kernels.pairs is not None or (kernels.matrix_unit is not None and "skinny" in kernels.matrix_unit.families)
    served = {"invariant": few and shape[1] % 128 == 0,
              "tiled": kernels.matrix_unit is not None and "tile_gemm" in kernels.matrix_unit.families and shape[1] % 128 == 0}
    kept = tuple(check for check in checks if all(served[name] for name in served if getattr(check, name)))
    return Case(replace(weight, shape=shape), kept)


def matrix_unit_of(weight: Weight) -> MatrixUnitKernels | None:
    """The storage's kernels for matrix units."""
    return format_of(weight.name).storage(weight.storage, weight.chosen)[1].kernels.matrix_unit


def _whole(quick: bool) -> tuple[Check, ...]:
    if quick:
        return (*(Check(rows, "bf16") for rows in QUICK_ROWS), Check(0, "f32"))
    return (Check(1, "bf16"), Check(1, "f16"), Check(2, "bf16"), Check(8, "f16", bias=True), Check(12, "bf16"), Check(16, "f16"),
            Check(24, "bf16", bias=True), Check(50, "f16"), Check(64, "bf16"), Check(100, "bf16"), Check(256, "f16"),
            Check(4, "f16", tiled=True), Check(3, "f32"), Check(0, "f32"), Check(0, "bf16"), Check(8, "bf16", invariant=True))


def _ragged(quick: bool) -> tuple[Check, ...]:
    if quick:
        return Check(1, "f16"), Check(5, "f16")
    return (Check(1, "f16", bias=True), Check(5, "bf16"), Check(11, "f16"), Check(33, "bf16"), Check(100, "f16", bias=True),
            Check(3, "f16", bias=True, tiled=True), Check(0, "f32"), Check(0, "f16"), Check(8, "f16", invariant=True))


def _odd(quick: bool) -> tuple[Check, ...]:
    if quick:
        return (Check(3, "bf16"),)
    return Check(1, "bf16"), Check(3, "f32", bias=True), Check(7, "f16"), Check(12, "bf16"), Check(77, "bf16"), Check(0, "f32")


def _others() -> tuple[Check, ...]:
    return Check(1, "bf16"), Check(5, "f16"), Check(12, "bf16"), Check(100, "bf16"), Check(0, "f32")


def _tall() -> tuple[Check, ...]:
    return Check(1, "bf16"), Check(8, "f16"), Check(24, "f16"), Check(33, "f16")


def _wide() -> tuple[Check, ...]:
    return Check(1, "f16"), Check(6, "bf16"), Check(16, "bf16"), Check(64, "bf16"), Check(20, "f16")


def _coded() -> tuple[Check, ...]:
    return (Check(1, "bf16"), Check(5, "bf16", bias=True), Check(16, "bf16"), Check(40, "bf16"), Check(0, "bf16"),
            Check(0, "f32"), Check(8, "bf16", invariant=True))


def others() -> Iterator[Weight]:
    """Every other value of each parameter, and the tensors that may be missing."""
    for weight in every():
        form = format_of(weight.name)
        layout = form.storage(weight.storage, weight.chosen)[1]
        if any(layout.tensors[name].optional for name in layout.coded):
            yield replace(weight, optional=True)
        for name, values in form.params.items():
            if name not in form.by:
                yield from (replace(weight, params=tuple({**weight.chosen, name: value}.items())) for value in values[1:])
