"""Times dequantize to float32 on one thread, by compiled loops or torch; GB/s are 1e9 bytes of float32 output per second.

A new output is allocated by the call, whose time then includes page faults; `out=` reuses the same memory.  gguf-py always
allocates, so both variants are compared with it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, quants
from numpy.typing import NDArray
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.timing import Side, calls
from bench.weights import BF16_BYTES, F32_BYTES, SHAPE, format_of, packed, storages, title

GOALS = {"int_group bits=4 gptq_v2": 1.0, "fp8_block safetensors": 2.0, "q4_k": 2.0, "q6_k": 2.0}              # GB/s


def figures(rounds: int) -> Iterator[Figure]:
    """Ratios for what gguf-py decodes too, then rates for every storage."""
    measured = [*storages()]
    compared = {name: storage for name, storage, _ in measured if "gguf" in format_of(name).spec.detect and decoded(name)}
    for name, storage in compared.items():
        yield from _beside_gguf(name, storage, rounds)
    for name, storage, params in measured:
        if name not in compared:
            fresh, reused = _sides(name, storage, params)
            yield from _rates(title(name, storage, params), *calls([fresh, reused], rounds))


def _beside_gguf(name: str, storage: str, rounds: int) -> Iterator[Figure]:
    theirs, fresh, reused = calls([Side(gguf_py, {"name": name}), *_sides(name, storage, {})], rounds)
    peer = Figure("", "GB/s", rates(F32_BYTES / 1e9, theirs))
    note = f"same bits; gguf-py {peer.text(peer.median)}"
    goal = gguf_goal(name)
    yield Figure(f"dequantize {name}, fresh output, to gguf-py", "x", ratios(theirs, fresh), goal, note=note)
    yield Figure(f"dequantize {name}, out=, to gguf-py", "x", ratios(theirs, reused), goal, note=note)
    yield from _rates(name, fresh, reused)


def gguf_goal(name: str) -> float:
    """How many times as fast as gguf-py."""
    return 2.5 if name in ("q4_0", "q8_0") else 5 if name.startswith(("iq1", "iq2", "iq3")) else 2


def decoded(name: str) -> bool:
    """Whether gguf-py decodes a type, which of float32 gives the very memory."""
    try:
        blocks, kind = _of_gguf(name)
        return not np.shares_memory(quants.dequantize(blocks, kind), blocks)
    except (KeyError, NotImplementedError, ValueError):
        return False


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
    blocks, kind = _of_gguf(name)
    return lambda: quants.dequantize(blocks, kind)


def _of_gguf(name: str) -> tuple[NDArray[np.uint8], GGMLQuantizationType]:
    """A weight's bytes in rows, and what gguf-py calls its type."""
    [blocks] = (tensor.view(torch.uint8).numpy() for tensor in packed(name).tensors.values())
    return blocks, GGMLQuantizationType[str(format_of(name).spec.detect["gguf"])]
