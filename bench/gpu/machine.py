"""Compares the PTX executor with the GPU: the same launches on the same numbers, and the difference of results."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import torch
from torch import Tensor

from bench.gpu import regimes
from bench.weights import format_of
from qdsl.analyze.execute import Options, execute
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.libraries.call import Call

SHAPE = (128, 512)
# Format, storage or None for the first, and rows of x: each family of kernels, with codes, tables and 8-bit x.
CASES = (("q4_0", "planar", 1), ("q4_0", "planar", 5), ("q4_0", "planar", 33), ("q4_k", "gguf", 1), ("nf4", "planar", 1),
         ("fp8_block", "planar", 5), ("q8_0", "planar", 33), ("mxfp4", None, 2))
SUMS = ("exact", "truncated")                                    # how the machine adds in matrix units


@dataclass(frozen=True)
class Difference:
    """One launch on the GPU and on the machine.

    equal: share of results with the same bits.  error: the largest difference, as a share of sum |x w|.
    findings: of the machine's checkers.
    """

    what: str
    kernel: str
    sums: str
    equal: float
    error: float
    findings: int


def differences(arch: str, device: str, run: Callable[[Call], object]) -> Iterator[Difference]:
    """The machine's results for an architecture against those of `run`, which launches on tensors of a device."""
    for name, storage, rows in CASES:
        form = format_of(name)
        packed = form.quantize(torch.randn(SHAPE, generator=torch.Generator().manual_seed(0)))
        packed = packed if storage in (None, packed.storage) else form.planar(packed)
        x = torch.randn(rows, SHAPE[1], generator=torch.Generator().manual_seed(1)).bfloat16()
        spread = x.double().abs() @ form.dequantize(packed, torch.float32).double().abs().t()
        on_gpu, calls = product(x.to(device), packed.to(device))
        for call in calls:
            run(call)
        kernel = calls[-1].family
        for sums in SUMS:
            here, calls = product(x, packed)
            findings = sum(len(execute(call, arch, options=Options(sums=sums)).findings) for call in calls)
            yield Difference(f"{name}.{packed.storage}, {rows} rows", kernel, sums, (on_gpu.cpu() == here).double().mean().item(),
                             ((on_gpu.cpu().double() - here.double()).abs() / spread).max().item(), findings)


def product(x: Tensor, packed: PackedWeight) -> tuple[Tensor, list[Call]]:
    """The memory for x @ w.T, and the launches that fill it, of the kernel for so many rows."""
    out = x.new_empty(x.shape[0], packed.shape[0])
    return out, list(launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed)))


def table(rows: list[Difference]) -> list[dict[str, object]]:
    """Rows of the results file."""
    return [asdict(difference) for difference in rows]
