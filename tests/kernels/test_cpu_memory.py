"""Memory for copies of weights: tensors share chunks, which are freed with the last of them."""

from __future__ import annotations

import threading
import weakref

import pytest
import torch
from torch import Tensor

from qdsl.runtime.cpu import memory


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_chunk", memory._MappedChunk())


def chunk() -> object:
    """The chunk of which the last tensor is a part; None if it is freed."""
    own = memory._chunk.memory
    return None if own is None else own()


def test_tensors_of_a_chunk_do_not_overlap() -> None:
    sizes = [1, 64, 65, 100_000, 3, memory.CHUNK // 2]
    parts = [memory.zero_bytes(size).fill_(number) for number, size in enumerate(sizes)]
    assert [len(part) for part in parts] == sizes
    assert all(bool((part == number).all()) for number, part in enumerate(parts))
    places = [part.data_ptr() for part in parts]
    assert all(place % memory.LINE == 0 for place in places) and max(places) - min(places) < memory.CHUNK
    large = memory.zero_bytes(memory.CHUNK + 1)
    assert len(large) == memory.CHUNK + 1 and not large.any()


def test_a_chunk_is_freed_with_its_last_tensor() -> None:
    first, second = memory.zero_bytes(10), memory.zero_bytes(10).view(torch.int16)
    whole = chunk()
    assert whole is not None
    freed = weakref.ref(whole)
    del whole, first
    assert freed() is not None
    second.fill_(7)
    del second
    assert freed() is None and chunk() is None
    assert not memory.zero_bytes(10).any()


def test_threads_have_chunks_of_their_own() -> None:
    own, others = memory.zero_bytes(10), list[Tensor]()
    thread = threading.Thread(target=lambda: others.append(memory.zero_bytes(10)))
    thread.start()
    thread.join()
    assert abs(own.data_ptr() - others[0].data_ptr()) >= memory.CHUNK - memory.LINE


def test_tensors_are_concatenated_in_new_memory() -> None:
    parts = [torch.arange(6, dtype=torch.float32).view(2, 3), torch.arange(3, dtype=torch.float32).view(1, 3) + 10]
    whole = memory.concatenate([parts[0], parts[1].t().contiguous().t()])
    assert torch.equal(whole, torch.cat(parts)) and whole.data_ptr() % memory.LINE == 0
