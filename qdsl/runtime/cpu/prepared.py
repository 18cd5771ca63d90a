"""A product by a compiled loop, prepared once for all weights of one description and x of one shape and dtype.

`run` checks what may have changed since (memory, dtype, size and device of every tensor), allocates the output and calls C
once.  A layer takes 4 to 5 us above its loop.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from qdsl.runtime.cpu import loops, threads
from qdsl.runtime.gpu.launch import read_tensors
from qdsl.runtime.libraries.private_apis import allocator
from qdsl.runtime.weight.packed import PackedWeight

Run = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor | None]
TYPES = {None: 0, torch.float32: 1, torch.bfloat16: 2}           # that product.c reads and writes


class _Changed(Exception):
    """A tensor is not as it was when the product was prepared."""


class PreparedProduct:
    """A `Prepared` of runtime/weight/products.py."""

    __slots__ = ("make_run", "run")

    def __init__(self, make_run: Callable[[tuple[int, ...]], Run], sizes: tuple[int, ...]) -> None:
        self.make_run = make_run
        self.run = make_run(sizes)

    def reshaped(self, sizes: tuple[int, ...]) -> PreparedProduct:
        """The same product for an x with other leading axes."""
        return PreparedProduct(self.make_run, sizes)


def prepare(packed: PackedWeight, together: int, m: int, dtype: torch.dtype, bias: torch.dtype | None,
            is_permuted: bool = False) -> PreparedProduct | None:
    """x [m, K] @ w.T + bias by the loop over a stored weight; None where it has none.

    together: rows of x that the loop takes at once.  dtype: of x and the result.  bias: its dtype, or None.  is_permuted: `run`
    gets the permutation of columns after the weight's tensors, and applies it to x.
    """
    bound = loops.find_loop(packed, together)
    tables = read_tensors(packed)[len(packed.layout.coded):]
    if bound is None or len(packed.layout.coded) > threads.MOST_TENSORS or len(tables) > threads.MOST_TABLES:
        return None
    if dtype not in TYPES or bias not in TYPES:
        wide = prepare(packed, together, m, torch.float32, bias and torch.float32, is_permuted)
        return None if wide is None else PreparedProduct(_round_through_float32(wide.make_run, dtype), (m, packed.shape[0]))
    described = loops.describe_product(packed, bound, together)
    described.type, described.bias_type = TYPES[dtype], TYPES[bias]
    described.tables[:len(tables)] = [0 if table is None else table.data_ptr() for table in tables]
    present = [place for place, name in enumerate(packed.layout.coded) if name in packed.tensors and name not in packed.in_order]
    stored = [packed.tensors[packed.layout.coded[place]] for place in present]
    checks = [(place, tensor.dtype, tensor.numel()) for place, tensor in zip(present, stored, strict=True)]
    return PreparedProduct(_run_maker(described, checks, packed.shape[0], m, dtype, is_permuted), (m, packed.shape[0]))


def _run_maker(described: threads.Product, checks: Sequence[tuple[int, torch.dtype, int]], n: int, m: int, dtype: torch.dtype,
               is_permuted: bool) -> Callable[[tuple[int, ...]], Run]:
    """`make_run` of a prepared product.  checks: slot of the address, dtype and number of elements of every tensor."""
    call, allocate, slots = threads.functions().product, allocator("cpu"), threads.MOST_TENSORS
    address = ctypes.byref(described)                            # keeps it alive

    def make_run(sizes: tuple[int, ...]) -> Run:
        strides = tuple(math.prod(sizes[axis + 1:]) for axis in range(len(sizes)))

        def run(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
            places = [0] * slots
            try:
                for tensor, (slot, stored, count) in zip(tensors, checks):           # noqa: B905 (the order comes last)
                    places[slot] = _address(tensor, stored, count)
                added = 0 if bias is None else _address(bias, bias.dtype, n)
                x = x.index_select(-1, tensors[-1]) if is_permuted else x if x.is_contiguous() else x.contiguous()
                source = x.data_ptr()
            except (RuntimeError, _Changed):                     # tensors of autograd's vmap have no memory
                return None
            out = x.new_empty(sizes) if allocate is None else allocate(sizes, strides, dtype)
            if not source or (bias is not None and bias.dim() != 1):
                return None
            if call(address, source, added, out.data_ptr(), m, torch.get_num_threads(), *places):
                raise MemoryError(f"no memory for {m} rows of x in float32")
            return out

        return run

    return make_run


def _address(tensor: Tensor, dtype: torch.dtype, count: int) -> int:
    """The address of a contiguous tensor in this machine's memory.  Raises _Changed for others."""
    place = tensor.data_ptr()
    if place and tensor.dtype is dtype and tensor.numel() == count and tensor.is_contiguous() and tensor.is_cpu:
        return place
    raise _Changed


def _round_through_float32(make_run: Callable[[tuple[int, ...]], Run], dtype: torch.dtype) -> Callable[[tuple[int, ...]], Run]:
    """`make_run` for x of another dtype, by a product in float32."""

    def bound(sizes: tuple[int, ...]) -> Run:
        product = make_run(sizes)

        def run(x: Tensor, tensors: Sequence[Tensor], bias: Tensor | None) -> Tensor | None:
            out = product(x.float(), tensors, None if bias is None else bias.float())
            return None if out is None else out.to(dtype)

        return run

    return bound
