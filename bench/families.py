"""Times conversions between checkpoint families on two threads, in the unit of other projects: 1e6 bytes of bfloat16 per second.

Their rates were measured elsewhere: 160 MB/s for transposing GPTQ's words for XPU, 43 to 206 between other storages.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench import convert
from bench.figure import Figure, rates
from bench.timing import Side, calls
from bench.weights import BF16_BYTES, SHAPE, floats, format_of, packed

THREADS = 2
CONVERTED: dict[tuple[str, str], float | None] = {
    ("gptq_v2", "xpu_int4pack"): 10000.0, ("awq", "gptq_v2"): 6000.0, ("gptq_v2", "awq"): 6000.0}         # goals: MB/s
GATHERED = 2500.0                                                # of GPTQ with act-order for XPU
ADOPTED = {"gptq_v2": 4000.0, "awq": 1500.0}                     # by torch's int4pack for CPUs
DECODED: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "GPTQ": ("int_group", {"storage": "gptq_v2", **convert.PARAMS}, 2500.0),
    "AWQ": ("int_group", {"storage": "awq", **convert.PARAMS}, 2500.0),
    "NF4": ("nf4", {}, 3000.0),
    "FP8 block": ("fp8_block", {}, None)}
QUANTIZED: dict[str, tuple[str, dict[str, Any], float | None]] = {
    "GPTQ": ("int_group", {"storage": "gptq_v2", **convert.PARAMS}, 1300.0),
    "FP8 block": ("fp8_block", {}, None)}


def figures(rounds: int) -> Iterator[Figure]:
    """Between storages, to bfloat16, and from it; of int4 all with groups of 128."""
    for (source, result), goal in CONVERTED.items():
        side = Side(convert.convert, {"source": source, "result": result, "threads": THREADS})
        yield from _figure(f"convert int4 {source} to {result}", side, goal, rounds)
    gathered = Side(convert.convert, {"source": "gptq_v2", "result": "xpu_int4pack", "act_order": True, "threads": THREADS})
    yield from _figure("convert int4 gptq_v2 with act-order to xpu_int4pack", gathered, GATHERED, rounds)
    for source, goal in ADOPTED.items():
        side = Side(convert.adopt, {"source": source, "threads": THREADS})
        yield from _figure(f"convert int4 {source} to int4pack for CPUs", side, goal, rounds)
    for title, (name, params, goal) in DECODED.items():
        yield from _figure(f"dequantize {title} to bf16, out=", Side(decode, {"name": name, "params": params}), goal, rounds)
    for title, (name, options, goal) in QUANTIZED.items():
        yield from _figure(f"quantize bf16 to {title}", Side(quantize, {"name": name, "options": options}), goal, rounds)


def _figure(what: str, side: Side, goal: float | None, rounds: int) -> Iterator[Figure]:
    [seconds] = calls([side], rounds)
    yield Figure(f"{what}, {THREADS} threads", "MB/s", rates(BF16_BYTES / 1e6, seconds), goal, note="of bf16 weight")


def decode(name: str, params: dict[str, Any]) -> Callable[[], Tensor]:
    """Dequantize into bfloat16 that is there."""
    torch.set_num_threads(THREADS)
    form, weight, out = format_of(name), packed(name, **params), torch.zeros(SHAPE, dtype=torch.bfloat16)
    return lambda: form.dequantize(weight, torch.bfloat16, out=out)


def quantize(name: str, options: dict[str, Any]) -> Callable[[], dict[str, Tensor]]:
    """Quantize bfloat16: checks, codes and the storage's tensors."""
    torch.set_num_threads(THREADS)
    form, weight = format_of(name), floats(torch.bfloat16)
    return lambda: form.quantize(weight, **options).tensors
