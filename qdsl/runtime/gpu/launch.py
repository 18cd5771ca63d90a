"""Launches of a storage's kernels: arguments from a packed weight, launch configuration from its plan."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from qdsl.runtime.gpu import configure, plan, strides
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.gpu.families import BY_EXPERTS, BY_NAME, has_quantized, quantized_calls
from qdsl.runtime.gpu.families.family import SECOND_AXIS, TYPES, is_aligned, parts
from qdsl.runtime.gpu.families.units import dequantize_calls, read_tensors, size_arguments
from qdsl.runtime.gpu.tiles import lane_tiles
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight import stream_kernels
from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.packed import PackedWeight

__all__ = ["SECOND_AXIS", "TYPES", "dequantize_calls", "has_quantized", "is_aligned", "quantized_calls", "read_tensors",
           "size_arguments"]


def dequantize(packed: PackedWeight, out: Tensor) -> None:
    """Run `dequantize`: w [N, K] into out, exact in float32, rounded once for float16 and bfloat16."""
    for call in dequantize_calls(packed, out):
        call.run()


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False) -> None:
    """Run the chosen fused kernel: x [M, K] @ w.T + bias into out [M, N]; x and out are contiguous.

    invariant: a row of x gives the same bits whatever the other rows are.
    """
    for call in linear_calls(x, packed, bias, out, invariant):
        call.run()


def linear_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor, invariant: bool = False,
                 candidate: Candidate | None = None) -> Iterator[Call]:
    """The launches of `linear`, for tensors on any device, meta too; candidate: a fused kernel, by default the cheapest."""
    if len(pieces := parts(x, out, 8)) > 1:
        for part, result in pieces:
            yield from linear_calls(part, packed, bias, result, invariant, candidate)
        return
    if configure.has_skinny_streams(x, packed):
        yield from stream_kernels.skinny_calls(x, packed, bias, out)
        return
    packed, calls = stream_kernels.decoded_with_calls(strides.gapless_weight(packed))
    yield from calls
    if not out.numel():
        return
    if candidate is None:
        choose = plan.invariant_candidate if invariant else plan.fused_candidate
        candidate = choose(packed, x.shape[0], x.dtype, x.device, is_aligned(x, packed))
    yield from BY_NAME[candidate.kind].calls(x, packed, bias, out, candidate.config)


def grouped(x: Tensor, packed: PackedWeight, tiles: Tensor, bias: Tensor | None, out: Tensor, rows: Tensor | None = None) -> None:
    """Run one kernel over experts: x [M, K], weight [E * N, K], bias [E, N], out [M, N], all contiguous.

    tiles: int32 [T, 3] of (expert, first row, end of the expert's rows); a program takes up to 8 of these rows.  rows: integers
    [M], the row of x [T, K] for each of the M rows.
    """
    for call in grouped_calls(x, packed, tiles, bias, out, rows):
        call.run()


def grouped_calls(x: Tensor, packed: PackedWeight, tiles: Tensor, bias: Tensor | None, out: Tensor, rows: Tensor | None = None,
                  ) -> Iterator[Call]:
    """The launch of `grouped`, for tensors on any device, meta too; requires fits_experts(x, packed)."""
    if out.numel():
        packed = strides.gapless_weight(packed)
        config = lane_tiles(out.shape[1] * cdiv(out.shape[0], 8), x.shape[1], x.device)
        yield from BY_EXPERTS.grouped_calls(x, packed, bias, out, config, tiles, rows)


def fits_experts(x: Tensor, packed: PackedWeight) -> bool:
    """Whether a kernel serves rows of experts, whatever their number, their alignment included."""
    return not BY_EXPERTS.why_not(plan.Product(packed, x.shape[0], x.dtype, x.device, is_aligned(x, packed)))
