"""Caches that tests fill: formats of keys and values, two sequences, and what attention may miss the reference by."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

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
    "fp8_ds_mla": (CacheFormat("fp8_ds_mla"), None),
    "nvfp4": (CacheFormat("nvfp4", numbers={"s": 0.03}), CacheFormat("nvfp4")),
}
SHARED = {"q8_0": (CacheFormat("q8_0"), None), "int8": (CacheFormat("int8_channel", scale_type="f32", divisor=127), None)}
BLOCK_SIZE, HEADS, HEAD_DIM, GROUP = 32, 2, 128, 3


class Dims(NamedTuple):
    """Heads of a cache, channels of keys and of values (None: of their own), and the query heads that share a key head."""

    heads: int = HEADS
    head_dim: int = HEAD_DIM
    value_dim: int | None = None
    group: int = GROUP


LATENT = Dims(1, 576, 512, 80)
LENGTHS = (70, 33)                                               # tokens of two sequences: open groups, and an open block
TABLES = torch.tensor([[5, 2, 7], [1, 4, 0]], dtype=torch.int32)
STEPS = (((0, 0, 40), (1, 0, 33)), ((0, 40, 69),), ((0, 69, 70),))      # which tokens of which sequences a call stores


def dims_of(name: str) -> Dims:
    """The sizes of a cache of a format of FORMATS."""
    return LATENT if name == "fp8_ds_mla" else Dims()


def empty(name: str) -> KVCache:
    """A cache of a format of FORMATS."""
    return allocated(FORMATS[name], dims_of(name))


def allocated(formats: tuple[CacheFormat, CacheFormat | None], dims: Dims) -> KVCache:
    """A cache of these formats and sizes, for two sequences."""
    return allocate(*formats, blocks=8, block_size=BLOCK_SIZE, heads=dims.heads, head_dim=dims.head_dim, value_dim=dims.value_dim,
                    sequences=2)


def slots_of(sequence: int, start: int, stop: int) -> Tensor:
    """The slots of tokens [start, stop) of a sequence."""
    t = torch.arange(start, stop)
    return TABLES[sequence].long()[t // BLOCK_SIZE] * BLOCK_SIZE + t % BLOCK_SIZE


def tokens(dims: Dims = Dims(), seed: int = 0) -> Iterator[tuple[Tensor, Tensor | None, Tensor, Tensor]]:
    """k, v, slots and sequences of every step; the last of each has no slot, and some rows are zeros or one number."""
    generator = torch.Generator().manual_seed(seed)
    for step in STEPS:
        slots = torch.cat([*(slots_of(*part) for part in step), torch.tensor([-1])]).int()
        sequences = torch.cat([*(torch.full((stop - start,), number) for number, start, stop in step), torch.tensor([0])]).int()
        k, v = torch.randn(2, len(slots), dims.heads, dims.head_dim, generator=generator) \
            * torch.logspace(-2, 1, len(slots))[:, None, None]
        k[0], v[0], k[-2:, 0], v[-2:, -1] = 0, 0, 0.5, -3.0
        yield k.bfloat16(), v.bfloat16() if dims.value_dim is None else None, slots, sequences


def queries(dtype: torch.dtype, dims: Dims = Dims()) -> Tensor:
    """One query token of both sequences."""
    return torch.randn(2, dims.heads * dims.group, dims.head_dim, generator=torch.Generator().manual_seed(9)).to(dtype)


def expected(q: Tensor, cache: KVCache) -> tuple[Tensor, Tensor]:
    """Attention in float32, and what a kernel may miss it by that rounds keys, p and values to q's dtype.

    A score is off by half a unit in the last place of every key, p by twice that and its own rounding, and a sum by the rounding
    of p and of values.
    """
    lengths, group = torch.tensor(LENGTHS, dtype=torch.int32), q.shape[1] // cache.heads
    wanted = attention_reference(q.float(), cache, TABLES, lengths)
    unit, allowed = torch.finfo(q.dtype).eps / 2, torch.empty_like(wanted)
    for b, length in enumerate(LENGTHS):
        k, v = (half.float().repeat_interleave(group, 1) for half in load(cache, slots_of(b, 0, length), torch.float32))
        if cache.tail is not None:
            count = length % cache.keys.group
            k[-count:] = cache.tail[b, :, :count].transpose(0, 1).float().repeat_interleave(group, 1)
        score = torch.einsum("hd,thd->ht", q[b].float(), k) * cache.head_dim ** -0.5
        size = torch.einsum("hd,thd->ht", q[b].float().abs(), k.abs()).amax(1) * cache.head_dim ** -0.5
        p = torch.softmax(score, 1)
        allowed[b] = torch.einsum("ht,thd->hd", p, v.abs()) * (3 * unit + (2 * unit + 1e-6) * size)[:, None] \
            + unit * wanted[b].abs() + 1e-6
    return wanted, allowed
