"""Timing a handful of launch configurations on the GPU that is there, and keeping the fastest for later processes.

Nothing needs this: configurations follow from shapes (runtime/configure.py).  What is found lies in a small JSON file per
device in the cache folder, by kernel, format, storage, parameters, shape and type of x.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import torch

from qdsl.files import write_text
from qdsl.runtime import PackedWeight, configure, launch
from qdsl.runtime.call import Call
from qdsl.runtime.gpu.triton import require, triton

MOST = 8                                                         # candidates per kernel


def tune(packed: PackedWeight, rows: Iterable[int] = (1, 8, 16), dtype: torch.dtype = torch.float16) -> dict[str, dict[str, int]]:
    """Time the kernels of a weight on its GPU for these numbers of rows of x, and keep the fastest configurations.

    Returns them as the file holds them.  Numbers of rows that no fused kernel for matrix units serves are left out.
    Raises MissingTriton where Triton is not installed.
    """
    require()
    found: dict[str, dict[str, int]] = {}
    packed = packed.as_stored()
    for m in rows:
        x = torch.ones(m, packed.shape[1], dtype=dtype, device=packed.device)
        out = torch.empty(m, packed.shape[0], dtype=dtype, device=packed.device)
        if launch.has_lanes(x, packed) and m <= configure.most_rows(packed, dtype, packed.device):
            kind = launch.kind(x, packed)
            choices = configure.candidates(kind, packed, m)[:MOST]
            times = [_time(next(iter(launch.linear_calls(x, packed, None, out, config=choice)))) for choice in choices]
            found[configure.key(kind, packed, dtype)] = choices[times.index(min(times))]
    _keep(configure.tuned_file(packed.device), found)
    return found


def _time(call: Call) -> float:
    """Median milliseconds of a launch whose weights are not in the cache."""
    taken: float = triton.testing.do_bench(replace(call).run, return_mode="median")
    return taken


def _keep(path: Path, found: dict[str, dict[str, int]]) -> None:
    os.makedirs(path.parent, exist_ok=True)
    write_text(path, json.dumps({**configure.tuned(path), **found}, indent=1, sort_keys=True) + "\n")
    configure.forget()
