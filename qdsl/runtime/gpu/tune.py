"""Timing the launches that a product may take on the GPU at hand, and keeping the fastest for later processes.

Nothing needs this: the plan of a weight follows from modelled costs (runtime/gpu/plan.py).  What was fastest lies in a small
JSON file per device in the cache folder, by format, storage, parameters, shape, rows and type of x.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from qdsl.host.files import write_text
from qdsl.runtime.gpu import configure, launch, plan, product
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.triton import require, triton
from qdsl.runtime.weight.packed import PackedWeight

MOST = 20                                                        # candidates per number of rows: those of least modelled cost


def tune(packed: PackedWeight, rows: Iterable[int] = (1, 8, 16), dtype: torch.dtype = torch.float16) -> dict[str, dict[str, Any]]:
    """Time the ways to multiply by a weight on its GPU for these numbers of rows of x, and keep the fastest for each number.

    A number stands for those down to half of it, 8 for 2 to 8.  Returns them as the file holds them: kind, configuration and
    milliseconds.  Raises MissingTriton where Triton is not installed.
    """
    require()
    fastest: dict[str, dict[str, Any]] = {}
    packed = packed.as_stored()
    for m in rows:
        x = torch.ones(m, packed.shape[1], dtype=dtype, device=packed.device)
        choice = plan.choice(packed, m, dtype, packed.device, launch.is_aligned(x, packed))
        times = [(_time(x, packed, option.candidate), option.candidate) for option in choice.options[:MOST]]
        milliseconds, candidate = min(times, key=lambda pair: pair[0])
        name = configure.key(packed, m, dtype)
        fastest[name] = {"kind": candidate.kind, "config": dict(candidate.config), "ms": milliseconds}
    _keep(configure.tuned_file(packed.device), fastest)
    return fastest


def _time(x: torch.Tensor, packed: PackedWeight, candidate: Candidate) -> float:
    """Median milliseconds of a product whose weights are not in the cache."""
    taken: float = triton.testing.do_bench(lambda: product.by(candidate, x, packed), return_mode="median")
    return taken


def _keep(path: Path, fastest: dict[str, dict[str, Any]]) -> None:
    os.makedirs(path.parent, exist_ok=True)
    write_text(path, json.dumps({**configure.tuned(path), **fastest}, indent=1, sort_keys=True) + "\n")
    plan.forget()
