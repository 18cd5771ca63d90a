"""Splits bfloat16 patterns into exponents, which lossless formats code, and signs with mantissas, which they keep."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import native

BLOCK = 1 << 16


def split_exponents(parts: Sequence[NDArray[np.uint16]]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Exponents u8, and signs with mantissas u8 (the sign above seven bits), of concatenated u16 arrays."""
    total = sum(map(len, parts))
    exponents = np.empty(total, np.uint8)
    sign_mantissa = np.empty(total, np.uint8)
    first = 0
    for patterns in parts:
        place = slice(first, first + len(patterns))
        split_exponents_into(patterns, exponents[place], sign_mantissa[place])
        first += len(patterns)
    return exponents, sign_mantissa


def split_exponents_into(patterns: NDArray[np.uint16], exponents: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8]) -> None:
    """Write the exponents, and signs with mantissas, of u16 [n]."""
    compiled = native.functions()
    if compiled is not None:
        patterns = np.ascontiguousarray(patterns)
        compiled.split_flat(patterns, exponents, sign_mantissa, len(patterns))
        return
    for start in range(0, len(patterns), BLOCK):
        part, some = slice(start, start + BLOCK), patterns[start:start + BLOCK]
        np.right_shift(some, 7, out=exponents[part], casting="unsafe")
        np.bitwise_or(some & 0x7F, some >> 8 & 0x80, out=sign_mantissa[part], casting="unsafe")


def count_symbols(symbols: NDArray[np.uint8]) -> NDArray[np.int64]:
    """The number of occurrences of each of 256 symbols."""
    flat = np.ascontiguousarray(symbols).reshape(-1)
    counts = np.zeros(256, np.int64)
    compiled = native.functions()
    if compiled is not None:
        compiled.count_symbols(flat, counts, len(flat))
        return counts
    pairs = np.zeros(1 << 16, np.int64)                          # two at a time, which takes half as long
    even = flat[:len(flat) & ~1].view("<u2")
    for start in range(0, len(even), 1 << 20):
        pairs += np.bincount(even[start:start + (1 << 20)], minlength=1 << 16)
    square = pairs.reshape(256, 256)
    counts += square.sum(0) + square.sum(1)
    if len(flat) % 2:
        counts[flat[-1]] += 1
    return counts


def join_exponents(exponents: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    """Write the bit patterns to out, u16 [n]: the inverse of `split_exponents`."""
    compiled = native.functions()
    if compiled is not None:
        sign_mantissa = np.ascontiguousarray(sign_mantissa)
        compiled.join_flat(exponents, sign_mantissa, out, len(out))
        return
    for start in range(0, len(sign_mantissa), BLOCK):
        part = slice(start, start + BLOCK)
        np.left_shift(exponents[part], 7, out=out[part], dtype=np.uint16)
        wide = sign_mantissa[part].astype(np.uint16)
        out[part] |= wide & 0x7F
        out[part] |= (wide & 0x80) << 8


def split_rows(patterns: NDArray[np.uint16]) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Exponents u8 [N, K] of patterns [N, K], and sign_mantissa u8 [N, 8 * ceil(K / 8)] as in bfloat16.py."""
    n, k = patterns.shape
    compiled = native.functions()
    if compiled is None:
        symbols, sign_mantissa = split_exponents([patterns.reshape(-1)])
        wide = sign_mantissa.reshape(n, k) if k % 8 == 0 else np.pad(sign_mantissa.reshape(n, k), [(0, 0), (0, -k % 8)])
        _swap_middle_bytes(wide, wide)
        return symbols.reshape(n, k), wide
    patterns = np.ascontiguousarray(patterns)
    symbols, wide = np.empty((n, k), np.uint8), np.empty((n, k + -k % 8), np.uint8)
    compiled.split(patterns, symbols, wide, n, k)
    return symbols, wide


def join_rows(symbols: NDArray[np.uint8], sign_mantissa: NDArray[np.uint8], out: NDArray[np.uint16]) -> None:
    """Write bit patterns to out [N, K]: the inverse of `split_rows`.  symbols and out are contiguous."""
    n, k = out.shape
    compiled = native.functions()
    sign_mantissa = np.ascontiguousarray(sign_mantissa)
    if compiled is not None:
        compiled.join(symbols, sign_mantissa, out, n, k)
        return
    straight = np.empty_like(sign_mantissa)
    _swap_middle_bytes(sign_mantissa, straight)
    join_exponents(symbols.reshape(-1), np.ascontiguousarray(straight[:, :k]).reshape(-1), out.reshape(-1))


def _swap_middle_bytes(rows: NDArray[np.uint8], out: NDArray[np.uint8]) -> None:
    """Swap the second and third of each four bytes of [N, 8 * q], which is its own inverse; `out` may be `rows`."""
    words, target = rows.reshape(-1).view("<u8"), out.reshape(-1).view("<u8")
    for start in range(0, len(words), BLOCK):
        part = words[start:start + BLOCK]
        target[start:start + BLOCK] = part & 0xFF0000FFFF0000FF | part >> 8 & 0x0000FF000000FF00 | part << 8 & 0x00FF000000FF0000
