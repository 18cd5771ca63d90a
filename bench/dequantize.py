"""The torch reference's dequantize to float32 on one thread; GB/s are 1e9 bytes of float32 output per second.

A fresh output is allocated by the call, whose time then includes the page faults; `out=` writes over the same memory at
every call.  gguf-py always allocates, so both are compared with that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.timing import Side, calls
from bench.weights import BF16_BYTES, F32_BYTES, SHAPE, format_of, packed, storages, title

GGUF_GOALS = {"q4_0": 2.5, "q8_0": 2.5}                          # times as fast as gguf-py
GOALS = {"int_group bits=4 gptq_v2": 1.0, "fp8_block": 2.0}      # GB/s


def figures(rounds: int) -> Iterator[Figure]:
    """Ratios for what gguf-py decodes too, then rates for every storage."""
    measured = [*storages()]
    for name, storage, _ in measured:
        if storage == "gguf":
            yield from _beside_gguf(name, rounds)
    for name, storage, params in measured:
        if storage != "gguf":
            fresh, reused = _sides(name, storage, params)
            yield from _rates(title(name, storage, params), *calls([fresh, reused], rounds))


def _beside_gguf(name: str, rounds: int) -> Iterator[Figure]:
    theirs, fresh, reused = calls([Side(gguf_py, {"name": name}), *_sides(name, "gguf", {})], rounds)
    peer = Figure("", "GB/s", rates(F32_BYTES / 1e9, theirs))
    note = f"same bits; gguf-py {peer.text(peer.median)}"
    goal = GGUF_GOALS.get(name)
    yield Figure(f"dequantize {name}, fresh output, to gguf-py", "x", ratios(theirs, fresh), goal, note=note)
    yield Figure(f"dequantize {name}, out=, to gguf-py", "x", ratios(theirs, reused), goal, note=note)
    yield from _rates(name, fresh, reused)


def _rates(what: str, fresh: list[float], reused: list[float]) -> Iterator[Figure]:
    for kind, seconds in (("fresh output", fresh), ("out=", reused)):
        weight = Figure("", "MB/s", rates(BF16_BYTES / 1e6, seconds))
        yield Figure(f"dequantize {what}, {kind}", "GB/s", rates(F32_BYTES / 1e9, seconds), GOALS.get(what),
                     note=f"of f32 output; {weight.text(weight.median)} of bf16 weight")


def _sides(name: str, storage: str, params: dict[str, Any]) -> list[Side]:
    arguments = {"name": name, "storage": storage, "params": params}
    return [Side(ours, {**arguments, "reuse": reuse}) for reuse in (False, True)]


def ours(name: str, storage: str, params: dict[str, Any], reuse: bool) -> Callable[[], Tensor]:
    """This project's dequantize."""
    form, weight = format_of(name), packed(name, storage, **params)
    out = torch.zeros(SHAPE) if reuse else None
    return lambda: form.dequantize(weight, torch.float32, out=out)


def gguf_py(name: str) -> Callable[[], Any]:
    """gguf-py's dequantize of the same blocks."""
    from gguf import GGMLQuantizationType, quants

    blocks = packed(name).tensors["blocks"].numpy()
    kind = GGMLQuantizationType[str(format_of(name).spec.detect["gguf"])]
    return lambda: quants.dequantize(blocks, kind)
