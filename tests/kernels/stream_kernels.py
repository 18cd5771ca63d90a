"""What the kernels of entropy codes come to, as JSON: `python -m tests.kernels.stream_kernels sm_90`.

They are compiled for the architecture, and for NVIDIA's counted.  Triton must not be interpreting.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qdsl.analyze import report, sass
from qdsl.analyze.compile import compile_launch, specialize_arguments
from qdsl.analyze.counts import count_instructions
from qdsl.analyze.gpus import arch_of
from qdsl.analyze.launches import meta_weight
from qdsl.runtime.gpu import configure, launch
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight import stream_kernels

SHAPE = (4096, 4096)
# Windows of 64 bits: codes of normal weights have 2.591 bits, and the shortest 2, so that a window is looked up 32 times.
SYMBOLS, STEPS = 64 / 2.591, 32


def launches(form: str) -> Iterator[tuple[str, Call]]:
    packed = meta_weight(importlib.import_module(f"qdsl.generated.{form}"), SHAPE, None, {})
    n, k = SHAPE
    for call in launch.dequantize_calls(packed, torch.empty(n, k, dtype=torch.bfloat16, device="meta")):
        yield "decode", call
        if "LEVELS" in call.constants:
            yield "decode, three levels", replace(call, constants={**call.constants, "LEVELS": 3})
    if form != "df11":                                           # the symbols of chosen experts
        for call in stream_kernels.decode_calls(packed, torch.empty(512, dtype=torch.int64, device="meta"))[1]:
            yield "symbols", call
    for rows in (1, 16) if form != "df11" else ():
        x, out = (torch.empty(rows, size, dtype=torch.bfloat16, device="meta") for size in (k, n))
        yield from ((f"{rows} rows", call) for call in launch.linear_calls(x, packed, None, out))


def windows(call: Call, arch: str) -> float:
    """Instructions of a thread per symbol: of both loops for each lookup, and of all else once for a window."""
    binary = compile_launch(call, arch_of(arch))
    code = sass.parse(binary.text)
    every = [[code.instructions[place] for place in loop] for loop in sass.loops(code)]
    lookups = call.constants["LEVELS"] + 1                       # loads of a trip
    trips = {True: 0.0, False: 0.0}
    for loop in every:
        count = sum(bool(instruction.loaded) for instruction in loop) / lookups
        writes = any(instruction.base == "STG" for instruction in loop)
        trips[writes] = min(trips[writes] or len(loop), len(loop) / count)
    outside = len(code.instructions) - sum(map(len, every))
    return (sum(trips.values()) * STEPS + outside) / SYMBOLS


def every(arch: str) -> Iterator[dict[str, Any]]:
    if arch == "gfx942":
        for form in ("df11", "hlane", "fix4", "fix3"):
            for what, call in launches(form):
                types, constants, hints = specialize_arguments(call)
                binary = triton.compile(ASTSource(call.kernel, types, constants, hints), target=GPUTarget("hip", arch, 64),
                                        options=dict(call.options))
                yield {"form": form, "what": what, "bytes": len(binary.asm["hsaco"])}
        return
    with configure.assumed(arch_of(arch).capability // 10, configure.MULTIPROCESSORS):
        for form in ("df11", "hlane", "fix4", "fix3"):
            for what, call in launches(form):
                is_counted = "LEVELS" not in call.constants
                compiled = compile_launch(call, arch_of(arch))
                counts = report(call, arch) if is_counted else count_instructions(compiled, arch, 1, 1, call.step, 1)
                count = counts.hot if is_counted else windows(call, arch)
                yield {"form": form, "what": what, "count": count, "spills": counts.spills, "shared": counts.shared_bytes,
                       "opcodes": counts.opcodes, "tensor": counts.tensor, "loads": counts.loads}


if __name__ == "__main__":
    for line in every(sys.argv[1]):
        print(json.dumps(line), flush=True)
