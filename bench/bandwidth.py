"""How much of a GPU's bandwidth x @ w.T of one row of x uses, for every format: `python -m bench.bandwidth [--gpu h200]`.

Nothing is timed: seconds are modelled (qdsl/runtime/gpu/costs.py).  What a format reaches in its best storage is a part of the
bandwidth that a copy reaches, for a weight of 28672 x 8192 and x in bfloat16.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import NamedTuple

import torch

from bench.dispatch import META, storages
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, plan
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu

SHAPE = (28672, 8192)                                            # of a model of 70 billion weights
REACHED = 0.85                                                   # the goal
X = torch.bfloat16
BOUNDS = {"memory": "memory", "busy": "instructions", "chain": "latency", "cached": "L2 cache", "first": "start"}


class Reach(NamedTuple):
    """What a storage reaches: the part of the bandwidth, the kernel, and what bounds that."""

    format: str
    storage: str
    part: float
    kernel: str
    bound: str


def reaches(gpu: Gpu) -> Iterator[Reach]:
    """The best storage of every format, and of every choice of parameters that chooses kernels."""
    best: dict[str, Reach] = {}
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        for packed in storages(SHAPE):
            storage, _, params = costs.storage_key(packed).partition(" ")
            name, _, storage = storage.partition(".")
            reach = reach_of(packed, gpu, f"{name} {params}".strip(), storage)
            if reach.part > best.get(reach.format, reach._replace(part=0.0)).part:
                best[reach.format] = reach
    yield from best.values()


def reach_of(packed: PackedWeight, gpu: Gpu, format: str, storage: str) -> Reach:
    """What one storage reaches in the way that its plan takes."""
    [option, *_] = plan.choice(packed, 1, X, META).options
    ideal = packed.nbytes / (gpu.bandwidth * 1e9 * costs.REACHABLE)
    bound = "decoded weights"
    if option.candidate.kind != "decode":
        terms = costs.launch_terms(packed, option.candidate, 1, X, gpu)
        bound = BOUNDS[max(BOUNDS, key=lambda name: float(getattr(terms, name)))]
    return Reach(format, storage, ideal / option.seconds, option.candidate.kind, bound)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bandwidth", description=__doc__)
    parser.add_argument("--gpu", default="h200", choices=list(GPUS))
    options = parser.parse_args()
    for reach in sorted(reaches(GPUS[options.gpu]), key=lambda reach: -reach.part):
        print(f"{reach.part:6.1%}  {reach.format:32} {reach.storage:20} {reach.kernel:10} {reach.bound}")


if __name__ == "__main__":
    main()
