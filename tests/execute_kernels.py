"""Compiled kernels executed from their PTX, against the reference: `python -m tests.execute_kernels 0 4` for a quarter of them.

A line of JSON per launch.  Triton must not be interpreting.  Kernels run that have all lines between them, each on one
architecture; in `make test-all` every kernel on every architecture.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from qdsl.analyze.execute import Finding, Options, execute
from qdsl.analyze.gpus import arch_of
from qdsl.runtime import PackedWeight, configure, launch, ops
from qdsl.runtime.call import Call
from tests.support.covering import ALL, covering, kernels
from tests.support.formats import Case, cases, random_packed, shapes, shuffled_fields, smallest
from tests.test_lanes import expected, lanes_of, shapes_of

ARCHS = ("sm_80", "sm_90", "sm_100")
DTYPES = (torch.bfloat16, torch.float16)
ROWS = {"dequantize": (0,), "linear": (1, 5), "row": (1,), "few": (5, 20), "many": (40, 100)}
ORDERS: tuple[str | int, ...] = ("lockstep", "reverse", 7)
OFFSETS = (0, 8, 4)                                              # of x from an address that 16 bytes divide, in bytes


@dataclass(frozen=True)
class Job:
    """A kernel of a storage, where and how it runs; rows of x, 0 for dequantize."""

    case: Case
    kind: str
    arch: str
    rows: int
    dtype: torch.dtype
    order: str | int
    offset: int

    def __str__(self) -> str:
        return f"{self.case} {self.kind} {self.arch} {self.rows} {str(self.dtype)[6:]} {self.order} {self.offset}"


def jobs() -> list[Job]:
    """Kernels that have all lines between them; what else is chosen goes round, so that pairs of choices meet."""
    every = [(case, kind) for case in cases() for kind in ROWS if any(kernels(case, kind)) and
             (kind in ("dequantize", "linear") or str(case) != "same_names.planar-group9")]
    chosen = []
    for number, (case, kind) in enumerate(covering(every, lambda pair: kernels(*pair))):
        for arch in ARCHS if ALL else [ARCHS[number % 3] if kind != "many" else ARCHS[1]]:
            turn = number // 3
            chosen.append(Job(case, kind, arch, ROWS[kind][turn % len(ROWS[kind])], DTYPES[turn % 2], ORDERS[turn % 5 % 3],
                              OFFSETS[turn % 7 % 3]))
    return chosen


def shape_of(job: Job) -> tuple[int, int]:
    if lanes_of(job.case) and job.kind in ("row", "few", "many"):
        return shapes_of(job.case)[1]
    return [smallest(job.case), *shapes(job.case, (7, 33), (160, 384))][-1]


def packed_of(job: Job) -> PackedWeight:
    """Random; columns in an order of their own where the storage has one."""
    shape = shape_of(job)
    if job.case.module.FORMAT.variant(job.case.choice).storages[job.case.storage].order and job.kind == "few":
        fields = shuffled_fields(job.case, shape, 0, {})
        return job.case.module.pack(fields, storage=job.case.storage, **job.case.choice)
    return random_packed(job.case, shape)


def sample(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows)) / 64).to(dtype)


def displaced(tensor: torch.Tensor, offset: int) -> torch.Tensor:
    """A copy whose first byte lies so many bytes behind the start of its storage."""
    skipped = offset // tensor.element_size()
    storage = torch.empty(tensor.numel() + skipped, dtype=tensor.dtype)
    return storage[skipped:].view(tensor.shape).copy_(tensor)


def run(calls: list[Call], job: Job, output: torch.Tensor) -> list[Finding]:
    options = Options(order=job.order)
    return [finding for number, call in enumerate(calls) for finding in execute(
        call, job.arch, outputs=(output,) if number == len(calls) - 1 else (), options=options).findings]


def result(job: Job) -> dict[str, Any]:
    """The largest error as a share of what is allowed (0 or infinite for dequantize), and what the checkers say."""
    packed = packed_of(job)
    with configure.assumed(arch_of(job.arch).capability // 10, configure.MULTIPROCESSORS):
        if not job.rows:
            out = torch.full(packed.shape, torch.nan)
            calls = list(launch.dequantize_calls(packed, out))
            findings = run(calls, job, out)
            weight = job.case.module.dequantize(packed, torch.float32)
            same = torch.equal(out.view(torch.int32), weight.view(torch.int32))
            error = 0.0 if same or bool(((out == weight) | (out.isnan() & weight.isnan())).all()) else float("inf")
        else:
            x = displaced(sample(job.rows, packed.shape[1], job.dtype), job.offset)
            bias = sample(1, packed.shape[0], job.dtype)[0] if job.rows % 2 else None
            out = torch.full((job.rows, packed.shape[0]), torch.nan, dtype=job.dtype)
            stored, weight = ops.as_stored(x, packed)
            calls = list(launch.linear_calls(stored, weight, bias, out))
            findings = run(calls, job, out)
            exact, allowed = expected(job.case, packed, x, bias)
            error = ((out.double() - exact).abs() / allowed).nan_to_num(torch.inf).max().item()
    return {"job": str(job), "kernel": calls[-1].kernel.__name__, "error": error,
            "findings": [str(finding) for finding in findings]}


def every(share: int, shares: int) -> Iterator[dict[str, Any]]:
    for job in jobs()[share::shares]:
        try:
            yield result(job)
        except Exception as error:                               # a line of its own, so that the others are tried, too
            yield {"job": str(job), "kernel": "", "error": float("inf"), "findings": [f"{type(error).__name__}: {error}"]}


if __name__ == "__main__":
    for line in every(int(sys.argv[1]), int(sys.argv[2])):
        print(json.dumps(line), flush=True)
