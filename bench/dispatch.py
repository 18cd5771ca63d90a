"""How much slower each plan's choice is than the best candidate, for every storage, number of rows of x, shape and GPU.

Nothing is timed: seconds are modelled (qdsl/runtime/gpu/costs.py).  `python -m bench --only dispatch` models both sides by the
shipped counts, and so shows what classes of rows cost.  For SAMPLE it compiles the kernels for their GPUs.

`python -m bench.dispatch` compiles the kernels of all products for their own GPUs, and compares by these counts.  It shows what
the shipped table costs by having counts of few shapes.  It takes a night of one core.  Counts are kept in $QDSL_CACHE: re-run
the same command to resume.  Several processes may share the file, for example one per GPU.
"""

from __future__ import annotations

import argparse
import importlib
import itertools
import json
import math
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch

from bench.compiled_costs import CompiledCosts, Counted, NotCounted
from bench.figure import Figure
from qdsl.core import places
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, costs, plan
from qdsl.runtime.gpu.devices import ARCHS, GPUS, Gpu
from qdsl.runtime.weight import stream_kernels

SHAPES = ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (152064, 4096))
ROWS = (*range(1, 18), 24, 32, 33, 48, 64, 65, 96, 127, 128, 129, 160, 255, 256, 257, 300, 384, 385, 511, 512,
        513, 769, 1000, 1025, 1153, 4097, 5000, 7000)
# Rows of x from 1 to 512 to compare.  Between two of them every kernel has the same grid, and only bytes of x and out grow.
EDGES = (1, 2, 3, *(rows for tile in range(0, 512, 8) for rows in (tile + 1, tile + 8) if rows > 3))
COMPARED = ("a100", "h100", "h200", "b200", "rtx4090", "rtx5090")
HEADS = ["GPU", "products", "above 1.15", "worst", "which"]
RESULTS = Path(__file__).parent / "results"
RECORD, KERNELS = RESULTS / "dispatch.json", RESULTS / "dispatch-kernels.jsonl"
PAIRED_ROWS = (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256, 257, 512)
META, X = torch.device("meta"), torch.bfloat16
WORST = 1.15                                                     # a choice may take this many times the best candidate's seconds
EXACT = 1.1                                                      # ratios above it are exact; others are known to be below it


class Product(NamedTuple):
    """A product to compare: a storage of a format, its parameters, the number of rows of x, the shape and the GPU."""

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
        return stream_kernels.with_typical_streams(form.empty(self.shape, self.storage, **form.complete(self.params)))


# A sample with every GPU and shape and each kind of storage and number of rows, in different pairs.
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


def storages(shape: tuple[int, int], only: str = "") -> Iterator[PackedWeight]:
    """A meta weight [N, K] of every storage of every shipped format; streams are as large as those of normal weights.

    only: prefix of the format's name.
    """
    for path in sorted(places.specs().glob(f"{only}*.yaml")):
        form = importlib.import_module(f"qdsl.generated.{path.stem}").FORMAT
        for key, variant in form.variants.items():
            for storage in variant.storages:
                try:
                    yield stream_kernels.with_typical_streams(form.empty(shape, storage, **dict(zip(form.by, key, strict=True))))
                except FormatError:
                    continue                                     # the storage has no weight of this shape


# -- by the shipped counts --------------------------------------------------------------------------------------------


def ratios(packed: PackedWeight, gpu: Gpu, rows: Iterable[int] = ROWS) -> Iterator[tuple[float, int]]:
    """The plan's seconds divided by the best candidate's, with the number of rows of x, for each of `rows`."""
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        for m in rows:
            chosen = costs.seconds(packed, plan.best(packed, m, X, META), m, X, gpu)
            best = min(costs.seconds(packed, candidate, m, X, gpu) for candidate in plan.candidates(packed, m, X, META))
            yield chosen / best, m


def has_counts(packed: PackedWeight, gpu: Gpu) -> bool:
    """Whether the table has counts of a storage for the GPU's architecture or a similar one."""
    return costs.counted_on(costs.storage_key(packed), "matvec", gpu.arch) is not None or \
        costs.counted_on(costs.storage_key(packed), "dequantize", gpu.arch) is not None


# -- by counts of compiled kernels ------------------------------------------------------------------------------------


def compiled_ratio(product: Product, compiled: CompiledCosts, nearest: int | None = None, exact: float = EXACT) -> float:
    """The plan's seconds divided by the best candidate's, by counts of compiled kernels; Triton must not interpret.

    nearest: compare only this many candidates, the best ones by the table; by default all.  A candidate is not compiled if
    loading its bytes alone takes so long that the ratio stays below `exact`.  Such a ratio is returned too small, but at least 1.
    """
    return compared(product.weight(), product.m, GPUS[product.gpu], compiled, nearest, exact)


def compared(packed: PackedWeight, m: int, gpu: Gpu, compiled: CompiledCosts, nearest: int | None = None,
             exact: float = EXACT) -> float:
    """compiled_ratio of a weight and m rows of x on a GPU; inf if the kernel that the plan chooses does not compile."""
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        first, *others = plan.choice(packed, m, X, META).options[:nearest]
        chosen = best = _compiled_seconds(packed, first.candidate, m, gpu, compiled)
        for option in others:
            if min(best, chosen / exact) > least_seconds(packed, option.candidate, m, gpu):
                best = min(best, _compiled_seconds(packed, option.candidate, m, gpu, compiled))
    return chosen / best if chosen < float("inf") else chosen


def _compiled_seconds(packed: PackedWeight, candidate: costs.Candidate, m: int, gpu: Gpu, compiled: CompiledCosts) -> float:
    counted = compiled.counted(packed, candidate, m, gpu.arch) or Counted(None)
    if counted.refused:
        return float("inf")
    cost = counted.cost and replace(counted.cost, spills=counted.spills)
    seconds = costs.seconds(packed, candidate, m, X, gpu, cost)
    if seconds < least_seconds(packed, candidate, m, gpu):
        raise ValueError(f"{candidate} of {costs.storage_key(packed)}, M = {m}, takes less than its bytes on a {gpu.title}")
    return seconds


def least_seconds(packed: PackedWeight, candidate: costs.Candidate, m: int, gpu: Gpu) -> float:
    """Modelled seconds if the candidate's kernel only loaded and stored: a lower bound for every kernel with its grid."""
    is_gemm = candidate.kind == "gemm"                           # whose matrix instructions are a term of the model
    weights = 1 if is_gemm else packed.shape[0] * packed.shape[1]
    loads = costs.Cost(registers=1, shared=0, warps=4 if is_gemm else 1, step=weights, trip=0.0, fixed=0.0, chain=0.0,
                       chain_loads=0.0, start=0.0, start_loads=0.9)
    return costs.seconds(packed, candidate, m, X, gpu, loads)


# -- which products ---------------------------------------------------------------------------------------------------


def products(gpus: Sequence[str], only: str = "") -> Iterator[tuple[PackedWeight, int, str]]:
    """Every product to compare, one storage after the other: a weight, a number of rows of x and a GPU."""
    by_storage: dict[str, list[PackedWeight]] = {}
    for packed in (packed for shape in SHAPES for packed in storages(shape, only)):
        by_storage.setdefault(costs.storage_key(packed), []).append(packed)
    for weights in by_storage.values():
        yield from itertools.product(weights, EDGES, gpus)


def pairs(only: str = "") -> Iterator[tuple[PackedWeight, int, str]]:
    """A sample of products: every storage, and every pair of values of (kernels of a storage, GPU, rows of x, shape)."""
    weights = {shape: {costs.storage_key(packed): packed for packed in storages(shape, only)} for shape in SHAPES}
    kinds = {key: _kernels_of(packed) for by_key in weights.values() for key, packed in by_key.items()}
    left = set().union(*(_pairs(setting) for kind in {*kinds.values()} for setting in _settings(kind)))
    uses: Counter[object] = Counter()
    for turn in range(len(PAIRED_ROWS) * len(kinds)):
        key = [*kinds][turn % len(kinds)]
        legal = [setting for setting in _settings(kinds[key]) if key in weights[setting[3]]]
        setting = max(legal, key=lambda one: (len(left & _pairs(one)), -sum(map(uses.__getitem__, one[1:]))))
        if turn < len(kinds) or left & _pairs(setting):
            left -= _pairs(setting)
            uses.update(setting[1:])
            yield weights[setting[3]][key], setting[2], setting[1]


def _settings(kind: tuple[object, ...]) -> list[tuple[tuple[object, ...], str, int, tuple[int, int]]]:
    return list(itertools.product([kind], COMPARED, PAIRED_ROWS, SHAPES))


def _pairs(setting: tuple[object, ...]) -> set[frozenset[object]]:
    return {frozenset(pair) for pair in itertools.combinations(setting, 2)}


def _kernels_of(packed: PackedWeight) -> tuple[object, ...]:
    """The properties that decide which kernels a storage has: its kernels, group sizes and the long axis of tiles."""
    kernels = packed.layout.kernels
    lanes = kernels.matrix_unit
    if lanes is None:
        return bool(packed.layout.streams), kernels.last, kernels.sums
    return (*lanes.families, lanes.records is not None,
            min(lanes.sizes(packed.sizes), default=0), lanes.codes.in_order)


# -- results ----------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """A product and its ratio, the plan's seconds divided by the best candidate's; exact above EXACT."""

    product: Product
    ratio: float


def rows(every: Iterable[tuple[PackedWeight, int, str]], compiled: CompiledCosts, seconds: float = math.inf) -> Iterator[Row]:
    """Compares products until `seconds` have passed.  Products that need a kernel which may not be compiled are skipped."""
    end = time.monotonic() + seconds
    for packed, m, gpu in every:
        if time.monotonic() > end:
            break
        params = {name: packed.params[name] for name in packed.format.by}
        try:
            yield Row(Product(packed.format.name, packed.storage, params, m, packed.shape, gpu),
                      compared(packed, m, GPUS[gpu], compiled))
        except NotCounted:
            continue


@dataclass
class Summary:
    """The products of a GPU: how many were compared, how many ratios exceed WORST, and the worst one."""

    products: int = 0
    above: int = 0
    worst: Row | None = None

    def add(self, row: Row) -> None:
        self.products += 1
        self.above += row.ratio > WORST
        if self.worst is None or row.ratio > self.worst.ratio:
            self.worst = row

    def cells(self) -> list[str]:
        """A line of the table below HEADS."""
        assert self.worst is not None
        product, ratio = self.worst
        return [GPUS[product.gpu].title, f"{self.products:,}", str(self.above),
                *([f"{ratio:.2f}", str(product).rpartition(",")[0]] if ratio > EXACT else [f"at most {EXACT:.2f}", ""])]


def summaries(compared_rows: Iterable[Row]) -> dict[str, Summary]:
    """A summary of each GPU's products."""
    by_gpu = {gpu: Summary() for gpu in COMPARED}
    for row in compared_rows:
        by_gpu[row.product.gpu].add(row)
    return {gpu: summary for gpu, summary in by_gpu.items() if summary.products}


def recorded() -> list[Row]:
    """The rows that the file RECORD holds."""
    return [Row(Product(form, storage, params, m, tuple(shape), gpu), ratio)
            for form, storage, params, m, shape, gpu, ratio in json.loads(RECORD.read_text(encoding="utf-8"))["products"]]


def record(compared_rows: Sequence[Row], compiled: CompiledCosts) -> None:
    """Write rows to RECORD, and the counts of the kernels that were compared to KERNELS."""
    lines = ",\n".join(json.dumps([*row.product, round(row.ratio, 3)]) for row in compared_rows)
    RECORD.write_text(f'{{"products": [\n{lines}\n]}}\n', encoding="utf-8")
    KERNELS.write_text("\n".join(compiled.lines()) + "\n", encoding="utf-8")


def figures(rounds: int) -> Iterator[Figure]:
    """The worst ratio of every GPU by the shipped counts, and the ratio of every product of SAMPLE; `rounds` is unused."""
    for name, gpu in GPUS.items():
        worst, where, count, counted = 1.0, "", 0, 0
        for shape in SHAPES:
            for packed in storages(shape):
                counted += has_counts(packed, gpu)
                count += 1
                for ratio, m in ratios(packed, gpu):
                    if ratio > worst:
                        worst, where = ratio, f"{costs.storage_key(packed)}, M = {m}, {shape[0]} x {shape[1]}"
        yield Figure(f"{name}: the plan's seconds divided by the best candidate's", "x", [worst], WORST, more=False,
                     note=f"{counted} of {count} weights have counts; {where}")
    compiled = CompiledCosts()
    for product in SAMPLE:
        ratio = compiled_ratio(product, compiled)
        yield Figure(f"{product}: the plan's seconds divided by the best candidate's, compiled", "x", [ratio], WORST, more=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the comparison; returns 1 if some plan's choice takes more than WORST times the best candidate's seconds."""
    parser = argparse.ArgumentParser(prog="python -m bench.dispatch", description=(__doc__ or "").split("\n\n")[2])
    parser.add_argument("--gpu", action="append", choices=COMPARED, help="may be repeated; by default all of them")
    parser.add_argument("--only", default="", metavar="PREFIX", help="formats whose name begins so")
    parser.add_argument("--pairs", action="store_true", help="a sample: GPU, rows, shape and kind of storage meet in pairs")
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no product after so many")
    parser.add_argument("--counted", action="store_true", help="only products whose kernels are all counted; compile none")
    parser.add_argument("--record", action="store_true",
                        help=f"with --pairs: write rows and kernels to {RECORD.name} and {KERNELS.name}")
    options = parser.parse_args(arguments)
    if options.record and not options.pairs:
        parser.error("--record needs --pairs")
    gpus, compiled = options.gpu or COMPARED, CompiledCosts(compiles=not options.counted)
    every = pairs(options.only) if options.pairs else products(gpus, options.only)
    compared_rows: list[Row] = []

    def shown(row: Row) -> Row:
        compared_rows.extend([row] if options.pairs else ())     # all products would take a gigabyte
        if row.ratio > WORST:
            print(f"{row.product}: {row.ratio:.2f}", file=sys.stderr, flush=True)
        return row

    by_gpu = summaries(map(shown, rows((product for product in every if product[2] in gpus), compiled, options.seconds)))
    lines = [HEADS, ["---"] * len(HEADS), *(summary.cells() for summary in by_gpu.values())]
    print("\n".join(f"| {' | '.join(cells)} |" for cells in lines))
    print(f"\n{compiled.fresh} kernels were compiled, {len(compiled.used)} compared.")
    if options.record:
        record(compared_rows, compiled)
    return int(any(summary.above for summary in by_gpu.values()))


if __name__ == "__main__":
    sys.exit(main())
