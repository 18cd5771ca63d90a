"""Codes symbols as a few bits, the distance from a base, and a list of patches for the few symbols outside of that window.

`window` has codes of four bits and one base.  The tensors of symbols u8 [N, K]:

    codes   i32 [N, ceil(K / 8)]  eight codes; bits 4m of the lower half are column 2m, of the upper half column 2m + 1
    base    u8 [1]                a code is the symbol base + code
    start   i32 [ceil(N / 16) + 1]  where the patches of each 16 rows begin
    index   i32 [patches]         which symbol of those rows: row * K + column, rising; its code is 0
    value   u8 [patches]          what it is

If K is not a multiple of 8, the codes of columns after K are 0.  Adjacent columns are in the halves of a word, so that a kernel
can process both at once.  qdsl/codecs/row_window/reference.py has codes of three bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import native
from qdsl.codecs.huffman import Words
from qdsl.core.codecs import CODECS, StreamError

ROWS = 16                                                        # rows that share a list of patches
WINDOW = 16                                                      # symbols that have a code
NAMES = tuple(CODECS["window"].tensors)
_TILE = 1 << 16                                                  # symbols to process together, in cache

Tensors = Mapping[str, NDArray[Any]]


def encode(symbols: NDArray[np.uint8], counts: NDArray[np.int64]) -> dict[str, NDArray[Any]]:
    """The tensors of symbols u8 [N, K], of which symbol i occurs counts[i] times."""
    n, k = symbols.shape
    base = int(np.convolve(counts, np.ones(WINDOW, np.int64), "valid").argmax())
    codes, places, values = _encode_codes(symbols, base, int(counts.sum() - counts[base:base + WINDOW].sum()))
    block = ROWS * k
    return {"codes": codes.view(np.int32), "base": np.array([base], np.uint8),
            "start": np.searchsorted(places, np.arange(-(-n // ROWS) + 1) * block).astype(np.int32),
            "index": (places % max(1, block)).astype(np.int32), "value": values}


def _encode_codes(symbols: NDArray[np.uint8], base: int, patches: int,
                  ) -> tuple[NDArray[np.uint32], NDArray[np.int64], NDArray[np.uint8]]:
    """The codes [N, ceil(K / 8)], and the flat places and values of the `patches` symbols without a code."""
    n, k = symbols.shape
    eights = -(-k // 8)
    codes = np.empty((n, eights), np.uint32)
    compiled = native.functions()
    if compiled is not None:
        places, values = np.empty(patches, np.int64), np.empty(patches, np.uint8)
        compiled.window_encode(symbols, base, codes, places, values, patches, n, k)
        return codes, places, values
    index = [np.zeros(0, np.int64)]
    step = max(1, _TILE // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        code = symbols[rows] - np.uint8(base)                    # below the base it wraps to 240 and more
        far = np.flatnonzero(code >= WINDOW)
        code.reshape(-1)[far] = 0
        index.append(far + start * k)
        codes[rows] = _pack_nibbles(np.pad(code, [(0, 0), (0, 8 * eights - k)]) if k % 8 else code)
    flat = np.concatenate(index)
    return codes, flat, symbols.reshape(-1)[flat]


def _pack_nibbles(code: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Words of eight codes."""
    words = np.ascontiguousarray(code).view("<u8")               # bytes 0 to 7 are columns 0 to 7
    even, odd = words & 0x00FF00FF00FF00FF, words >> 8 & 0x00FF00FF00FF00FF
    return (_together(even) | _together(odd) << 16).astype(np.uint32)


def _together(spread: Words) -> Words:
    """Packs four codes, 16 bits apart, into 16 bits."""
    two = (spread | spread >> 12) & 0x000000FF000000FF
    return (two | two >> 24) & 0xFFFF


def _apart(words: Words) -> Words:
    """Spreads the four codes of the lower 16 bits, 16 bits apart."""
    two = (words | words << 24) & 0x000000FF000000FF
    return (two | two << 12) & 0x000F000F000F000F


def check(tensors: Tensors, shape: tuple[int, int]) -> None:
    """Validates tensors of a file for [N, K], so that decoders stay inside them.  Raises StreamError."""
    n, k = shape
    blocks, patches = -(-n // ROWS), len(tensors.get("value", ()))
    wanted = {"codes": ("<i4", (n, -(-k // 8))), "base": ("u1", (1,)), "start": ("<i4", (blocks + 1,)),
              "index": ("<i4", (patches,)), "value": ("u1", (patches,))}
    for name, (kind, size) in wanted.items():
        if name not in tensors or tensors[name].dtype != kind or tensors[name].shape != size:
            raise StreamError(f"{name} is missing, or not {list(size)} of {kind}")
    if ROWS * k >= 1 << 31:
        raise StreamError(f"{k} columns are more than patches can name")
    if int(tensors["base"][0]) > 256 - WINDOW:
        raise StreamError(f"base {int(tensors['base'][0])}: codes would pass 255")
    start, index = tensors["start"], tensors["index"]
    if start[0] or start[-1] != patches or (np.diff(start) < 0).any():
        raise StreamError(f"the starts of patches do not rise from 0 to {patches}")
    limits = np.minimum(ROWS, n - ROWS * np.arange(blocks)) * k
    if patches and ((index < 0).any() or (index >= np.repeat(limits, np.diff(start))).any()):
        raise StreamError("a patch is not in its rows")


def decode(tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.uint8]:
    """The symbols u8 [N, K].  Raises StreamError if `check` does."""
    check(tensors, shape)
    k = shape[1]
    out = np.empty(shape, np.uint8)
    _decode_codes(tensors["codes"], int(tensors["base"][0]), out)
    start = tensors["start"]
    block = np.repeat(np.arange(len(start) - 1) * (ROWS * k), np.diff(start))
    out.reshape(-1)[block + tensors["index"]] = tensors["value"]
    return out


def decode_rows(tensors: Tensors, shape: tuple[int, int], rows: NDArray[np.int64]) -> NDArray[np.uint8]:
    """The symbols u8 [len(rows), K] of some rows; decodes only these.  Raises StreamError if `check` does."""
    check(tensors, shape)
    k = shape[1]
    out = np.empty((len(rows), k), np.uint8)
    _decode_codes(tensors["codes"][rows], int(tensors["base"][0]), out)
    for place, row in enumerate(rows.tolist() if k else ()):
        block = slice(*tensors["start"][row // ROWS:row // ROWS + 2].tolist())
        patch_row, column = np.divmod(tensors["index"][block], k)
        mine = patch_row == row % ROWS
        out[place, column[mine]] = tensors["value"][block][mine]
    return out


def _decode_codes(codes: NDArray[np.int32], base: int, out: NDArray[np.uint8]) -> None:
    """Decode codes [rows, words] into out [rows, K], without patches."""
    rows, k = out.shape
    compiled = native.functions()
    if compiled is not None:
        compiled.window_decode(np.ascontiguousarray(codes).view(np.uint32), base, out, rows, k)
        return
    step = max(1, _TILE // max(1, k))
    for first in range(0, rows, step):
        words = codes[first:first + step].view(np.uint32).astype(np.uint64)
        part = (_apart(words) | _apart(words >> 16) << 8).view(np.uint8)[:, :k]
        np.add(part, np.uint8(base), out=out[first:first + step])
