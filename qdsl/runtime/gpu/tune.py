"""Timing the candidates of a product on the GPU at hand, and keeping the fastest for later processes.

Tuning is optional: without it the plan of a weight follows from modelled costs (runtime/gpu/plan.py).  The fastest candidates are
kept in a JSON file per device in the cache folder, by format, storage, parameters, shape, rows and dtype of x.
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
from qdsl.runtime.libraries.triton import require, runs_kernels, triton
from qdsl.runtime.weight.packed import FormatError, PackedWeight

MOST = 20                                                        # most candidates per number of rows, of least modelled cost


def tune(packed: PackedWeight, rows: Iterable[int] = (1, 8, 16), dtype: torch.dtype = torch.float16) -> dict[str, dict[str, Any]]:
    """Time the candidates for a weight on its GPU for these numbers of rows of x, and keep the fastest for each.

    A number also serves smaller ones down to half of it, 8 those from 2 to 8.  Returns what the file holds: kind, configuration
    and milliseconds.  Raises MissingTriton if Triton is not installed, and FormatError for a weight that is on no GPU.
    """
    require()
    if not runs_kernels(packed.device):
        raise FormatError(f"tune times kernels on a GPU, and this weight is on {packed.device}: move it with .cuda(); products "
                          "on a CPU need no tuning")
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
    """Median milliseconds of a product, with the weight out of the cache."""
    taken: float = triton.testing.do_bench(lambda: product.product_by(candidate, x, packed), return_mode="median")
    return taken


def _keep(path: Path, fastest: dict[str, dict[str, Any]]) -> None:
    os.makedirs(path.parent, exist_ok=True)
    write_text(path, json.dumps({**configure.read_tuned(path), **fastest}, indent=1, sort_keys=True) + "\n")
    plan.forget()
