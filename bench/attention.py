"""Counts instructions of paged attention per cached byte, for kernels derived from a format and a hand-written kernel.

`python -m bench.attention` prints SASS instructions of the loop: of the derived kernel as launched, and of the hand-written one
with its best tile.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from typing import Any

import torch

from bench.attention_kernel import hand_written, hand_written_latent
from qdsl.analyze import sass
from qdsl.analyze.compile import compile_launch
from qdsl.analyze.gpus import arch_of
from qdsl.kv_cache import CacheFormat, allocate
from qdsl.kv_cache.cache_launches import attention_calls
from qdsl.runtime.gpu import configure
from qdsl.runtime.libraries.call import Call

FORMATS = {"int8": CacheFormat("int8_channel", scale_type="f32", divisor=127),
           "fp8": CacheFormat("fp8_channel", scale_type="f32"), "latent": CacheFormat("fp8_ds_mla")}
CONFIGS = ((128, 4), (64, 4), (32, 2), (32, 1))                  # tokens of a tile, warps
LATENT_CONFIGS = ((32, 4), (64, 8), (64, 4))
BLOCK, D, SEQUENCES, HEADS, GROUP = 128, 128, 8, 8, 4
LATENT_GROUP, ROW = 16, 656


def derived(name: str, dtype: torch.dtype, device: str = "meta") -> Call:
    """The launch of the derived kernel over 64 blocks of cache for every one of 8 sequences."""
    heads, head_dim, value_dim, queries = (1, 576, 512, LATENT_GROUP) if name == "latent" else (HEADS, D, None, HEADS * GROUP)
    cache = allocate(FORMATS[name], blocks=64 * SEQUENCES, block_size=BLOCK, heads=heads, head_dim=head_dim, value_dim=value_dim,
                     device=device)
    q = torch.empty(SEQUENCES, queries, head_dim, dtype=dtype, device=device)
    tables = torch.empty(SEQUENCES, 64, dtype=torch.int32, device=device)
    lengths = torch.empty(SEQUENCES, dtype=torch.int32, device=device)
    return next(attention_calls(q, cache, tables, lengths, q.new_empty(SEQUENCES, queries, cache.value_dim), splits=8))


def by_hand(call: Call) -> Call:
    """The launch of the hand-written kernel on what the derived one is launched on."""
    named = dict(zip(call.kernel.arg_names, call.arguments, strict=False))
    constants = {name: call.constants[name] for name in ("SCALE", "BLOCK", "BH", "BT")}
    state = [named[name] for name in ("tables", "lengths", "partial", "weights", "PAGES")]
    if call.constants["SHARED"]:
        arguments = [named["q"], *named["keys"], *named["behind"], *state, named["G"]]
        return replace(call, kernel=hand_written_latent, arguments=tuple(arguments), constants=constants)
    (k, k_scale, *_), (v, v_scale, *_) = named["keys"], named["values"]
    arguments = [named["q"], k, k_scale, v, v_scale, *state, named["HEADS"], named["G"]]
    return replace(call, kernel=hand_written, arguments=tuple(arguments), constants={**constants, "D": call.constants["D"]})


def with_tile(call: Call, tokens: int, warps: int) -> Call:
    """The launch with tiles of so many tokens."""
    return replace(call, constants={**call.constants, "BT": tokens}, options={**call.options, "num_warps": warps})


def per_byte(call: Call, arch: str) -> float:
    """Instructions of the loop that a thread executes, for a byte of keys and values."""
    kernel = compile_launch(call, arch_of(arch))
    code = sass.parse(kernel.text)
    loop = sass.hot_loop(code)
    assert loop is not None
    return len(loop) * kernel.warps * 32 / (int(call.constants["BT"]) * token_bytes(call))


def token_bytes(call: Call) -> int:
    """Bytes of a token and head in codes and what lies among them: of keys and values, or of what is both."""
    return ROW if call.kernel is hand_written_latent or call.constants.get("SHARED") else 2 * int(call.constants["D"])


def rows(arch: str) -> Iterator[dict[str, Any]]:
    """Instructions per byte of the derived kernel, and of the one by hand by tile, for both formats and dtypes of q."""
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for name, dtype in product(FORMATS, (torch.float16, torch.bfloat16)):
            call = derived(name, dtype)
            yield {"format": name, "q": str(dtype)[6:], "arch": arch, "derived": per_byte(call, arch), "by_hand": {
                f"{tokens} tokens, {warps} warps": per_byte(with_tile(by_hand(call), tokens, warps), arch)
                for tokens, warps in (LATENT_CONFIGS if name == "latent" else CONFIGS)}}


if __name__ == "__main__":
    for row in rows(sys.argv[1] if len(sys.argv) > 1 else "sm_90"):
        print(json.dumps(row))
