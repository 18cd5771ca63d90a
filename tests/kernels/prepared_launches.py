"""Prepared launches against those that Triton makes: the kernel that it chooses, the grid, and every argument.

Run as a script, because Triton must not be interpreting.  A stand-in for its driver takes the launches.  Each product is asked
for with tensors of its own, so that addresses differ, until its launches are prepared; the same tensors then go through
`kernel[grid]`.  A line of JSON per product.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import torch
import triton

import qdsl
from bench.launch import stubbed
from qdsl.generated import hlane, int8_channel, int_group, iq4_nl, q4_0
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import costs, plan, scratch
from qdsl.runtime.torch import decode, experts, ops
from qdsl.runtime.weight import packed as packed_weights

BF16, F16 = torch.bfloat16, torch.float16
# Weight, rows of x, type of x, of the bias, elements that x lies behind an aligned place, and the mode of the product.
CASES: tuple[tuple[str, tuple[int, ...], torch.dtype, torch.dtype | None, int, str], ...] = (
    ("q4_0.large", (1, 2048), BF16, None, 0, ""), ("q4_0.large", (1, 2048), BF16, BF16, 0, ""),
    ("q4_0.large", (1, 2048), BF16, None, 1, ""), ("q4_0.planar", (5, 256), BF16, None, 0, ""),
    ("q4_0.planar", (16, 256), BF16, None, 0, ""), ("q4_0.planar", (4, 4, 256), BF16, F16, 0, ""),
    ("q4_0.planar", (17, 256), BF16, None, 0, ""), ("q4_0.planar", (18, 256), BF16, None, 0, ""),
    ("q4_0.large", (96, 2048), BF16, BF16, 0, ""),               # programs share K
    ("q4_0.gguf", (6, 256), F16, F16, 0, ""),
    ("iq4_nl.gguf", (1, 256), BF16, None, 0, ""), ("q4_0.gguf", (4, 256), F16, BF16, 1, ""),
    ("act-order", (1, 256), BF16, None, 0, ""), ("act-order", (2, 2, 256), BF16, BF16, 0, ""),
    ("hlane", (1, 256), BF16, BF16, 0, ""), ("hlane", (1, 256), F16, None, 0, ""),
    ("int8_channel", (2, 256), BF16, BF16, 0, "quantize_x"),
    ("q4_0.tiles", (300, 256), BF16, F16, 0, ""), ("q4_0.tiles", (2, 150, 256), BF16, None, 0, ""),
)
DECODED = 2 * 128 * 256                                          # bytes decoded at a time: q4_0.tiles has three tiles
QDSL = Path(qdsl.__file__).parent


def drawn(shape: tuple[int, ...], dtype: torch.dtype, offset: int = 0) -> torch.Tensor:
    """Zeros that lie `offset` elements behind an aligned place."""
    memory = torch.zeros(torch.Size(shape).numel() + 64, dtype=dtype)
    start = -memory.data_ptr() % 64 // memory.element_size() + offset
    return memory[start:start + torch.Size(shape).numel()].view(shape)


def weight(name: str) -> PackedWeight:
    """A weight in tensors of its own, which begin where kernels rely on it."""
    packed = _weights()[name]

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        boundary = max(64, 1 << (tensor.nbytes - 1).bit_length())
        memory = torch.zeros(tensor.nbytes + boundary, dtype=torch.uint8)
        start = -memory.data_ptr() % boundary
        return memory[start:start + tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    return packed.apply(moved)


@cache
def _weights() -> dict[str, PackedWeight]:
    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    fields = int_group.unpack(int_group.quantize(numbers, bits=4, group=128))
    index = torch.arange(256, dtype=torch.int32) % 2
    return {"q4_0.planar": q4_0.planar(q4_0.quantize(numbers)), "q4_0.large": q4_0.FORMAT.empty((2048, 2048), "planar", "cpu"),
            "q4_0.gguf": q4_0.quantize(numbers), "q4_0.tiles": q4_0.quantize(numbers.repeat(5, 1)),
            "iq4_nl.gguf": iq4_nl.quantize(numbers), "hlane": hlane.quantize(numbers.bfloat16()),
            "int8_channel": int8_channel.quantize(numbers),
            "act-order": int_group.planar(int_group.pack({**fields, "g": index}, storage="gptq_v1", bits=4, group=128))}


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
    for name, shape, dtype, bias_type, offset, mode in CASES:
        runs, weights = [], []                                   # a plan lives as long as a weight that has it
        for is_anew in (False, False, False, True):              # the weight's tensors are new every time, but the last
            packed = weights[-1] if is_anew else weight(name)
            weights.append(packed)
            if not is_anew:
                x, bias = drawn(shape, dtype, offset), None if bias_type is None else drawn(packed.shape[:1], bias_type)
            own = plan.plan_of(packed)
            if is_anew:
                own.ready.clear()
            launched.clear()
            ops.linear(x, packed, bias, mode)
            runs.append([*launched])
        tensors = [*packed.tensors.values(), x, *([] if bias is None else [bias])]
        names = {tensor.data_ptr(): f"tensor {i}" for i, tensor in enumerate(tensors)}
        names[scratch.counters.take(1, x.device).data_ptr()] = "counters"
        prepared, triton_own = ([shown(value, names) for value in calls] for calls in runs[2:])
        choice = next(reversed(own.choices.values()), None)
        yield {"case": f"{name} {shape} {dtype} {bias_type} {offset}{mode and f' {mode}'}",
               "kind": choice.candidate.kind if choice is not None else mode,
               "split": choice.candidate.config.get("SPLIT", 1) if choice is not None else 1,
               "prepared": [is_prepared(calls) for calls in runs[:3]], "kernels": [call[4] for call in prepared],
               "same": prepared == triton_own}
    yield from hooks(launched)


def hooks(launched: list[tuple[Any, ...]]) -> Iterator[dict[str, Any]]:
    """With a hook set, launches go through Triton's launcher, which calls it."""
    packed, x = weight("q4_0.planar"), drawn((1, 256), BF16)
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


def products() -> dict[str, Callable[[], object]]:
    """A product of every kind that has prepared launches, by how it is called or what it is of."""
    packed, x = weight("q4_0.planar"), drawn((1, 256), BF16)
    layer, (tensors, key) = q4_0.Linear(packed), ops.operation_arguments(packed)
    operation, inner = torch.ops.qdsl.linear.default, drawn((1, 256), BF16).requires_grad_()
    permuted, coded, codes = weight("act-order"), weight("hlane"), weight("int8_channel")
    narrow = int8_channel.Linear(codes, quantize_x=True)

    def cast(function: Callable[..., object], *arguments: Any) -> object:
        with torch.autocast("cpu", BF16):
            return function(*arguments)

    def differentiated(function: Callable[..., object], *arguments: Any) -> object:
        with torch.enable_grad():
            return function(*arguments)

    return {"linear": lambda: q4_0.linear(x, packed), "Linear": lambda: layer(x),
            "operation": lambda: operation(x, tensors, None, key), "autocast": lambda: cast(q4_0.linear, x.float(), packed),
            "autocast Linear": lambda: cast(layer, x.float()), "act-order": lambda: int_group.linear(x, permuted),
            "entropy-coded": lambda: hlane.linear(x, coded), "decoded": lambda: hlane.linear(x.half(), coded),
            "quantize_x": lambda: int8_channel.linear(x, codes, quantize_x=True), "quantize_x Linear": lambda: narrow(x),
            "gradients": lambda: differentiated(q4_0.linear, inner, packed)}


def functions() -> dict[str, list[str]]:
    """The functions of qdsl that products run which are prepared."""
    with torch.no_grad():
        row = products()
        for function in (*row.values(), *row.values()):
            function()
        return {name: called(function) for name, function in row.items()}


def capturable() -> dict[str, Callable[[], object]]:
    """What may be captured in a CUDA graph: products, those of experts, and weights that are decoded."""
    packed, x, offsets = weight("q4_0.planar"), drawn((4, 256), BF16), torch.tensor([0, 1, 1, 2, 4])
    (tensors, key), (coded, coded_key) = ops.operation_arguments(packed), ops.operation_arguments(weight("hlane"))
    large, rows = weight("q4_0.large"), drawn((96, 2048), BF16)
    def gradients() -> torch.Tensor:
        with torch.enable_grad():
            variable = x.clone().requires_grad_()
            return torch.autograd.grad(q4_0.grouped_linear(variable, packed, offsets, partial=True).sum(), variable)[0]

    return products() | {
        "shared K": lambda: q4_0.linear(rows, large),
        "grouped_linear": lambda: torch.ops.qdsl.grouped_linear(x, tensors, offsets, None, key, True, ""),
        "grouped_linear float64": lambda: q4_0.grouped_linear(x.double(), packed, offsets, partial=True),
        "gradients of grouped_linear": gradients,
        "grouped_linear decoded": lambda: torch.ops.qdsl.grouped_linear(x, coded, offsets, None, coded_key, False, ""),
        "dequantize": lambda: torch.ops.qdsl.dequantize(tensors, key, BF16),
        "dequantize streams": lambda: torch.ops.qdsl.dequantize(coded, coded_key, BF16)}


def on_gpu() -> ExitStack:
    """Tensors on the CPU meet kernels in what is no `linear`, too."""
    stack = ExitStack()
    tile_map = experts.tile_map
    stack.enter_context(patch.object(experts, "tile_map", lambda *arguments: tile_map(*arguments).zero_()))   # nothing writes it
    for module in (experts, decode, packed_weights):
        stack.enter_context(patch.object(module, "runs_kernels", lambda device: True))
    return stack


def operators(row: dict[str, Callable[[], object]]) -> dict[str, list[str]]:
    """The operators of torch that run in it, where none may wait for the device."""
    names = {}
    for name, function in row.items():
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            function()
        names[name] = sorted({event.key for event in profile.key_averages()})
    return names


def captured(row: dict[str, Callable[[], object]], launched: list[tuple[Any, ...]]) -> dict[str, Any]:
    """A simulated capture, twice: of each the streams of its launches, and the counters of those that share K.

    Whatever a capture forbids raises: to load a kernel, which allocates, and to zero counters that another launch may use.
    """
    def forbidden(*arguments: object, **options: object) -> None:
        raise RuntimeError("a capture has no such call")

    driver, rows, counters = triton.runtime.driver.active, {}, list[int]()
    take = scratch.counters.take

    def taken(*arguments: Any) -> torch.Tensor:
        zeros = take(*arguments)
        counters.append(zeros.data_ptr())
        return zeros

    with ExitStack() as stack:
        for owner, name, value in ((scratch, "is_captured", lambda device: True), (driver, "load_binary", forbidden),
                                   (torch, "zeros", forbidden), (driver, "stream", 99), (scratch.counters, "take", taken)):
            stack.enter_context(patch.object(owner, name, value))
        for name, function in (*row.items(), *row.items()):
            launched.clear()
            function()
            rows[name] = sorted({*rows.get(name, ()), *(call[3] for call in launched)})
    return {"streams": rows, "counters": counters}


if __name__ == "__main__":
    launched: list[tuple[Any, ...]] = []
    with stubbed(launched), patch.object(costs, "DECODED", DECODED):
        for row in every(launched):
            print(json.dumps(row), flush=True)
        print(json.dumps(functions()), flush=True)
        with torch.no_grad(), on_gpu():
            row = capturable()
            for function in row.values():
                function()                                       # before a capture everything has run once
            print(json.dumps(operators(row)), flush=True)
            print(json.dumps(captured(row, launched)), flush=True)
