"""Codes symbols in DFloat11's Huffman code of at most 32 bits: one stream, whose windows are decoded in parallel.

A window has 64 bits, a block as many windows as a GPU's block has threads; gaps and positions say where codes and symbols begin.
The tensors of symbols u8 [n]:

    tables     u8 [rows, 256]         see qdsl/codecs/lookup.py
    data       u8 [bytes]             the stream, the first bit of a byte highest; END's code fills the last byte
    gaps       u8 [ceil(5 * threads * blocks / 8)]  5 bits for every window: where its first code begins
    positions  u8 [4 * (blocks + 1)]  u32, the first symbol whose code begins in a block, and n; the last block has none where it
                                      holds only the tail of a code
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import bits, lanes
from qdsl.codecs.huffman import END, PrefixCode, df11_code
from qdsl.codecs.lookup import code_of_tables, df11_tables
from qdsl.core.codecs import CODECS, StreamError

THREADS = 512
NAMES = tuple(CODECS["huffman_windows"].tensors)
_LANE = 8                                                        # windows to decode in one go

Tensors = Mapping[str, NDArray[Any]]


def encode(symbols: NDArray[np.uint8], counts: NDArray[np.int64], threads: int = THREADS) -> dict[str, NDArray[Any]]:
    """The tensors of symbols, of which symbol i occurs counts[i] times; without symbols the tables have only the row of lengths.

    Raises StreamError for symbols from 240 on and codes with too many table rows, which the tables cannot represent.
    """
    symbols = np.ascontiguousarray(symbols).reshape(-1)
    if not len(symbols):
        return {"tables": np.zeros((1, 256), np.uint8), "data": symbols, "positions": np.zeros(4, np.uint8), "gaps": symbols}
    code = df11_code(counts)
    tables = df11_tables(code)
    stream = bits.write_stream(symbols, counts, code)
    windows, gaps, positions = _entry_points(stream, len(symbols), int(code.lengths[symbols[-1]]), threads)
    _fill_last_byte(stream, code)
    padded = np.zeros(-(-len(stream.data) // (8 * threads)) * threads, np.uint8)
    padded[:windows] = gaps
    return {"tables": tables, "data": stream.data, "positions": np.append(positions, len(symbols)).astype("<u4").view(np.uint8),
            "gaps": np.packbits(np.unpackbits(padded[:, None], axis=1)[:, 3:])}


def _entry_points(stream: bits.BitStream, count: int, last: int, threads: int,
                  ) -> tuple[int, NDArray[np.uint8], NDArray[np.int64]]:
    """The number of windows in which a code begins, their gaps, and the first symbol of every such block.

    last: bits of the last code.  END counts as a code if it fills the last byte: it begins at the end of the others.
    """
    final = stream.bits if stream.bits % 8 else stream.bits - last
    windows = final // bits.WINDOW + 1
    gaps = stream.gaps[:windows].copy()
    if final == stream.bits and stream.starts[windows - 1] == count:
        gaps[-1] = stream.bits % bits.WINDOW
    return windows, gaps, stream.starts[:windows:threads]


def _fill_last_byte(stream: bits.BitStream, code: PrefixCode) -> None:
    """Fill the last byte with the first bits of END's code."""
    room = -stream.bits % 8
    if room:
        size, value = code.words[END]
        stream.data[-1] |= value >> size - room if size >= room else value << room - size


@dataclass(frozen=True)
class WindowedStream:
    """A validated stream: code and entry points, ready to be decoded."""
    data: NDArray[np.uint8]
    count: int
    threads: int
    code: PrefixCode
    gaps: NDArray[np.uint8]
    positions: NDArray[np.int64]

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that dfloat11's CUDA kernel needs."""
        return shared_memory(self.threads, int(np.diff(self.positions).max(initial=0)))

    def decode(self, *, every: bool = False) -> NDArray[np.uint8]:
        """The symbols u8 [n].  every: start at every window, instead of each eighth.

        Raises StreamError if codes contradict the gaps of these windows, positions, or the stream's end.
        """
        step = 1 if every else math.gcd(_LANE, self.threads)     # so that blocks begin with a lane
        windows = -(-8 * len(self.data) // bits.WINDOW)
        starts = np.arange(0, windows, step, dtype=np.int64) * bits.WINDOW + self.gaps[:windows:step]
        symbols = np.empty(self.count, np.uint8)
        counts = []
        at = 0
        for part, lane_counts in lanes.decode(self.data, starts, self.code, self.count):
            symbols[at:at + len(part)] = part[:self.count - at]
            at = min(self.count, at + len(part))
            counts.append(lane_counts)
        first = np.cumsum(np.concatenate([[0], *counts]))[:-1]
        self._check(symbols, np.minimum(first, self.count), starts, at, self.threads // step)
        return symbols

    def _check(self, symbols: NDArray[np.uint8], first: NDArray[np.int64], starts: NDArray[np.int64], count: int, lanes: int,
               ) -> None:
        """Raises StreamError unless positions match the codes, and the codes fill the stream except for less than a byte.

        first: the first symbol of each lane, which begins at starts; count: symbols of the stream; lanes: per block.
        """
        blocks = first[::lanes]
        recorded = self.positions[:len(blocks)]
        wrong = np.flatnonzero(recorded != blocks[:len(recorded)])
        if wrong.size:
            block = wrong[0]
            raise StreamError(f"block {block} begins with symbol {blocks[block]}, and its position says {recorded[block]}")
        last = int(np.flatnonzero(first < self.count)[-1])
        end = int(starts[last]) + int(self.code.lengths[symbols[first[last]:]].sum(dtype=np.int64))
        if count < self.count or not 0 <= 8 * len(self.data) - end < 8:
            raise StreamError(f"the data hold {count} symbols of {self.count}, and their codes end at bit {end} of "
                              f"{8 * len(self.data)}")


def shared_memory(threads: int, fullest: int) -> int:
    """Bytes that dfloat11's CUDA kernel asks for: four for each thread, two for each symbol of the fullest block."""
    return 4 * threads + 4 + 2 * fullest


def threads_within(limit: int, threads: int, fullest: int, shortest: int) -> int | None:
    """The most threads, halved repeatedly, with which a stream of such codes stays within `limit` bytes; None if 8 fail.

    fullest: symbols of the fullest block of `threads`; shortest: bits of the shortest code.
    """
    most = threads
    while most >= 8 and shared_memory(most, min(fullest, -(-bits.WINDOW * most // shortest))) > limit:
        most //= 2
    return most if most >= 8 else None


def validated_stream(tensors: Tensors, count: int, threads: int | None = None) -> WindowedStream:
    """The validated stream for `count` symbols from a file's tensors, so that decoders stay inside them.

    threads: by default as many as gaps and positions allow.  Raises StreamError for other types or sizes, positions that fall or
    leave the stream, and tables that are no code.
    """
    for name in NAMES:
        if name not in tensors or tensors[name].dtype != np.uint8 or tensors[name].ndim != 1 + (name == "tables"):
            raise StreamError(f"{name} are missing, or not {'[rows, 256]' if name == 'tables' else '[n]'} of u1")
    data, size = tensors["data"], len(tensors["data"])
    if not count or not size or count > 8 * size or count >> 31 or size >> 31:
        raise StreamError(f"{count} symbols in a stream of {size} bytes")
    candidates = [1 << power for power in range(3, 11)] if threads is None else [threads]
    fit = [candidate for candidate in candidates if _sizes_fit(tensors, candidate)]
    if not fit:
        raise StreamError(f"{len(tensors['gaps'])} bytes of gaps and {len(tensors['positions'])} of positions are not those of "
                          f"{size} bytes{f' with {threads} threads' if threads else ''}")
    positions = tensors["positions"].view("<u4").astype(np.int64)
    if positions[0] or positions[-1] != count or (np.diff(positions) < 0).any():
        raise StreamError(f"positions do not rise from 0 to {count}")
    blocks = -(-size // (8 * fit[-1]))
    five = np.unpackbits(tensors["gaps"])[:5 * fit[-1] * blocks].reshape(-1, 5)
    gaps = np.packbits(five, axis=1)[:, 0] // 8
    return WindowedStream(data, count, fit[-1], code_of_tables(tensors["tables"]), gaps, positions)


def _sizes_fit(tensors: Tensors, threads: int) -> bool:
    blocks = -(-len(tensors["data"]) // (8 * threads))
    return len(tensors["gaps"]) == -(-5 * threads * blocks // 8) and len(tensors["positions"]) in (4 * blocks, 4 * blocks + 4)


def decode(tensors: Tensors, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """The symbols u8 [n] of a weight of that shape.  Raises StreamError as `validated_stream` and `WindowedStream.decode`."""
    return validated_stream(tensors, math.prod(shape)).decode() if math.prod(shape) else np.zeros(0, np.uint8)
