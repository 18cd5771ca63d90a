"""Concatenates codes to a bit stream, first bit first, and finds where the windows of the stream begin.

Adjacent codes are joined in pairs as long as they fit 64 bits, so that few are left to place.  Codes that begin in one 64-bit
word have no bit in common, so that their sum is that word.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import native
from qdsl.codecs.huffman import PrefixCode, Words

BLOCK = 1 << 16                                                  # symbols to write together; their arrays stay in cache
WINDOW = 64                                                      # bits


@dataclass(frozen=True)
class BitStream:
    """data: u8, first bit highest, the last byte padded with zeros.  bits: the number of bits of codes.

    starts: i64 [windows + 1], gaps: u8 [windows + 1]: for each multiple of 64 up to `bits`, the first code that begins at or
    after it, and its distance in bits; the number of symbols, and 0, if there is none.
    """
    data: NDArray[np.uint8]
    bits: int
    starts: NDArray[np.int64]
    gaps: NDArray[np.uint8]


def write_stream(symbols: NDArray[np.uint8], counts: NDArray[np.int64], code: PrefixCode) -> BitStream:
    """The stream of u8 symbols, of which symbol i occurs counts[i] times.  Codes have at most 32 bits."""
    bits = int(counts @ code.lengths)
    starts = np.full(bits // WINDOW + 2, len(symbols), np.int64)
    gaps = np.zeros(bits // WINDOW + 2, np.uint8)
    compiled = native.functions()
    if compiled is not None:
        data = np.zeros(4 * (bits // 32 + 1), np.uint8)
        codes = np.array([code.words.get(symbol, (0, 0)) for symbol in range(256)], np.uint64)
        table = codes[:, 1] << 8 | codes[:, 0]
        compiled.windows_encode(symbols, len(symbols), bits, table, data, starts, gaps)
        return BitStream(data[:-(-bits // 8)], bits, starts, gaps)
    words = np.zeros(bits // 64 + 2, np.uint64)
    pairs = PairCodes(code)
    start = 0
    for first in range(0, len(symbols), BLOCK):
        part = symbols[first:first + BLOCK]
        levels, values = _join_codes(*pairs.joined_codes(part))
        ends = np.cumsum(levels[-1], dtype=np.int64)
        begins = ends - levels[-1]
        place_bits(words[start >> 6:], begins + (start & 63), levels[-1], values)
        windows = slice(-(-start // WINDOW), -(-(start + int(ends[-1])) // WINDOW))
        bounds = np.arange(windows.start, windows.stop) * WINDOW - start
        index, gaps[windows] = _first_from(bounds, levels, begins, ends, code.lengths[part])
        np.add(index, first, out=starts[windows])
        start += int(ends[-1])
    return BitStream(words.byteswap().view(np.uint8)[:-(-bits // 8)], bits, starts, gaps)


class PairCodes:
    """Joined codes of two adjacent symbols, by their 16 bits: lengths, and bits at the upper end of 64."""

    def __init__(self, code: PrefixCode) -> None:
        self.code = code
        second, first = np.divmod(np.arange(1 << 16), 256)       # the first of two bytes is the lower one
        self.lengths = code.lengths[first] + code.lengths[second]
        self.values = code.values[first] | code.values[second] >> code.lengths[first].astype(np.uint64)

    def joined_codes(self, symbols: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], Words]:
        """The joined codes of pairs of symbols; an odd last symbol is alone."""
        both = symbols[:len(symbols) & ~1].view("<u2")
        lengths, values = self.lengths[both], self.values[both]
        if len(symbols) % 2:
            lengths = np.append(lengths, self.code.lengths[symbols[-1:]])
            values = np.append(values, self.code.values[symbols[-1:]])
        return lengths, values


def _join_codes(lengths: NDArray[np.uint8], values: Words) -> tuple[list[NDArray[np.uint8]], Words]:
    """Joins adjacent codes while all fit 64 bits: the lengths of every level, pairs first, and the last level's codes."""
    levels = [lengths]
    while len(lengths) > 1:
        if len(lengths) % 2:
            levels[-1] = lengths = np.append(lengths, np.uint8(0))
            values = np.append(values, np.uint64(0))
        both = lengths[0::2] + lengths[1::2]
        if both.max() > 64:
            break
        shift = np.minimum(lengths[0::2], 63)                    # after 64 bits there is nothing to join
        values = values[0::2] | values[1::2] >> shift
        lengths = both
        levels.append(lengths)
    return levels, values


def place_bits(words: Words, begins: NDArray[np.int64], lengths: NDArray[np.uint8], values: Words) -> None:
    """Set the bits of values at offsets `begins`, which rise and do not overlap."""
    shift = (begins & 63).astype(np.uint8)
    word = begins >> 6
    sums = np.cumsum(values >> shift)                            # modulo 2^64, which cancels in differences
    last = np.append(np.flatnonzero(word[1:] != word[:-1]), len(word) - 1)
    words[word[last]] |= np.diff(sums[last], prepend=np.uint64(0))
    over = np.flatnonzero(shift + lengths > 64)
    words[word[over] + 1] |= values[over] << 64 - shift[over]


def _first_from(bounds: NDArray[np.int64], levels: list[NDArray[np.uint8]], begins: NDArray[np.int64], ends: NDArray[np.int64],
                lengths: NDArray[np.uint8]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """The first symbol that begins at or after each bound, and its distance, by descending the levels of joined codes.

    bounds: spaced like windows, beginning in the first window.
    """
    if not bounds.size:
        return bounds, bounds
    before = np.bincount(ends - bounds[0] + WINDOW - 1 >> 6, minlength=len(bounds))[:len(bounds)]
    index = np.cumsum(before)                                    # how many groups end at or before each bound
    begin = begins.take(index)
    for level in [*levels[-2::-1], lengths]:
        index += index
        step = level.take(index)
        later = begin + step <= bounds
        begin += step * later
        index += later
    across = begin < bounds                                      # a code crosses the bound; take the next one
    begin += lengths.take(index) * across
    return index + across, begin - bounds
