"""Tensors that a storage holds in entropy codes: between torch and the codes, which are numpy's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from qdsl.entropy import huffman_lanes, huffman_windows, window
from qdsl.entropy.lookup import StreamError

if TYPE_CHECKING:
    from qdsl.runtime.layout import Storage, Stream

CODINGS = {"window": window, "huffman_lanes": huffman_lanes, "huffman_windows": huffman_windows}


def decode(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors that a storage's streams hold, on their device.  Raises StreamError for a stream that is damaged."""
    return {name: _decoded(name, stream, {role: tensors[each] for role, each in stream.names.items()}, shape)
            for name, stream in layout.streams.items()}


def _decoded(name: str, stream: Stream, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> Tensor:
    arrays = {role: tensor.detach().cpu().contiguous().numpy() for role, tensor in tensors.items()}
    try:
        found = torch.from_numpy(CODINGS[stream.coding].decode(arrays, shape))
    except StreamError as error:
        raise StreamError(f"the stream of '{name}' is damaged: {error}") from None
    return found.to(next(iter(tensors.values())).device)


def encode(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors of a storage, of those that pack made.  Raises StreamError for elements that a code cannot hold."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in layout.streams:
            found[name] = tensor
            continue
        stream = layout.streams[name]
        found |= {stream.names[role]: each for role, each in _encoded(name, stream, tensor, shape).items()}
    return {name: found[name] for name in layout.tensors if name in found}


def _encoded(name: str, stream: Stream, tensor: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    symbols = tensor.detach().cpu().contiguous().numpy()
    counts = np.bincount(symbols.reshape(-1), minlength=256)
    try:
        found = CODINGS[stream.coding].encode(symbols, counts)
    except StreamError as error:
        raise StreamError(f"'{name}' cannot be held: {error}") from None
    return {role: torch.from_numpy(array).to(tensor.device) for role, array in found.items()}
