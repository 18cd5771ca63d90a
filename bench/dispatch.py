"""What plans choose beside the best of all ways, for every storage, number of rows, shape and GPU.

Nothing is timed: seconds are modelled (qdsl/runtime/gpu/costs.py).  Over all products both sides are modelled by the shipped
counts, which shows what classes of rows cost.  For SAMPLE every way is compiled for the GPU, and modelled by the counts of this
very kernel: that shows what the table costs, whose counts are of few configurations and of some architectures.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple

import torch

from bench.figure import Figure
from qdsl.analyze import report
from qdsl.analyze.predict import cost
from qdsl.core import places
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, launch, plan
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu
from qdsl.runtime.weight import streams

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (152064, 4096))
ROWS = (*range(1, 18), 24, 32, 33, 48, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257, 300, 384, 385, 511, 512,
        513, 769, 1000, 1025, 1153, 4097, 5000, 7000)
META, X = torch.device("meta"), torch.bfloat16
WORST = 1.15                                                     # times the best way's seconds that a choice may take


class Product(NamedTuple):
    """A storage of a format, by its parameters that choose kernels, and x [m, K] on a GPU."""

    form: str
    storage: str
    params: dict[str, int | str]
    m: int
    shape: tuple[int, int]
    gpu: str

    def __str__(self) -> str:
        return f"{self.form}.{self.storage}, M = {self.m}, {self.shape[0]} x {self.shape[1]}, {self.gpu}"

    def weight(self) -> PackedWeight:
        form = importlib.import_module(f"qdsl.generated.{self.form}").FORMAT
        return streams.usual(form.empty(self.shape, self.storage, **form.complete(self.params)))


# Every GPU and shape, each kind of storage and number of rows, in pairs that differ.
SAMPLE = (
    Product("q4_k", "planar", {}, 8, SHAPES[0], "h200"), Product("q4_k", "gguf", {}, 1, SHAPES[2], "a100"),
    Product("int_group", "planar", {"bits": 4}, 16, SHAPES[3], "h100"),
    Product("int_group", "awq", {"bits": 4}, 1, SHAPES[0], "b200"),
    Product("q6_k", "planar", {}, 2, SHAPES[4], "rtx5090"), Product("nf4", "planar", {}, 1, SHAPES[1], "rtx4090"),
    Product("mxfp4", "planar", {}, 64, SHAPES[2], "b200"), Product("fp8_block", "safetensors", {}, 33, SHAPES[1], "rtx5090"),
    Product("squeezellm", "squeezellm", {"bits": 4}, 1, SHAPES[3], "h200"),
    Product("coreml_lut", "coreml", {"bits": 4}, 3, SHAPES[0], "rtx4090"),
    Product("iq2_xxs", "planar", {}, 4, SHAPES[1], "a100"), Product("q4_0", "planar", {}, 1, SHAPES[5], "b200"),
)


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


def compiled_ratio(product: Product, nearest: int | None = None) -> float:
    """The same for one product, by counts of the kernels compiled for its GPU; Triton must not be interpreting.

    nearest: how many ways are compared, the best ones by the table; all by default.
    """
    packed, gpu = product.weight(), GPUS[product.gpu]
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        options = plan.choice(packed, product.m, X, META).options[:nearest]
        compiled: dict[str, costs.Cost] = {}
        seconds = [costs.seconds(packed, option.candidate, product.m, X, gpu,
                                 _counts(packed, option.candidate, product.m, gpu, compiled)) for option in options]
    return seconds[0] / min(seconds)


def _counts(packed: PackedWeight, candidate: costs.Candidate, m: int, gpu: Gpu, compiled: dict[str, costs.Cost]) -> costs.Cost:
    """Counts of a candidate's kernel, kept in `compiled`.  Where programs share K, those of the kernel whose programs do not:
    what is added up after the loop has a term of its own.
    """
    n, k = packed.shape
    config = {key: 1 if key == "SPLIT" else value for key, value in candidate.config.items()}
    key = f"{candidate.kind} {config}"
    if key not in compiled:
        x, out, w = (torch.empty(size, dtype=X, device="meta") for size in ((m, k), (m, n), (n, k)))
        decodes = candidate.kind == "decode"
        [call] = launch.dequantize_calls(packed, w) if decodes else \
            launch.linear_calls(x, packed, None, out, candidate=replace(candidate, config=config))
        counts = report(call, gpu.arch)
        compiled[key] = replace(cost(counts), rows=counts.weights / k if decodes and counts.has_loop else 0.0)
    return compiled[key]


def has_counts(packed: PackedWeight, gpu: Gpu) -> bool:
    """Whether the table has counts of a storage for the GPU's architecture, or one whose counts serve it."""
    return costs.counted_on(costs.storage_key(packed), "matvec", gpu.arch) is not None or \
        costs.counted_on(costs.storage_key(packed), "dequantize", gpu.arch) is not None


def figures(rounds: int) -> Iterator[Figure]:
    """The worst ratio on every GPU, and that of every product of SAMPLE; `rounds` are of no use."""
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
    for product in SAMPLE:
        yield Figure(f"{product}: the plan's choice beside the best way, compiled", "x", [compiled_ratio(product)], WORST,
                     more=False)
