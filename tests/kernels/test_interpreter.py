"""The guard around the interpreter sees what it should, and the mended bf16 is that of torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl

from tests.support.interpreter import INTERPRETED, guarded, times

pytestmark = pytest.mark.skipif(not INTERPRETED, reason="on a GPU nothing is interpreted")


@triton.jit
def _copy(source, target, count, ahead, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at + ahead, at < count, 0), at < count)


@triton.jit
def _cast(source, target, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(target + at, tl.load(source + at).to(target.dtype.element_ty))


@pytest.mark.parametrize(("count", "ahead"), [(9, 0), (8, 1), (8, -1)])
def test_one_element_outside_is_seen(count: int, ahead: int) -> None:
    storage = torch.zeros(32)
    source, target = storage[8:16], torch.zeros(8)
    with guarded(source, target), pytest.raises(Exception, match="out of bounds"):
        _copy[(1,)](source, target, count, ahead, SIZE=16)


def test_touched_elements_are_counted() -> None:
    source, target = torch.arange(8.0), torch.zeros(8)
    with guarded(source, target) as trace:
        _copy[(1,)](source, target, 5, 2, SIZE=8)
        _copy[(1,)](source, target, 3, 0, SIZE=8)
    assert times(trace.loads, source).tolist() == [1, 1, 2, 1, 1, 1, 1, 0]
    assert times(trace.stores, target).tolist() == [2, 2, 2, 1, 1, 0, 0, 0]


def test_float32_rounds_to_bf16_as_in_torch() -> None:
    generator = np.random.default_rng(0)
    bits = np.concatenate([generator.integers(0, 1 << 32, 6000, np.uint32),
                           (np.arange(0x8000, 0x10000, 8, np.uint32) << 16) + 0x8000,      # ties
                           (np.arange(0, 0x10000, 16, np.uint32) << 16) + 0x7FFF])
    source = torch.from_numpy(bits[:1 << 13].view(np.float32))
    target = torch.empty(source.numel(), dtype=torch.bfloat16)
    _cast[(8,)](source, target, SIZE=1 << 10)
    wanted = source.to(torch.bfloat16)
    assert torch.equal(target.isnan(), wanted.isnan())
    assert torch.equal(target.nan_to_num(0).view(torch.int16), wanted.nan_to_num(0).view(torch.int16))


def test_every_bf16_becomes_float32_as_in_torch() -> None:
    source = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    target = torch.empty(source.numel())
    _cast[(16,)](source, target, SIZE=1 << 12)
    assert torch.equal(target.view(torch.int32), source.view(torch.int16).to(torch.int32) << 16)
