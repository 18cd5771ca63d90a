"""Launches of the kernels of side branches."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.gpu.kernels.csr import csr
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import runs_kernels
from qdsl.runtime.weight.arrays import cdiv

BLOCK = 128                                                      # entries of a row of w that a program multiplies at a time
ROWS = 8                                                         # rows of x per program
SECOND_AXIS = 65535                                              # limit of the grid's second axis


def has_csr(x: Tensor) -> bool:
    """Whether the CSR kernel multiplies x [M, K]: on GPUs, for any dtype but float64."""
    return runs_kernels(x.device) and x.dtype != torch.float64


def csr_call(out: Tensor, sums: Tensor, x: Tensor, start: Tensor, column: Tensor, value: Tensor) -> Call:
    """The launch that writes out [M, N] + x [M, K] @ s.T to sums; s is sparse [N, K], its entries sorted by row."""
    (m, k), n = x.shape, out.shape[1]
    block = 1 if m == 1 else min(ROWS, 1 << (m - 1).bit_length())
    rows = max(block, 1 << (cdiv(m, SECOND_AXIS) - 1).bit_length())
    arguments = (out, sums, x, start, column, value, m, n, k)
    return Call(csr, arguments, {"BM": rows, "BLOCK": BLOCK}, (n, cdiv(m, rows)), {"num_warps": 4})


def run_csr(out: Tensor, x: Tensor, start: Tensor, column: Tensor, value: Tensor) -> Tensor:
    """out [M, N] + x [M, K] @ s.T; s is sparse [N, K], its entries sorted by row and already validated."""
    sums = torch.empty_like(out, memory_format=torch.contiguous_format)
    if sums.numel():
        csr_call(out.contiguous(), sums, x.contiguous(), start, column.contiguous(), value.contiguous()).run()
    return sums
