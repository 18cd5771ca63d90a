"""Prefix codes: the bits of each symbol.

A symbol is an exponent, 0 to 255.  END is a marker that also has a code in DF11, to fill the last byte of a stream.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

END = -1
Words = NDArray[np.integer[Any]]                                  # u64, which shifts keep but their types do not show
LONGEST = 32                                                     # bits of a DF11 code: its 5-bit gaps reach no further


@dataclass(frozen=True)
class PrefixCode:
    """words: symbol -> (bits, value), with a code's first bit highest in its value, in the order of the tree's leaves."""
    words: Mapping[int, tuple[int, int]]

    @cached_property
    def lengths(self) -> NDArray[np.uint8]:
        """[256], in bits; 0 for a symbol without a code."""
        lengths = np.zeros(256, np.uint8)
        for symbol, (bits, _) in self.words.items():
            if symbol != END:
                lengths[symbol] = bits
        return lengths

    @cached_property
    def values(self) -> NDArray[np.uint64]:
        """[256], each code at the upper end of 64 bits."""
        values = np.zeros(256, np.uint64)
        for symbol, (bits, value) in self.words.items():
            if symbol != END:
                values[symbol] = value << 64 - bits
        return values

    @property
    def longest(self) -> int:
        """The bits of the longest code."""
        return max(bits for bits, _ in self.words.values())


def df11_code(counts: NDArray[np.int64]) -> PrefixCode:
    """The code that dfloat11 0.5 gives exponents which occur counts[0..255] times: Huffman's, at most 32 bits long.

    While a code is longer, the 2, 3, ... rarest counts are set to 1; numpy's order decides among equal counts.
    """
    present = np.flatnonzero(counts)
    used = {int(symbol): int(counts[symbol]) for symbol in present}
    code = _huffman_code(used)
    rare = 2
    while code.longest > LONGEST:
        rarest = np.argpartition(counts[present], rare)[:rare]
        code = _huffman_code({**used, **{int(present[place]): 1 for place in rarest}})
        rare += 1
    return code


def _huffman_code(counts: Mapping[int, int]) -> PrefixCode:
    """Huffman's code of the symbols and of END, which counts once.

    Subtrees join by their count, of equal ones by the leftmost symbol, END before all; the first of two gets the bit 0.
    """
    heap = [(count, symbol, [(symbol, 0, 0)]) for symbol, count in {END: 1, **counts}.items()]
    heapq.heapify(heap)
    while len(heap) > 1:
        first, leftmost, zero = heapq.heappop(heap)
        second, _, one = heapq.heappop(heap)
        leaves = [(symbol, bits + 1, value) for symbol, bits, value in zero]
        leaves += [(symbol, bits + 1, value + (1 << bits)) for symbol, bits, value in one]
        heapq.heappush(heap, (first + second, leftmost, leaves))
    return PrefixCode({symbol: (bits, value) for symbol, bits, value in heap[0][2]})


def canonical_code(counts: NDArray[np.int64], longest: int) -> PrefixCode:
    """The shortest canonical code of at most `longest` bits for symbols that occur counts[0..255] times; ties by symbol.

    A single symbol takes one bit.  Raises ValueError if there are more symbols than codes of that length.
    """
    symbols = [int(symbol) for symbol in np.flatnonzero(counts)]
    if len(symbols) > 1 << longest:
        raise ValueError(f"{len(symbols)} symbols have no code of {longest} bits")
    return code_of_lengths(dict(zip(symbols, _package_merge([int(counts[symbol]) for symbol in symbols], longest), strict=True)))


def code_of_lengths(lengths: Mapping[int, int]) -> PrefixCode:
    """The canonical code with these lengths: its words rise with length, then with the symbol."""
    words, value, before = {}, 0, 0
    for bits, symbol in sorted((bits, symbol) for symbol, bits in lengths.items()):
        value <<= bits - before
        words[symbol] = (bits, value)
        value, before = value + 1, bits
    return PrefixCode(words)


def _package_merge(counts: list[int], longest: int) -> list[int]:
    """Lengths of the best code of at most `longest` bits, by Larmore and Hirschberg's package-merge.

    The length of a symbol's code is the number of lightest packages that contain its leaf; among equals leaves precede packages.
    """
    if len(counts) < 2:
        return [1] * len(counts)
    order = sorted(range(len(counts)), key=lambda place: (counts[place], place))
    leaves: list[tuple[int, tuple[int, ...]]] = [(counts[place], (place,)) for place in order]
    level = leaves
    for _ in range(longest - 1):
        packages = [(a + b, (*inside, *others)) for (a, inside), (b, others) in zip(level[0::2], level[1::2], strict=False)]
        level = sorted([*leaves, *packages], key=lambda item: item[0])   # stable: leaves precede equal packages
    lengths = [0] * len(counts)
    for _, places in level[:2 * len(counts) - 2]:
        for place in places:
            lengths[place] += 1
    return lengths
