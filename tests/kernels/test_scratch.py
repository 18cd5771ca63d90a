"""Memory that programs of a launch share: counters of their own for every stream and every captured launch."""

from __future__ import annotations

from itertools import combinations

import pytest
import torch

from qdsl.runtime.gpu import scratch
from qdsl.runtime.gpu.scratch import Counters, scratch_of

CPU = torch.device("cpu")


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


def test_sums_are_allocated_for_every_launch() -> None:
    (one, _), (other, zeros) = scratch_of(4, 1024, CPU), scratch_of(4, 1024, CPU)
    assert one.shape == (4096,) and one.dtype == torch.float32 and not overlap(one, other) and len(zeros) >= 4
