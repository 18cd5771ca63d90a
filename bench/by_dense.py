"""`python -m bench.by_dense`: modelled time of products by that of the vendor's dense bfloat16 matmul; below 1 is faster.

Nothing is timed, and no GPU is needed.  Weights are where a loader puts them (runtime/gpu/placement.py): in storage planar where
that is faster, by the model, for the GPU.  --missed lists the products that miss the goals, grouped by cause.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from unittest.mock import patch

import torch

from bench import dispatch
from qdsl.analyze.gpus import GPUS, Gpu, arch_of, gpu_of
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, placement, plan
from qdsl.runtime.gpu.families.lanes import TileGemm
from qdsl.runtime.weight.planar import planar_template

SHAPE = (8192, 8192)
COMPARED = ("a100", "rtx4090", "h100", "h200", "b200", "mi300x")
ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096)
GOALS = {1: 1.0, 16: 1.0, 32: 1.0, 64: 1.0, 128: 1.1, 256: 1.35, 512: 1.35, 1024: 1.35, 2048: 1.2, 4096: 1.1}
BITS = 4.0, 8.6                                                  # per stored weight, scales included
META, X = torch.device("meta"), torch.bfloat16
# Of docs/performance.md: storages as checkpoints have them, and rows of x.
SHOWN: tuple[tuple[str, str, dict[str, int | str]], ...] = (
    ("int_group", "gptq_v2", {"bits": 4}), ("int_group", "awq", {"bits": 4}), ("q4_0", "gguf", {}), ("q4_k", "gguf", {}),
    ("q6_k", "gguf", {}), ("q8_0", "gguf", {}), ("nf4", "bitsandbytes", {}), ("ocp_mxfp4", "compressed_tensors", {}),
    ("fp8_block", "safetensors", {}), ("fp8_channel", "safetensors", {}), ("int8_channel", "safetensors", {}))
SHOWN_ROWS = (1, 16, 64, 256, 4096)
README, README_GPUS, README_ROWS = (SHOWN[0], SHOWN[3], SHOWN[5], SHOWN[8]), ("a100", "rtx4090", "h200", "b200"), (1, 16, 64, 256)


@dataclass(frozen=True)
class Product:
    """The modelled time of one product by that of the dense matmul.

    placed: the storage that a loader gives the weight.  cause: what takes the time.
    """

    storage: str
    placed: str
    gpu: str
    rows: int
    kernel: str
    of_dense: float
    cause: str

    @property
    def is_missed(self) -> bool:
        """Whether it takes longer than the goal."""
        return self.of_dense > GOALS[self.rows]


def products(packed: PackedWeight, gpu: Gpu, rows: Iterable[int] = ROWS) -> Iterator[Product]:
    """The products of a weight on meta, placed as a loader does for a GPU."""
    with configure.assumed(arch_of(gpu.arch).capability // 10, gpu.multiprocessors, gpu), \
            patch.object(placement, "runs_kernels", lambda device: True):
        gain = placement.planar_gain(packed, META)
        placed = planar_template(packed) if gain > placement.GAIN else packed
        for m in rows:
            chosen = plan.choice(placed, m, X, META)
            best = next(option for option in chosen.options if option.candidate == chosen.candidate)
            dense = costs.matmul_seconds(m, *packed.shape, X.itemsize, gpu)
            yield Product(costs.storage_key(packed), placed.storage, gpu.name, m, chosen.candidate.kind, best.seconds / dense,
                          cause(placed, chosen.candidate, m, gpu))


def cause(packed: PackedWeight, chosen: costs.Candidate, m: int, gpu: Gpu) -> str:
    """What takes the time of a product: a kernel that there is not, or the largest part of the chosen one's time."""
    kernels, family, kind = packed.layout.kernels.matrix_unit, TileGemm(), chosen.kind
    if not gpu.is_nvidia:
        return f"AMD has no kernels of its own: {kind}"
    if kernels is None or family.name not in kernels.families:
        return f"the storage has no {family.name}: {kind}"
    if 1 < m <= 256 and not family.candidates(plan.Product(packed, m, X, META)):
        counted = costs.counted_on(costs.storage_key(packed), family.name, gpu.arch)
        return f"{family.name} {'spills' if counted else 'is not counted'}: {kind}"
    if kind != "decode":
        terms = costs.launch_terms(packed, chosen, m, X, gpu)
        return f"{max(('memory', 'busy', 'chain'), key=lambda part: getattr(terms, part))} of {kind}"
    n, k = packed.shape
    least = (packed.nbytes + X.itemsize * n * k) / (gpu.bandwidth * 1e9 * costs.REACHABLE) + costs.LAUNCH
    dense = costs.matmul_seconds(m, n, k, X.itemsize, gpu)
    return "bytes of decode" if least + dense > GOALS[m] * dense else "instructions of decode"


def weights(only: str = "") -> Iterator[PackedWeight]:
    """A meta weight of every storage of 4 to 8 bits without an entropy code."""
    for packed in dispatch.storages(SHAPE, only):
        if BITS[0] <= 8 * packed.nbytes / (SHAPE[0] * SHAPE[1]) <= BITS[1] and not packed.layout.streams:
            yield packed


def shown(storages: Sequence[tuple[str, str, dict[str, int | str]]] = SHOWN, gpus: Sequence[str] = COMPARED,
          rows: Sequence[int] = SHOWN_ROWS) -> Iterator[list[str]]:
    """A line per storage: its name, and by GPU the ratios at these numbers of rows of x."""
    for name, storage, params in storages:
        packed = dispatch.Product(name, storage, params, 1, SHAPE, "").weight()
        yield [f"`{costs.storage_key(packed)}`", *(" / ".join(f"{one.of_dense:.2f}" for one in products(
            packed, gpu_of(gpu), rows)) for gpu in gpus)]


def summary(results: Sequence[Product]) -> Iterator[str]:
    """For each GPU: how many storages miss the goal at each number of rows, the median and the worst."""
    for gpu in dict.fromkeys(product.gpu for product in results):
        for rows, goal in GOALS.items():
            some = sorted((one for one in results if (one.gpu, one.rows) == (gpu, rows)), key=lambda one: one.of_dense)
            if some:
                above, worst = sum(one.is_missed for one in some), some[-1]
                yield (f"{gpu}, {rows} rows: {above} of {len(some)} above {goal}; median {some[len(some) // 2].of_dense:.2f}, "
                       f"worst {worst.of_dense:.2f} ({worst.storage} as {worst.placed}, {worst.kernel})")


def missed(results: Iterable[Product]) -> Iterator[str]:
    """For each cause: how many products miss the goal, by GPU and rows of x, then their storages with the worst ratio."""
    groups: dict[str, list[Product]] = defaultdict(list)
    for one in results:
        if one.is_missed:
            groups[one.cause].append(one)
    for name, group in sorted(groups.items(), key=lambda pair: -len(pair[1])):
        yield f"{len(group)} products: {name}"
        for gpu in dict.fromkeys(one.gpu for one in group):
            of_gpu = [one for one in group if one.gpu == gpu]
            rows = ", ".join(f"{count} at {m}" for m, count in sorted(Counter(one.rows for one in of_gpu).items()))
            worst: dict[str, float] = {}
            for one in of_gpu:
                worst[one.storage] = max(one.of_dense, worst.get(one.storage, 0.0))
            yield f"  {gpu}: {rows} rows"
            ordered = sorted(worst, key=worst.__getitem__, reverse=True)
            yield "    " + ", ".join(f"{storage} {worst[storage]:.2f}" for storage in ordered)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.by_dense", description=__doc__)
    parser.add_argument("--only", default="", metavar="PREFIX", help="formats whose name begins so")
    parser.add_argument("--gpu", action="append", choices=list(GPUS))
    parser.add_argument("--missed", action="store_true", help="list products that miss the goals, by cause")
    parser.add_argument("--json", type=Path, metavar="FILE")
    options = parser.parse_args()
    results = [product for packed in weights(options.only) for name in options.gpu or COMPARED
             for product in products(packed, gpu_of(name))]
    print("\n".join((missed if options.missed else summary)(results)))
    if options.json:
        options.json.write_text(json.dumps([asdict(product) for product in results], indent=0))


if __name__ == "__main__":
    main()
