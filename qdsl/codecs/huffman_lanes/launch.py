"""Launches of `huffman_lanes` (qdsl/codecs/huffman_lanes/reference.py)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs.huffman_lanes import kernels
from qdsl.codecs.huffman_lanes import reference as entropy
from qdsl.runtime.gpu import configure
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight.arrays import cdiv

WARPS = 4

Tensors = Mapping[str, Tensor]
BULK = ("words",)                                                # tensors whose shape alone is checked
ASSUMED = {"longest": entropy.LONGEST}


def stream_info(tensors: Mapping[str, NDArray[Any]], shape: tuple[int, int]) -> dict[str, int]:
    """Validates tensors; returns the bits of the longest code.  Raises StreamError."""
    entropy.check(tensors, shape)
    return {"longest": int((tensors["table"] & 127).max(initial=0))}


def typical_shapes(shape: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of tensors that depend on the weights, for exponents of normal weights: 2.78 bits, padding included."""
    n, k = shape
    per_row, chunks = entropy.lanes_of(k)
    turns = cdiv(278 * n * k, 100 * 32 * entropy.GROUP) + entropy.AHEAD
    return {"words": (turns * entropy.GROUP,), "starts": (chunks, cdiv(n, entropy.GROUP // per_row))}


def block_rows(shape: tuple[int, int]) -> int:
    return _lanes_and_grid(*shape)[1]


def group_rows(shape: tuple[int, int]) -> int:
    """Rows that share a group of words."""
    return entropy.GROUP // entropy.lanes_of(shape[1])[0]


def row_band(tensors: Tensors, shape: tuple[int, int], start: int, stop: int) -> dict[str, Tensor]:
    """The tensors of rows [start, stop) in the same code; words of their groups are copied, not decoded.

    start: a multiple of group_rows; stop: a multiple too, or N.
    """
    words, starts, table = (tensors[name] for name in entropy.NAMES)
    first, last = start // group_rows(shape), cdiv(stop, group_rows(shape))
    end = starts.new_tensor([words.numel() // entropy.GROUP - entropy.AHEAD])
    bounds = torch.cat([starts, torch.cat([starts[1:, 0], end])[:, None]], 1)    # with the end of the last group of every chunk
    begins, ends = bounds[:, first], bounds[:, last]
    moved = starts[:, first:last] + ((ends - begins).cumsum(0) - ends)[:, None]
    parts = [words[entropy.GROUP * begin:entropy.GROUP * end] for begin, end in zip(begins.tolist(), ends.tolist(), strict=True)]
    return {"words": torch.cat([*parts, words.new_zeros(entropy.AHEAD * entropy.GROUP)]), "starts": moved.to(starts.dtype),
            "table": table}


def decode_calls(tensors: Tensors, info: Mapping[str, int], out: Tensor, shape: tuple[int, int], blocks: Tensor | None = None,
               ) -> Iterator[Call]:
    """The launch that makes the symbols u8 [N, K].

    blocks: int32 [B], only these blocks of rows, one after the other in out.
    """
    n, k = shape
    per_row, rows, walk, (programs, chunks) = _lanes_and_grid(n, k)
    turns = tensors["words"].numel() // entropy.GROUP
    arguments = _arguments(tensors)
    yield Call(kernels.symbols, (*arguments, out, turns, n, k, *walk, blocks), {"R": per_row, "BN": rows},
               (programs if blocks is None else len(blocks), chunks), {"num_warps": WARPS},
               weights=rows * per_row * 8 * walk[2], step=rows * per_row * 8, aligned=_alignment(arguments))


def dequantize_calls(to_weights: Any, at: int, tensors: Tensors, uncoded: Tensor, info: Mapping[str, int], out: Tensor,
                     ) -> Iterator[Call]:
    """The launch that makes 16-bit weights [N, K]; K is a multiple of 128.

    to_weights: the function that makes pairs of weights from pairs of symbols at bit `at` and the uncoded bits.  uncoded: the
    tensor of those bits.
    """
    n, k = out.shape
    per_row, rows, walk, grid = _lanes_and_grid(n, k)
    times = 1 if walk[1] % 2 or walk[2] % 2 else 2
    arguments = _arguments(tensors)
    yield Call(kernels.dequantize, (*arguments, uncoded.view(torch.int64), out.view(torch.int32),
                            tensors["words"].numel() // entropy.GROUP, n, k // 8, *walk),
               {"to_weights": to_weights, "AT": at, "R": per_row, "BN": rows, "TIMES": times}, grid, {"num_warps": WARPS},
               weights=rows * per_row * 8 * walk[2], step=rows * per_row * 8 * times, aligned=_alignment(arguments))


def has_skinny(shape: tuple[int, int], info: Mapping[str, int]) -> bool:
    """Whether the lanes of a row match the layout of a matrix unit."""
    return entropy.lanes_of(shape[1])[0] in (4, 8)


def skinny_calls(to_weights: Any, at: int, tensors: Tensors, uncoded: Tensor, info: Mapping[str, int], x: Tensor,
              bias: Tensor | None, out: Tensor, F: Any) -> Iterator[Call]:
    """The launch of x [M, K] times the weight's transpose, plus bias [N], into out [M, N]; K is a multiple of 128."""
    (m, k), n = x.shape, out.shape[1]
    per_row, _, walk, (_, chunks) = _lanes_and_grid(n, k)
    rows = entropy.GROUP // per_row                              # of w per group, and of x per block
    blocks = 1 if m <= rows else 2 if m <= 2 * rows else 4
    warps = 1 if cdiv(n, 2 * rows) < 8 * configure.target(x.device).multiprocessors else WARPS
    arguments = _arguments(tensors)
    yield Call(kernels.skinny, (*arguments, uncoded.view(torch.int64), x.view(torch.int32), bias, out,
                     tensors["words"].numel() // entropy.GROUP, m, n, k // 8, *walk, chunks),
               {"to_weights": to_weights, "AT": at, "R": per_row, "W": warps, "BLOCKS": blocks, "F": F},
               (cdiv(n, 2 * rows * warps), cdiv(m, rows * blocks)), {"num_warps": warps, "num_stages": 1},
               weights=2 * rows * warps * k, step=2 * warps * entropy.GROUP * 8, aligned=_alignment(arguments))


def _lanes_and_grid(n: int, k: int) -> tuple[int, int, tuple[int, int, int], tuple[int, int]]:
    """Lanes per row, rows per program, (groups per chunk, runs per lane, runs per chunk), and the grid."""
    per_row, chunks = entropy.lanes_of(k)
    runs = cdiv(k, entropy.RUN * per_row)
    rows = WARPS * entropy.GROUP // per_row
    return per_row, rows, (cdiv(n, entropy.GROUP // per_row), runs, cdiv(runs, chunks)), (cdiv(n, rows), chunks)


def _arguments(tensors: Tensors) -> tuple[Tensor, ...]:
    words, starts, table = (tensors[name].contiguous() for name in entropy.NAMES)
    return words, starts, align_table(table)


def _alignment(arguments: tuple[Tensor, ...]) -> tuple[tuple[Tensor, int], ...]:
    """The alignment of the table, the last argument, for Call.aligned."""
    return ((arguments[-1], arguments[-1].nbytes),)


def align_table(table: Tensor) -> Tensor:
    """The table, copied if its address is not a multiple of its size: kernels join both by OR."""
    size = table.numel() * table.element_size()
    if table.is_meta or table.data_ptr() % size == 0:
        return table
    room = torch.empty(2 * table.numel(), dtype=table.dtype, device=table.device)
    copy = room[-room.data_ptr() % size // table.element_size():][:table.numel()]
    return copy.copy_(table)
