"""Quantizes x to 8 bits by torch, for weights with 8-bit codes; gpu/kernels/eight_bit.py makes the same bits in a kernel.

A group of columns of a row of x has a scale: its largest magnitude divided by the type's largest number (448 for e4m3, 127 for
i8), at least 2^-126.  Codes are x times 1 / scale, rounded to nearest even.  Each step is rounded to float32.  A group is 128
columns if the weight's scales vary along K, else the whole row.  If a number is not finite, the scale is NaN and codes are 0.

With a static scale (a checkpoint's input_scale) codes are x / scale, rounded to nearest even and clamped to the type's range,
-448 to 448 or -128 to 127.  Infinities are clamped too; if a number is NaN, the scale is NaN and codes are 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.weight.arrays import cdiv
from qdsl.runtime.weight.layout import PLANAR
from qdsl.runtime.weight.matrix_unit import EightBit
from qdsl.runtime.weight.packed import FormatError, PackedWeight

CHUNK = 128                                                      # columns per group
LARGEST = {"e4m3": 448.0, "i8": 127.0}
SMALLEST = 2.0 ** -126                                           # a normal number, so that flushing subnormals does not matter


def check_quantize_x(packed: PackedWeight) -> None:
    """Raises FormatError unless the weight can be multiplied by 8-bit x."""
    kernels = packed.layout.kernels.matrix_unit
    name = f"{packed.format.name}.{packed.storage}"
    if kernels is None or kernels.eight is None:
        raise FormatError(f"quantize_x: {name} does not hold its codes as rows of 8 bits, e4m3 or i8")
    for text, size in zip(kernels.sums.blocks, kernels.sizes(packed.sizes), strict=True):
        if size % CHUNK and size < packed.shape[1]:
            raise FormatError(f"quantize_x: x is quantized in groups of {CHUNK} columns, and {text} = {size} is no multiple")


def can_quantize_x(packed: PackedWeight) -> bool:
    """Whether the weight can be multiplied by 8-bit x."""
    try:
        check_quantize_x(packed)
    except FormatError:
        return False
    return True


def storage_for(packed: PackedWeight) -> str:
    """The storage with rows of 8-bit codes to which a planar weight converts; '' for other weights."""
    storages = packed.variant.storages.items() if packed.storage == PLANAR else ()
    return next((name for name, layout in storages if layout.kernels.matrix_unit and layout.kernels.matrix_unit.eight), "")


def quantize_x(x: Tensor, kind: str, groups: bool, scale: float | None = None) -> tuple[Tensor, Tensor]:
    """x [M, K] as codes [M, K], float8_e4m3fn or int8, and scales float32 [M, ceil(K/128)], or [M, 1] without groups.

    scale: a static scale, used instead of scales from x.
    """
    size = CHUNK if groups else max(1, x.shape[1])
    wide = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % size)).view(len(x), cdiv(x.shape[1], size), size)
    if scale is None:
        top = wide.abs().amax(2)
        usable = top < torch.inf
        scales = (top / LARGEST[kind]).clamp(min=SMALLEST).masked_fill(~usable, torch.nan)
        values = wide * (1 / scales)[..., None]
    else:
        usable = ~wide.isnan().any(2)
        static = torch.full((), scale, dtype=torch.float32, device=x.device)    # by a number a GPU would multiply by 1 / scale
        scales = static.expand(usable.shape).masked_fill(~usable, torch.nan)
        values = wide / static
    values = values.masked_fill(~usable[..., None], 0)
    codes = values.round().clamp(-128, 127).to(torch.int8) if kind == "i8" else values.clamp(-448, 448).to(torch.float8_e4m3fn)
    return codes.flatten(1)[:, :x.shape[1]].contiguous(), scales


def fake_quantize_x(x: Tensor, packed: PackedWeight, scale: float | None = None) -> Tensor:
    """x [M, K] quantized for a weight and dequantized: float32 [M, K], or float64 for float64 x.  scale: a static one."""
    kernel = _own(packed)
    dtype = torch.promote_types(x.dtype, torch.float32)
    if not x.numel():
        return x.to(dtype)
    codes, scales = quantize_x(x, kernel.type, kernel.groups, scale)
    wide = scales.to(dtype).repeat_interleave(CHUNK if kernel.groups else x.shape[1], 1)[:, :x.shape[1]]
    return codes.to(dtype) * wide


def _own(packed: PackedWeight) -> EightBit:
    kernels = packed.layout.kernels.matrix_unit
    assert kernels is not None and kernels.eight is not None
    return kernels.eight
