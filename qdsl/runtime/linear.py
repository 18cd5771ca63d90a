"""x @ w.T + bias for a packed weight, differentiable in x and bias, never holding the whole weight on a CPU.

On a GPU few rows of x go through the fused kernel; many are served by dequantized tiles and the vendor's matmul.  On a CPU
tiles are dequantized and multiplied; Triton's interpreter is never used.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from qdsl.runtime import cpu, launch
from qdsl.runtime.packed import FormatError, PackedWeight
from qdsl.runtime.tiles import decode_rows, row_tiles

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
FUSED_ROWS = 16                                                  # predicted, not measured: past it a weight is decoded too often


def linear(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """x [..., K] times the weight's transpose, plus bias [N]: [..., N] in x's dtype, or under autocast in autocast's.

    Sums are float32.  On a GPU up to 16 rows of x meet exact float32 weights; in every other case weights are first rounded
    to x's dtype.  Raises FormatError where x does not fit.
    """
    n, k = packed.shape
    if x.shape[-1:] != (k,) or x.dtype not in FLOATS:
        raise FormatError(f"x {list(x.shape)} {str(x.dtype)[6:]} does not fit a weight [{n}, {k}]: expected floats [..., {k}]")
    check_bias(bias, packed)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.device != packed.device:
            raise FormatError(f"{name} is on {tensor.device}, the weight on {packed.device}")
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    result: Tensor = _Linear.apply(x, bias, packed)  # type: ignore[no-untyped-call]
    return result


def check_bias(bias: Tensor | None, packed: PackedWeight) -> None:
    """Raises FormatError unless the bias is floats [N]."""
    n, k = packed.shape
    if bias is not None and (bias.shape != (n,) or bias.dtype not in FLOATS):
        raise FormatError(f"bias {list(bias.shape)} {str(bias.dtype)[6:]} does not fit a weight [{n}, {k}]: "
                          f"expected floats [{n}]")


class _Linear(torch.autograd.Function):
    """The product with its gradients; the weight itself is not trained."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, packed: PackedWeight) -> Tensor:
        ctx.packed = packed
        ctx.bias_dtype = None if bias is None else bias.dtype
        return _product(_rows(x).contiguous(), packed, bias).view(*x.shape[:-1], packed.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        packed = ctx.packed
        gradient = gradients[0]
        rows = _rows(gradient)
        to_x = to_bias = None
        if ctx.needs_input_grad[0]:
            to_x = _transposed(rows, packed).view(*gradient.shape[:-1], packed.shape[1])
        if ctx.needs_input_grad[1]:
            to_bias = rows.float().sum(0).to(ctx.bias_dtype)
        return to_x, to_bias, None


def _rows(x: Tensor) -> Tensor:
    """[..., K] as [M, K], K = 0 too."""
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])


def _product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    if x.device.type == "cpu":
        return cpu.product(x, packed, bias)
    out = x.new_empty(x.shape[0], packed.shape[0])
    if x.device.type == "cuda" and x.shape[0] <= FUSED_ROWS:
        launch.linear(x, packed, bias, out)
        return out
    for start, stop in row_tiles(packed, weights=_tile_weights(x)):
        weight = _weights(packed, start, stop, x.dtype)
        out[:, start:stop] = torch.nn.functional.linear(x, weight, None if bias is None else bias[start:stop].to(x.dtype))
    return out


def _transposed(gradient: Tensor, packed: PackedWeight) -> Tensor:
    """gradient [M, N] @ w: [M, K], summed over tiles in float32."""
    total = torch.zeros(gradient.shape[0], packed.shape[1], dtype=torch.float32, device=gradient.device)
    for start, stop in row_tiles(packed, weights=_tile_weights(gradient)):
        total += gradient[:, start:stop].float() @ _weights(packed, start, stop, torch.float32)
    return total.to(gradient.dtype)


def _tile_weights(x: Tensor) -> int:
    """Weights dequantized at a time: a cache's worth on a CPU, 64 MB of float16 on a GPU."""
    return 1 << 18 if x.device.type == "cpu" else 1 << 25


def _weights(packed: PackedWeight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows [start, stop) of the weight."""
    weight = torch.empty(stop - start, packed.shape[1], dtype=dtype, device=packed.device)
    if packed.device.type == "cuda":
        launch.dequantize(packed.cut("N", start, stop), weight)
        return weight
    decode_rows(packed, start, stop, weight)
    return weight
