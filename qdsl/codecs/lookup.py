"""DF11's lookup tables, which decode a code eight bits at a time.

Row 0 is for the first byte of a code; an entry is a symbol, or 256 - i for 'continue in row i with the next byte'.  The last row
holds the length of every symbol's code.  A file has no other table: `code_of_tables` validates these rows and derives the code.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs.huffman import END, LONGEST, PrefixCode
from qdsl.core.codecs import StreamError

FIRST_POINTER = 240                                              # entries from here on point to rows 16 to 1
ROWS = 256 - FIRST_POINTER + 2                                   # the first row, rows of pointers, the row of lengths


def df11_tables(code: PrefixCode) -> NDArray[np.uint8]:
    """[rows, 256], the bytes that dfloat11 0.5 writes.

    It fills entries without a code, those of END, with the previous entry, across rows.  Without a previous entry dfloat11 fails;
    here it is the first symbol of the code.  Raises StreamError if entries would be both symbols and pointers.
    """
    leaves = {symbol: word for symbol, word in code.words.items() if symbol != END}
    worst = max(leaves)
    if worst >= FIRST_POINTER:
        raise StreamError(f"exponent {worst}: DF11 has no entry for exponents from {FIRST_POINTER} on (magnitudes from 2^113 "
                          "on, infinities, NaN); store these weights as they are, or as hlane or fix4")
    prefixes = sorted(dict.fromkeys([(0, 0), *(_prefix(bits, value, (bits - 1) // 8) for bits, value in leaves.values())]),
                      key=lambda prefix: prefix[0])              # stable: rows of one depth in the order of the leaves
    if len(prefixes) > ROWS - 1:
        raise StreamError(f"DF11 has at most {ROWS - 1} rows for a code, and this one needs {len(prefixes)}; store these weights "
                          "as they are, or as hlane or fix4")
    tables = np.zeros((len(prefixes) + 1, 256), np.uint8)
    entry = next(iter(leaves))
    for row, prefix in enumerate(prefixes):
        placed = _row_entries(leaves, prefixes, prefix)
        for place in range(256):
            entry = placed.get(place, entry)
            tables[row, place] = entry
    tables[-1] = code.lengths
    return tables


def _prefix(bits: int, value: int, whole: int) -> tuple[int, int]:
    """The number of whole bytes at the start of a code, and their value."""
    return whole, value >> bits - 8 * whole


def _row_entries(leaves: dict[int, tuple[int, int]], prefixes: list[tuple[int, int]], prefix: tuple[int, int]) -> dict[int, int]:
    """The first entries of codes with this prefix, and pointers to longer codes."""
    whole = prefix[0]
    placed = {}
    for symbol, (bits, value) in leaves.items():
        if bits <= 8 * whole or _prefix(bits, value, whole) != prefix:
            continue
        left = bits - 8 * whole
        if left <= 8:
            placed[(value & (1 << left) - 1) << 8 - left] = symbol
        else:
            longer = _prefix(bits, value, whole + 1)
            placed[longer[1] & 255] = 256 - prefixes.index(longer)
    return placed


def code_of_tables(tables: NDArray[np.uint8]) -> PrefixCode:
    """The code in the tables of a file, with END in its place.

    Raises StreamError unless they are a complete code: every row reached once, every symbol's length equal to its place's, and
    one place left for END.  A decoder that follows such rows ends after 32 bits.
    """
    if tables.ndim != 2 or tables.shape[1] != 256 or not 2 <= len(tables) <= ROWS:
        raise StreamError(f"luts are [2 to {ROWS}, 256], not {list(tables.shape)}")
    lengths = tables[-1]
    words: dict[int, tuple[int, int]] = {}
    unused: list[tuple[int, int]] = []                             # END's places: number of whole bytes, and their value
    prefixes = {0: (0, 0)}                                       # of each row
    for row, entries in enumerate(tables[:-1]):
        if row not in prefixes:
            raise StreamError(f"luts: no entry before row {row} leads there")
        whole, prefix = prefixes[row]
        place = _end_entry_count(tables) if row == 0 else 0
        unused += [(1, value) for value in range(place)]
        while place < 256:
            entry, value = int(entries[place]), prefix << 8 | place
            size, target = 1, 256 - entry
            if not lengths[entry] and entry >= FIRST_POINTER and target not in prefixes:
                if not row < target < len(tables) - 1 or whole == LONGEST // 8 - 1:
                    raise StreamError(f"luts: row {row}, entry {place} leads to row {target}")
                prefixes[target] = (whole + 1, value)
            elif lengths[entry] and entry not in words:
                bits = int(lengths[entry])
                size = 1 << max(0, 8 * (whole + 1) - bits)
                if not 8 * whole < bits <= 8 * (whole + 1) or place % size or (entries[place:place + size] != entry).any():
                    raise StreamError(f"luts: row {row}, entry {place}: exponent {entry} has {bits} bits, and its code lies "
                                      "elsewhere")
                words[entry] = (bits, value >> 8 * (whole + 1) - bits)
            else:
                unused.append((whole + 1, value))
            place += size
    missing = [symbol for symbol in np.flatnonzero(lengths) if symbol not in words]
    if missing:
        raise StreamError(f"luts: exponent {missing[0]} has a length and no code")
    return PrefixCode({**words, END: _end_code(unused)})


def _end_entry_count(tables: NDArray[np.uint8]) -> int:
    """How many entries END has if its code is all zeros: they repeat the next entry, of the same length (see `df11_tables`)."""
    bits = int(tables[-1, tables[0, 0]])
    if not 0 < bits <= 8:
        return 0
    size = 1 << 8 - bits
    left = 1.0 - float(np.sum(0.5 ** tables[-1][tables[-1] > 0]))
    return size if left == 0.5 ** bits and (tables[0, :2 * size] == tables[0, 0]).all() else 0


def _end_code(unused: list[tuple[int, int]]) -> tuple[int, int]:
    """The code of END: the place that no symbol uses."""
    values = [value for _, value in unused]
    count = len(values)
    if not unused or len({whole for whole, _ in unused}) > 1 or count & count - 1 or values[0] % count \
            or values != list(range(values[0], values[0] + count)):
        raise StreamError("luts: what the exponents leave is no code for the end")
    shift = count.bit_length() - 1
    return 8 * unused[0][0] - shift, values[0] >> shift
