"""Builds a rank's packed weights from a checkpoint's tensors, in the order in which a loader brings them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import as_stored, layout_of, module_of, wrapped
from qdsl.checkpoint.files.safetensors import shown
from qdsl.checkpoint.report.shards import RankPiece, ShardError, row_piece
from qdsl.core.borders import StoredSpan
from qdsl.core.stored import INPUT_SCALE, element_dtype
from qdsl.runtime.weight.algebra import concatenate_rows
from qdsl.runtime.weight.packed import FormatError, PackedWeight

__all__ = ["Collector", "RankPart", "join_parts", "linear", "row_piece"]


@dataclass(frozen=True, slots=True)
class RankPart:
    """A packed weight that a rank stores, and which of its rows or columns belong to the rank.

    quantize_x, input_scale: as `linear` of the format takes them.
    """

    weight: PackedWeight
    span: StoredSpan
    quantize_x: bool = False
    input_scale: float | None = None

    def linear(self, x: Tensor, batch_invariant: bool = False) -> Tensor:
        """The matmul of x [..., K of the rank] with the rank's rows and columns: [..., N of the rank]."""
        (before, after), is_cut = self.span.padding, self.span.is_padded
        if self.span.dim == "K" and is_cut:
            x, is_cut = functional.pad(x, (before, after)), False
        product = self.weight.format.linear(x, self.weight, None, self.quantize_x, batch_invariant, self.input_scale)
        return product.narrow(-1, before, self.span.stop - self.span.start) if is_cut else product

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """The rank's rows and columns as a dense tensor."""
        return needed(self.weight.format.dequantize(self.weight, dtype), self.span)


def needed(dense: Tensor, span: StoredSpan) -> Tensor:
    """The rows or columns of a dense weight [..., N, K] that are needed of those that are held."""
    return dense.narrow(-1 if span.dim == "K" else -2, span.padding[0], span.stop - span.start)


class Collector:
    """Takes the tensors of one layer of a checkpoint in any order, and builds the rank's parts when all have come.

    encode: packs a rank's part of a layer of plain numbers; a part that it cannot hold (FormatError) stays plain.
    """

    def __init__(self, layer: Layer, pieces: Sequence[RankPiece], encode: Callable[[Tensor], PackedWeight] | None = None) -> None:
        self.layer, self.pieces, self.encode = layer, tuple(pieces), encode
        self.input_scale: float | None = None                    # of x, static, of a layer that has one
        self._tensors: dict[str, Tensor] = {}

    @property
    def storage_names(self) -> dict[str, str]:
        """The storage's tensor names, by the suffix that follows the layer's name in the checkpoint, such as 'weight_scale'."""
        return {full[len(self.layer.name) + 1:]: name for name, full in self.layer.tensors.items()}

    @property
    def unused(self) -> list[str]:
        """Suffixes of tensors that are not part of the weight, such as scales of x; without the bias."""
        others = [full[len(self.layer.name) + 1:] for full in (*self.layer.others.values(), *self.layer.settings)]
        return [leaf for leaf in others if leaf != "bias"]

    def dtype(self, leaf: str) -> torch.dtype:
        """The dtype of a tensor of the storage, by its suffix."""
        layout = layout_of(self.layer)[self.storage_names[leaf]]
        dtype: torch.dtype = getattr(torch, element_dtype(str(self.layer.params.get(layout.dtype, layout.dtype))))
        return dtype

    def take(self, leaf: str, tensor: Tensor) -> None:
        """Store a whole tensor of the checkpoint, by its suffix; of the unused ones only the scale of x."""
        if leaf == INPUT_SCALE and tensor.numel() == 1:
            self.input_scale = float(tensor)
        if leaf not in self.storage_names:
            return
        name = self.storage_names[leaf]
        self._tensors[name] = as_stored(self.layer, name, tensor)

    @property
    def has_begun(self) -> bool:
        """Whether any tensor has come."""
        return bool(self._tensors)

    @property
    def is_complete(self) -> bool:
        return self._tensors.keys() == self.layer.tensors.keys()

    def parts(self, device: torch.device | None = None) -> list[RankPart]:
        """The rank's parts, copied to a device; the collected tensors are dropped.  Raises ShardError where they do not fit."""
        if missing := self.layer.tensors.keys() - self._tensors.keys():
            raise ShardError(f"{shown(self.layer.name)}: the loader did not bring {', '.join(sorted(missing))}")
        tensors, self._tensors = self._tensors, {}
        try:
            whole = wrapped(self.layer, tensors)
            weights = [whole.shard(piece.span.dim, piece.span.first, piece.span.last) for piece in self.pieces]
        except FormatError as error:
            raise ShardError(f"{shown(self.layer.name)}: {error}") from None
        return [RankPart(self._encoded(weight.apply(partial(_own, device=device))), piece.span)
                for weight, piece in zip(weights, self.pieces, strict=True)]

    def zeros(self, device: torch.device | None = None) -> list[RankPart]:
        """The rank's parts with zeros, for a model that is loaded without weights.  Raises FormatError."""
        parts = []
        for piece in self.pieces:
            size, layer = piece.span.last - piece.span.first, self.layer
            shape = (size, layer.shape[1]) if piece.span.dim == "N" else (layer.shape[0], size)
            dense = torch.zeros(shape, dtype=torch.bfloat16, device=device)
            parts.append(RankPart(self._encoded(module_of(layer).quantize(dense, layer.storage, **layer.params)), piece.span))
        return parts

    def _encoded(self, weight: PackedWeight) -> PackedWeight:
        if self.encode is not None:
            with suppress(FormatError):
                return self.encode(weight.format.dequantize(weight))
        return weight


def join_parts(parts: Sequence[RankPart]) -> list[RankPart]:
    """Parts with consecutive rows, joined to one weight where their tensors allow it.

    Weights of different formats, with a scale or an index of columns for all rows, entropy-coded ones, and those of differing
    static scales of x stay by themselves.
    """
    modes = {(part.quantize_x, part.input_scale) for part in parts}
    if len(parts) > 1 and len(modes) == 1 and all(part.span.dim == "N" and not part.span.is_padded for part in parts):
        whole = concatenate_rows([part.weight for part in parts])
        if whole is not None:
            return [replace(parts[0], weight=whole, span=StoredSpan("N", 0, whole.shape[0], 0, whole.shape[0]))]
    return [*join_parts(parts[:-1]), parts[-1]] if len(parts) > 1 else list(parts)


def linear(x: Tensor, parts: Sequence[RankPart], batch_invariant: bool = False) -> Tensor:
    """The matmul of x [..., K] with parts of consecutive rows: [..., N]."""
    products = [part.linear(x, batch_invariant) for part in parts]
    return products[0] if len(products) == 1 else torch.cat(products, -1)


def _own(tensor: Tensor, device: torch.device | None) -> Tensor:
    """A contiguous copy on a device, which does not keep the whole tensor of a file alive."""
    moved = tensor.to(device or tensor.device)
    return moved if moved.device != tensor.device else moved.clone(memory_format=torch.contiguous_format)
