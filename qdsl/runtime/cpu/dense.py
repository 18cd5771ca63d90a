"""Weights of lossless codes that a CPU keeps decoded, because decoding takes many times as long as a product.

`kept_decoded` makes that copy as interleaved ones are made (kept.py says which weights have copies), where it leaves as much
memory free as it takes.  Products are torch's, with the bits and the speed of a dense layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor

from qdsl.host.system import free_memory
from qdsl.runtime.cpu import kept, memory
from qdsl.runtime.cpu.prepared import PreparedProduct, Run
from qdsl.runtime.weight.match import torch_dtype
from qdsl.runtime.weight.packed import PackedWeight
from qdsl.runtime.weight.tiles import decode_rows, row_tiles


def kept_decoded(packed: PackedWeight) -> Tensor | None:
    """A weight of a lossless code as a tensor [N, K], decoded at the first call; None for other weights, or without memory."""
    if not packed.layout.streams or packed.variant.copies is None:
        return None
    entry = kept.get_copy(packed, partial(_decode, packed))
    return None if entry is None else entry.copy


def _decode(packed: PackedWeight) -> kept.KeptCopy[Tensor] | None:
    name = str(packed.variant.copies)
    dtype = torch_dtype(str(packed.params.get(name, packed.variant.fields[name].type)))
    nbytes = packed.shape[0] * packed.shape[1] * dtype.itemsize
    if not 0 < 2 * nbytes <= free_memory():
        return None
    weight = memory.zero_bytes(nbytes).view(dtype).view(packed.shape)
    whole = packed.decode_streams()
    for start, stop in row_tiles(whole):
        decode_rows(whole, start, stop, weight[start:stop])
    return kept.KeptCopy(weight, weight.data_ptr())


def prepare_dense(packed: PackedWeight, m: int, bias: torch.dtype | None, is_permuted: bool) -> PreparedProduct | None:
    """x [m, K] @ w.T + bias, x in the weight's dtype, for all weights of one description; None where this one has no copy.

    bias: its dtype, or None.  is_permuted: `run` gets the permutation of columns after the weight's tensors.
    """
    first, described = kept_decoded(packed), kept.description_number(packed)
    if first is None or bias not in (None, first.dtype):
        return None

    def make_run(sizes: tuple[int, ...]) -> Run:
        def run(x: Tensor, tensors: Sequence[Tensor], added: Tensor | None) -> Tensor | None:
            try:
                entry = kept.find(tensors[:-1] if is_permuted else tensors, described)
            except RuntimeError:                                 # tensors of autograd's vmap have no memory
                return None
            if entry is None or not x.is_cpu:
                return None
            return torch.nn.functional.linear(x.index_select(-1, tensors[-1]) if is_permuted else x, entry.copy, added)

        return run

    return PreparedProduct(make_run, (m, packed.shape[0]))
