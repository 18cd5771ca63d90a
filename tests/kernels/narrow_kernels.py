"""Kernels for x in 8 bits, and for experts, compiled and counted, as JSON: `python -m tests.kernels.narrow_kernels`."""

from __future__ import annotations

import json
from collections.abc import Iterator

import torch

import qdsl
from bench.gpu import regimes
from qdsl.analyze import Report, launches, report
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.gpu.devices import GPUS, SCHEDULERS
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import experts

SHAPE = (4096, 4096)


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def quantized(name: str, rows: int) -> Call:
    """The product's launch, which comes after the one that quantizes x."""
    packed = launches.meta_weight(qdsl.load(name), SHAPE, "safetensors", {})
    return list(launch.quantized_calls(meta(rows, SHAPE[1]), packed, None, meta(rows, SHAPE[0])))[-1]


def few() -> Iterator[tuple[str, Call]]:
    """Of one weight with 8 rows of x, and of 8 experts that it is cut into, with as many rows each."""
    packed = launches.meta_weight(qdsl.load("q4_0"), SHAPE, "planar", {})
    x = meta(8, SHAPE[1], dtype=torch.float16)
    out = meta(8, SHAPE[0], dtype=x.dtype)
    yield "one", next(launch.linear_calls(x, packed, None, out, candidate=regimes.candidate(x, packed)))
    x, out = meta(64, SHAPE[1], dtype=x.dtype), meta(64, SHAPE[0] // 8, dtype=x.dtype)
    yield "experts", next(launch.grouped_calls(x, packed, meta(16, 3, dtype=torch.int32), None, out))


def every() -> Iterator[tuple[str, str, Call]]:
    for name, rows in (("fp8_block", 16), ("fp8_block", 128), ("fp8_block", 512), ("fp8_block", 4096), ("fp8_channel", 512),
                       ("int8_channel", 16), ("int8_channel", 512)):
        with configure.assumed(9, 132):
            yield f"{name} {rows}", "sm_90", quantized(name, rows)
    with configure.assumed(10, 148):
        yield "fp8_block 512", "sm_100", quantized("fp8_block", 512)
    yield "int8_channel 512", "sm_80", quantized("int8_channel", 512)
    configure.has_fp8 = lambda device: False
    yield "fp8_block 512", "sm_80", quantized("fp8_block", 512)
    for title, call in few():
        yield title, "sm_90", call
    for rows in (16, 128):
        x, w, out = meta(64, SHAPE[1]), meta(8 * 1024, SHAPE[1]), meta(64, 1024)
        call = experts.matmul_call(x, w, None, meta(64, dtype=torch.int64), meta(12, 3, dtype=torch.int32), out, rows)
        yield f"decoded experts {rows}", "sm_90", call


def seconds(counts: Report, pipe: str) -> float:
    """For which a part of an H100's schedulers works, where all of them have as much to do."""
    h100 = GPUS["h100"]
    cycles = counts.hot_cycles.get(pipe, 0.0) * counts.trips + counts.outside_cycles.get(pipe, 0.0)
    return cycles * counts.programs * counts.warps / (h100.multiprocessors * SCHEDULERS * h100.clock * 1e9)


if __name__ == "__main__":
    for title, arch, call in every():
        counts = report(call, arch)
        print(json.dumps({"title": title, "arch": arch, "spills": counts.spills, "stack": counts.stack,
                          "shared": counts.shared_bytes, "hot": counts.hot, "tensor": sorted(counts.tensor),
                          "issue": seconds(counts, "issue"), "matrices": seconds(counts, "tensor")}), flush=True)
