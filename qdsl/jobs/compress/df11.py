"""Encodes groups of weights to DFloat11's tensors, byte for byte as dfloat11 0.2 to 0.5, and decodes them.

A group is a concatenation of bfloat16 tensors.  Its exponents are a stream of qdsl/codecs/huffman_windows/reference.py: luts,
encoded_exponent, output_positions and gaps.  Its other tensors are

    sign_mantissa    u8 [n]            the sign above seven bits
    split_positions  i64 [tensors - 1]  where the later tensors of the group begin
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import exponents
from qdsl.codecs.huffman_windows import reference as huffman_windows
from qdsl.codecs.huffman_windows.reference import THREADS, WindowedStream
from qdsl.core.codecs import StreamError

STREAM = {"tables": "luts", "data": "encoded_exponent", "positions": "output_positions", "gaps": "gaps"}
NAMES = ("luts", "encoded_exponent", "sign_mantissa", "output_positions", "gaps", "split_positions")

Tensors = Mapping[str, NDArray[Any]]


def encode(parts: Sequence[NDArray[np.uint16]], threads: int = THREADS) -> dict[str, NDArray[Any]]:
    """The tensors of a group.

    parts: the bits of each weight, u16 [n], at least one.  threads: windows per block.  Raises StreamError for exponents from 240
    on and codes with too many table rows, which DF11 cannot represent.
    """
    numels = [len(part) for part in parts]
    if not 0 < sum(numels) < 1 << 31:
        raise StreamError(f"a group of {sum(numels)} weights: DF11 holds 1 to 2^31 - 1")
    symbols, sign_mantissa = exponents.split_exponents(parts)
    stream = huffman_windows.encode(symbols, exponents.count_symbols(symbols), threads)
    tensors = {STREAM[role]: tensor for role, tensor in stream.items()}
    tensors |= {"sign_mantissa": sign_mantissa, "split_positions": np.cumsum(numels, dtype=np.int64)[:-1]}
    return {name: tensors[name] for name in NAMES}


def validated_stream(tensors: Tensors, threads: int | None = None) -> WindowedStream:
    """The validated stream of a file's group; see huffman_windows.  Raises StreamError."""
    sign_mantissa, splits = tensors.get("sign_mantissa"), tensors.get("split_positions")
    if sign_mantissa is None or sign_mantissa.dtype != np.uint8 or sign_mantissa.ndim != 1:
        raise StreamError("sign_mantissa is missing, or not [n] of u1")
    if splits is None or splits.dtype != np.int64 or splits.ndim != 1:
        raise StreamError("split_positions are missing, or not [tensors - 1] of i8")
    if splits.size and (splits[0] < 0 or splits[-1] > len(sign_mantissa) or (np.diff(splits) < 0).any()):
        raise StreamError(f"split_positions do not rise from 0 to {len(sign_mantissa)}")
    stream = {role: tensors[name] for role, name in STREAM.items() if name in tensors}
    return huffman_windows.validated_stream(stream, len(sign_mantissa), threads)


def decode(tensors: Tensors, threads: int | None = None, *, every: bool = False) -> NDArray[np.uint16]:
    """The bit patterns u16 [n] of a file's group.  every: check every gap, which takes longer.  Raises StreamError."""
    symbols = validated_stream(tensors, threads).decode(every=every)
    out = np.empty(len(symbols), np.uint16)
    exponents.join_exponents(symbols, tensors["sign_mantissa"], out)
    return out
