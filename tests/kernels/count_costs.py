"""Kernels of the shipped table counted anew: `python -m tests.kernels.count_costs`; exit code 1 where a count differs.

A pairwise sample: every kind of kernel, configuration and architecture with storages of different families.  Then what plans
choose for some products, against the next best ways: all are compiled for GPUs for which other architectures' counts stand in.
Triton must not be interpreting.
"""

from __future__ import annotations

import sys

from bench import dispatch
from bench.costs import calls, row, weights
from qdsl.runtime.gpu import costs

SAMPLE = (
    ("sm_90", "q4_0.planar", ("gemv R=1", "skinny R=2", "tile_gemm R=1 16")), ("sm_90", "q4_0.gguf", ("matvec", "dequantize")),
    ("sm_90", "fp8_block.safetensors", ("skinny R=1",)), ("sm_90", "iq2_xxs.gguf", ("matvec",)),
    ("sm_90", "hlane.hlane", ("skinny 1",)), ("sm_80", "q6_k.planar", ("gemv R=2",)),
)
CHOSEN = {"q4_k.planar, M = 8, 4096 x 4096, h200": 2, "int_group.awq, M = 1, 4096 x 4096, b200": 2}       # ways that are compared


def main() -> int:
    differing = 0
    for arch, storage, keys in SAMPLE:
        packed = next(packed for packed in weights(storage.split(".")[0]) if costs.storage_key(packed) == storage)
        launched = dict(calls(packed, arch))
        for key in keys:
            shipped, counted = costs.table()[arch][storage][key], row(launched[key], arch)
            if shipped != counted:
                differing += 1
                print(f"{arch} {storage} {key}: the table says {shipped}, the compiler {counted}")
    products = {str(product): product for product in dispatch.SAMPLE}
    for name, nearest in CHOSEN.items():
        if (ratio := dispatch.compiled_ratio(products[name], nearest)) > dispatch.WORST:
            differing += 1
            print(f"{name}: what the plan chooses takes {ratio:.2f} times as long as another way")
    return int(differing > 0)


if __name__ == "__main__":
    sys.exit(main())
