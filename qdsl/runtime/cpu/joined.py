"""Copies of several weights that lie in memory one after the other, so that one loop multiplies x by all of them.

A model multiplies the same x by q, k and v, and by gate and up.  One larger product has fewer calls and larger parts for threads.
Groups of 16 rows are independent in the loops, so that every result has the bits of its own product.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from qdsl.runtime.cpu import kept, memory, rows, threads
from qdsl.runtime.cpu.prepared import TYPES
from qdsl.runtime.libraries.private_apis import allocator
from qdsl.runtime.weight.packed import PackedWeight

Run = Callable[[Tensor, Sequence[int]], list[Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class JoinedCopies:
    """The copies of some weights as one.  whole: of all rows.  sizes: rows of each weight."""

    whole: rows.InterleavedWeight
    sizes: tuple[int, ...]

    def prepare(self, sizes: Sequence[int], dtype: torch.dtype, bias: torch.dtype | None, rounds_x: bool) -> Run | None:
        """A function of x and the addresses of biases, 0 for none: the results of all weights; None for many rows.

        sizes: of x [..., K], which has to be contiguous.  bias: the dtype of all biases.  rounds_x: x is rounded to 8 bits.
        """
        allocate, m = allocator("cpu"), torch.Size(sizes[:-1]).numel()
        if allocate is None or not 0 < m <= rows.FEW or dtype not in TYPES or bias not in TYPES:
            return None
        way = rows.RowLoopChoice.of(self.whole, m, dtype, bias, rounds_x)
        call, described, weight = threads.functions().products, ctypes.byref(way.described), ctypes.addressof(self.whole.weight)
        count, unused = len(self.sizes), [0] * (threads.MOST_JOINED - len(self.sizes))
        counts = (ctypes.c_int64 * count)(*self.sizes)
        outputs = [(shape, rows.strides_of(shape)) for shape in [(*sizes[:-1], n) for n in self.sizes]]
        whole = self.whole                                       # the memory of the weight's address

        def run(x: Tensor, biases: Sequence[int]) -> list[Tensor]:
            results = [allocate(shape, strides, dtype) for shape, strides in outputs]
            if call(described, x.data_ptr(), m, torch.get_num_threads(), weight, counts, count, *biases, *unused,
                    *[result.data_ptr() for result in results], *unused):
                raise MemoryError(f"no memory for {m} rows of {whole.columns} columns in float32")
            return results

        return run


def join_copies(weights: Sequence[PackedWeight]) -> JoinedCopies | None:
    """New copies of weights as one, in place of those that they have; None where one has none, or they differ in kind.

    All but the last have whole groups of 16 rows.
    """
    sizes = [rows.code_bytes(weight) for weight in weights]
    if not 1 < len(weights) <= threads.MOST_JOINED or not all(sizes):
        return None
    codes = memory.zero_bytes(sum(sizes))
    copies = [copy for weight, own in zip(weights, torch.split(codes, sizes), strict=True)
              if (copy := rows.interleaved_copy(weight, own)) is not None]
    if len(copies) < len(weights) or not _can_run_together(copies):
        return None
    first, counts = copies[0], tuple(copy.shape[0] for copy in copies)
    fields = tuple(memory.concatenate([copy.fields[place] for copy in copies]) for place in range(len(first.fields)))
    groups, parts = 0, []
    for n in counts:
        parts.append(_slice_joined(first, codes, fields, groups, n))
        groups += -(-n // rows.ROWS)
    kept.replace_copies(copies, [rows.entry_of(part) for part in parts])
    return JoinedCopies(_slice_joined(first, codes, fields, 0, sum(counts)), counts)


def _can_run_together(copies: Sequence[rows.InterleavedWeight]) -> bool:
    """Whether loops multiply all copies at once: they have the same loops, columns and levels, and whole groups of rows."""
    first = copies[0]
    shifts = {tuple(copy.weight.shift) for copy in copies}
    levels = all((copy.levels is None) == (first.levels is None) for copy in copies) and all(
        first.levels is None or torch.equal(first.levels, copy.levels) for copy in copies if copy.levels is not None)
    alike = all(copy.functions is first.functions and copy.shape[1] == first.shape[1] and copy.sums == first.sums
                and copy.factor is None for copy in copies)
    return alike and levels and len(shifts) == 1 and not any(copy.shape[0] % rows.ROWS for copy in copies[:-1])


def _slice_joined(like: rows.InterleavedWeight, codes: Tensor, fields: Sequence[Tensor], first: int, n: int,
                  ) -> rows.InterleavedWeight:
    """n rows, from a group of 16 on, of the memory of joined copies."""
    count, columns = -(-n // rows.ROWS), like.columns
    size = like.codes.numel() // -(-like.shape[0] // rows.ROWS)
    own = codes[first * size:(first + count) * size]
    parts = tuple(field[first:first + count] for field in fields)
    weight = rows.described_weight(own, like.levels, parts, list(like.weight.shift)[:len(parts)], n, columns)
    return rows.InterleavedWeight(like.functions, weight, (n, like.shape[1]), like.sums, None, own, like.levels, parts)
