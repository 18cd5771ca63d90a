"""x @ w.T on a CPU, one row of x, one thread: x in 8 bits (QDSL_CPU_INT8=1), where neighbours in memory are rows of w."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

from bench import linear
from bench.figure import Figure, ratios
from bench.timing import Side, calls
from bench.weights import packed, storages, title

WEIGHTS = ("int_group bits=4 gptq_v2", "int_group bits=4 awq")
BASE: dict[str, Any] = {"name": "q4_0", "storage": "gguf", "params": {}}         # as large as they are, but stored row by row
GOAL = 1.0                                                       # of the speed of BASE, by weight


def figures(rounds: int) -> Iterator[Figure]:
    """Speeds with x in 8 bits as multiples of those of the exact product, and of BASE in 8 bits."""
    for name, storage, params in storages():
        if title(name, storage, params) not in WEIGHTS:
            continue
        weight: dict[str, Any] = {"name": name, "storage": storage, "params": params}
        sides = [Side(ours, {**BASE, "int8": True}), Side(ours, {**weight, "int8": False}), Side(ours, {**weight, "int8": True})]
        copies = [linear._copies(packed(own["name"], own["storage"], **own["params"]).nbytes) for own in (BASE, weight, weight)]
        base, exact, int8 = ([seconds / count for seconds in side]
                             for side, count in zip(calls(sides, rounds, same=False), copies, strict=True))
        note = "{:.2f} ms; exact {:.2f} ms; q4_0 in 8 bits {:.2f} ms".format(
            *(1000 * Figure("", "s", seconds).median for seconds in (int8, exact, base)))
        what = f"linear {title(name, storage, params)}, M = 1, one thread, int8"
        yield Figure(f"{what}, to exact", "x", ratios(exact, int8), note=note)
        yield Figure(f"{what}, to q4_0 in int8", "x", ratios(base, int8), GOAL, note=note)


def ours(int8: bool, **arguments: Any) -> Callable[[], Tensor]:
    """This project's linear, with x in 8 bits or as it is."""
    os.environ |= {"QDSL_CPU_INT8": str(int(int8)), "QDSL_CPU_INTERLEAVE": "always" if int8 else "auto"}
    return linear.ours(rows=1, compiled=True, threads=1, **arguments)
