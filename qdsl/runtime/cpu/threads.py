"""The compiled functions that run loops on several threads (product.c), and the threads that they use.

Threads are those of the OpenMP that torch has loaded: its libgomp or another with GOMP_parallel.  Where torch has none, this
process has a pool of its own.  A forked child runs loops on one thread, because OpenMP's threads are those of its parent.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch

from qdsl.host import library
from qdsl.runtime.libraries.private_apis import openmp_parallel

SOURCE = Path(__file__).with_name("product.c")
MOST_TENSORS, MOST_TABLES = 8, 4                                 # of a weight; of a format
PARTS = 8                                                        # of the rows that a thread takes, on average
MOST_JOINED = 4                                                  # weights that `products` multiplies as one
PROCESS = os.getpid()                                            # in which torch may have started OpenMP's threads

Body = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
Parallel = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)

_pools: dict[int, ThreadPoolExecutor] = {}


class Product(ctypes.Structure):
    """What product.c needs of a loop and of weights of one description; it has the meaning of the fields."""

    _fields_ = [("run", ctypes.c_void_p), ("arrange", ctypes.c_void_p),
                *((name, ctypes.c_int64) for name in ("n", "k", "tiles", "units", "step", "parts", "share", "together",
                                                      "arranged", "type", "bias_type", "is_whole", "tensors")),
                ("tables", ctypes.c_void_p * MOST_TABLES)]


@dataclass(frozen=True, slots=True, eq=False)
class Functions:
    """The functions of product.c.  parallel: what they call to run on several threads, which `attach` sets; alive as long as they
    are.
    """

    product: Any
    products: Any
    rows: Any
    attach: Any
    parallel: Any


@contextmanager
def one_thread() -> Iterator[None]:
    """Lets torch use one thread, as for many small copies: its threads wait for each other where others use the processors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


@cache
def functions() -> Functions:
    """The functions of product.c, compiled for any machine of this kind.  Raises as `library.load` does."""
    loaded = library.load(SOURCE.read_text(encoding="utf-8"), ("-O3",))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    product, products, rows, attach = loaded.product, loaded.products, loaded.rows, loaded.attach
    product.restype, product.argtypes = number, [pointer] * 4 + [number] * 2 + [pointer] * MOST_TENSORS
    products.restype = number
    products.argtypes = [*[pointer] * 2, *[number] * 2, *[pointer] * 2, number, *[pointer] * 2 * MOST_JOINED]
    rows.restype, rows.argtypes = None, [pointer] * 3 + [number] * 3
    attach.restype, attach.argtypes = None, [pointer, number]
    openmp = openmp_parallel()
    parallel = Parallel(_in_own_pool) if openmp is None else openmp
    attach(ctypes.cast(parallel, pointer), 0 if openmp is None else PROCESS)
    return Functions(product, products, rows, attach, parallel)


def _in_own_pool(body: int, work: int, count: int, flags: int) -> None:
    """GOMP_parallel by this process's own threads: call body(work) in each.  The caller does not wait for one that is late."""
    take, others = Body(body), []
    try:
        others = [_pool(count - 1).submit(take, work) for _ in range(count - 1)]
    finally:                                                     # also when the interpreter ends and starts no more threads
        take(work)
        for other in others:
            if not other.cancel():
                other.result()


def _pool(count: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked process starts its own."""
    if count not in _pools:
        _pools[count] = ThreadPoolExecutor(count, "qdsl-cpu")
    return _pools[count]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)
