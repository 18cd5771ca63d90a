"""An order of sixteen levels in which a kernel joins both halves of a table by an exclusive or.

A byte permutation looks a code up among eight bytes.  For a code of the other half it repeats the top bit of a byte instead
(gpu/kernels/codebook.py).  If the levels of codes q and q + 8 have equal top bits in both bytes, that bit is known, and the table
makes up for it.  Does: finds such an order of levels as bfloat16.  NF4 has one.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

SIGN = 0x8000
TOP_BITS = 0x8080                                                # of both bytes


def pair_order(numbers: Sequence[float]) -> tuple[int, ...] | None:
    """The indices of sixteen numbers, of which numbers i and i + 8 have equal top bits as bfloat16; None if no order has that."""
    bits = [bf16_bits(number) for number in numbers]
    for zero in (0, SIGN):                                       # no sum of products shows the sign of zero
        alike: dict[int, list[int]] = {}
        for place, word in enumerate(bits):
            alike.setdefault((word or zero) & TOP_BITS, []).append(place)
        if all(len(places) % 2 == 0 for places in alike.values()):
            return tuple(place for first in (0, 1) for places in alike.values() for place in places[first::2])
    return None


def pair_bits(numbers: Sequence[float]) -> list[int] | None:
    """The bfloat16 bits of sixteen numbers in a pair_order(), with zero's sign as its pair's; None for another order."""
    bits = [bf16_bits(number) for number in numbers]
    signed = [word or bits[place ^ 8] & SIGN for place, word in enumerate(bits)]
    return None if any((low ^ high) & TOP_BITS for low, high in zip(signed[:8], signed[8:], strict=True)) else signed


def bf16_bits(number: float) -> int:
    """The bits of the nearest bfloat16, ties to even."""
    bits = struct.unpack("<I", struct.pack("<f", number))[0]
    return int(bits + 0x7FFF + (bits >> 16 & 1) >> 16)
