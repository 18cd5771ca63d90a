"""Times x @ w.T on a CPU, x in bfloat16, two threads: compiled products, torch's tiles, dense torch, gguf-py with matmul.

GB/s are 1e9 bytes of packed weight per second.  A sample multiplies by each of several copies of the weight, together larger than
a cache, like the layers of a model; a figure is the time per copy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.timing import Side, calls
from bench.weights import BF16_BYTES, SHAPE, floats, format_of, packed, title, titled

THREADS = 2
ROWS = (1, 2, 8, 32, 256)
WHOLE = ("q8_0", "q4_0 gguf")                                    # measured at every M and beside gguf-py
OTHERS = ("q4_k", "q6_k", "fp8_block safetensors", "int8_channel safetensors", "int_group bits=4 gptq_v2",
          "int_group bits=4 awq")                                # at 1 and 32
RATE_GOALS = {"q8_0": 15.0, "q4_0 gguf": 12.0}                   # GB/s at M = 1, compiled
TIME_GOALS = {"q8_0": 2.5, "q4_0 gguf": 4.0}                     # times the time of F.linear on the dense weight, at M = 32
THREADS_GOAL = 1.7                                               # of two threads, as a multiple of the speed of one
CACHE = 96 << 20                                                 # bytes that the copies of a weight have together, at least


FUSED = ("int_group", "gptq_v2", {"bits": 4})                    # measured through torch's int4 operation too, as fuse_ stores it


def figures(rounds: int) -> Iterator[Figure]:
    """Rates of the compiled products, the time of both ways beside dense bfloat16, and that of torch's int4 operation to both."""
    for what, name, storage, params in titled(WHOLE + OTHERS):
        for rows in ROWS if what in WHOLE else (1, 32):
            arguments = {"name": name, "storage": storage, "params": params, "rows": rows}
            sides = [Side(dense, {"rows": rows}), Side(ours, {**arguments, "compiled": True}),
                     Side(ours, {**arguments, "compiled": False})]
            if what in WHOLE:
                sides.append(Side(gguf_py, {"name": name, "rows": rows}))
            nbytes = packed(name, storage, **params).nbytes
            counts = [_copies(BF16_BYTES), _copies(nbytes), _copies(nbytes), 1]
            times = [[seconds / count for seconds in side]
                     for side, count in zip(calls(sides, rounds, same=False), counts, strict=False)]
            yield from _figures(what, rows, nbytes, *times)
    for name in ("q8_0", "q4_0", "q4_k"):                        # whose loop takes columns of x in another order
        arguments = {"name": name, "storage": "gguf", "params": {}, "rows": 1, "compiled": True}
        one, two = calls([Side(ours, {**arguments, "threads": threads}) for threads in (1, THREADS)], rounds)
        yield Figure(f"linear {name}, M = 1, compiled, two threads to one", "x", ratios(one, two), THREADS_GOAL)
    for rows in (1, 32):
        yield from _fused_figures(rows, rounds)
    sides = [Side(act_order, {"linear": linear}) for linear in (True, False)]
    product, operation = calls(sides, rounds, same=True)
    yield Figure(f"linear {title(*FUSED)} act-order, M = 1, int4pack.for_device, time to torch's int4 operation", "x",
                 ratios(product, operation), 1.1, more=False)


def _figures(what: str, rows: int, nbytes: int, dense: list[float], compiled: list[float], tiles: list[float],
             gguf: list[float] | None = None) -> Iterator[Figure]:
    times = Figure("", "s", dense)
    note = f"dense bf16 F.linear {1000 * times.median:.2f} ms"
    yield Figure(f"linear {what}, M = {rows}, compiled", "GB/s", rates(nbytes / 1e9, compiled),
                 RATE_GOALS.get(what) if rows == 1 else None, note=f"{1000 * Figure('', 's', compiled).median:.2f} ms; {note}")
    goal = TIME_GOALS.get(what) if rows == 32 else None
    for way, seconds in (("compiled", compiled), ("tiles", tiles)):
        yield Figure(f"linear {what}, M = {rows}, {way}, time to dense bf16", "x", ratios(seconds, dense), goal, more=False,
                     note=note)
    if gguf:
        yield Figure(f"linear {what}, M = {rows}, compiled, to gguf-py and matmul", "x", ratios(gguf, compiled))


def _fused_figures(rows: int, rounds: int) -> Iterator[Figure]:
    name, storage, params = FUSED
    arguments = {"name": name, "storage": storage, "params": params, "rows": rows}
    sides = [Side(fused, arguments), Side(ours, {**arguments, "compiled": True}), Side(ours, {**arguments, "compiled": False})]
    torchs, *others = calls(sides, rounds, same=False)
    note = f"{1000 * Figure('', 's', torchs).median / _copies(packed(name, storage, **params).nbytes):.2f} ms"
    for way, seconds in zip(("compiled", "tiles"), others, strict=True):
        yield Figure(f"linear {title(*FUSED)}, M = {rows}, torch's int4 operation, time to {way}", "x", ratios(torchs, seconds),
                     more=False, note=note)


def fused(name: str, storage: str, params: dict[str, Any], rows: int, threads: int = THREADS) -> Callable[[], Tensor]:
    """The layers that `qdsl.fuse_` makes."""
    from qdsl.models.fused import FusedLinear

    torch.set_num_threads(threads)
    weight, x = packed(name, storage, **params), _x(rows)
    layers = [FusedLinear(weight.apply(torch.clone)) for _ in range(_copies(weight.nbytes))]
    return lambda: torch.cat([layer(x) for layer in layers])


def act_order(linear: bool) -> Callable[[], Tensor]:
    """The weight for this machine, multiplied by `int4pack.linear`, or by torch's operation with x moved already."""
    int4pack, int_group = format_of("int4pack"), format_of("int_group")
    torch.set_num_threads(THREADS)
    weight, x = packed(FUSED[0], FUSED[1], **FUSED[2]), _x(1)
    columns = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(0))
    fields = int_group.unpack(weight) | {"g": columns.int() // weight.sizes["group"]}
    order_weight = int4pack.for_device(int_group.pack(fields, weight.storage, **weight.params), x.dtype)
    layers = [order_weight.apply(torch.clone) for _ in range(_copies(order_weight.nbytes))]
    if linear:
        return lambda: torch.cat([int4pack.linear(x, layer) for layer in layers])
    assert order_weight.order is not None
    moved, group = x.index_select(1, order_weight.order), order_weight.sizes["group"]
    tensors = [[layer.tensors[name] for name in ("weight", "scales_and_zeros")] for layer in layers]
    arguments = [(codes.view(weight.shape[0], -1), group, scales) for codes, scales in tensors]
    return lambda: torch.cat([torch.ops.aten._weight_int4pack_mm_for_cpu(moved, *triple) for triple in arguments])


def ours(name: str, storage: str, params: dict[str, Any], rows: int, compiled: bool, threads: int = THREADS,
         ) -> Callable[[], Tensor]:
    """This project's linear."""
    from qdsl.runtime.cpu import linear as cpu

    torch.set_num_threads(threads)
    if hasattr(os, "sched_setaffinity"):                         # OpenMP has bound this thread, and those of loops begin as it is
        os.sched_setaffinity(0, os.sched_getaffinity(os.getppid()))
    cpu.compile_products(compiled)
    form, weight, x = format_of(name), packed(name, storage, **params), _x(rows)
    layers = [weight.apply(torch.clone) for _ in range(_copies(weight.nbytes))]
    return lambda: torch.cat([form.linear(x, layer) for layer in layers])


def dense(rows: int) -> Callable[[], Tensor]:
    """torch's own product with the weight in bfloat16."""
    torch.set_num_threads(THREADS)
    weight, x = floats(torch.bfloat16), _x(rows)
    layers = [weight.clone() for _ in range(_copies(weight.nbytes))]
    return lambda: torch.cat([torch.nn.functional.linear(x, layer) for layer in layers])


def gguf_py(name: str, rows: int) -> Callable[[], Any]:
    """gguf-py's dequantize and numpy's product, in float32."""
    from gguf import GGMLQuantizationType, quants

    blocks = packed(name).tensors["blocks"].numpy()
    kind = GGMLQuantizationType[str(format_of(name).spec.detect["gguf"])]
    x = _x(rows).float().numpy()
    return lambda: x @ quants.dequantize(blocks, kind).T


def _x(rows: int) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(rows, SHAPE[1], dtype=torch.bfloat16)


def _copies(nbytes: int) -> int:
    return -(-CACHE // nbytes)
