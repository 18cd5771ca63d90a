"""Tensors that a storage holds in entropy codes, decoded and validated by qdsl/codecs on a CPU."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.core.codecs import StreamError, exponents, implementation
from qdsl.core.shapes import Axis
from qdsl.runtime.weight.errors import stream_errors
from qdsl.runtime.weight.layout import Storage, Stream

# -- on a CPU ----------------------------------------------------------------------------------------------------------


def decode(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The decoded tensors of a storage's streams, decoded by the CPU, on the weight's device.

    Raises StreamError for a damaged stream.
    """
    plain = {}
    for name, stream in layout.streams.items():
        arrays = {role: _array(tensor) for role, tensor in tensors_of(stream, tensors).items()}
        try:
            decoded = torch.from_numpy(implementation(stream.coding).decode(arrays, shape))
        except StreamError as error:
            raise StreamError(f"the stream of '{name}' is damaged: {error}") from None
        plain[name] = decoded.to(next(iter(tensors.values())).device)
    return plain


def decode_rows(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int], rows: Tensor) -> dict[str, Tensor] | None:
    """Some rows of the decoded tensors of a storage's streams; None if a code has no random access.  Raises StreamError.

    rows: int64 [R], on the CPU, all within the weight.
    """
    plain = {}
    for name, stream in layout.streams.items():
        decoder = getattr(implementation(stream.coding), "decode_rows", None)
        if decoder is None:
            return None
        arrays = {role: _array(tensor) for role, tensor in tensors_of(stream, tensors).items()}
        try:
            plain[name] = torch.from_numpy(decoder(arrays, shape, rows.numpy()))
        except StreamError as error:
            raise StreamError(f"the stream of '{name}' is damaged: {error}") from None
    return plain


def encode(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The tensors of a storage from those that pack returns.  Raises StreamError for elements that a code cannot hold."""
    encoded: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        if name not in layout.streams:
            encoded[name] = tensor
            continue
        stream = layout.streams[name]
        encoded |= {stream.names[role]: array for role, array in _encoded(name, stream, tensor, shape).items()}
    return {name: encoded[name] for name in layout.tensors if name in encoded}


def _encoded(name: str, stream: Stream, tensor: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    symbols = _array(tensor)
    try:
        arrays = implementation(stream.coding).encode(symbols, exponents().count_symbols(symbols))
    except StreamError as error:
        raise StreamError(f"'{name}' cannot be encoded: {error}") from None
    return {role: torch.from_numpy(array).to(tensor.device) for role, array in arrays.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return array


def tensors_of(stream: Stream, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a stream by their roles in its code."""
    return {role: tensors[name] for role, name in stream.names.items()}


# -- facts that kernels rely on -------------------------------------------------------------------------------------------


def validated_stream_info(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str:
    """Validates the tables, starts and indices of a storage's streams, and returns the stream info that kernels rely on.

    The result is text, as operations take it: 'exponents.threads=512 ...'.  Raises StreamError for streams that do not fit.
    """
    entries = []
    for name, stream in layout.streams.items():
        launches = implementation(stream.coding, "launch")
        arrays = {role: _like(tensor) if role in launches.BULK else _array(tensor)
                  for role, tensor in tensors_of(stream, tensors).items()}
        try:
            entries += [f"{name}.{key}={value}" for key, value in launches.stream_info(arrays, shape).items()]
        except StreamError as error:
            raise StreamError(f"the stream of '{name}' is damaged: {error}") from None
    return " ".join(entries)


def stream_info(format: str, layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str:
    """The result of `validated_stream_info`; '' without streams and on meta.  Raises FormatError for damaged streams."""
    if not layout.streams or any(tensor.is_meta for tensor in tensors.values()):
        return ""
    with stream_errors(format):
        return validated_stream_info(layout, tensors, shape)


def _like(tensor: Tensor) -> NDArray[Any]:
    """Zeros in the shape of a tensor, without memory."""
    return np.broadcast_to(torch.zeros((), dtype=tensor.dtype, device="cpu").numpy(), tuple(tensor.shape))


# -- tensors beside the streams ----------------------------------------------------------------------------------------


def plain_axes(layout: Storage, names: Iterable[str]) -> dict[str, Sequence[Axis]]:
    """The axes of those tensors that do not belong to a stream."""
    streamed = {name for stream in layout.streams.values() for name in stream.names.values()}
    return {name: layout.tensors[name].axes for name in names if name not in streamed}


def has_plain_rows(layout: Storage, names: Iterable[str], sizes: Mapping[str, int]) -> bool:
    """Whether every tensor besides the streams has separate rows, or serves all rows."""
    axes = [axis for stored in plain_axes(layout, names).values() for axis in stored]
    return all(axis.dim != "N*K" and (axis.dim != "N" or axis.by(sizes) == 1) for axis in axes)
