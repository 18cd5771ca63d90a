"""Instructions of paged attention per cached byte, as JSON: `python -m tests.kernels.gate_kv_caches`."""

from __future__ import annotations

import json

import torch

from bench.attention import by_hand, derived, per_byte, with_tile
from qdsl.analyze.gpus import arch_of
from qdsl.runtime.gpu import configure
from tests.support.covering import quarter_of

LIMITS = {("int8", torch.float16): 6.1, ("int8", torch.bfloat16): 6.2, ("fp8", torch.bfloat16): 4.6,
          ("latent", torch.bfloat16): 7.3}
TILES = ((128, 4), (32, 1))                                      # tokens and warps with which the one by hand has the fewest
LATENT_TILES = ((64, 4),)


def main() -> None:
    arch = "sm_90"
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for (name, dtype), limit in quarter_of(list(LIMITS.items())):
            call = derived(name, dtype)
            counts = [per_byte(with_tile(by_hand(call), *tile), arch) for tile in (LATENT_TILES if name == "latent" else TILES)]
            print(json.dumps({"format": name, "q": str(dtype)[6:], "derived": per_byte(call, arch), "by_hand": min(counts),
                              "limit": limit}))


if __name__ == "__main__":
    main()
