"""The GPU's work to decode a weight in various codes: instruction counts for sm_90, and lower bounds of times.

A warp looks up 32 entries of a table at once.  The L1 cache serves one line of 128 bytes per cycle, so that a lookup takes as
many cycles as it touches lines.  The project's predictor ignores these cycles (analyze/predict.py).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import qdsl
from bench import code_kernels
from qdsl.analyze import sass
from qdsl.analyze.compile import compile_launch
from qdsl.analyze.counts import report
from qdsl.analyze.gpus import SCHEDULERS, WARP, arch_of, gpu_of
from qdsl.analyze.launches import meta_weight, product_calls
from qdsl.analyze.predict import predict
from qdsl.codecs.huffman_lanes.reference import AHEAD, GROUP
from qdsl.runtime.gpu.costs import REACHABLE
from qdsl.runtime.libraries.call import Call

ARCH, GPU = "sm_90", "h200"
N = K = 8192
PER_ROW = 8                                                      # lanes
LINE = 128                                                       # bytes
DENSE = 16.0                                                     # bits of a plain weight
WINDOW, PER_CODE = 64, 2.591                                     # bits of df11's window, and of a code of normal weights
HEAD = ["8192 x 8192, H200", "bits", "instructions", "L1 cycles", "issue us", "L1 us", "memory us", "at least us"]


def table(bits: Mapping[str, float]) -> list[list[str]]:
    """Rows of text: a code, its bits per weight, instructions and L1 cycles per weight, and lower bounds of times.

    bits: per weight, by what bench.codes calls a code.
    """
    gpu = gpu_of(GPU)
    lines = [HEAD, ["plain bfloat16", f"{DENSE:.2f}", "", "", "", "", f"{_memory(DENSE):.1f}", f"{_memory(DENSE):.1f}"]]
    for title, code, lookups, entries, call in _decoders():
        counts = report(call, ARCH)
        lines.append(_row(title, bits[code], counts.hot, lookups * _lines(entries), 1e6 * predict(counts, gpu).busy))
    windows = _windows()
    issued = 1e-3 * N * K / WARP * windows / (SCHEDULERS * gpu.multiprocessors * gpu.clock)
    lines.append(_row("df11", bits["df11"], windows, math.nan, issued))
    return lines


def _row(title: str, bits: float, instructions: float, cycles: float, busy: float) -> list[str]:
    gpu = gpu_of(GPU)
    cached = 1e-3 * N * K / WARP * cycles / gpu.multiprocessors / gpu.clock
    times = [time for time in (busy, cached, _memory(bits)) if not math.isnan(time)]
    return [title, f"{bits:.2f}", f"{instructions:.1f}", *("-" if math.isnan(value) else f"{value:.1f}" for value in
            (cycles, busy, cached)), f"{_memory(bits):.1f}", f"{max(times):.1f}"]


def _memory(bits: float) -> float:
    """Microseconds to read a weight."""
    return 1e6 * N * K * bits / 8 / (gpu_of(GPU).bandwidth * 1e9 * REACHABLE)


def _lines(entries: float) -> float:
    """Lines that 32 lookups in a table of so many bytes meet, all entries being as likely."""
    lines = max(1.0, entries / LINE)
    return lines * (1 - (1 - 1 / lines) ** WARP) if entries else 0.0


def _decoders() -> Iterator[tuple[str, str, float, float, Call]]:
    """A title, what bench.codes calls it, lookups per weight, bytes of the table, and a launch that decodes to bfloat16."""
    [hlane], [fix4], [fix3] = (_calls(name) for name in ("hlane", "fix4", "fix3"))
    to_weights = hlane.constants["to_weights"]
    yield "fix4", "fix4", 0, 0, fix4
    yield "fix3", "fix3", 0, 0, fix3
    yield "hlane", "hlane", 1, 512, hlane
    yield "hlane, 4 streams a thread", "hlane", 1, 512, replace(hlane, options={**hlane.options, "num_warps": 1})
    for title, code, lookups, size, four, longest in (
            ("two symbols a lookup, codes of 6 bits", "Huffman, at most 6 bits", 0.5, 4 << 12, code_kernels.two_by_two, 6),
            ("two symbols a lookup, codes of 8 bits", "Huffman, at most 8 bits", 0.5, 4 << 16, code_kernels.two_by_two, 8),
            ("tANS, 256 states", "tANS, 256 states", 1, 4 << 8, code_kernels.four_by_state, 8),
            ("tANS, 1024 states", "tANS, 1024 states", 1, 4 << 10, code_kernels.four_by_state, 10)):
        yield title, code, lookups, size, _streams(four, longest, to_weights, size)


def _calls(name: str) -> list[Call]:
    """The launches that decode a weight of a format to bfloat16."""
    return product_calls(meta_weight(qdsl.load(name), (N, K), None, {}), "dequantize", 1, torch.bfloat16)


def _empty(size: int, dtype: torch.dtype) -> Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def _streams(four: Any, longest: int, to_weights: Any, size: int) -> Call:
    """A launch of bench.code_kernels.decode."""
    runs, rows, groups = K // (8 * PER_ROW), 4 * WARP // PER_ROW, N * PER_ROW // WARP
    turns = round(2.8 * N * K / 32 / GROUP) + AHEAD
    arguments = (_empty(turns * GROUP, torch.int32), _empty(groups, torch.int32), _empty(size // 4, torch.int32),
                 _empty(N * K // 8, torch.int64), _empty(N * K // 2, torch.int32), turns, N, K // 8, groups, runs)
    constants = {"next_four": four, "to_weights": to_weights, "LONGEST": longest, "R": PER_ROW, "BN": rows}
    return Call(code_kernels.decode, arguments, constants, (N // rows,), {"num_warps": 4}, rows * K, rows * PER_ROW * 8)


def _windows() -> float:
    """Instructions of df11's decoder for a weight.  Two loops go round as often as a window may have codes, for those it has.

    One counts symbols, one stores them.  Of a loop that is unrolled, the copy for what is left does not run.
    """
    call = _calls("df11")[0]
    code = sass.parse(compile_launch(call, arch_of(ARCH)).text)
    [steps] = [value for name, value in zip(call.kernel.arg_names, call.arguments, strict=False) if name == "steps"]
    assert isinstance(steps, int)
    trips: dict[bool, list[float]] = {False: [], True: []}
    for loop in sass.loops(code):
        stores = any(instruction.base == "STG" for instruction in code.instructions[loop.start:loop.stop])
        trips[stores].append(len(loop) / max(map(abs, sass.loop_counter_steps(code, loop))))
    return sum(map(min, trips.values())) * steps / (WINDOW / PER_CODE)
