"""Fields that were written over: told from those that are as they are, and from those that borrow."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.core.overflowed_zeros import MIN_BITS, has_overflowed_zeros


def stream(fields: list[int], bits: int, spills: bool) -> bytes:
    """Zero points less one as words of 32 bits: a -1 borrows, or, as auto-gptq has it, is written over what is above it."""
    words = []
    per_word = 32 // bits
    for start in range(0, len(fields), per_word):
        part = [field - 1 << bits * place for place, field in enumerate(fields[start:start + per_word])]
        words.append((np.bitwise_or.reduce([field & 0xFFFFFFFF for field in part]) if spills else sum(part)) & 0xFFFFFFFF)
    return np.array(words, np.uint32).tobytes()


@pytest.mark.parametrize("bits", [2, 4, 8])
@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_only_what_was_written_over_is_told(bits: int, data: st.DataObject) -> None:
    seed = data.draw(st.integers(0, 9999))
    fields = np.random.default_rng(seed).integers(0, 1 << bits, 32 * 24).tolist()
    per_word = 32 // bits
    words = [fields[start:start + per_word] for start in range(0, len(fields), per_word)]
    over = sum(bits * (per_word - 1 - word.index(0)) for word in words if 0 in word)
    assert has_overflowed_zeros(stream(fields, bits, True), bits) == (over >= MIN_BITS)
    assert not has_overflowed_zeros(stream(fields, bits, False), bits)
    assert not has_overflowed_zeros(stream([max(1, field) for field in fields], bits, True), bits)


def test_three_bits_cross_words() -> None:
    """Fields in two words and runs that are cut off are not checked."""
    packed = sum((field - 1 & 7) << 3 * place for place, field in enumerate([4] * 32))
    clean = packed.to_bytes(12, "little")
    overflowed = (packed | 0xFFFFFFFF & -1 << 6).to_bytes(12, "little")      # field 2 of the first word was 0
    assert not has_overflowed_zeros(clean * 8, 3) and has_overflowed_zeros(overflowed * 2 + clean[:4], 3)
    assert not has_overflowed_zeros(b"", 3) and not has_overflowed_zeros(clean[:8], 3)
