"""Decodes many parts of a bit stream in parallel: each lane begins at a known bit and ends where the next one begins.

A lookup of 16 bits gives up to eight symbols at once.  The stream is not trusted: a lane advances with every lookup, reads no
word outside the stream, and must end exactly where the next one begins.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import native
from qdsl.codecs.huffman import END, PrefixCode, Words
from qdsl.core.codecs import StreamError
from qdsl.host.c_functions import CFunctions

LANES = 4096                                                     # lanes to decode together: their state stays in cache
LONG = 32                                                        # bits of the longest code
_BITS = 16                                                       # bits of a lookup
_MOST = 8                                                        # symbols of a lookup


class Lookup:
    """The contents of 16 bits of a stream: symbols as bytes of a u64, their number and bits.  No symbol: longer code or END."""

    def __init__(self, code: PrefixCode) -> None:
        self.lengths = code.lengths.astype(np.int64)
        self.order, self.first = _symbols_in_order(code)
        symbol = self.find(np.arange(1 << _BITS, dtype=np.uint64) << LONG - _BITS)
        bits = np.where(symbol == END, 255, self.lengths[symbol])
        self.symbols = np.zeros(1 << _BITS, np.uint64)
        self.count = np.zeros(1 << _BITS, np.uint8)
        self.bits = np.zeros(1 << _BITS, np.int64)
        for place in range(_MOST):
            following = np.arange(1 << _BITS) << self.bits & (1 << _BITS) - 1
            more = (self.count == place) & (self.bits + bits[following] <= _BITS)
            self.symbols[more] |= symbol[following[more]].astype(np.uint64) << 8 * place
            self.count[more] += 1
            self.bits[more] += bits[following[more]]

    def find(self, window: Words) -> NDArray[np.int64]:
        """The symbol whose code begins the upper of 32 bits; zero-padded codes partition all windows."""
        return self.order[np.searchsorted(self.first, window, side="right") - 1]


def _symbols_in_order(code: PrefixCode) -> tuple[NDArray[np.int64], NDArray[np.uint64]]:
    """Symbols ordered by their codes, which partition all windows of 32 bits, and the first window of each."""
    first = {symbol: value << LONG - bits for symbol, (bits, value) in code.words.items()}
    order = sorted(first, key=lambda symbol: first[symbol])
    return np.array(order), np.array([first[symbol] for symbol in order], np.uint64)


def decode(data: NDArray[np.uint8], starts: NDArray[np.int64], code: PrefixCode, room: int,
           ) -> Iterator[tuple[NDArray[np.uint8], NDArray[np.int64]]]:
    """Yields the symbols of the lanes, in order, and the number per lane, for some lanes at a time.

    data: u8, the stream.  starts: i64, rising: the bit at which each lane begins.  The last lane ends with the data; the caller
    drops symbols decoded from bits after the last code.  room: the most symbols that are needed.  Raises StreamError if the codes
    of a lane do not end at the start of the next, unless the data end there.
    """
    ends = np.append(starts[1:], 8 * len(data))
    compiled = native.functions()
    if compiled is not None:
        symbols, counts, closed = _decode_natively(compiled, data, starts, ends, code, room)
        _check_closed(closed, ends, data)
        yield symbols, counts
        return
    lookup = Lookup(code)
    for first in range(0, len(starts), LANES):
        part = slice(first, first + LANES)
        origin = int(starts[first]) & ~31
        symbols, counts, closed = _decode_lanes(_words(data, origin >> 5, (int(ends[part][-1]) >> 5) + 2), starts[part] - origin,
                                    ends[part] - origin, lookup)
        _check_closed(closed + origin, ends[part], data)
        yield symbols, counts


def _check_closed(closed: NDArray[np.int64], ends: NDArray[np.int64], data: NDArray[np.uint8]) -> None:
    """Raises StreamError if the last code of a lane does not end with the lane, or in the data's last byte."""
    wrong = np.flatnonzero((closed != ends) & (closed <= 8 * len(data) - 8))
    if wrong.size:
        raise StreamError(f"the code before bit {int(ends[wrong[0]])} ends at {int(closed[wrong[0]])}")


def _decode_natively(compiled: CFunctions, data: NDArray[np.uint8], starts: NDArray[np.int64], ends: NDArray[np.int64],
                     code: PrefixCode, room: int) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Symbols of all lanes, up to the room, the number per lane, and the bits at which their last codes end; in C."""
    order, first = _symbols_in_order(code)
    symbols, counts, closed = np.empty(room, np.uint8), np.zeros(len(starts), np.int64), np.zeros(len(starts), np.int64)
    table = (first.astype(np.uint32), order.astype(np.int16))
    data, longest = np.ascontiguousarray(data), max(0, int((ends - starts).max()))
    if not compiled.windows_decode(
            data, len(data), starts, len(starts), longest, *table, len(order), code.lengths, symbols, room, counts, closed):
        raise MemoryError("no memory for the windows of a stream")
    return symbols[:counts.sum()], counts, closed


def decode_count(words: Words, at: NDArray[np.int64], count: int, lookup: Lookup) -> NDArray[np.uint8]:
    """The first `count` symbols [lanes, count] of lanes that begin at bits `at`; codes have at most 16 bits.

    words: 64 bits from every multiple of 32 on.  If codes pass the end, the last word repeats.
    """
    lanes, left, steps = np.arange(len(at)), np.full(len(at), count), []
    total = len(at)
    while len(at) and count:
        window = words[np.minimum(at >> 5, len(words) - 1)] << (at & 31).astype(np.uint64)
        index = (window >> 64 - _BITS).astype(np.int64)
        some = np.minimum(lookup.count[index], left)
        steps.append((lanes, lookup.symbols[index], some))
        at, left = at + lookup.bits[index], left - some
        if not left.all():
            going = left > 0
            at, left, lanes = at[going], left[going], lanes[going]
    return _join_steps(steps, total)[0].reshape(total, count)


def _words(data: NDArray[np.uint8], start: int, stop: int) -> Words:
    """64 bits from every multiple of 32 on; zeros after the end."""
    padded = np.zeros(4 * (stop - start + 1), np.uint8)
    piece = data[4 * start:4 * (stop + 1)]
    padded[:len(piece)] = piece
    words = padded.view(">u4").astype(np.uint64)
    return words[:-1] << 32 | words[1:]


def _decode_lanes(words: Words, at: NDArray[np.int64], ends: NDArray[np.int64], lookup: Lookup,
                  ) -> tuple[NDArray[np.uint8], NDArray[np.int64], NDArray[np.int64]]:
    """Symbols of lanes that begin at bits `at` of the words, the number per lane, and the bits at which their last codes end."""
    lanes, closed, steps = np.arange(len(at)), np.zeros(len(at), np.int64), []
    while len(at):
        window = words[at >> 5] << (at & 31).astype(np.uint64) >> LONG
        index = (window >> LONG - _BITS).astype(np.int64)
        symbols, count, after = lookup.symbols[index], lookup.count[index], at + lookup.bits[index]
        long = np.flatnonzero(count == 0)
        if long.size:
            decoded = lookup.find(window[long])
            symbols[long], count[long] = decoded.astype(np.uint64) & 255, decoded != END
            after[long] += np.where(decoded == END, 64 * len(words), lookup.lengths[decoded])
        over = np.flatnonzero(after >= ends)
        if over.size:
            count[over], closed[lanes[over]] = _count_before_ends(symbols[over], count[over], at[over], ends[over], lookup)
        steps.append((lanes, symbols, count))
        if over.size:
            going = after < ends
            at, ends, lanes = after[going], ends[going], lanes[going]
        else:
            at = after
    return *_join_steps(steps, len(closed)), closed


def _count_before_ends(symbols: Words, count: NDArray[np.uint8], at: NDArray[np.int64], ends: NDArray[np.int64], lookup: Lookup,
                       ) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """How many symbols of a lookup begin before the ends of their lanes, and where the last of those ends."""
    bits = lookup.lengths[symbols.view(np.uint8).reshape(-1, _MOST)]
    bits[np.arange(_MOST) >= count[:, None]] = 0
    stops = at[:, None] + np.cumsum(bits, axis=1)
    kept = ((stops - bits < ends[:, None]) & (bits > 0)).sum(1)
    return kept, np.where(kept, np.take_along_axis(stops, np.maximum(kept, 1)[:, None] - 1, 1)[:, 0], at)


def _join_steps(steps: list[tuple[NDArray[np.int64], Words, NDArray[np.uint8]]], lanes: int,
                ) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """The symbols of all lanes in order, and the number per lane."""
    symbols = np.zeros((lanes, len(steps)), np.uint64)
    counts = np.zeros((lanes, len(steps)), np.uint8)
    for step, (index, some, count) in enumerate(steps):
        symbols[index, step] = some
        counts[index, step] = count
    kept = np.arange(_MOST, dtype=np.uint8) < counts.reshape(-1, 1)
    return symbols.view(np.uint8).reshape(-1, _MOST)[kept], counts.sum(1, dtype=np.int64)
