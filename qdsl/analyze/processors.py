"""Explains the runtime's choice for a product on this machine's CPU, with the measured time of every way to compute it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch

from qdsl.analyze.choices import of_dense
from qdsl.analyze.launches import TYPES
from qdsl.runtime import Format, PackedWeight
from qdsl.runtime.cpu import linear
from qdsl.runtime.weight.packed import FormatError

CPU = "cpu"
CPU_TYPES = {**TYPES, "f32": torch.float32}
TILE = 256                                                       # random rows, which repeat: quantizing takes long
RUNS, SECONDS = 30, 1.0                                          # per candidate, at most; one run at least
WORK = {"stored": "stored numbers are the weights: torch's matmul",
        "rows": "a compiled loop over a copy with interleaved rows", "plain": "a compiled loop over the stored weight",
        "decode": "tiles decoded by a compiled loop, then torch's matmul",
        "int8": "torch's kernel for int8 codes", "tiles": "tiles decoded by torch, then torch's matmul"}


def random_weight(format: Format, shape: tuple[int, int], storage: str | None, params: Mapping[str, Any]) -> PackedWeight:
    """A quantized random weight [N, K], as layers of models hold it.  Raises FormatError for a format that quantizes nothing."""
    packed = _quantize_random(format, shape, storage, params)
    packed.keeps_copy = True
    return packed


def _quantize_random(format: Format, shape: tuple[int, int], storage: str | None, params: Mapping[str, Any]) -> PackedWeight:
    n, k = shape
    draw = torch.Generator("cpu").manual_seed(0)
    rows = torch.randn(min(n, TILE), k, generator=draw, dtype=torch.float32, device="cpu") / 16
    if n > TILE and not n % TILE:
        tile = format.quantize(rows, storage, **params)
        try:
            return PackedWeight.join([tile] * (n // TILE))
        except FormatError:                                      # rows share something
            pass
    return format.quantize(rows.repeat(-(-n // len(rows)), 1)[:n], storage, **params)


def explain_choice(packed: PackedWeight, rows: int, x: str) -> dict[str, Any]:
    """The choice for `rows` rows of x of a dtype ('f32'), as `choices.explain_choice`, with measured times."""
    multiplied = torch.randn(rows, packed.shape[1], dtype=torch.float32, device="cpu").to(CPU_TYPES[x])
    ways = linear.candidates(packed, rows, multiplied.dtype)
    times = [_median_seconds(linear.runner(way, multiplied, packed)) for way in ways]
    candidates = [{"kernel": way.kind, "config": dict(way.config), "grid": [], "us": float(f"{seconds * 1e6:.4g}")}
                  for way, seconds in zip(ways, times, strict=True)]
    weight, threads = torch.empty(packed.shape, dtype=multiplied.dtype, device="cpu").fill_(1 / 16), torch.get_num_threads()
    dense = _median_seconds(lambda: torch.nn.functional.linear(multiplied, weight))
    return {"format": packed.format.name, "storage": packed.storage, "shape": list(packed.shape), "rows": rows, "x": x,
            "gpu": f"this CPU, {threads} thread{'s' * (threads > 1)}", "times": "measured", "chosen": candidates[0],
            **of_dense(times[0], dense),
            "reason": f"{WORK.get(ways[0].kind, ways[0].kind)}; the first of these ways that the weight has", "counts": "",
            "candidates": candidates, "refused": {}}


def _median_seconds(product: Callable[[], object]) -> float:
    """The median of some runs of a product, the first one, which may compile, left out."""
    with torch.inference_mode():
        product()
        times: list[float] = []
        while len(times) < RUNS and sum(times) < SECONDS:
            start = time.perf_counter()
            product()
            times.append(time.perf_counter() - start)
    return statistics.median(times)
