"""Kernel csr on the PTX machine, as JSON: `python -m tests.kernels.execute_csr`, without TRITON_INTERPRET."""

from __future__ import annotations

import json

import torch
from torch import Tensor

from qdsl.analyze.execute import execute
from qdsl.runtime.gpu.branch_launches import csr_call
from tests.support.only_ptx import stop_at_ptx

ROWS, N, K = (1, 5), 12, 96


def entries(seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Starts, columns and values of [N, K]: rows of no entry, of few and of all."""
    generator = torch.Generator().manual_seed(seed)
    present = torch.rand(N, K, generator=generator) < torch.linspace(0, 1, N)[:, None]
    present[-1] = True
    start = torch.cat([torch.zeros(1, dtype=torch.int64), present.sum(1).cumsum(0)]).to(torch.int32)
    return start, present.nonzero()[:, 1].to(torch.int32), torch.randn(int(start[-1]), generator=generator).to(dtype)


def operands(m: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """x [m, K] and the product that comes first [m, N]."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(m, K, generator=generator).to(dtype), torch.randn(m, N, generator=generator)


def wanted(x: Tensor, out: Tensor, start: Tensor, column: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """The sums in float64, and how far float32 sums may be from them."""
    dense = torch.zeros(N, K, dtype=torch.float64)
    for n in range(N):
        own = slice(int(start[n]), int(start[n + 1]))
        dense[n, column[own].long()] = value[own].double()
    size = x.double().abs() @ dense.abs().T + out.double().abs()
    return x.double() @ dense.T + out.double(), 8 * 2.0 ** -24 * size


def main() -> None:
    stop_at_ptx()
    for arch, dtype, value_dtype in (("sm_80", torch.float16, torch.float32), ("sm_90", torch.bfloat16, torch.float16)):
        lists = entries(dtype=value_dtype)
        for m in ROWS:
            x, out = operands(m, dtype)
            sums = torch.full_like(out, torch.nan)
            findings = execute(csr_call(out, sums, x, *lists), arch, outputs=(sums,)).findings
            exact, allowed = wanted(x, out, *lists)
            print(json.dumps({"arch": arch, "rows": m, "findings": list(map(str, findings)),
                              "error": float(((sums.double() - exact).abs() / allowed).nan_to_num(torch.inf).max())}))


if __name__ == "__main__":
    main()
