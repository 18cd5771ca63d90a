"""What plans choose beside the best of all ways, for every storage, number of rows, shape and GPU, by the shipped counts.

Nothing is timed or compiled: seconds are modelled (qdsl/runtime/gpu/costs.py).  Plans choose for classes of rows; a ratio says
how much slower a choice is than the best way for the rows themselves.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator

import torch

from bench.figure import Figure
from qdsl.core import places
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, plan
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu
from qdsl.runtime.weight import streams

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (152064, 4096))
ROWS = (*range(1, 18), 24, 32, 33, 48, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257, 300, 384, 385, 511, 512,
        513, 769, 1000, 1025, 1153, 4097, 5000, 7000)
META, X = torch.device("meta"), torch.bfloat16
WORST = 1.15                                                     # times the best way's seconds that a choice may take


def storages(shape: tuple[int, int]) -> Iterator[PackedWeight]:
    """A weight on meta of every storage of every format that ships, streams as large as those of normal weights."""
    for path in sorted(places.specs().glob("*.yaml")):
        form = importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT
        for key, variant in form.variants.items():
            for storage in variant.storages:
                try:
                    yield streams.usual(form.empty(shape, storage, **dict(zip(form.by, key, strict=True))))
                except FormatError:
                    continue                                     # the storage has no weight of this shape


def ratios(packed: PackedWeight, gpu: Gpu, rows: Iterable[int] = ROWS) -> Iterator[tuple[float, int]]:
    """By how much what a plan chooses is slower than the best candidate, with the number of rows of x."""
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        for m in rows:
            chosen = costs.seconds(packed, plan.best(packed, m, X, META), m, X, gpu)
            best = min(costs.seconds(packed, candidate, m, X, gpu) for candidate in plan.candidates(packed, m, X, META))
            yield chosen / best, m


def has_counts(packed: PackedWeight, gpu: Gpu) -> bool:
    """Whether the table has counts of a storage for the GPU's architecture, or one whose counts serve it."""
    return any(costs.storage_key(packed) in costs.table().get(arch, {}) for arch in costs.similar_archs(gpu.arch))


def figures(rounds: int) -> Iterator[Figure]:
    """The worst ratio on every GPU; `rounds` are of no use."""
    for name, gpu in GPUS.items():
        worst, where, count, counted = 1.0, "", 0, 0
        for shape in SHAPES:
            for packed in storages(shape):
                counted += has_counts(packed, gpu)
                count += 1
                for ratio, m in ratios(packed, gpu):
                    if ratio > worst:
                        worst, where = ratio, f"{costs.storage_key(packed)}, M = {m}, {shape[0]} x {shape[1]}"
        yield Figure(f"{name}: the plan's choice beside the best way", "x", [worst], WORST, more=False,
                     note=f"{counted} of {count} weights have counts; {where}")
