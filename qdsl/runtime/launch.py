"""Launching a storage's kernels: arguments from a packed weight, tile sizes from its shape."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from qdsl.runtime import configure
from qdsl.runtime.arrays import cdiv
from qdsl.runtime.packed import PackedWeight
from qdsl.runtime.shapes import axis

TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16}
WARPS = 4
UNITS = 1024                                                     # units per program and step: eight for each of 128 threads
ROWS_OF_X = 65535                                                # the most that a grid's second axis can count


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: a kernel, its arguments in order, the constants it is specialised on, and how it is compiled.

    For `qdsl analyze`: the weights that one program takes, and those of a trip of its loop, 0 without one.
    """

    kernel: Any
    arguments: tuple[Tensor | int | None, ...]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    options: Mapping[str, Any]
    weights: int = 0
    step: int = 0

    def run(self) -> None:
        self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def dequantize(packed: PackedWeight, out: Tensor) -> None:
    """Run the dequantize kernel: w [N, K] into out, exact in float32, rounded once for float16 and bfloat16."""
    for call in dequantize_calls(packed, out):
        call.run()


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False) -> None:
    """Run the linear kernel: x [M, K] @ w.T + bias into out [M, N]; x and out are contiguous.

    invariant: a row of x gives the same bits whatever rows are beside it.
    """
    for call in linear_calls(x, packed, bias, out, invariant):
        call.run()


def dequantize_calls(packed: PackedWeight, out: Tensor) -> Iterator[Call]:
    """The launches of `dequantize`, for tensors on any device, meta too."""
    kernels, rows, units = _kernels(packed)
    if not rows or not units:
        return
    bn, bk = _tile(kernels.last, rows, units, kernels.sums)
    # Contracted multiply-adds would skip a rounding that the formula has.
    yield Call(kernels.dequantize, (*_tensors(packed), out, *packed.shape, *packed.sizes.values()), {"BN": bn, "BK": bk},
               (cdiv(rows, bn), cdiv(units, bk)), {"num_warps": WARPS, "enable_fp_fusion": False},
               weights=min(bn, rows) * min(bk, units) * _unit(packed))


def linear_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False,
                 config: Mapping[str, int] | None = None) -> Iterator[Call]:
    """The launches of `linear`, for tensors on any device, meta too; config: of a kernel for matrix units."""
    kernels, rows, units = _kernels(packed)
    if not rows or not x.shape[0]:
        return
    if has_lanes(x, packed):
        which = kind(x, packed, invariant)
        # Bits may depend on how warps share K, so that what must not vary is launched by rule.
        chosen = config or (configure.candidates(which, packed, x.shape[0])[0] if invariant else
                            configure.chosen(which, packed, x.shape[0], x))
        yield _lane_call(x, packed, bias, out, which, chosen)
        return
    bn, bk = _tile(kernels.last, rows, units, kernels.sums)
    for start in range(0, x.shape[0], ROWS_OF_X):
        part, result = x[start:start + ROWS_OF_X], out[start:start + ROWS_OF_X]
        yield Call(kernels.linear, (*_tensors(packed), part, bias, result, *packed.shape, *packed.sizes.values()),
                   {"BN": bn, "BK": bk}, (cdiv(rows, bn), part.shape[0]), {"num_warps": WARPS},
                   weights=min(bn, rows) * units * _unit(packed), step=bn * bk * _unit(packed))


def has_lanes(x: Tensor, packed: PackedWeight) -> bool:
    """Whether the kernels for matrix units serve x [M, K]: 16-bit floats, whole chunks of columns, codes that are numbers."""
    lanes = packed.layout.kernels.lanes
    if lanes is None or x.dtype not in TYPES or packed.shape[1] % 128 or not packed.shape[1] or not packed.finite:
        return False
    if x.device.type == "cuda" and configure.target(x.device).capability < 8:
        return False                                             # AMD's, and those before bfloat16: the plain kernel serves them
    wide = [tensor for tensor in packed.tensors.values() if tensor.dtype == torch.int32 or tensor.shape == packed.shape]
    return min(lanes.sizes(packed.sizes), default=lanes.least) >= lanes.least and all(
        tensor.is_meta or tensor.data_ptr() % 16 == 0 for tensor in (x, *wide))


def kind(x: Tensor, packed: PackedWeight, invariant: bool = False) -> str:
    """Which of the kernels for matrix units serves x [M, K]."""
    lanes = packed.layout.kernels.lanes
    assert lanes is not None
    if invariant:
        return "few"
    if x.shape[0] > 8 and lanes.many is not None and configure.target(x.device).capability == 9:
        return "many"
    return "row" if x.shape[0] == 1 and lanes.row is not None else "few"


def _lane_call(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, which: str, config: Mapping[str, int]) -> Call:
    lanes = packed.layout.kernels.lanes
    assert lanes is not None
    (m, k), n = x.shape, packed.shape[0]
    tensors = [tensor if tensor is None or tensor.shape != (n, k) else tensor.view(torch.int32) for tensor in _tensors(packed)]
    constants = {**packed.sizes, **config, "F": TYPES[x.dtype]}
    options = {"num_warps": config.get("W") or config["WN"] * config["WK"], "num_stages": config.get("STAGES", 1),
               "enable_fp_fusion": True}
    rows = 16 * config["R"] * (config.get("W") or config["WN"])
    columns = 128 if which == "many" else 256 * config["WK"]
    taken = {"weights": min(rows, n) * k, "step": rows * columns}
    if which == "many":
        return Call(lanes.many, (*tensors, x, bias, out, m, n, k), constants, (cdiv(n, rows), cdiv(m, config["BM"])), options,
                    **taken)
    pairs = x.view(torch.int32)
    if which == "row":
        return Call(lanes.row, (*tensors, pairs, bias, out, n, k), constants, (cdiv(n, rows),), options, **taken)
    return Call(lanes.few, (*tensors, pairs, bias, out, m, n, k), constants, (cdiv(n, rows), cdiv(m, 8)), options, **taken)


def _kernels(packed: PackedWeight) -> tuple[Any, int, int]:
    kernels = packed.layout.kernels
    rows, units = (axis(text).extent(*packed.shape, packed.sizes) for text in (kernels.rows, kernels.units))
    assert rows is not None and units is not None
    return kernels, rows, units


def _unit(packed: PackedWeight) -> int:
    """Weights in a unit of a row of tiles."""
    rows, units = axis(packed.layout.kernels.rows), axis(packed.layout.kernels.units)
    return rows.by(packed.sizes) * units.by(packed.sizes) // (rows.words * units.words)


def _tensors(packed: PackedWeight) -> list[Tensor | None]:
    """Kernel arguments in storage order: 8-bit floats as bytes, None for what is missing or adds nothing."""
    found: list[Tensor | None] = []
    for name in packed.layout.tensors:
        tensor = packed.tensors.get(name) if name not in packed.in_order else None
        if tensor is not None:
            tensor = tensor.contiguous()
            if tensor.is_floating_point() and tensor.element_size() == 1:
                tensor = tensor.view(torch.uint8)
        found.append(tensor)
    return found


def _tile(last: str, rows: int, units: int, sums: int) -> tuple[int, int]:
    """Rows and units of a tile, powers of two: long along the axis that is contiguous in memory."""
    along = units if last == "k" else rows
    across = rows if last == "k" else units
    size = max(128, UNITS // sums)
    long = min(256 if last == "k" else 128, _power(along), size)
    short = min(size // long, _power(across))
    return (short, long) if last == "k" else (long, short)


def _power(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (max(1, value) - 1).bit_length()
