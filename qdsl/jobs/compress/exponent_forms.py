"""bfloat16 weights in hlane, fix4 and fix3: exponents in an entropy-coded stream, signs and mantissas uncoded.

    sign_mantissa  u8 [N, 8 * ceil(K / 8)]  the sign above seven bits; of each four columns the bytes of 0, 2, 1, 3
    weight_shape   i64 [2]  N and K

The order of columns lets a kernel build two bfloat16 from a pair of exponents at a time.  Columns after K are 0.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qdsl.codecs import exponents
from qdsl.codecs.huffman_lanes import reference as huffman_lanes
from qdsl.codecs.row_window import reference as row_window
from qdsl.codecs.window import reference as window
from qdsl.core.codecs import StreamError

Tensors = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class ExponentFormat:
    """A format with one stream.  names: the storage's names of the stream's tensors, in the order of the code."""
    names: tuple[str, ...]
    own: tuple[str, ...]
    of: Callable[[NDArray[np.uint8], NDArray[np.int64]], dict[str, NDArray[Any]]]
    symbols: Callable[[Tensors, tuple[int, int]], NDArray[np.uint8]]

    @property
    def tensor_names(self) -> tuple[str, ...]:
        return (*self.names, "sign_mantissa", "weight_shape")

    def encode(self, patterns: NDArray[np.uint16]) -> dict[str, NDArray[Any]]:
        """The tensors of bit patterns u16 [N, K]."""
        symbols, sign_mantissa = exponents.split_rows(patterns)
        stream = self.of(symbols, exponents.count_symbols(symbols))
        named = {name: stream[own] for name, own in zip(self.names, self.own, strict=True)}
        return {**named, "sign_mantissa": sign_mantissa, "weight_shape": np.array(patterns.shape, np.int64)}

    def decode(self, tensors: Tensors, shape: tuple[int, int]) -> NDArray[np.uint16]:
        """The bit patterns u16 [N, K].  Raises StreamError for tensors that do not fit."""
        n, k = shape
        sign_mantissa, weight_shape = tensors.get("sign_mantissa"), tensors.get("weight_shape")
        if weight_shape is None or weight_shape.dtype != np.int64 or weight_shape.shape != (2,) \
                or weight_shape.tolist() != [n, k]:
            raise StreamError(f"weight_shape is missing, or not {[n, k]}")
        if sign_mantissa is None or sign_mantissa.dtype != np.uint8 or sign_mantissa.shape != (n, k + -k % 8):
            raise StreamError(f"sign_mantissa is missing, or not {[n, k + -k % 8]} of u1")
        stream = {own: tensors[name] for name, own in zip(self.names, self.own, strict=True) if name in tensors}
        symbols = self.symbols(stream, shape)
        out = np.empty(shape, np.uint16)
        exponents.join_rows(symbols, sign_mantissa, out)
        return out


HLANE = ExponentFormat(("words", "starts", "table"), huffman_lanes.NAMES, huffman_lanes.encode, huffman_lanes.decode)
FIX4 = ExponentFormat(("codes", "base", "patch_start", "patch_index", "patch_exponent"), window.NAMES, window.encode,
                      window.decode)
FIX3 = ExponentFormat(("codes", "upper", "base", "patch_start", "patch_column", "patch_exponent"), row_window.NAMES,
                      row_window.encode, row_window.decode)
