"""Products by torch's int8 operation, for rows of signed 8-bit codes with one scale each, where no loop is compiled.

The operation reads the codes where they lie, sums in float32 and rounds the result once.  It has vector kernels on x86 for x and
scales in bfloat16 alone; in float32 and float16 it takes as long as torch's decode and product, or twice that.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_rows

FEW = 32                                                         # rows of x for which it is faster than decoded tiles
STEP = 32                                                        # columns that its vectors take; it reads past the end of others


def product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
    """x [M, K] @ w.T: [M, N]; None where the operation does not take x or the weight, or would round a scale.

    A bias is left to others: added to a result that is rounded, it would be rounded twice.
    """
    kernels = packed.layout.kernels.matrix_unit
    w8a8 = None if kernels is None or kernels.scale is not None else kernels.w8a8    # a scale for a group, not for a row
    if w8a8 is None or w8a8.type != "i8" or bias is not None or not _is_taken(x, packed.tensors[w8a8.codes]):
        return None
    scales = _scales(packed, w8a8.codes)
    return None if scales is None else torch.ops.aten._weight_int8pack_mm(x, packed.tensors[w8a8.codes], scales)


def _is_taken(x: Tensor, codes: Tensor) -> bool:
    """Whether the operation has a fast kernel for x and these codes [N, K]."""
    return x.dtype == torch.bfloat16 and 0 < x.shape[0] <= FEW and x.shape[1] > 0 and x.shape[1] % STEP == 0 and \
        codes.is_contiguous() and x.is_contiguous() and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512") and \
        hasattr(torch.ops.aten, "_weight_int8pack_mm") and not torch.compiler.is_compiling()


def _scales(packed: PackedWeight, codes: str) -> Tensor | None:
    """What a code of 1 stands for in each row, bfloat16 [N]; None where that is rounded, or a code of 0 is not 0.

    The decode is a line in its code, as kernels with `w8a8` are made for no other.
    """
    n = packed.shape[0]
    decoded = []
    for code in (0, 1):
        column = packed.derive({**packed.tensors, codes: packed.tensors[codes].new_full((n, 1), code)}, (n, 1))
        decoded.append(torch.empty(n, 1))
        decode_rows(column, 0, n, decoded[-1])
    zeros, ones = decoded
    scales = ones[:, 0].bfloat16()
    return scales if not zeros.any() and torch.equal(scales.float(), ones[:, 0]) else None
