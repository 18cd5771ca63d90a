"""Memory for copies of weights, in huge pages where Linux has them.

A product reads a weight from end to end, and a model reads all of them for every token.  In pages of 4 KB that takes a quarter
longer: the processor looks up the address of each page, and its prefetcher stops at the end of one.  Copies follow one another
in chunks, so that small ones share huge pages.  A chunk is freed with the last copy in it.
"""

from __future__ import annotations

import mmap
import threading
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from qdsl.host.system import map_memory

CHUNK, LINE = 32 << 20, 64                                       # bytes that are mapped at once; of a line of caches


class _MappedChunk(threading.local):
    """The memory that a thread mapped last, until it is freed, and how many of its bytes are taken."""

    def __init__(self) -> None:
        self.memory: weakref.ref[mmap.mmap] | None = None
        self.taken = 0


_chunk = _MappedChunk()


def zero_bytes(nbytes: int) -> Tensor:
    """A tensor of so many zero bytes, at a multiple of 64; memory is used as it is written."""
    memory = None if _chunk.memory is None else _chunk.memory()
    if memory is None or _chunk.taken + nbytes > len(memory):
        memory = map_memory(max(nbytes, CHUNK))
        _chunk.memory, _chunk.taken = weakref.ref(memory), 0
    start, _chunk.taken = _chunk.taken, -(-(_chunk.taken + nbytes) // LINE) * LINE
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes, offset=start)


def concatenate(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors of one dtype along their first axis, in new memory."""
    shape = (sum(len(tensor) for tensor in tensors), *tensors[0].shape[1:])
    whole = zero_bytes(sum(tensor.nbytes for tensor in tensors)).view(tensors[0].dtype).view(shape)
    return torch.cat(list(tensors), out=whole)
