"""The share of a GPU's bandwidth that x @ w.T reaches for one row of x, per format: `python -m bench.bandwidth [--gpu h200]`.

Nothing is timed: seconds are modelled (qdsl/runtime/gpu/costs.py).  100 % is the bandwidth of a plain copy.  The best storage of
a format is chosen for the largest of SHAPES, and x is in bfloat16.  `most` is the share of a launch that only waits for memory,
below 100 % because a launch has to start.  `limit` is the share if the kernel waited only for its bottleneck.
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

SHAPES = ((4096, 4096), (8192, 8192), (28672, 8192))             # the last is of a model of 70 billion weights
REACHED = 0.85                                                   # the goal
X = torch.bfloat16
BOUNDS = {"memory": "memory", "busy": "instructions", "chain": "latency", "cached": "L2 cache", "first": "start"}


class Part(NamedTuple):
    """For a weight of one shape: shares of the bandwidth, modelled and at most; the kernel's bottleneck, and the limit by it."""

    reached: float
    most: float
    bound: str
    limit: float


class Reach(NamedTuple):
    """The results of a storage: shares of the bandwidth for SHAPES in order, and the kernel for the last."""

    format: str
    storage: str
    kernel: str
    parts: tuple[Part, ...]

    @property
    def part(self) -> Part:
        """Of the largest weight."""
        return self.parts[-1]


def reaches(gpu: Gpu) -> Iterator[Reach]:
    """The best storage of every format, and of every choice of parameters that chooses kernels."""
    best: dict[str, tuple[float, PackedWeight]] = {}
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        for packed in storages(SHAPES[-1]):
            name = _format_of(packed)
            reached = part_of(packed, gpu).reached
            if reached > best.get(name, (0.0, packed))[0]:
                best[name] = reached, packed
        for name, (_, packed) in best.items():
            weights = [*(_of_shape(packed, shape) for shape in SHAPES[:-1]), packed]
            kernel = plan.choice(packed, 1, X, META).options[0].candidate.kind
            yield Reach(name, packed.storage, kernel, tuple(part_of(weight, gpu) for weight in weights))


def _format_of(packed: PackedWeight) -> str:
    """The format, and the parameters that choose kernels."""
    storage, _, params = costs.storage_key(packed).partition(" ")
    return f"{storage.partition('.')[0]} {params}".strip()


def _of_shape(packed: PackedWeight, shape: tuple[int, int]) -> PackedWeight:
    """A weight in the same storage."""
    return next(weight for weight in storages(shape, packed.format.name)
                if costs.storage_key(weight) == costs.storage_key(packed))


def part_of(packed: PackedWeight, gpu: Gpu) -> Part:
    """What one storage reaches in the way that its plan takes."""
    [option, *_] = plan.choice(packed, 1, X, META).options
    ideal = packed.nbytes / (gpu.bandwidth * 1e9 * costs.REACHABLE)
    most = ideal / (costs.LAUNCH + costs.LATENCY + ideal)
    if option.candidate.kind == "decode":
        return Part(ideal / option.seconds, most, "decoded weights", ideal / option.seconds)
    terms = costs.launch_terms(packed, option.candidate, 1, X, gpu)
    bound = max(BOUNDS, key=lambda name: float(getattr(terms, name)))
    return Part(ideal / option.seconds, most, BOUNDS[bound], ideal / max(ideal, float(getattr(terms, bound))))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.bandwidth", description=__doc__)
    parser.add_argument("--gpu", default="h200", choices=list(GPUS))
    options = parser.parse_args()
    for reach in sorted(reaches(GPUS[options.gpu]), key=lambda reach: -reach.part.reached):
        parts = "  ".join(f"{part.reached:6.1%} of {part.most:6.1%}" for part in reach.parts)
        print(f"{parts}  {reach.format:32} {reach.storage:20} {reach.kernel:10} {reach.part.bound} {reach.part.limit:.0%}")


if __name__ == "__main__":
    main()
