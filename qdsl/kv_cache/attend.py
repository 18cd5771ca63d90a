"""Attention of one query token per sequence over a paged cache: the reference in torch, and the choice of the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.kv_cache import cache_launches
from qdsl.kv_cache.cache import KVCache
from qdsl.kv_cache.store import load
from qdsl.runtime import FormatError
from qdsl.runtime.libraries.triton import on_device, runs_kernels


def attention(q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, scale: float | None = None,
              sequences: Tensor | None = None) -> Tensor:
    """softmax(q k^T * scale) v [B, query heads, value_dim] of queries [B, query heads, head_dim] over their sequences' tokens.

    block_tables: int32 [B, pages], the blocks of a sequence in order.  seq_lens: int32 [B], tokens, including the query's own.
    scale: head_dim ** -0.5 by default.  sequences: int32 [B], as in `store`; by default 0, 1, ...  Query heads that share a key
    head are neighbours.  The result has q's dtype.  On a GPU one kernel reads the packed cache, and a second one adds up parts of
    sequences.  A sequence without tokens gives 0.  Raises FormatError for tensors that do not fit.
    """
    _check(q, cache, block_tables, seq_lens)
    if not runs_kernels(q.device) or cache_launches.why_not_attend(cache, q):
        return attention_reference(q, cache, block_tables, seq_lens, scale, sequences)
    out = q.new_empty(*q.shape[:2], cache.value_dim)
    with on_device(q.device):
        for call in cache_launches.attention_calls(q.contiguous(), cache, block_tables, seq_lens, out, scale, sequences):
            call.run()
    return out


def attention_reference(q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor, scale: float | None = None,
                        sequences: Tensor | None = None) -> Tensor:
    """As `attention`, in torch in float32, on any device, one sequence at a time."""
    _check(q, cache, block_tables, seq_lens)
    out = q.new_zeros(*q.shape[:2], cache.value_dim)
    for b, length in enumerate(seq_lens.tolist()):
        if length:
            t = torch.arange(length, device=q.device)
            slots = block_tables[b].long()[t // cache.block_size] * cache.block_size + t % cache.block_size
            k, v = load(cache, slots, torch.float32)
            if cache.tail is not None and (count := length % cache.keys.group):
                tail = cache.tail[b if sequences is None else int(sequences[b])]
                k[-count:] = tail[:, :count].transpose(0, 1).float()
            query = q[b].float().view(cache.heads, -1, cache.head_dim) * (scale or cache.head_dim ** -0.5)
            weights = torch.softmax(torch.einsum("hgd,thd->hgt", query, k), -1)
            out[b] = torch.einsum("hgt,thd->hgd", weights, v).flatten(0, 1).to(q.dtype)
    return out


def _check(q: Tensor, cache: KVCache, block_tables: Tensor, seq_lens: Tensor) -> None:
    """Raises FormatError for tensors that do not fit the cache."""
    if q.dim() != 3 or q.shape[2] != cache.head_dim or q.shape[1] % cache.heads or not q.is_floating_point():
        raise FormatError(f"q is floats [B, a multiple of {cache.heads}, {cache.head_dim}], not {str(q.dtype)[6:]} "
                          f"{list(q.shape)}")
    if block_tables.shape[:1] != q.shape[:1] or seq_lens.shape != q.shape[:1] or block_tables.dim() != 2:
        raise FormatError(f"{q.shape[0]} queries need block_tables [{q.shape[0]}, pages] and seq_lens [{q.shape[0]}], not "
                          f"{list(block_tables.shape)} and {list(seq_lens.shape)}")
