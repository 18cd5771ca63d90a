"""x @ w.T + bias for a packed weight, differentiable in x and bias; a CPU never holds the whole dense weight.

On a GPU runtime/gpu/plan.py chooses a fused kernel, or dequantized tiles and the vendor's matmul; on a CPU runtime/cpu/linear.py
a compiled loop or tiles.  On devices without Triton torch dequantizes tiles and multiplies them; Triton's interpreter is never
used.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from qdsl.runtime.cpu import int4
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.product import product, quantized_product
from qdsl.runtime.weight import eight
from qdsl.runtime.weight.packed import FormatError, PackedWeight
from qdsl.runtime.weight.target import plan_of
from qdsl.runtime.weight.tiles import decode_rows, row_tiles

QUANTIZE_X, INVARIANT, MATCH_DENSE = "quantize_x", "batch_invariant", "match_dense"        # modes of a product
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_x(x: Tensor, bias: Tensor | None, shape: tuple[int, int], device: torch.device) -> None:
    """Raises FormatError unless x is floats [..., K] and the bias floats [N], on the weight's device."""
    n, k = shape
    if x.shape[-1:] != (k,) or x.dtype not in FLOATS:
        raise FormatError(f"x {list(x.shape)} {str(x.dtype)[6:]} does not fit a weight [{n}, {k}]: expected floats [..., {k}]")
    if x.layout is not torch.strided:
        raise FormatError(f"x is {str(x.layout)[6:]}; expected a dense tensor: x.to_dense()")
    check_bias(bias, shape)
    for name, tensor in (("x", x), ("bias", bias)):
        if tensor is not None and tensor.device != device:
            raise FormatError(f"{name} is on {tensor.device}, the weight on {device}")


def check_bias(bias: Tensor | None, shape: tuple[int, int]) -> None:
    """Raises FormatError unless the bias is floats [N]."""
    n, k = shape
    if bias is not None and (bias.shape != (n,) or bias.dtype not in FLOATS):
        raise FormatError(f"bias {list(bias.shape)} {str(bias.dtype)[6:]} does not fit a weight [{n}, {k}]: "
                          f"expected floats [{n}]")


def mode_of(quantize_x: bool, batch_invariant: bool, input_scale: float | None = None, match_dense: bool = False) -> str:
    """The `mode` argument of operations.  Raises FormatError for options that exclude each other.

    A static scale of x follows as text that converts back to the same float.
    """
    wanted = {QUANTIZE_X: quantize_x, INVARIANT: batch_invariant, MATCH_DENSE: match_dense}
    modes = [mode for mode, is_wanted in wanted.items() if is_wanted]
    if len(modes) > 1:
        raise FormatError(f"{' and '.join(modes)} exclude each other: choose one")
    if quantize_x and input_scale is not None:
        if not 0 < input_scale < math.inf:
            raise FormatError(f"input_scale is {input_scale:g}; a scale is positive and finite")
        return f"{QUANTIZE_X}={input_scale!r}"
    return modes[0] if modes else ""


def gradient_mode(mode: str) -> str:
    """The mode of products for the gradient of a product; only a dense layer's gradients depend on its mode."""
    return mode if mode == MATCH_DENSE else ""


def is_quantized(mode: str) -> bool:
    return mode.startswith(QUANTIZE_X)


def _static_scale(mode: str) -> float | None:
    _, _, digits = mode.partition("=")
    return float(digits) if digits else None


def as_stored(x: Tensor, packed: PackedWeight) -> tuple[Tensor, PackedWeight]:
    """x [..., K] permuted to stored column order, and the weight in stored order; their product is the same.

    That weight shares this weight's plan, where the next product finds prepared ones.
    """
    if packed.order is None:
        return x, packed
    stored = packed.as_stored()
    if packed.runs_kernels or (packed.device.type == "cpu" and packed.layout.is_order_plain):
        own = plan_of(packed) if packed.layout.is_order_plain else packed.stored_plan or plan_of(stored)
        stored.plan = packed.stored_plan = own
    return x.index_select(-1, packed.order), stored


def packed_linear(x: Tensor, packed: PackedWeight, bias: Tensor | None, mode: str = "") -> Tensor:
    """x [..., K] times a packed weight's transpose, plus bias [N]: [..., N]."""
    if is_quantized(mode):
        return _quantized_x_product(x, packed.decode_streams(), bias, mode)
    if mode != INVARIANT and (out := int4.int4_product(x, packed, bias)) is not None:
        return out
    if packed.runs_kernels:
        return product(x, packed, bias, mode, mode == INVARIANT)
    plain = packed if mode != INVARIANT and cpu.has_decoded_copy(x, packed) else packed.decode_streams()
    if mode == INVARIANT:
        return _invariant_product(x, plain, bias)
    return cpu.product(x, plain, bias, mode if plain is packed else None)


def _invariant_product(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor:
    """The batch-invariant product on a CPU: rows are multiplied one by one, so that their bits do not depend on other rows."""
    out = x.new_empty(x.shape[0], packed.shape[0])
    for start, stop in row_tiles(packed, weights=tile_weights(x)):
        weight = _weights(packed, start, stop, x.dtype)
        part = None if bias is None else bias[start:stop].to(x.dtype)
        for i in range(x.shape[0]):
            out[i:i + 1, start:stop] = torch.nn.functional.linear(x[i:i + 1], weight, part)
    return out


def _quantized_x_product(x: Tensor, packed: PackedWeight, bias: Tensor | None, mode: str) -> Tensor:
    """The product with x quantized to 8 bits: by a kernel, or without one by dequantizing x and multiplying in float32."""
    scale = _static_scale(mode)
    if not packed.runs_kernels or not launch.has_quantized(x, packed):
        return packed_linear(eight.fake_quantize_x(x, packed, scale), packed, bias).to(x.dtype)
    return quantized_product(x, packed, bias, scale, mode)


def packed_matmul(gradient: Tensor, packed: PackedWeight) -> Tensor:
    """gradient [M, N] @ w: [M, K], summed over tiles in float32, or in float64 for a float64 gradient."""
    packed = packed.decode_streams()
    dtype = torch.promote_types(gradient.dtype, torch.float32)
    wide = gradient.to(dtype)
    total = torch.zeros(gradient.shape[0], packed.shape[1], dtype=dtype, device=gradient.device)
    for start, stop in row_tiles(packed, weights=tile_weights(gradient)):
        total.addmm_(wide[:, start:stop], _weights(packed, start, stop, dtype))
    return total.to(gradient.dtype)


def tile_weights(x: Tensor) -> int:
    """Weights to dequantize at a time: as many as fit a cache on a CPU, 64 MB of float16 on a GPU."""
    return 1 << 18 if x.device.type == "cpu" else 1 << 25


def _weights(packed: PackedWeight, start: int, stop: int, dtype: torch.dtype) -> Tensor:
    """Rows [start, stop) of the decoded weight."""
    weight = torch.empty(stop - start, packed.shape[1], dtype=dtype, device=packed.device)
    if packed.runs_kernels:
        launch.dequantize(packed.cut("N", start, stop), weight)
        return weight
    decode_rows(packed, start, stop, weight)
    return weight
