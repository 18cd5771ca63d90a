"""Codes symbols in a Huffman code of at most eight bits, in lanes that are decoded in parallel.

A row of symbols u8 [N, K] has R lanes; lane i has the i-th, (R+i)-th, (2R+i)-th, ... run of eight columns.  Columns are divided
into C chunks with separate streams.  32 lanes, of 32 / R rows, are a group.  Their 32-bit words are interleaved, as many turns as
the group's longest lane needs, so that lanes read adjacent words.

    words   i32 [words]  word w of lane l of a group is at 32 * (its start + w) + l; the first bit of a code is highest
    starts  i32 [C, ceil(N / (32 / R))]  of groups, in units of 32 words
    table   i16 [256]    by eight bits: 128 * symbol + bits of its code

The code is canonical, ties by symbol, so that its lengths determine the table.  If K is not a multiple of 8 * R, rows are padded
with the symbol of the shortest code.  Two turns of 32 words follow the last, so that a lane may read ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import bits, lanes, native
from qdsl.codecs.huffman import PrefixCode, Words, canonical_code, code_of_lengths
from qdsl.core.codecs import CODECS, StreamError
from qdsl.host.c_functions import CFunctions

LONGEST = 8                                                      # bits of a code: one lookup of 256 entries
GROUP = 32                                                       # lanes, a warp
RUN = 8                                                          # columns of a lane in a row: their codes fit 64 bits
AHEAD = 2                                                        # turns after the last
NAMES = tuple(CODECS["huffman_lanes"].tensors)

Tensors = Mapping[str, NDArray[Any]]


def lanes_of(k: int) -> tuple[int, int]:
    """The lanes of a row of K columns, and the chunks, of 512 columns or more because groups pad every lane."""
    return 8 if k >= 4096 else 4 if k >= 2048 else 1, max(1, k // 4096)


def encode(symbols: NDArray[np.uint8], counts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The tensors of symbols u8 [N, K], of which symbol i occurs counts[i] times."""
    code = canonical_code(counts, LONGEST)
    compiled = native.functions()
    words, turns = _encode_groups(symbols, code) if compiled is None else _encode_natively(compiled, symbols, code)
    return {"words": words.view(np.int32), "starts": (np.cumsum(turns).reshape(turns.shape) - turns).astype(np.int32),
            "table": _lookup_table(code)}


def _filler(code: PrefixCode) -> int:
    """The padding symbol: that of the shortest code."""
    return min(code.words, key=lambda symbol: code.words[symbol], default=0)


def _encode_groups(symbols: NDArray[np.uint8], code: PrefixCode) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """All words, and the number of turns of each group in each chunk: [C, groups]."""
    n, k = symbols.shape
    per_row, chunks = lanes_of(k)
    runs = -(-k // (RUN * per_row))                              # of each lane
    bounds = _bounds(runs, chunks)
    pad = [(0, 0), (0, RUN * per_row * runs - k)]
    rows = GROUP // per_row
    step = rows * max(1, bits.BLOCK // max(1, rows * k))         # rows that are encoded together
    pairs = bits.PairCodes(code)
    streams: list[list[NDArray[np.uint32]]] = [[] for _ in bounds]
    sizes: list[list[NDArray[np.int64]]] = [[] for _ in bounds]
    for first in range(0, n, step):
        part = np.pad(symbols[first:first + step], pad, constant_values=_filler(code))
        lengths, values = _join_eights(part, pairs)
        for chunk, (start, stop) in enumerate(bounds):
            shape = (len(part), runs, per_row)
            words, size = _interleave(_lanes(lengths.reshape(shape)[:, start:stop]), _lanes(values.reshape(shape)[:, start:stop]))
            streams[chunk].append(words)
            sizes[chunk].append(size)
    turns = np.array([size for chunk_parts in sizes for part in chunk_parts for size in part], np.int64)
    words = np.concatenate([*(part for chunk_parts in streams for part in chunk_parts), np.zeros(AHEAD * GROUP, np.uint32)])
    return words, turns.reshape(chunks, -(-n // rows))


def _encode_natively(compiled: CFunctions, symbols: NDArray[np.uint8], code: PrefixCode,
                     ) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """As `_encode_groups`, in C."""
    n, k = symbols.shape
    per_row, chunks = lanes_of(k)
    codes = np.zeros(256, np.uint16)                             # 256 * the code + its bits
    for symbol, (size, value) in code.words.items():
        codes[symbol] = value << 8 | size
    turns = np.zeros((chunks, -(-n // (GROUP // per_row))), np.int64)
    parts = [(chunk, (n, k, per_row, start, stop - start))
             for chunk, (start, stop) in enumerate(_bounds(-(-k // (RUN * per_row)), chunks))]
    for chunk, part in parts:
        compiled.lanes_turns(symbols, *part, codes, _filler(code), turns[chunk])
    starts = np.cumsum(turns).reshape(turns.shape) - turns
    words = np.zeros((int(turns.sum()) + AHEAD) * GROUP, np.uint32)
    for chunk, part in parts:
        compiled.lanes_encode(symbols, *part, codes, _filler(code), starts[chunk], words)
    return words, turns


def _bounds(runs: int, chunks: int) -> list[tuple[int, int]]:
    """The runs of each chunk; all chunks are equal except the last ones, which may be smaller or empty."""
    size = -(-runs // chunks)
    return [(min(runs, chunk * size), min(runs, chunk * size + size)) for chunk in range(chunks)]


def _join_eights(symbols: NDArray[np.uint8], pairs: bits.PairCodes) -> tuple[NDArray[np.uint8], Words]:
    """Joined codes of each eight adjacent symbols of a row: lengths, and bits at the upper end of 64."""
    lengths, values = pairs.joined_codes(symbols.reshape(-1))
    for _ in range(2):
        values = values[0::2] | values[1::2] >> lengths[0::2]
        lengths = lengths[0::2] + lengths[1::2]
    return lengths, values


def _lanes(runs: NDArray[Any]) -> NDArray[Any]:
    """[rows, runs, R] as [lanes, runs]."""
    return np.ascontiguousarray(runs.transpose(0, 2, 1)).reshape(runs.shape[0] * runs.shape[2], runs.shape[1])


def _interleave(lengths: NDArray[np.uint8], values: Words) -> tuple[NDArray[np.uint32], NDArray[np.int64]]:
    """The interleaved words of lanes in groups, and the number of turns of each group."""
    ends = np.cumsum(lengths, axis=1, dtype=np.int64)
    total = ends[:, -1] if lengths.shape[1] else np.zeros(len(lengths), np.int64)
    groups = -(-len(lengths) // GROUP)
    turns = -(-np.pad(total, (0, groups * GROUP - len(total))).reshape(groups, GROUP).max(1) // 32)
    stride = int(turns.max(initial=0)) // 2 + 1                  # 64-bit words of a lane, before lanes are interleaved
    words = np.zeros(groups * GROUP * stride + 1, np.uint64)
    if lengths.size:
        origins = np.arange(len(lengths), dtype=np.int64)[:, None] * (64 * stride)
        bits.place_bits(words, (ends - lengths + origins).reshape(-1), lengths.reshape(-1), values.reshape(-1))
    halves = words[:-1].byteswap().view(">u4").astype(np.uint32).reshape(groups, GROUP, 2 * stride)
    return np.concatenate([halves[group, :, :turns[group]].T.reshape(-1) for group in range(groups)]), turns


def _lookup_table(code: PrefixCode) -> NDArray[np.int16]:
    """The table by eight bits; unused entries, which exist for a single exponent, have that exponent and one bit."""
    table = np.zeros(256, np.int16)
    for symbol, (size, value) in code.words.items():
        table[value << 8 - size:] = symbol << 7 | size
    return table


def check(tensors: Tensors, shape: tuple[int, int]) -> PrefixCode:
    """Validates tensors for [N, K], so that decoders stay inside them, and returns their code.  Raises StreamError."""
    n, k = shape
    per_row, chunks = lanes_of(k)
    wanted = {"words": ("<i4", None), "starts": ("<i4", (chunks, -(-n // (GROUP // per_row)))), "table": ("<i2", (256,))}
    for name, (kind, size) in wanted.items():
        if name not in tensors or tensors[name].dtype != kind or (size is not None and tensors[name].shape != size):
            raise StreamError(f"{name} is missing, or not {list(size) if size else '[words]'} of {kind}")
    turns, remainder = divmod(len(tensors["words"]), GROUP)
    starts = tensors["starts"].reshape(-1)
    ends = np.concatenate([[0], starts, [turns - AHEAD]])
    if remainder or ends[1] or (np.diff(ends) < 0).any():
        raise StreamError(f"starts do not rise from 0 to at most {turns - AHEAD}")
    runs = np.array([stop - start for start, stop in _bounds(-(-k // (RUN * per_row)), chunks)])
    if (np.diff(ends[1:]).reshape(chunks, -1) > -(-LONGEST * RUN * runs[:, None] // 32)).any():
        raise StreamError("starts give a group more words than codes of its lanes can have")
    code = _code_of_table(tensors["table"])
    if (_lookup_table(code) != tensors["table"]).any():
        raise StreamError("table is not that of a canonical code")
    if n * k and not code.words:
        raise StreamError("table holds no code")
    return code


def _code_of_table(table: NDArray[np.int16]) -> PrefixCode:
    """The canonical code with the lengths that a table has."""
    entries = np.unique(table).tolist()
    lengths = {entry >> 7 & 255: entry & 127 for entry in entries if entry}
    if len(lengths) < sum(entry != 0 for entry in entries) or any(not 0 < size <= LONGEST for size in lengths.values()):
        raise StreamError("table has a symbol with two lengths, or a length that is none")
    return code_of_lengths(lengths)


def decode(tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The symbols u8 [N, K].  Raises StreamError if `check` does, and for codes that pass the end of a group."""
    n, k = shape
    check(tensors, shape)
    if not n * k:
        return np.empty(shape, np.uint8)
    return np.ascontiguousarray(_decode_groups(tensors, shape, np.arange(-(-n // (GROUP // lanes_of(k)[0]))))[:n, :k])


def decode_rows(tensors: Tensors, shape: tuple[int, int], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The symbols u8 [len(rows), K] of some rows; decodes only their groups.  Raises StreamError as `decode`."""
    check(tensors, shape)
    if not len(rows) * shape[1]:
        return np.empty((len(rows), shape[1]), np.uint8)
    size = GROUP // lanes_of(shape[1])[0]
    groups, place = np.unique(rows // size, return_inverse=True)
    return _decode_groups(tensors, shape, groups)[place.reshape(-1) * size + rows % size, :shape[1]]


@lru_cache(maxsize=4)
def _lookup(table: bytes) -> lanes.Lookup:
    """The lookup of a table's code, cached because building it takes longer than decoding a few rows."""
    return lanes.Lookup(_code_of_table(np.frombuffer(table, np.int16)))


def _decode_groups(tensors: Tensors, shape: tuple[int, int], groups: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The symbols [rows, columns] of groups of rows, with the padding of the last group and of the last columns."""
    n, k = shape
    per_row, chunks = lanes_of(k)
    runs, rows = -(-k // (RUN * per_row)), GROUP // per_row
    starts = tensors["starts"].reshape(-1).astype(np.int64)
    stops = np.append(starts[1:], len(tensors["words"]) // GROUP - AHEAD)
    words = tensors["words"].view(np.uint32).reshape(-1, GROUP)
    out = np.empty((len(groups) * rows, runs, per_row, RUN), np.uint8)
    compiled = native.functions()
    step = max(1, len(groups)) if compiled is not None else lanes.LANES // GROUP
    for chunk, (start, stop) in enumerate(_bounds(runs, chunks)):
        for first in range(0, len(groups) if start < stop else 0, step):
            index = chunk * -(-n // rows) + groups[first:first + step]
            part = out[first * rows:(first + len(index)) * rows]
            if compiled is not None:
                used = _decode_natively(compiled, words, starts[index], stops[index], tensors["table"], part, (start, stop))
            else:
                lookup = _lookup(tensors["table"].tobytes())
                symbols, used = _decode_lanes(words, starts[index], stops[index], RUN * (stop - start), lookup)
                part[:, start:stop] = symbols.reshape(-1, per_row, stop - start, RUN).transpose(0, 2, 1, 3)
            _check_used(used, stops[index] - starts[index])
    return out.reshape(len(groups) * rows, -1)


def _check_used(used: NDArray[np.int64], turns: NDArray[np.int64]) -> None:
    """Raises StreamError for a group whose longest lane takes more bits than its words have."""
    over = np.flatnonzero(used > 32 * turns)
    if over.size:
        raise StreamError(f"words: the codes of a lane take {used[over[0]]} bits of {32 * turns[over[0]]}")


def _decode_natively(compiled: CFunctions, words: NDArray[np.uint32], starts: NDArray[np.int64], stops: NDArray[np.int64],
                     table: NDArray[np.int16], out: NDArray[np.uint8], runs: tuple[int, int]) -> NDArray[np.int64]:
    """Decode these runs of the symbols [rows, runs, R, 8] of groups in C; returns the bits of their longest lanes."""
    used = np.zeros(len(starts), np.int64)
    (start, stop), per_row = runs, out.shape[2]
    if not compiled.lanes_decode(np.ascontiguousarray(words), starts, stops, len(starts), stop - start, per_row,
                                 np.ascontiguousarray(table).view(np.uint16), out, start * per_row * RUN, out[0].size, used):
        raise MemoryError("no memory for the lanes of a group")
    return used


def _decode_lanes(words: NDArray[np.uint32], starts: NDArray[np.int64], stops: NDArray[np.int64], count: int,
                  lookup: lanes.Lookup) -> tuple[NDArray[np.uint8], NDArray[np.int64]]:
    """Symbols [lanes, count] of groups with turns from starts to stops, and the bits of the longest lane of each group."""
    turns = stops - starts
    stride = int(turns.max(initial=0)) + 2
    lane_words = np.zeros((len(turns) * GROUP, stride), np.uint64)
    for group, (start, stop) in enumerate(zip(starts.tolist(), stops.tolist(), strict=True)):
        lane_words[group * GROUP:(group + 1) * GROUP, :stop - start] = words[start:stop].T
    flat = lane_words.reshape(-1)
    at = np.arange(len(lane_words), dtype=np.int64) * (32 * stride)
    symbols = lanes.decode_count(flat[:-1] << 32 | flat[1:], at, count, lookup)
    used = lookup.lengths.astype(np.uint8)[symbols].sum(1, dtype=np.int64).reshape(len(turns), GROUP).max(1, initial=0)
    return symbols, used
