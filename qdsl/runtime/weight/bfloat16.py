"""bfloat16 weights of exponents and other bits, and back: what a storage's unpack and pack do, in one pass on a CPU.

It is for storages of streams in which kernels make weights by pairs.  Loops of the codecs do the work.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs import bfloat16
from qdsl.runtime.torch.private_apis import is_batched, is_in_torch_dispatch_mode
from qdsl.runtime.weight.layout import Pairs, Storage

if TYPE_CHECKING:
    from qdsl.runtime.weight.packed import PackedWeight

EIGHT = 8                                                        # columns that share two words of uncoded bits


def write(packed: PackedWeight, out: Tensor) -> bool:
    """Writes a weight whose streams are decoded to out [N, K]; False where it has no such storage, or out another type."""
    pairs = packed.layout.kernels.pairs
    if pairs is None or out.dtype != torch.bfloat16 or not out.is_contiguous() or not _is_bfloat16(pairs):
        return False
    symbols, uncoded = packed.tensors[pairs.stream], packed.tensors[pairs.uncoded]
    if not _is_plain(symbols, uncoded, out):
        return False
    bfloat16.join(_array(symbols), _array(uncoded), _patterns(out))
    return True


def fields_of(packed: PackedWeight, tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The fields of the tensors that unpack takes.  packed: the weight, its streams decoded."""
    pairs, n, k = packed.layout.kernels.pairs, *packed.shape
    if pairs is not None and packed.device.type == "cpu":
        weight = torch.empty(n, k, dtype=torch.bfloat16)
        if write(packed, weight):
            return dict.fromkeys(packed.variant.fields, weight)
    return packed.layout.fields_of(tensors, packed.extents)


def tensors_of(layout: Storage, fields: Mapping[str, Tensor | None], extents: Mapping[str, int]) -> dict[str, Tensor]:
    """The tensors that pack returns, before streams are encoded."""
    pairs, weight = layout.kernels.pairs, next(iter(fields.values()))
    if pairs is None or weight is None or not _is_plain(weight) or not _is_bfloat16(pairs):
        return layout.tensors_of(fields, extents)
    symbols, uncoded = bfloat16.split(_patterns(weight.detach().contiguous()))
    return {pairs.stream: torch.from_numpy(symbols), pairs.uncoded: torch.from_numpy(uncoded)}


def _is_plain(*tensors: Tensor) -> bool:
    """Whether tensors have numbers on a CPU, which nothing but this call has to see."""
    return not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not is_batched(tensor)
        for tensor in tensors)


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().contiguous().numpy()
    return array


def _patterns(weight: Tensor) -> NDArray[np.uint16]:
    """The bits of a contiguous bfloat16 tensor, in its memory."""
    array: NDArray[np.uint16] = weight.view(torch.int16).numpy().view(np.uint16)
    return array


@lru_cache(maxsize=64)
def _is_bfloat16(pairs: Pairs) -> bool:
    """Whether weights are made as the codecs make them.  Both only move bits, so that single bits tell."""
    if pairs.type != "bf16" or pairs.at != 7:
        return False
    single = np.packbits(np.eye(16 * EIGHT, dtype=np.uint8), axis=1)
    symbols, uncoded = np.ascontiguousarray(single[:, :EIGHT]), np.ascontiguousarray(single[:, EIGHT:])
    weights = np.empty(symbols.shape, np.uint16)
    bfloat16.join(symbols, uncoded, weights)
    exponents = symbols.astype(np.uint32) << pairs.at
    words = uncoded.view("<u4")
    halves = tuple(exponents[:, column] | exponents[:, column + 1] << 16 for column in range(0, EIGHT, 2))
    in_kernels = np.stack(pairs.weights.fn(halves, words[:, 0], words[:, 1]), axis=1)
    return np.array_equal(in_kernels.view("<u2"), weights)
