"""Stores tokens into a cache and loads them: the reference in torch, and the choice between it and the kernel."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.kv_cache import cache_launches
from qdsl.kv_cache.cache import CachedRows, KVCache
from qdsl.runtime import FormatError
from qdsl.runtime.libraries.triton import on_device, runs_kernels

INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32}


def store(cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, sequences: Tensor | None = None) -> None:
    """Encodes keys and values [T, heads, head_dim] into the cache at slots [T], in place; a slot of -1 is skipped.

    v: None if values are channels of keys.  slots, sequences: int32 or int64.  Tokens of a sequence come in order.  sequences
    [T]: the sequence of each token, below the number given to `allocate`; needed if tokens share numbers of keys.  A group of
    keys is encoded when its last token comes; until then the tail holds its keys.  On a GPU a kernel encodes, for schemes that
    have one, without waiting for the host.  Raises FormatError for tensors that do not fit.  Only the reference raises for
    numbers that are not finite.
    """
    _check(cache, k, v, slots, sequences)
    if not runs_kernels(k.device) or cache_launches.why_not_store(cache):
        store_reference(cache, k, v, slots, sequences)
        return
    with on_device(k.device):
        for call in cache_launches.store_calls(cache, k, v, slots, sequences):
            call.run()


def store_reference(cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, sequences: Tensor | None = None) -> None:
    """As `store`, in torch, on any device, for every scheme."""
    _check(cache, k, v, slots, sequences)
    kept = slots >= 0
    k, v, slots = k[kept], None if v is None else v[kept], slots[kept].long()
    if cache.keys.group == 1:
        _write_rows(cache.keys, k, cache.rows(slots))
    else:
        assert sequences is not None
        _store_groups(cache, k, slots, sequences[kept].long())
    if v is not None:
        _write_rows(cache.values, v, cache.rows(slots))


def load(cache: KVCache, slots: Tensor, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    """Decodes keys [T, heads, head_dim] and values [T, heads, value_dim] at slots [T], int32 or int64, on any device.

    Keys of an incomplete group are not in their slots yet, but in the tail.
    """
    rows = cache.rows(slots)
    keys = cache.keys.decoded(rows, dtype)
    return keys, keys[..., :cache.value_dim] if cache.is_shared else cache.values.decoded(rows, dtype)


def _write_rows(cached: CachedRows, tokens: Tensor, rows: Tensor) -> None:
    """Encodes [..., head_dim] into rows [...]; each group of rows must be whole and in order."""
    if not rows.numel():
        return
    encoded = cached.encoded(tokens.reshape(-1, tokens.shape[-1])).tensors
    for name, tensor in cached.packed.tensors.items():
        if shared := cached.rows_of(tensor):
            _indexable(tensor)[rows.flatten()[::shared] // shared] = _indexable(encoded[name]).to(tensor.device)


def _indexable(tensor: Tensor) -> Tensor:
    """A view of the same bits as signed integers, which torch can index; floats of 16 bits or more unchanged."""
    size = tensor.dtype.itemsize
    return tensor if tensor.is_floating_point() and size > 1 else tensor.view(INTEGERS[size])


def _store_groups(cache: KVCache, k: Tensor, slots: Tensor, sequences: Tensor) -> None:
    """Stores keys that share numbers among tokens: encodes the groups that are complete, and keeps the others in the tail."""
    group, count = cache.keys.group, slots.numel()
    assert cache.tail is not None
    place = slots % group
    last = torch.nonzero(place == group - 1)[:, 0]
    steps = torch.arange(group, device=slots.device) - (group - 1)
    members, wanted = last[:, None] + steps, slots[last][:, None] + steps
    is_new = (members >= 0) & (slots[members.clamp(min=0)] == wanted)
    before = cache.tail[sequences[last]].transpose(1, 2)         # groups, tokens, heads, channels
    keys = torch.where(is_new[:, :, None, None], k[members.clamp(min=0)].float(), before.float())
    rows = cache.rows(wanted.flatten()).view(*wanted.shape, cache.heads)
    _write_rows(cache.keys, keys.transpose(1, 2), rows.transpose(1, 2))
    end = torch.arange(count, device=slots.device) + (group - 1 - place)
    closes = (end < count) & (slots[end.clamp(max=count - 1)] == slots + (group - 1 - place))
    cache.tail[sequences[~closes], :, place[~closes]] = k[~closes].to(cache.tail.dtype)


def _check(cache: KVCache, k: Tensor, v: Tensor | None, slots: Tensor, sequences: Tensor | None) -> None:
    """Raises FormatError for tensors that do not fit the cache."""
    shape = (slots.numel(), cache.heads, cache.head_dim)
    if cache.is_shared != (v is None):
        raise FormatError(f"values are the first {cache.value_dim} channels of keys: v is None" if cache.is_shared else
                          "v is None, and values are not channels of keys")
    for name, tensor in (("k", k), ("v", k if v is None else v)):
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            raise FormatError(f"{name} is floats {list(shape)}, not {str(tensor.dtype)[6:]} {list(tensor.shape)}")
    if slots.dtype not in (torch.int32, torch.int64):
        raise FormatError(f"slots are int32 or int64, not {str(slots.dtype)[6:]}")
    if cache.tail is not None and sequences is None:
        raise FormatError(f"keys share numbers among {cache.keys.group} tokens: say which sequence each token is of")
