"""Memory that programs of a launch share: counters of their own for every stream and every captured launch."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl.generated import q4_0
from qdsl.runtime.gpu import costs, product, scratch
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.scratch import Counters, scratch_of
from qdsl.runtime.libraries.call import Call

CPU = torch.device("cpu")
ALLOCATIONS = (torch.ops.aten.new_empty.default, torch.ops.aten.empty.memory_format)


class Decoded(TorchDispatchMode):
    """Allocations of `size` numbers, and the most of them that were alive at a time: blocks that a caching allocator needs."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size
        self.alive: list[StorageWeakRef] = []
        self.count = self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in ALLOCATIONS and result.numel() == self.size:
            self.count += 1
            self.alive = [ref for ref in self.alive if not ref.expired()] + [StorageWeakRef(result.untyped_storage())]
            self.most = max(self.most, len(self.alive))
        return result


def overlap(one: torch.Tensor, other: torch.Tensor) -> bool:
    return max(one.data_ptr(), other.data_ptr()) < min(one.data_ptr() + one.nbytes, other.data_ptr() + other.nbytes)


def test_counters_of_a_stream_are_zeroed_once() -> None:
    counters = Counters()
    first, again, other = counters.take(3, CPU, 1), counters.take(500, CPU, 1), counters.take(3, CPU, 2)
    assert first is again and not overlap(first, other)
    assert first.dtype == torch.int32 and len(first) >= 500 and not first.any()
    assert len(counters.take(scratch.STREAM + 1, CPU, 1)) > scratch.STREAM
    assert counters.take(7, torch.device("meta")).is_meta


def test_captured_launches_have_counters_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    counters, captured = Counters(), True
    monkeypatch.setattr(scratch, "is_captured", lambda device: captured)
    taken = [counters.take(5, CPU, 1)]                           # nothing was zeroed before: the capture does it
    captured = False
    taken += [counters.take(5, CPU, 1)]
    captured = True
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros", None)                      # from now on the capture has no launch that zeroes
        taken += [counters.take(5, CPU, 1) for _ in range(3)]
    monkeypatch.setattr(scratch, "RESERVE", 0)                   # used up
    taken += [counters.take(5, CPU, 1)]
    assert not any(overlap(one, other) for one, other in combinations(taken, 2))
    assert all(tensor.data_ptr() % 16 == 0 and len(tensor) >= 5 and not tensor.any() for tensor in taken)


@pytest.mark.parametrize("rows", [256, 128])
def test_decoded_weights_of_all_layers_take_turns_in_one_block(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """None outlives its product, be it a whole weight or tiles of one, so that the next has the same memory in stream order."""
    monkeypatch.setattr(costs, "DECODED", 2 * rows * 128)
    monkeypatch.setattr(Call, "run", lambda call: None)          # the interpreter keeps tensors until cycles are collected
    layers = [q4_0.quantize(torch.randn(256, 128)) for _ in range(3)]
    with Decoded(rows * 128) as decoded:
        for layer in layers:
            product.product_by(Candidate("decode"), torch.randn(3, 128, dtype=torch.float16), layer)
    assert decoded.count == 3 and decoded.most == 1
    assert all(ref.expired() for ref in decoded.alive)


def test_sums_are_allocated_for_every_launch() -> None:
    (one, _), (other, zeros) = scratch_of(4, 1024, CPU), scratch_of(4, 1024, CPU)
    assert one.shape == (4096,) and one.dtype == torch.float32 and not overlap(one, other) and len(zeros) >= 4
