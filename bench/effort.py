"""Measures the effort for a new format: bench/w4.yaml, 4-bit codes with one scale per 32, written from scratch."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

import qdsl
from bench.figure import Figure
from qdsl.compiler.emit.module.build import files_of

SPEC = Path(__file__).with_name("w4.yaml")
ROWS, COLUMNS = 256, 1024


def figures(rounds: int) -> Iterator[Figure]:
    """Lines of the spec, the time to compile it, and whether what came out of it is exact."""
    lines = len(SPEC.read_text(encoding="utf-8").splitlines())
    yield Figure("a 4-bit format with a scale per 32, from scratch", "lines", [lines], 15, more=False,
                 note="of YAML, no Python: bench/w4.yaml")
    seconds = []
    for _ in range(rounds):
        start = time.perf_counter()
        files = files_of(SPEC)
        seconds.append(time.perf_counter() - start)
    line_count = sum(text.count("\n") for text in files.values())
    yield Figure("compiling it", "s", seconds, more=False, note=f"into {line_count} lines of torch and Triton")
    wrong = differences(_module())
    yield Figure("elements that round trips through it change", "elements", [sum(wrong.values())], 0, more=False,
                 note=", ".join(f"{what}: {count}" for what, count in wrong.items()))


def _module() -> ModuleType:
    """The spec's module, built into a cache of its own."""
    before = os.environ.get("QDSL_CACHE")
    with tempfile.TemporaryDirectory() as folder:
        os.environ["QDSL_CACHE"] = folder
        try:
            return qdsl.load(SPEC)
        finally:
            del os.environ["QDSL_CACHE"]
            if before is not None:
                os.environ["QDSL_CACHE"] = before


def differences(w4: ModuleType) -> dict[str, int]:
    """How many elements every round trip changes."""
    torch.manual_seed(0)
    quantized = w4.quantize(torch.randn(ROWS, COLUMNS))
    fields = {"q": torch.randint(0, 16, (ROWS, COLUMNS), dtype=torch.uint8),
              "s": torch.randn(ROWS, COLUMNS // 32).to(torch.float16)}
    packed = w4.pack(fields)
    decoded = w4.dequantize(packed, torch.float32)
    # The formula once more, by other means: float64 holds the product exactly, so it is rounded once, as in float32.
    wanted = ((fields["q"].double() - 8) * fields["s"].double().repeat_interleave(32, 1)).float()
    again = w4.quantize(w4.dequantize(quantized, torch.float32))
    return {
        "pack(unpack)": _differ(quantized.tensors, w4.pack(w4.unpack(quantized)).tensors),
        "unpack(pack)": _differ(fields, w4.unpack(packed)),
        "dequantize": _differ({"w": wanted}, {"w": decoded}),
        "quantize(dequantize)": _differ(quantized.tensors, again.tensors),
    }


def _differ(wanted: dict[str, Tensor], actual: dict[str, Tensor]) -> int:
    assert wanted.keys() == actual.keys()
    return sum(int((wanted[name] != actual[name]).sum()) for name in wanted)
