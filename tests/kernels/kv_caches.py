"""Caches that tests fill: formats of keys and values, two sequences, and what attention may miss the reference by."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from qdsl.kv_cache import CacheFormat, KVCache, allocate, attention_reference, load

FORMATS = {
    "fp8_tensor": (CacheFormat("fp8_tensor", numbers={"s": 0.01}),) * 2,
    "fp8_channel": (CacheFormat("fp8_channel", scale_type="f32"),) * 2,
    "int8_channel": (CacheFormat("int8_channel", scale_type="f32", divisor=127),) * 2,
    "int4": (CacheFormat("mlx", bits=4, group=32), CacheFormat("kivi", bits=4, gn=1, gk=-1)),
    "kivi": (CacheFormat("kivi", bits=2, gn=32, gk=1), CacheFormat("kivi", bits=2, gn=1, gk=32)),
    "q8_0": (CacheFormat("q8_0"),) * 2,
    "q4_0": (CacheFormat("q4_0"),) * 2,
    "nvfp4": (CacheFormat("nvfp4", numbers={"s": 0.03}), CacheFormat("nvfp4")),
}
BLOCK_SIZE, HEADS, HEAD_DIM, GROUP = 32, 2, 128, 3
LENGTHS = (70, 33)                                               # tokens of two sequences: open groups, and an open block
TABLES = torch.tensor([[5, 2, 7], [1, 4, 0]], dtype=torch.int32)
STEPS = (((0, 0, 40), (1, 0, 33)), ((0, 40, 69),), ((0, 69, 70),))      # which tokens of which sequences a call stores


def empty(name: str) -> KVCache:
    """A cache of a format of FORMATS."""
    return allocate(*FORMATS[name], blocks=8, block_size=BLOCK_SIZE, heads=HEADS, head_dim=HEAD_DIM, sequences=2)


def slots_of(sequence: int, start: int, stop: int) -> Tensor:
    """The slots of tokens [start, stop) of a sequence."""
    t = torch.arange(start, stop)
    return TABLES[sequence].long()[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE


def tokens(seed: int = 0) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """k, v, slots and sequences of every step; the last of each has no slot, and some rows are zeros or one number."""
    generator = torch.Generator().manual_seed(seed)
    for step in STEPS:
        slots = torch.cat([*(slots_of(*part) for part in step), torch.tensor([-1])]).int()
        sequences = torch.cat([*(torch.full((stop - start,), number) for number, start, stop in step), torch.tensor([0])]).int()
        k, v = torch.randn(2, len(slots), HEADS, HEAD_DIM, generator=generator) * torch.logspace(-2, 1, len(slots))[:, None, None]
        k[0], v[0], k[-2:, 0], v[-2:, 1] = 0, 0, 0.5, -3.0
        yield k.bfloat16(), v.bfloat16(), slots, sequences


def queries(dtype: torch.dtype) -> Tensor:
    """One query token of both sequences."""
    return torch.randn(2, HEADS * GROUP, HEAD_DIM, generator=torch.Generator().manual_seed(9)).to(dtype)


def expected(q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Attention in float32, and what a kernel may miss it by that rounds keys, p and values to q's dtype.

    A score is off by half a unit in the last place of every key, p by twice that and its own rounding, and a sum by the rounding
    of p and of values.
    """
    lengths = torch.tensor(LENGTHS, dtype=torch.int32)
    wanted = attention_reference(q.float(), cache, TABLES, lengths)
    unit, allowed = torch.finfo(q.dtype).eps / 2, torch.empty_like(wanted)
    for b, length in enumerate(LENGTHS):
        k, v = (half.float().repeat_interleave(GROUP, 1) for half in load(cache, slots_of(b, 0, length), torch.float32))
        if cache.tail is not None:
            count = length % cache.keys.group
            k[-count:] = cache.tail[b, :, :count].transpose(0, 1).float().repeat_interleave(GROUP, 1)
        score = torch.einsum("hd,thd->ht", q[b].float(), k) * HEAD_DIM ** -0.5
        size = torch.einsum("hd,thd->ht", q[b].float().abs(), k.abs()).amax(1) * HEAD_DIM ** -0.5
        p = torch.softmax(score, 1)
        allowed[b] = torch.einsum("ht,thd->hd", p, v.abs()) * (3 * unit + (2 * unit + 1e-6) * size)[:, None] \
            + unit * wanted[b].abs() + 1e-6
    return wanted, allowed
