"""The kernels for each number of rows, independent of plans, so that checks and tests run all of them."""

from __future__ import annotations

import torch

from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, launch, plan
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import BY_NAME
from qdsl.runtime.gpu.families.lanes import most_columns
from qdsl.runtime.weight import stream_kernels

FEWER = 16                                                       # rows of x that kernels are checked with, without 'tile_gemm'


def candidate(x: torch.Tensor, packed: PackedWeight, is_tiled: bool = False) -> Candidate | None:
    """The kernel for so many rows, in the first configuration: 'gemv' one, 'tile_gemm' more than 8, else 'skinny' or 'matvec'.

    is_tiled: 'tile_gemm' for fewer rows too, where it serves them.  None for streams, which have kernels of their own.
    """
    if packed.layout.streams:
        return None
    m, is_aligned = x.shape[0], launch.is_aligned(x, packed)
    kinds = plan.kinds(packed, m, x.dtype, x.device, is_aligned)
    order = ("gemv", "tile_gemm", "skinny") if is_tiled or m > 8 else ("gemv", "skinny")
    wanted = next((kind for kind in order if kind in kinds), "matvec")
    legal = plan.candidates(packed, m, x.dtype, x.device, is_aligned)
    return next((option for option in legal if option.kind == wanted), plan.any_product(packed, m))


def is_decoded(x: torch.Tensor, packed: PackedWeight) -> bool:
    """Whether a product of so many rows is checked as that of the dequantized weight."""
    if packed.layout.streams:
        return x.shape[0] > stream_kernels.SKINNY_ROWS or not configure.has_skinny_streams(x, packed)
    many = BY_NAME["tile_gemm"].why_not(plan.Product(packed, 2, x.dtype, x.device)) == ""
    return x.shape[0] > (most_columns(packed) if many else FEWER)
