"""Codes symbols as three bits, the distance from the base of their row, and patches for the symbols outside of that window.

The tensors of symbols u8 [N, K], where S = ceil(K / 65536):

    codes   i32 [N, 2 * ceil(K / 32)]  the lower two bits of 16 codes: bits 2m of the lower half are column 2m, of the upper
                                       half column 2m + 1
    upper   i32 [N, ceil(K / 32)]  the third bits of 32 codes: bit m of the lower half is column 2m, of the upper half 2m + 1
    base    i16 [N]                a code is the symbol base + code; not u8, from which Triton makes other operands of MMAs
    start   i32 [N * S + 1]        where the patches of each 65536 columns of a row begin
    column  i16 [patches]          which of those columns, as 16 bits without sign, rising; its code is 0
    value   u8 [patches]           what it is

Codes of columns after K are 0.  About 1.3 % of the exponents of trained weights are patches, sixty times as many as of four bits.
So each has a column of 16 bits, and a row has a base and a list of its own: a kernel adds patches of many rows side by side.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import native
from qdsl.codecs.huffman import Words
from qdsl.core.codecs import CODECS, StreamError

WINDOW = 8                                                       # symbols that have a code
SPAN = 1 << 16                                                   # columns that a list of patches can name
NAMES = tuple(CODECS["row_window"].tensors)
_TILE = 1 << 16                                                  # symbols to process together, in cache

Tensors = Mapping[str, NDArray[Any]]


def encode(symbols: NDArray[np.uint8], counts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The tensors of symbols u8 [N, K].  counts: of each symbol, which this code counts by rows itself."""
    n, k = symbols.shape
    base, patches = _bases(symbols)
    codes, upper, places, values = _encode_codes(symbols, base, patches)
    begin = (np.arange(n, dtype=np.int64)[:, None] * k + np.arange(0, max(1, k), SPAN)).reshape(-1)
    return {"codes": codes.view(np.int32), "upper": upper.view(np.int32), "base": base.astype(np.int16),
            "start": np.append(np.searchsorted(places, begin), len(places)).astype(np.int32),
            "column": (places % max(1, k)).astype(np.uint16).view(np.int16), "value": values}


def _bases(symbols: NDArray[np.uint8]) -> tuple[NDArray[np.uint8], int]:
    """The first base of each row for which most symbols have a code, and how many symbols have none."""
    n, k = symbols.shape
    base = np.zeros(n, np.uint8)
    compiled = native.functions()
    if compiled is not None:
        coded = np.zeros(n, np.int64)
        compiled.row_window_bases(symbols, base, coded, n, k)
        return base, n * k - int(coded.sum())
    step, patches = max(1, _TILE // max(256, k)), n * k
    for start in range(0, n, step):
        part = symbols[start:start + step]
        places = np.arange(len(part))[:, None] * 256 + part
        counts = np.bincount(places.reshape(-1), minlength=256 * len(part)).reshape(-1, 256)
        sums = np.pad(np.cumsum(counts, axis=1), [(0, 0), (1, 0)])
        coded = sums[:, WINDOW:] - sums[:, :-WINDOW]
        base[start:start + step] = coded.argmax(1)
        patches -= int(coded.max(1).sum())
    return base, patches


def _encode_codes(symbols: NDArray[np.uint8], base: NDArray[np.uint8], patches: int,
                  ) -> tuple[NDArray[np.uint32], NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint8]]:
    """The codes [N, 2 * ceil(K / 32)] and their third bits, and the flat places and values of the symbols without a code."""
    n, k = symbols.shape
    groups = -(-k // 32)
    codes, upper = np.empty((n, 2 * groups), np.uint32), np.empty((n, groups), np.uint32)
    compiled = native.functions()
    if compiled is not None:
        places, values = np.empty(patches, np.int64), np.empty(patches, np.uint8)
        compiled.row_window_encode(symbols, base, codes, upper, places, values, patches, n, k)
        return codes, upper, places, values
    index = [np.zeros(0, np.int64)]
    step = max(1, _TILE // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        code = symbols[rows] - base[rows, None]                  # below the base it wraps to 8 and more
        far = np.flatnonzero(code >= WINDOW)
        code.reshape(-1)[far] = 0
        index.append(far + start * k)
        codes[rows], upper[rows] = _pack_codes(np.pad(code, [(0, 0), (0, 32 * groups - k)]))
    flat = np.concatenate(index)
    return codes, upper, flat, symbols.reshape(-1)[flat]


def _pack_codes(code: NDArray[np.uint8]) -> tuple[Words, Words]:
    """Words of the lower two bits of 16 codes, and of the third bits of 32."""
    words = np.ascontiguousarray(code).view("<u8")               # bytes 0 to 7 are columns 0 to 7
    even, odd = words & 0x00FF00FF00FF00FF, words >> 8 & 0x00FF00FF00FF00FF
    two = (_together(even & 0x0003000300030003, 2) | _together(odd & 0x0003000300030003, 2) << 16).reshape(len(code), -1, 2)
    one = (_together(even >> 2 & 0x0001000100010001, 1) | _together(odd >> 2 & 0x0001000100010001, 1) << 16)
    four = one.reshape(len(code), -1, 4)
    return (two[..., 0] | two[..., 1] << 8, four[..., 0] | four[..., 1] << 4 | four[..., 2] << 8 | four[..., 3] << 12)


def _together(spread: Words, bits: int) -> Words:
    """Packs four codes of so many bits, 16 bits apart."""
    two = spread | spread >> (16 - bits)
    return (two | two >> 2 * (16 - bits)) & (1 << 4 * bits) - 1


def _apart(words: Words, bits: int) -> Words:
    """Spreads the four lowest codes of so many bits, 16 bits apart."""
    one, pair = ((1 << count * bits) - 1 for count in (1, 2))
    two = (words & pair | (words >> 2 * bits & pair) << 32)
    return (two | two << (16 - bits)) & np.uint64(one * 0x0001000100010001)


def spans_of(k: int) -> int:
    """The lists of patches of a row of K columns."""
    return max(1, -(-k // SPAN))


def check(tensors: Tensors, shape: tuple[int, int]) -> None:
    """Validates tensors of a file for [N, K], so that decoders stay inside them.  Raises StreamError."""
    n, k = shape
    groups, spans, patches = -(-k // 32), spans_of(k), len(tensors.get("value", ()))
    wanted = {"codes": ("<i4", (n, 2 * groups)), "upper": ("<i4", (n, groups)), "base": ("<i2", (n,)),
              "start": ("<i4", (n * spans + 1,)), "column": ("<i2", (patches,)), "value": ("u1", (patches,))}
    for name, (kind, size) in wanted.items():
        if name not in tensors or tensors[name].dtype != kind or tensors[name].shape != size:
            raise StreamError(f"{name} is missing, or not {list(size)} of {kind}")
    if (tensors["base"].view(np.uint16) > 256 - WINDOW).any():
        raise StreamError(f"a base is not from 0 to {256 - WINDOW}: codes would pass 255")
    start = tensors["start"]
    if start[0] or start[-1] != patches or (np.diff(start) < 0).any():
        raise StreamError(f"the starts of patches do not rise from 0 to {patches}")
    last = k - (spans - 1) * SPAN                                # columns of the last list of a row
    if last < SPAN and (_columns(tensors)[np.repeat(np.arange(n * spans) % spans == spans - 1, np.diff(start))] >= last).any():
        raise StreamError("a patch is not in its row")


def _columns(tensors: Tensors) -> NDArray[np.uint16]:
    return tensors["column"].view(np.uint16)


def _places(tensors: Tensors, k: int) -> NDArray[np.int64]:
    """The flat place of every patch."""
    spans = spans_of(k)
    number = np.repeat(np.arange(len(tensors["start"]) - 1), np.diff(tensors["start"]))
    return number // spans * k + number % spans * SPAN + _columns(tensors)


def decode(tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The symbols u8 [N, K].  Raises StreamError if `check` does."""
    check(tensors, shape)
    out = np.empty(shape, np.uint8)
    _decode_codes(tensors["codes"], tensors["upper"], tensors["base"], out)
    out.reshape(-1)[_places(tensors, shape[1])] = tensors["value"]
    return out


def decode_rows(tensors: Tensors, shape: tuple[int, int], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The symbols u8 [len(rows), K] of some rows; decodes only these.  Raises StreamError if `check` does."""
    check(tensors, shape)
    return decode(_taken(tensors, shape[1], rows), (len(rows), shape[1]))


def _taken(tensors: Tensors, k: int, rows: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The tensors of some rows."""
    spans, start = spans_of(k), tensors["start"]
    lists = (rows[:, None] * spans + np.arange(spans)).reshape(-1)
    counts = start[lists + 1] - start[lists]
    begin = np.append(0, np.cumsum(counts, dtype=np.int32))
    patches = np.arange(begin[-1]) + np.repeat(start[lists] - begin[:-1], counts)
    return {**{name: tensors[name][rows] for name in ("codes", "upper", "base")}, "start": begin.astype(np.int32),
            "column": tensors["column"][patches], "value": tensors["value"][patches]}


def _decode_codes(codes: NDArray[np.int32], upper: NDArray[np.int32], base: NDArray[np.int16], out: NDArray[np.uint8]) -> None:
    """Decode codes into out [rows, K], without patches."""
    rows, k = out.shape
    compiled = native.functions()
    if compiled is not None:
        compiled.row_window_decode(*(np.ascontiguousarray(words).view(np.uint32) for words in (codes, upper)),
                                   base.astype(np.uint8), out, rows, k)
        return
    step = max(1, _TILE // max(1, k))
    for first in range(0, rows, step):
        part = slice(first, first + step)
        two, one = (words[part].view(np.uint32).astype(np.uint64) for words in (codes, upper))
        eights = np.stack([two, two >> 8], 2).reshape(len(two), -1)
        thirds = np.stack([one >> 4 * u for u in range(4)], 2).reshape(len(one), -1)
        even, odd = (_apart(eights >> at, 2) | _apart(thirds >> at, 1) << 2 for at in (0, 16))
        code = np.ascontiguousarray(even | odd << 8).view(np.uint8)[:, :k]
        np.add(code, base[part, None].astype(np.uint8), out=out[part])
