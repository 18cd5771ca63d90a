"""Launches of a format's kernels on weights with a shape but no data."""

from __future__ import annotations

from collections.abc import Mapping
from types import ModuleType

import torch
from torch import Tensor

from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.kernels.scale_columns import scale_columns
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.weight import stream_kernels

KERNELS = ("linear", "dequantize")
TYPES = {"bf16": torch.bfloat16, "f16": torch.float16}


def meta_weight(module: ModuleType, shape: tuple[int, int], storage: str | None, params: Mapping[str, int | str]) -> PackedWeight:
    """A meta weight [N, K] without optional tensors, with streams of typical size.

    Raises FormatError.
    """
    return stream_kernels.with_typical_streams(module.FORMAT.empty(shape, storage, **module.FORMAT.complete(params)))


def product_calls(packed: PackedWeight, kind: str, rows: int, dtype: torch.dtype) -> list[Call]:
    """The launches of `linear` with `rows` rows of x, or of `dequantize`; x and the output have this dtype.

    If the numbers determine how often a kernel's loops run (DF11), the launch does not state its weights.  The launch that
    multiplies x by a factor per column is omitted, because it reads no weight.
    """
    k = packed.shape[1]
    x, out = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((rows, k), out_shape(packed, kind, rows)))
    return [call for call in calls_on(packed, kind, x, out) if call.kernel is not scale_columns]


def calls_on(packed: PackedWeight, kind: str, x: Tensor, out: Tensor) -> list[Call]:
    """The launches of `linear` of x, or of `dequantize`, into out."""
    return list(launch.dequantize_calls(packed, out) if kind == "dequantize" else launch.linear_calls(x, packed, None, out))


def out_shape(packed: PackedWeight, kind: str, rows: int) -> tuple[int, int]:
    """The shape of the output of `linear` with `rows` rows, or of `dequantize`."""
    n, k = packed.shape
    return (n, k) if kind == "dequantize" else (rows, n)


def title(packed: PackedWeight, kind: str, rows: int, x: str) -> str:
    """The launch as text: 'linear of q4_0.blocks [256, 1024], 1 row of x in bf16'."""
    where = f"{kind} of {packed.format.name}.{packed.storage} [{packed.shape[0]}, {packed.shape[1]}]"
    return f"{where} to {x}" if kind == "dequantize" else f"{where}, {rows} row{'s' * (rows > 1)} of x in {x}"
