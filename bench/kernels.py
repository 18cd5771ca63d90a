"""The Triton kernels on a GPU: dequantize to bfloat16, and linear beside torch's matmul with the weight in bfloat16.

Times are those of triton.testing.do_bench, which empties the L2 cache before every call.  They are of the module's own
functions, as a model calls them: where a kernel is shorter than the Python that launches it, that is what they show.
GB/s are 1e9 bytes of packed weight read and bfloat16 written per second.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from bench.figure import Figure, rates, ratios
from bench.timing import WrongResult, interleave
from bench.weights import BF16_BYTES, SHAPE, floats, format_of, packed, storages, title

ROWS_OF_X = (1, 16, 256, 4096)


def available() -> bool:
    """Whether there is a GPU to measure."""
    return torch.cuda.is_available()


def figures(rounds: int) -> Iterator[Figure]:
    """Every storage; no goals yet."""
    dense = floats(torch.bfloat16).cuda()
    xs = [torch.randn(m, SHAPE[1], dtype=torch.bfloat16, device="cuda") for m in ROWS_OF_X]
    repeats = max(3, rounds // 3)                                # a time of do_bench is a median of many calls already
    for name, storage, params in storages():
        yield from _storage(name, storage, params, dense, xs, repeats)


def _storage(name: str, storage: str, params: dict[str, Any], dense: Tensor, xs: list[Tensor],
             rounds: int) -> Iterator[Figure]:
    form, on_cpu, what = format_of(name), packed(name, storage, **params), title(name, storage, params)
    weight = on_cpu.to("cuda")
    out = torch.empty(SHAPE, dtype=torch.bfloat16, device="cuda")
    form.dequantize(weight, out=out)
    if not torch.equal(out.cpu(), form.dequantize(on_cpu)):
        raise WrongResult(f"{what}: the kernel and the reference dequantize differently")
    [seconds] = interleave([_timer(lambda: form.dequantize(weight, out=out))], rounds)
    moved = on_cpu.nbytes + BF16_BYTES
    yield Figure(f"{what}: dequantize kernel to bf16", "GB/s", rates(moved / 1e9, seconds),
                 note=f"read and written; {_microseconds(seconds)}")
    for x in xs:
        sides = [_timer(lambda x=x: torch.nn.functional.linear(x, dense)),  # type: ignore[misc]
                 _timer(lambda x=x: form.linear(x, weight))]                # type: ignore[misc]
        theirs, ours = interleave(sides, rounds)
        yield Figure(f"{what}: linear, M = {x.shape[0]}, to dense bf16", "x", ratios(theirs, ours),
                     note=f"{_microseconds(ours)}; dense {_microseconds(theirs)}")


def _timer(call: Callable[[], Tensor]) -> Callable[[], float]:
    """The median seconds of a call."""
    from triton.testing import do_bench

    return lambda: float(do_bench(call, return_mode="median")) / 1e3


def _microseconds(seconds: list[float]) -> str:
    shown = Figure("", "us", [each * 1e6 for each in seconds])
    return shown.text(shown.median)
