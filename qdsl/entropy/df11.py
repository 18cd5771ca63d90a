"""DFloat11's tensors of a group of weights, byte for byte those of dfloat11 0.2 to 0.5, and back.

A group is several bfloat16 tensors in a row.  Its exponents are one Huffman stream, cut into windows of 64 bits, each for one
thread, and blocks of `threads` windows; gaps and positions say where codes and weights begin in them.

    encoded_exponent  u8 [bytes]             the stream
    sign_mantissa     u8 [n]
    luts              u8 [rows, 256]         see qdsl/entropy/lookup.py
    gaps              u8 [ceil(5 * threads * blocks / 8)]  5 bits for every window: where its first code begins
    output_positions  u8 [4 * (blocks + 1)]  u32, the first weight whose code begins in a block, and n; the last block has none
                                             where it holds only the tail of a code
    split_positions   i64 [tensors - 1]      where the later tensors of the group begin
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.entropy import bits, exponents, lanes
from qdsl.entropy.huffman import END, Code, df11_code
from qdsl.entropy.lookup import StreamError, code_of, tables_of

THREADS = 512
NAMES = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps", "split_positions")
_LANE = 8                                                        # windows that are decoded in one go
SHARED_LIMIT = 48 << 10                                          # bytes of shared memory that a launch may use unasked

Tensors = Mapping[str, NDArray[Any]]


def encode(patterns: NDArray[np.uint16], numels: Sequence[int] = (), threads: int = THREADS) -> dict[str, NDArray[Any]]:
    """The tensors of a group.

    patterns: u16 [n], the weights' bits, n > 0; numels: weights of each tensor, one if not given.  threads: windows of a block.
    Raises StreamError for exponents from 240 on and codes of too many rows, which DF11 cannot hold.
    """
    if not len(patterns) or sum(numels or [len(patterns)]) != len(patterns):
        raise StreamError(f"a group of {len(patterns)} weights in tensors of {list(numels)}")
    symbols, rest, counts = exponents.split(patterns)
    code = df11_code(counts)
    tables = tables_of(code)
    stream = bits.write(symbols, counts, code)
    windows, gaps, positions = _entries(stream, len(symbols), int(code.lengths[symbols[-1]]), threads)
    _fill(stream, code)
    held = np.zeros(-(-len(stream.data) // (8 * threads)) * threads, np.uint8)
    held[:windows] = gaps
    return {"luts": tables, "encoded_exponent": stream.data, "sign_mantissa": rest,
            "output_positions": np.append(positions, len(symbols)).astype("<u4").view(np.uint8), "gaps": _five_bits(held),
            "split_positions": np.cumsum(numels, dtype=np.int64)[:-1]}


def _entries(stream: bits.Stream, count: int, last: int, threads: int,
             ) -> tuple[int, NDArray[np.uint8], NDArray[np.int64]]:
    """Windows in which a code begins, their gaps, and the first weight of every block in which one does.

    last: bits of the last code.  END, where it fills the last byte, counts as a code: it begins where the others end.
    """
    final = stream.bits if stream.bits % 8 else stream.bits - last
    windows = final // bits.WINDOW + 1
    gaps = stream.gaps[:windows].copy()
    if final == stream.bits and stream.starts[windows - 1] == count:
        gaps[-1] = stream.bits % bits.WINDOW
    return windows, gaps, stream.starts[:windows:threads]


def _fill(stream: bits.Stream, code: Code) -> None:
    """The last byte goes on with the first bits of END's code."""
    room = -stream.bits % 8
    if room:
        size, value = code.words[END]
        stream.data[-1] |= value >> size - room if size >= room else value << room - size


def _five_bits(gaps: NDArray[np.uint8]) -> NDArray[np.uint8]:
    return np.packbits(np.unpackbits(gaps[:, None], axis=1)[:, 3:])


@dataclass(frozen=True)
class Group:
    """Tensors of a group that were found whole: code and entry points, ready to be decoded."""
    tensors: Tensors
    threads: int
    code: Code
    gaps: NDArray[np.uint8]
    positions: NDArray[np.int64]

    @property
    def count(self) -> int:
        """Weights."""
        return len(self.tensors["sign_mantissa"])

    @property
    def shared_memory(self) -> int:
        """Bytes of shared memory that dfloat11's CUDA kernel asks for: two for each weight of the fullest block."""
        return 4 * self.threads + 4 + 2 * int(np.diff(self.positions).max(initial=0))

    def decode(self) -> NDArray[np.uint16]:
        """The patterns u16 [n] of all weights.  Raises StreamError where codes miss gaps, positions, or the stream's end."""
        step = math.gcd(_LANE, self.threads)                     # so that blocks begin with a lane
        windows = -(-8 * len(self.tensors["encoded_exponent"]) // bits.WINDOW)
        starts = np.arange(0, windows, step, dtype=np.int64) * bits.WINDOW + self.gaps[:windows:step]
        found = np.empty(self.count, np.uint8)
        counts = []
        at = 0
        for symbols, each in lanes.decode(self.tensors["encoded_exponent"], starts, lanes.Lookup(self.code)):
            found[at:at + len(symbols)] = symbols[:self.count - at]
            at = min(self.count, at + len(symbols))
            counts.append(each)
        first = np.cumsum(np.concatenate([[0], *counts]))[:-1]
        self._check(found, np.minimum(first, self.count), starts, at)
        out = np.empty(self.count, np.uint16)
        exponents.join(found, self.tensors["sign_mantissa"], out)
        return out

    def _check(self, found: NDArray[np.uint8], first: NDArray[np.int64], starts: NDArray[np.int64], count: int) -> None:
        """Positions are those of the codes, and the codes fill the stream but for less than a byte.

        first: the first weight of each lane, which begins at starts; count: how many weights the stream has.
        """
        blocks = first[::self.threads // math.gcd(_LANE, self.threads)]
        told = self.positions[:len(blocks)]
        wrong = np.flatnonzero(told != blocks[:len(told)])
        if wrong.size:
            raise StreamError(f"output_positions: block {wrong[0]} begins with weight {blocks[wrong[0]]}, not {told[wrong[0]]}")
        last = int(np.flatnonzero(first < self.count)[-1])
        end = int(starts[last]) + int(self.code.lengths[found[first[last]:]].sum(dtype=np.int64))
        if count < self.count or not 0 <= 8 * len(self.tensors["encoded_exponent"]) - end < 8:
            raise StreamError(f"encoded_exponent holds {count} weights of {self.count}, and its codes end at bit {end} of "
                              f"{8 * len(self.tensors['encoded_exponent'])}")


def group(tensors: Tensors, threads: int = THREADS) -> Group:
    """Tensors of a file, checked: no decoder that follows them leaves them.

    Raises StreamError for tensors of other types or sizes, positions that fall or leave the group, and tables that are no code.
    """
    for name, kind in zip(NAMES, ("u1", "u1", "u1", "u1", "u1", "<i8"), strict=True):
        if name not in tensors or tensors[name].dtype != kind or tensors[name].ndim != (2 if name == "luts" else 1):
            raise StreamError(f"{name} is missing, or not {'[rows, 256]' if name == 'luts' else '[n]'} of {kind}")
    count, size = len(tensors["sign_mantissa"]), len(tensors["encoded_exponent"])
    blocks = -(-size // (8 * threads))
    if not count or not size or not count <= 8 * size or count >> 31 or size >> 31:
        raise StreamError(f"{count} weights in a stream of {size} bytes")
    if len(tensors["gaps"]) != -(-5 * threads * blocks // 8):
        raise StreamError(f"gaps: {len(tensors['gaps'])} bytes for {blocks} blocks of {threads} windows, not "
                          f"{-(-5 * threads * blocks // 8)}; another number of threads may have been meant")
    if len(tensors["output_positions"]) not in (4 * blocks, 4 * blocks + 4):
        raise StreamError(f"output_positions: {len(tensors['output_positions'])} bytes for {blocks} blocks")
    positions = tensors["output_positions"].view("<u4").astype(np.int64)
    if positions[0] or positions[-1] != count or (np.diff(positions) < 0).any():
        raise StreamError(f"output_positions do not rise from 0 to {count}")
    splits = tensors["split_positions"]
    if splits.size and (splits[0] < 0 or splits[-1] > count or (np.diff(splits) < 0).any()):
        raise StreamError(f"split_positions do not rise from 0 to {count}")
    five = np.unpackbits(tensors["gaps"])[:5 * threads * blocks].reshape(-1, 5)
    gaps = np.packbits(five, axis=1)[:, 0] // 8
    return Group(tensors, threads, code_of(tensors["luts"]), gaps, positions)
