"""Splits bfloat16 weights into exponents and other bits, and joins them: a storage's pack and unpack in one pass on a CPU.

It serves storages with entropy-coded exponents, by loops of the codecs (qdsl/codecs/exponents.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs import exponents
from qdsl.runtime.libraries.private_apis import is_batched, is_in_torch_dispatch_mode
from qdsl.runtime.weight.layout import Storage, Variant
from qdsl.runtime.weight.packed import PackedWeight

EIGHT = 8                                                        # columns whose bits are adjacent
Unpack = Callable[..., dict[str, Tensor]]


def write(packed: PackedWeight, out: Tensor) -> bool:
    """Write a weight with decoded streams to out [N, K]; False if its storage or the dtype of out does not fit."""
    if packed.variant.copies is None or out.dtype != torch.bfloat16 or not out.is_contiguous():
        return False
    arrangement = _arrangement(packed.layout)
    if not arrangement or not _is_plain(out, *packed.tensors.values()):
        return False
    symbols, uncoded = (packed.tensors[name].detach().contiguous().numpy() for name in packed.layout.coded)
    n, k = out.shape
    shapes = ((n, k), (n, k + -k % EIGHT)) if arrangement == "quads" else ((n * k,), (n * k,))
    if (symbols.shape, uncoded.shape) != shapes:
        return False
    if arrangement == "quads":
        exponents.join_rows(symbols, uncoded, _patterns(out))
    else:
        exponents.join(symbols, uncoded, _patterns(out).reshape(-1))
    return True


def fields_of(packed: PackedWeight, tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The fields of the tensors that unpack takes.  packed: the weight, with its streams decoded."""
    if packed.variant.copies is not None and packed.device.type == "cpu" and _arrangement(packed.layout):
        weight = torch.empty(packed.shape, dtype=torch.bfloat16, device="cpu")
        if write(packed, weight):
            return {packed.variant.copies: weight}
    return packed.layout.fields_of(tensors, packed.extents)


def tensors_of(variant: Variant, layout: Storage, fields: Mapping[str, Tensor | None], extents: Mapping[str, int],
               ) -> dict[str, Tensor]:
    """The tensors that pack returns, before streams are encoded."""
    weight = None if variant.copies is None else fields.get(variant.copies)
    arrangement = "" if weight is None else _arrangement(layout)
    if weight is None or not arrangement or not _is_plain(weight):
        return layout.tensors_of(fields, extents)
    patterns = _patterns(weight.detach().contiguous())
    parts = exponents.split_rows(patterns) if arrangement == "quads" else exponents.split([patterns.reshape(-1)])
    return dict(zip(_decoded(layout).coded, map(torch.from_numpy, parts), strict=True))


def _is_plain(*tensors: Tensor) -> bool:
    """Whether tensors are plain CPU tensors with numbers, not traced or otherwise observed."""
    return not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not is_batched(tensor)
        for tensor in tensors)


def _patterns(weight: Tensor) -> NDArray[np.uint16]:
    """The bits of a contiguous bfloat16 tensor, without a copy."""
    array: NDArray[np.uint16] = weight.view(torch.int16).numpy().view(np.uint16)
    return array


def _decoded(layout: Storage) -> Storage:
    """The storage with decoded tensors in place of streams."""
    return layout.decoded if layout.streams else layout


def _arrangement(layout: Storage) -> str:
    """'quads' or 'flat' if `split_rows` or `split` of the codecs make the storage's two byte tensors; else ''."""
    decoded = _decoded(layout)
    stored = [decoded.tensors[name] for name in decoded.coded]
    if [one.dtype for one in stored] != ["u8", "u8"] or not set(layout.reads) <= {"N", "K"}:
        return ""
    return _proven(layout.unpack, len(stored[0].axes) == 1, layout.reads)


@lru_cache(maxsize=64)
def _proven(unpack: Unpack, is_flat: bool, reads: Sequence[str]) -> str:
    """The arrangement that an unpack function has.  It and the codecs only move bits, so testing single bits proves it."""
    single = np.packbits(np.eye(16 * EIGHT, dtype=np.uint8), axis=1)
    symbols, uncoded = (np.ascontiguousarray(half) for half in np.split(single, [EIGHT], axis=1))
    weights = np.empty(symbols.shape, np.uint16)
    if is_flat:
        symbols, uncoded = symbols.reshape(-1), uncoded.reshape(-1)
        exponents.join(symbols, uncoded, weights.reshape(-1))
    else:
        exponents.join_rows(symbols, uncoded, weights)
    extents = {"N": len(single), "K": EIGHT}
    fields = unpack(torch.from_numpy(symbols), torch.from_numpy(uncoded), **{name: extents[name] for name in reads})
    is_same = all(field.dtype == torch.bfloat16 and np.array_equal(_patterns(field.contiguous()), weights)
                  for field in fields.values())
    return ("flat" if is_flat else "quads") if is_same and len(fields) == 1 else ""
