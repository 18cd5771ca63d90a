"""Divides the rows of a loop into small parts that threads of this process take one by one.

A thread that wakes late or shares its processor delays nobody: the others take its parts.  The caller does not wait for a thread
that has taken no part.  Idle threads sleep.  OpenMP's threads spin, which costs more than it saves as soon as another program or
pool uses a processor.
"""

from __future__ import annotations

import ctypes
import os
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

from qdsl.host import library

SOURCE = Path(__file__).with_name("threads.c")

_pools: dict[int, ThreadPoolExecutor] = {}


def run_divided(run: Any, arguments: tuple[Any, ...], rows: tuple[int, int], units: int, step: int, count: int,
                parts: int) -> None:
    """Call run(*arguments, begin, end, units) for parts of `rows`, multiples of `step`, on `count` threads.

    arguments: addresses of tensors, x, arranged x and out; N and K.  parts: per thread, on average.
    """
    first, last = rows
    part = max(1, -(-(last - first) // (count * parts * step))) * step
    *places, n, k = arguments
    addresses = [ctypes.cast(place, ctypes.c_void_p).value or 0 for place in (run, *places)]
    work = (ctypes.c_int64 * 11)(first, last, part, *addresses, n, k, units)
    take = _take()
    others = [_pool(count - 1).submit(take, work) for _ in range(count - 1)]
    take(work)
    for other in others:
        if not other.cancel():
            other.result()


@cache
def _take() -> Any:
    """The compiled function that takes parts until none are left.  Raises as `library.load` does."""
    take = library.load(SOURCE.read_text(encoding="utf-8")).take
    take.restype, take.argtypes = None, [ctypes.c_void_p]
    return take


def _pool(count: int) -> ThreadPoolExecutor:
    """The threads of this process; a forked process starts its own."""
    if count not in _pools:
        _pools[count] = ThreadPoolExecutor(count, "qdsl-cpu")
    return _pools[count]


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_pools.clear)
