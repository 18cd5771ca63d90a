"""Splits bfloat16 weights into exponents and other bits, and joins them: a storage's pack and unpack in one pass on a CPU.

It serves storages with entropy-coded exponents, by loops of the codecs (qdsl/codecs/exponents.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.core.codecs import exponents
from qdsl.core.slices import Digits, FieldPiece
from qdsl.runtime.libraries.private_apis import is_batched, is_in_torch_dispatch_mode
from qdsl.runtime.weight.layout import Storage, Variant
from qdsl.runtime.weight.packed import PackedWeight

EIGHT = 8                                                        # columns whose bits are adjacent
# Digits of the exponents and of the other bits (core/slices.py): in order, or with bytes 2 and 3 of four exchanged.
ARRANGEMENTS: dict[str, tuple[Sequence[Digits], Sequence[Digits]]] = {
    "flat": ([0], [0]), "quads": ([0, 1], [0, [(2, 2, 1), (2, 1, 1), (2, 4, 1), (0, 8, 1)]])}


def write_decoded(packed: PackedWeight, out: Tensor) -> bool:
    """Write a weight with decoded streams to out [N, K]; False if its storage or the dtype of out does not fit."""
    if packed.variant.copies is None or out.dtype != torch.bfloat16 or not out.is_contiguous():
        return False
    arrangement = _arrangement(packed.layout)
    if not arrangement or not _are_plain_tensors(out, *packed.tensors.values()):
        return False
    symbols, uncoded = (packed.tensors[name].detach().contiguous().numpy() for name in packed.layout.coded)
    n, k = out.shape
    shapes = ((n, k), (n, k + -k % EIGHT)) if arrangement == "quads" else ((n * k,), (n * k,))
    if (symbols.shape, uncoded.shape) != shapes:
        return False
    if arrangement == "quads":
        exponents().join_rows(symbols, uncoded, _patterns(out))
    else:
        exponents().join_exponents(symbols, uncoded, _patterns(out).reshape(-1))
    return True


def fields_of(packed: PackedWeight, tensors: Iterable[Tensor | None]) -> dict[str, Tensor]:
    """The fields of the tensors that unpack takes.  packed: the weight, with its streams decoded."""
    if packed.variant.copies is not None and packed.device.type == "cpu" and _arrangement(packed.layout):
        weight = torch.empty(packed.shape, dtype=torch.bfloat16, device="cpu")
        if write_decoded(packed, weight):
            return {packed.variant.copies: weight}
    return packed.layout.fields_of(tensors, packed.extents)


def tensors_of(variant: Variant, layout: Storage, fields: Mapping[str, Tensor | None], extents: Mapping[str, int],
               ) -> dict[str, Tensor]:
    """The tensors that pack returns, before streams are encoded."""
    weight = None if variant.copies is None else fields.get(variant.copies)
    arrangement = "" if weight is None else _arrangement(layout)
    if weight is None or not arrangement or not _are_plain_tensors(weight):
        return layout.tensors_of(fields, extents)
    patterns = _patterns(weight.detach().contiguous())
    parts = exponents().split_rows(patterns) if arrangement == "quads" else exponents().split_exponents([patterns.reshape(-1)])
    return dict(zip(layout.decoded.coded, map(torch.from_numpy, parts), strict=True))


def _are_plain_tensors(*tensors: Tensor) -> bool:
    """Whether tensors are plain CPU tensors with numbers, not traced or otherwise observed."""
    return not torch.compiler.is_compiling() and not is_in_torch_dispatch_mode() and all(
        type(tensor) in (Tensor, torch.nn.Parameter) and tensor.device.type == "cpu" and not is_batched(tensor)
        for tensor in tensors)


def _patterns(weight: Tensor) -> NDArray[np.uint16]:
    """The bits of a contiguous bfloat16 tensor, without a copy."""
    array: NDArray[np.uint16] = weight.view(torch.int16).numpy().view(np.uint16)
    return array


def _arrangement(layout: Storage) -> str:
    """'quads' or 'flat' if `split_rows` or `split` of the codecs make the storage's two byte tensors; else ''."""
    decoded = layout.decoded
    stored = [decoded.tensors[name] for name in decoded.coded]
    if [(tensor.dtype, tensor.words, tensor.adds, tensor.flips) for tensor in stored] != [("u8", (), 0, 0)] * 2:
        return ""
    field = "".join(stored[0].fields)
    return next((name for name, (symbols, uncoded) in ARRANGEMENTS.items() if [tensor.slices for tensor in stored] == [
        (FieldPiece(field, 0, symbols, 7, 8),), (FieldPiece(field, 0, uncoded, 0, 7), FieldPiece(field, 7, uncoded, 15, 1))]), "")
