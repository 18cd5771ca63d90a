"""Prepared launches against those that Triton makes: the kernel that it chooses, the grid, and every argument.

Run as a script, because Triton must not be interpreting.  A stand-in for its driver takes the launches.  Each product is asked
for with tensors of its own, so that addresses differ, until its launches are prepared; the same tensors then go through
`kernel[grid]`.  A line of JSON per product.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import triton

import qdsl
from bench.launch import stubbed
from qdsl.generated import iq4_nl, q4_0
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import plan, product, scratch
from qdsl.runtime.torch import ops

BF16, F16 = torch.bfloat16, torch.float16
# Format and storage, rows of x, type of x, of the bias, and elements that x lies behind an aligned place.
CASES = (
    ("q4_0", "planar", (1, 256), BF16, None, 0), ("q4_0", "planar", (1, 256), BF16, BF16, 0),
    ("q4_0", "planar", (1, 256), BF16, None, 1), ("q4_0", "planar", (5, 256), BF16, None, 0),
    ("q4_0", "planar", (16, 256), BF16, None, 0), ("q4_0", "planar", (4, 4, 256), BF16, F16, 0),
    ("q4_0", "planar", (17, 256), BF16, None, 0), ("q4_0", "planar", (18, 256), BF16, None, 0),
    ("q4_0", "gguf", (6, 256), F16, F16, 0),
    ("q4_0", "planar", (64, 2048), BF16, BF16, 0),               # programs share K of a larger weight
    ("iq4_nl", "gguf", (1, 256), BF16, None, 0), ("q4_0", "gguf", (4, 256), F16, BF16, 1),
)
QDSL = Path(qdsl.__file__).parent
MODULES = {"q4_0": q4_0, "iq4_nl": iq4_nl}


def drawn(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Zeros that lie `offset` elements behind an aligned place."""
    memory = torch.zeros(torch.Size(shape).numel() + 64, dtype=dtype)
    start = -memory.data_ptr() % 64 // memory.element_size() + offset
    return memory[start:start + torch.Size(shape).numel()].view(shape)


def weight(name: str, storage: str, k: int = 256) -> PackedWeight:
    return MODULES[name].FORMAT.empty((64 if k == 256 else 2048, k), storage, "cpu").apply(lambda tensor: tensor.clone())


def shown(launched: tuple[Any, ...], names: dict[int, str]) -> list[Any]:
    """A launch: grid, stream, kernel, metadata and arguments, tensors by their addresses, those that differ by their names."""
    row = [value.data_ptr() if isinstance(value, torch.Tensor) else value for value in (*launched[:6], *flat(launched[9:]))]
    texts = [names.get(value, str(value)) if type(value) is int else str(value) for value in row]
    return ["out" if text.isdigit() and int(text) > 1 << 32 else text for text in texts]   # a product allocates its own


def flat(values: Iterable[Any]) -> Iterator[Any]:
    """Arguments, those of a tuple one by one, in brackets."""
    for value in values:
        if isinstance(value, tuple):
            yield from ("(", *flat(value), ")")
        else:
            yield value


def is_prepared(calls: list[tuple[Any, ...]]) -> bool:
    """Whether launches are those of prepared.py, which fill addresses in; tables alone stay tensors."""
    return sum(isinstance(value, torch.Tensor) for call in calls for value in flat(call[9:])) <= len(calls)


def every(launched: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    for name, storage, shape, dtype, bias_type, offset in CASES:
        runs, weights = [], []                                   # a plan lives as long as a weight that has it
        for _ in range(3):                                       # the weight's tensors are new every time
            packed = weight(name, storage, shape[-1])
            weights.append(packed)
            x, bias = drawn(shape, dtype, offset), None if bias_type is None else drawn(packed.shape[:1], bias_type)
            plan.plan_of(packed)
            launched.clear()
            ops.linear(x, packed, bias)
            runs.append([*launched])
        flat = x.view(-1, shape[-1])
        candidate = plan.best(packed, len(flat), dtype, x.device, offset == 0)
        launched.clear()
        product.by(candidate, flat, packed, bias)
        tensors = [*packed.tensors.values(), x, *([] if bias is None else [bias])]
        names = {tensor.data_ptr(): f"tensor {i}" for i, tensor in enumerate(tensors)}
        names[scratch.counters.take(1, x.device).data_ptr()] = "counters"
        prepared, triton_own = ([shown(value, names) for value in calls] for calls in (runs[-1], launched))
        yield {"case": f"{name}.{storage} {shape} {dtype} {bias_type} {offset}", "kind": candidate.kind,
               "split": candidate.config.get("SPLIT", 1),
               "prepared": [is_prepared(calls) for calls in runs], "kernel": prepared[0][4], "launches": len(launched),
               "same": prepared == triton_own}
    yield from hooks(launched)


def hooks(launched: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """With a hook set, launches go through Triton's launcher, which calls it."""
    packed, x = weight("q4_0", "planar"), drawn((1, 256), BF16)
    runtime, kernel_hook = triton.knobs.runtime, lambda metadata: None
    for is_set in (False, True):
        if is_set:
            runtime.launch_enter_hook.add(kernel_hook)
        for _ in range(2):
            launched.clear()
            ops.linear(x, packed, None)
        yield {"case": f"hook {is_set}", "prepared": [is_prepared(launched)], "hook": launched[0][7] is not None}
    runtime.launch_enter_hook.remove(kernel_hook)


def called(function: Callable[[], object]) -> list[str]:
    """The functions of qdsl that a call runs."""
    names: list[str] = []

    def profile(frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and Path(frame.f_code.co_filename).is_relative_to(QDSL):
            names.append(frame.f_code.co_qualname)

    sys.setprofile(profile)
    function()
    sys.setprofile(None)
    return names


def functions() -> dict[str, list[str]]:
    """Those of a product that is prepared, by the function, the layer and the operation."""
    packed, x = weight("q4_0", "planar"), drawn((1, 256), BF16)
    layer, (tensors, words) = q4_0.Linear(packed), ops.words(packed)
    operation = torch.ops.qdsl.linear.default
    row = {"linear": lambda: q4_0.linear(x, packed), "Linear": lambda: layer(x),
             "operation": lambda: operation(x, tensors, None, *words, *packed.shape)}
    with torch.no_grad():
        for function in (*row.values(), *row.values()):
            function()
        return {name: called(function) for name, function in row.items()}


if __name__ == "__main__":
    launched: list[tuple[Any, ...]] = []
    with stubbed(launched):
        for row in every(launched):
            print(json.dumps(row), flush=True)
        print(json.dumps(functions()), flush=True)
