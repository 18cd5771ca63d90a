"""Launches of `huffman_windows` (qdsl/codecs/huffman_windows/reference.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs.huffman_windows import kernels
from qdsl.codecs.huffman_windows import reference as entropy
from qdsl.codecs.lookup import FIRST_POINTER
from qdsl.core.codecs import StreamError
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.arrays import cdiv

WINDOW = 8                                                       # bytes

Tensors = Mapping[str, Tensor]
BULK = ("data", "gaps")                                          # tensors whose size alone is checked
ASSUMED = {"threads": entropy.THREADS, "levels": 2, "steps": 32}


def stream_info(tensors: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, int]:
    """Validates tensors; returns windows per block, table rows per lookup, and the most codes that begin in a window.

    Raises StreamError.
    """
    count = shape[0] * shape[1]
    if not count:
        return ASSUMED
    threads = entropy.validated_stream(tensors, count).threads
    lengths = tensors["tables"][-1]
    if lengths[FIRST_POINTER:].any():
        raise StreamError(f"luts: exponent {FIRST_POINTER + int(lengths[FIRST_POINTER:].argmax())} is the name of a row, too")
    return {"threads": threads, "levels": -(-int(lengths.max()) // 8), "steps": -(-8 * WINDOW // int(lengths[lengths > 0].min()))}


def typical_shapes(shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that depend on the weights, for exponents of normal weights: 2.591 bits, in three rows."""
    size = cdiv(2591 * shape[0] * shape[1], 8000)
    blocks = cdiv(size, WINDOW * entropy.THREADS)
    return {"tables": (4, 256), "data": (size,), "positions": (4 * (blocks + 1),),
            "gaps": (cdiv(5 * entropy.THREADS * blocks, 8),)}


def block_rows(shape: tuple[int, int]) -> int:
    """0 rows: a program decodes a part of the data, which may begin anywhere in a row."""
    return 0


def group_rows(shape: tuple[int, int]) -> int:
    """0 rows: a row's codes may begin anywhere in the data."""
    return 0


def decode_calls(tensors: Tensors, info: Mapping[str, int], out: Tensor, shape: tuple[int, int], blocks: Tensor | None = None,
               ) -> Iterator[Call]:
    """The launch that makes the symbols u8 [N * K]; blocks: None."""
    tables, data, positions, gaps = (tensors[name].contiguous() for name in entropy.NAMES)
    threads, size = info["threads"], data.numel()
    programs = cdiv(size, WINDOW * threads)
    yield Call(kernels.symbols, (tables, data, positions, gaps, out, size, positions.numel() // 4 - 1, gaps.numel(),
                                 tables.shape[0], info["steps"]), {"T": threads, "LEVELS": info["levels"]}, (programs,),
               {"num_warps": max(1, threads // 32)})             # the data decide how many weights a program has
