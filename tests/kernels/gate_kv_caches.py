"""Instructions of paged attention per cached byte, as JSON: `python -m tests.kernels.gate_kv_caches`."""

from __future__ import annotations

import json
from dataclasses import replace

import torch

from bench.attention import by_hand, derived, per_byte
from qdsl.analyze.gpus import arch_of
from qdsl.runtime.gpu import configure

LIMITS = {("int8", torch.float16): 6.6, ("int8", torch.bfloat16): 6.9, ("fp8", torch.bfloat16): 5.3}
CONFIGS = ((64, 4), (32, 2))                                     # tokens of a tile, and warps, of the one by hand


def main() -> None:
    arch = "sm_90"
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for (name, dtype), limit in LIMITS.items():
            call = derived(name, dtype)
            counts = [per_byte(replace(by_hand(call), constants={**by_hand(call).constants, "BT": tile},
                                       options={**call.options, "num_warps": warps}), arch) for tile, warps in CONFIGS]
            print(json.dumps({"format": name, "q": str(dtype)[6:], "default": per_byte(call, arch), "by_hand": min(counts),
                              "limit": limit}))


if __name__ == "__main__":
    main()
