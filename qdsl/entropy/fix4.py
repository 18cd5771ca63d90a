"""fix4: exponents as four bits, their distance from a base, and a list of the few weights whose exponent is another one.

Of a weight [N, K], with K8 = ceil(K / 8):

    codes           i32 [N, K8]     eight codes; bits 4m of the lower half are column 2m, of the upper half column 2m + 1
    sign_mantissa   u8 [N, 8 * K8]  of each four columns the bytes of 0, 2, 1, 3
    base            u8 [1]          a code is the exponent base + code
    patch_start     i32 [ceil(N / 16) + 1]  where the patches of each 16 rows begin
    patch_index     i32 [patches]   which weight of those rows: row * K + column, rising; its code is 0
    patch_exponent  u8 [patches]

Where K is no multiple of 8 the columns after K have code and byte 0.  The order of codes and bytes lets a kernel make two
bfloat16 of a pair at a time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.entropy import exponents
from qdsl.entropy.huffman import Words
from qdsl.entropy.lookup import StreamError

ROWS = 16                                                        # whose patches are listed together
WINDOW = 16                                                      # exponents that have a code
NAMES = ("codes", "sign_mantissa", "base", "patch_start", "patch_index", "patch_exponent")
QUAD = (0, 2, 1, 3)
_TILE = 1 << 16                                                  # weights that are worked on together, in cache

Tensors = Mapping[str, NDArray[Any]]


def encode(patterns: NDArray[np.uint16]) -> dict[str, NDArray[Any]]:
    """The tensors of a weight of any patterns u16 [N, K]."""
    n, k = patterns.shape
    symbols, rest, counts = exponents.split(patterns.reshape(-1))
    base = int(np.convolve(counts, np.ones(WINDOW, np.int64), "valid").argmax())
    eights = -(-k // 8)
    codes = np.empty((n, eights), np.uint32)
    signs = np.zeros((n, 8 * eights), np.uint8)
    index = [np.zeros(0, np.int64)]
    step = max(1, _TILE // max(1, k))
    for start in range(0, n, step):
        rows = slice(start, start + step)
        code = symbols.reshape(n, k)[rows] - np.uint8(base)      # below the base it wraps round, to 240 and more
        far = np.flatnonzero(code >= WINDOW)
        code.reshape(-1)[far] = 0
        index.append(far + start * k)
        codes[rows] = _nibbles(_padded(code, eights))
        signs[rows] = in_quads(_padded(rest.reshape(n, k)[rows], eights))
    flat = np.concatenate(index)
    block = ROWS * k
    return {"codes": codes.view(np.int32), "sign_mantissa": signs, "base": np.array([base], np.uint8),
            "patch_start": np.searchsorted(flat, np.arange(-(-n // ROWS) + 1) * block).astype(np.int32),
            "patch_index": (flat % max(1, block)).astype(np.int32), "patch_exponent": symbols[flat]}


def in_quads(rows: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """[N, 4 * q] with the second and third of each four bytes exchanged, which undoes itself."""
    return rows.reshape(len(rows), rows.shape[1] // 4, 4)[..., QUAD].reshape(rows.shape)


def _padded(rows: NDArray[np.uint8], eights: int) -> NDArray[np.uint8]:
    return rows if rows.shape[1] == 8 * eights else np.pad(rows, [(0, 0), (0, 8 * eights - rows.shape[1])])


def _nibbles(code: NDArray[np.uint8]) -> NDArray[np.uint32]:
    """Words of eight codes."""
    words = np.ascontiguousarray(code).view("<u8")               # bytes 0 to 7 are columns 0 to 7
    even, odd = words & 0x00FF00FF00FF00FF, words >> 8 & 0x00FF00FF00FF00FF
    return (_together(even) | _together(odd) << 16).astype(np.uint32)


def _together(spread: Words) -> Words:
    """Four codes, 16 bits apart, in 16 bits."""
    two = (spread | spread >> 12) & 0x000000FF000000FF
    return (two | two >> 24) & 0xFFFF


def _apart(words: Words) -> Words:
    """Of the lower 16 bits four codes, 16 bits apart."""
    two = (words | words << 24) & 0x000000FF000000FF
    return (two | two << 12) & 0x000F000F000F000F


def check(tensors: Tensors, shape: tuple[int, int]) -> None:
    """Tensors for a weight [N, K]: no decoder that follows them leaves them.  Raises StreamError where they do not fit."""
    n, k = shape
    eights, blocks = -(-k // 8), -(-n // ROWS)
    patches = len(tensors.get("patch_exponent", ()))
    wanted = {"codes": ("<i4", (n, eights)), "sign_mantissa": ("u1", (n, 8 * eights)), "base": ("u1", (1,)),
              "patch_start": ("<i4", (blocks + 1,)), "patch_index": ("<i4", (patches,)), "patch_exponent": ("u1", (patches,))}
    for name, (kind, size) in wanted.items():
        if name not in tensors or tensors[name].dtype != kind or tensors[name].shape != size:
            raise StreamError(f"{name} is missing, or not {list(size)} of {kind}")
    if ROWS * k >= 1 << 31:
        raise StreamError(f"{k} columns are more than patches can name")
    if int(tensors["base"][0]) > 256 - WINDOW:
        raise StreamError(f"base {int(tensors['base'][0])}: codes would pass 255")
    start, index = tensors["patch_start"], tensors["patch_index"]
    if start[0] or start[-1] != patches or (np.diff(start) < 0).any():
        raise StreamError(f"patch_start does not rise from 0 to {patches}")
    limits = np.minimum(ROWS, n - ROWS * np.arange(blocks)) * k
    if patches and ((index < 0).any() or (index >= np.repeat(limits, np.diff(start))).any()):
        raise StreamError("patch_index leaves its rows")


def decode(tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.uint16]:
    """The patterns u16 [N, K] of checked tensors."""
    n, k = shape
    out = np.empty(shape, np.uint16)
    start = tensors["patch_start"].astype(np.int64)
    step = ROWS * max(1, _TILE // max(1, ROWS * k))
    for first in range(0, n, step):
        rows = slice(first, min(n, first + step))
        words = tensors["codes"][rows].view(np.uint32).astype(np.uint64)
        symbols = (_apart(words) | _apart(words >> 16) << 8).view(np.uint8)[:, :k] + tensors["base"]
        blocks = start[first // ROWS:-(-rows.stop // ROWS) + 1]
        patches = slice(blocks[0], blocks[-1])
        index = tensors["patch_index"][patches] + np.repeat(np.arange(len(blocks) - 1) * (ROWS * k), np.diff(blocks))
        symbols.reshape(-1)[index] = tensors["patch_exponent"][patches]
        rest = in_quads(tensors["sign_mantissa"][rows])[:, :k]
        exponents.join(symbols.reshape(-1), rest.reshape(-1), out[rows].reshape(-1))
    return out
