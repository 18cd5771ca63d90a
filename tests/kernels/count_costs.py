"""Kernels of the counted table compiled anew: `python -m tests.kernels.count_costs`; exit code 1 where a count differs.

A sample: every kind of kernel, configuration and architecture with storages of different families.  Then what plans choose for
some products, against the next best ways: all are compiled for GPUs for which other architectures' counts stand in.  Then the
pairwise sample of bench/results/dispatch.json, by the counts of compiled kernels that are kept beside it; rows of which a kernel
has changed since are left out.  Triton must not be interpreting.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from bench import dispatch
from bench.compiled_costs import CompiledCosts
from bench.costs import calls, counted, row, weights
from qdsl.runtime.gpu import costs
from tests.support.covering import quarter_of

SAMPLE = (
    ("sm_90", "q4_0.planar", ("gemv R=1", "skinny R=2", "skinny R=1 16", "tile_gemm R=1 16")),
    ("sm_90", "q4_0.gguf", ("matvec", "dequantize")),
    ("sm_90", "fp8_block.safetensors", ("skinny R=1",)), ("sm_90", "iq2_xxs.gguf", ("matvec",)),
    ("sm_90", "hlane.hlane", ("skinny 1",)), ("sm_80", "q6_k.planar", ("gemv R=2",)),
)
CHOSEN = {"q4_k.planar, M = 8, 4096 x 4096, h200": 2, "int_group.awq, M = 1, 4096 x 4096, b200": 2}       # ways that are compared


def main() -> int:
    wrong = [*different_counts(), *slow_choices(), *slow_in_pairs()]
    print("\n".join(wrong))
    return int(bool(wrong))


def different_counts() -> list[str]:
    wrong, compiled = [], CompiledCosts(Path(os.devnull))
    for arch, storage, keys in SAMPLE:
        packed = next(packed for packed in weights(storage.split(".")[0]) if costs.storage_key(packed) == storage)
        launched = dict(calls(packed, arch))
        for key in keys:
            before, now = counted()[arch][storage][key], row(launched[key], arch, compiled)
            if before != now:
                wrong.append(f"{arch} {storage} {key}: the table says {before}, the compiler {now}")
    return wrong


def slow_choices() -> list[str]:
    products = {str(product): product for product in dispatch.SAMPLE}
    compiled = CompiledCosts(Path(os.devnull))
    ratios = {name: dispatch.compiled_ratio(products[name], compiled, nearest)
              for name, nearest in quarter_of(list(CHOSEN.items()))}
    return [f"{name}: what the plan chooses takes {ratio:.2f} times as long as another way" for name, ratio in ratios.items()
            if ratio > dispatch.WORST]


def slow_in_pairs() -> list[str]:
    """Products of the record whose choice is too slow, by kernels that are kept; also where no row is left to compare."""
    products = [kept.product for kept in dispatch.recorded()]
    compiled = CompiledCosts(dispatch.KERNELS, compiles=False)
    left = list(dispatch.rows(((product.weight(), product.m, product.gpu) for product in products), compiled))
    slow = [f"{product}: the choice takes {ratio:.2f} times the best way" for product, ratio in left if ratio > dispatch.WORST]
    return slow if left else ["all kernels of bench/results/dispatch.json have changed"]


if __name__ == "__main__":
    sys.exit(main())
