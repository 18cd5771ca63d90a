"""Tensors that a storage holds in entropy codes: decoded by qdsl/codecs on a CPU, by its kernels on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.codecs import exponents
from qdsl.codecs.lookup import StreamError
from qdsl.core.shapes import Axis, extents
from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.triton import tl
from qdsl.runtime.weight.errors import stream_errors

if TYPE_CHECKING:
    from qdsl.runtime.weight.layout import Pairs, Storage, Stream
    from qdsl.runtime.weight.packed import PackedWeight


class _Modules(dict[str, Any]):
    """A module of each entropy code by the code's name, imported on first use, because most formats have no streams."""

    def __init__(self, module: str) -> None:
        super().__init__()
        self.module = module

    def __missing__(self, name: str) -> Any:
        self[name] = import_module(f"qdsl.codecs.{name}.{self.module}")
        return self[name]


CODINGS: Mapping[str, Any] = _Modules("reference")
LAUNCHES: Mapping[str, Any] = _Modules("launch")
PAIRED = {"bf16": (torch.bfloat16, tl.bfloat16), "f16": (torch.float16, tl.float16)}
SKINNY_ROWS = 16                                                 # rows of x up to which kernels decode in registers (predicted)


# -- on a CPU ----------------------------------------------------------------------------------------------------------


def decode(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """The decoded tensors of a storage's streams, decoded by the CPU, on the weight's device.

    Raises StreamError for a damaged stream.
    """
    plain = {}
    for name, stream in layout.streams.items():
        arrays = {role: _array(tensor) for role, tensor in _tensors(stream, tensors).items()}
        try:
            decoded = torch.from_numpy(CODINGS[stream.coding].decode(arrays, shape))
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
        decoder = getattr(CODINGS[stream.coding], "decode_rows", None)
        if decoder is None:
            return None
        arrays = {role: _array(tensor) for role, tensor in _tensors(stream, tensors).items()}
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
        arrays = CODINGS[stream.coding].encode(symbols, exponents.count(symbols))
    except StreamError as error:
        raise StreamError(f"'{name}' cannot be encoded: {error}") from None
    return {role: torch.from_numpy(array).to(tensor.device) for role, array in arrays.items()}


def _array(tensor: Tensor) -> NDArray[Any]:
    array: NDArray[Any] = tensor.detach().cpu().contiguous().numpy()
    return array


def _tensors(stream: Stream, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {role: tensors[name] for role, name in stream.names.items()}


# -- facts that kernels rely on -------------------------------------------------------------------------------------------


def check(layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str:
    """Validates the tables, starts and indices of a storage's streams, and returns the stream info that kernels rely on.

    The result is text, as operations take it: 'exponents.threads=512 ...'.  Raises StreamError for streams that do not fit.
    """
    entries = []
    for name, stream in layout.streams.items():
        launches = LAUNCHES[stream.coding]
        arrays = {role: _like(tensor) if role in launches.BULK else _array(tensor)
                  for role, tensor in _tensors(stream, tensors).items()}
        try:
            entries += [f"{name}.{key}={value}" for key, value in launches.stream_info(arrays, shape).items()]
        except StreamError as error:
            raise StreamError(f"the stream of '{name}' is damaged: {error}") from None
    return " ".join(entries)


def stream_info(format: str, layout: Storage, tensors: Mapping[str, Tensor], shape: tuple[int, int]) -> str:
    """The result of `check`; '' without streams and on meta.  Raises FormatError for damaged streams."""
    if not layout.streams or any(tensor.is_meta for tensor in tensors.values()):
        return ""
    with stream_errors(format):
        return check(layout, tensors, shape)


def _like(tensor: Tensor) -> NDArray[Any]:
    """Zeros in the shape of a tensor, without memory."""
    return np.broadcast_to(torch.zeros((), dtype=tensor.dtype, device="cpu").numpy(), tuple(tensor.shape))


def _stream_info(packed: PackedWeight, name: str) -> Mapping[str, int]:
    """The stream info of a tensor's stream; typical values on meta.  Raises FormatError."""
    if not packed.stream_info and packed.device.type == "meta":
        assumed: Mapping[str, int] = LAUNCHES[packed.layout.streams[name].coding].ASSUMED
        return assumed
    if not packed.stream_info:
        packed.stream_info = stream_info(packed.format.name, packed.layout, packed.tensors, packed.shape)
    return _read(packed.stream_info, name)


@lru_cache(maxsize=1024)
def _read(stream_info: str, name: str) -> Mapping[str, int]:
    words = (word.partition("=") for word in stream_info.split())
    return {key.removeprefix(f"{name}."): int(value) for key, _, value in words if key.startswith(f"{name}.")}


# -- by kernels --------------------------------------------------------------------------------------------------------


def decoded(packed: PackedWeight) -> tuple[PackedWeight, list[Call]]:
    """The weight with decoded tensors instead of its streams, and the launches that fill them; itself if it has no streams.

    Raises FormatError.
    """
    if not packed.layout.streams:
        return packed, []
    plain, calls = decode_calls(packed)
    return packed.with_plain(plain), calls


def decode_calls(packed: PackedWeight, rows: Tensor | None = None) -> tuple[dict[str, Tensor], list[Call]]:
    """Empty tensors for the decoded streams, and the launches that fill them.  Raises FormatError.

    rows: int64 [R] on the device: decode only these rows, in runs for which has_rows holds.
    """
    plain: dict[str, Tensor] = {}
    calls: list[Call] = []
    for name, stream in packed.layout.streams.items():
        launches = LAUNCHES[stream.coding]
        shape = extents(stream.plain.axes, packed.shape[0] if rows is None else len(rows), packed.shape[1], packed.sizes)
        assert shape is not None
        plain[name] = torch.empty(shape, dtype=torch.uint8, device=packed.device)
        if plain[name].numel():
            height = 1 if rows is None else launches.block_rows(packed.shape)
            blocks = None if rows is None else (rows[::height] // height).to(torch.int32)
            decoding = launches.decode_calls(_tensors(stream, packed.tensors), _stream_info(packed, name), plain[name],
                                             packed.shape, blocks)
            calls += [replace(call, workspace=(plain[name],)) for call in decoding]
    return plain, calls


def has_rows(packed: PackedWeight, run: int) -> bool:
    """Whether kernels can decode chosen rows: runs of `run` rows that begin at a multiple of it."""
    heights = [LAUNCHES[stream.coding].block_rows(packed.shape) for stream in packed.layout.streams.values()]
    return has_plain_rows(packed) and all(height and run % height == 0 for height in heights)


def row_band(packed: PackedWeight, start: int, stop: int) -> PackedWeight | None:
    """Rows [start, stop) as a weight in the same codes, without decoding; None for borders inside groups of rows, and on meta.

    Raises FormatError for a damaged stream.
    """
    n, k = packed.shape
    groups = [LAUNCHES[stream.coding].group_rows(packed.shape) for stream in packed.layout.streams.values()]
    if packed.device.type == "meta" or not groups or not has_plain_rows(packed) or \
            any(not rows or start % rows or (stop % rows and stop != n) for rows in groups):
        return None
    tensors = dict(packed.tensors)
    for name, axes in plain_axes(packed).items():
        for place, axis in enumerate(axes):
            tensors[name] = tensors[name].narrow(place, start, stop - start) if axis.dim == "N" else tensors[name]
    for name, stream in packed.layout.streams.items():
        _stream_info(packed, name)                               # validates the starts of groups
        band = LAUNCHES[stream.coding].row_band(_tensors(stream, packed.tensors), packed.shape, start, stop)
        tensors |= {stream.names[role]: tensor for role, tensor in band.items()}
    result = packed.derive(tensors, (stop - start, k))
    result.stream_info = stream_info(packed.format.name, packed.layout, result.tensors, result.shape)
    return result


def has_plain_rows(packed: PackedWeight) -> bool:
    """Whether every tensor besides the streams has separate rows, or serves all rows."""
    axes = [axis for stored in plain_axes(packed).values() for axis in stored]
    return all(axis.dim != "N*K" and (axis.dim != "N" or axis.by(packed.sizes) == 1) for axis in axes)


def plain_axes(packed: PackedWeight) -> dict[str, Sequence[Axis]]:
    """The axes of tensors that do not belong to a stream."""
    streamed = {name for stream in packed.layout.streams.values() for name in stream.names.values()}
    return {name: packed.layout.tensors[name].axes for name in packed.tensors if name not in streamed}


def usual(packed: PackedWeight) -> PackedWeight:
    """A weight on meta with streams as large as those of normally distributed weights."""
    tensors = dict(packed.tensors)
    for stream in packed.layout.streams.values():
        for role, shape in LAUNCHES[stream.coding].usual(packed.shape).items():
            name = stream.names[role]
            tensors[name] = torch.empty(shape, dtype=tensors[name].dtype, device="meta")
    return packed.derive(tensors)


def has_dequantize(packed: PackedWeight, out: Tensor) -> bool:
    """Whether kernels can decode and dequantize in one launch, in registers: needs out's dtype and whole words."""
    pairs = _pairs(packed)
    return pairs is not None and out.dtype == PAIRED[pairs.type][0] and out.is_contiguous() and _are_wide(packed, pairs, out)


def dequantize_calls(packed: PackedWeight, out: Tensor) -> Iterator[Call]:
    """The launches that decode streams and write weights to `out`; requires has_dequantize.  Raises FormatError."""
    pairs = _pairs(packed)
    assert pairs is not None
    stream = packed.layout.streams[pairs.stream]
    if out.numel():
        yield from LAUNCHES[stream.coding].dequantize_calls(
            pairs.weights, pairs.at, _tensors(stream, packed.tensors), packed.tensors[pairs.uncoded].contiguous(),
            _stream_info(packed, pairs.stream), out)


def program_weights(packed: PackedWeight) -> int:
    """The weights that a program of `dequantize` decodes, to bfloat16; 0 if no kernel does, or its launch does not state them."""
    out = torch.empty(packed.shape, dtype=torch.bfloat16, device="meta")
    return sum(call.weights for call in dequantize_calls(packed, out)) if has_dequantize(packed, out) else 0


def has_skinny(x: Tensor, packed: PackedWeight) -> bool:
    """Whether kernels can decode weights in registers and multiply x [M, K] by them."""
    pairs = _pairs(packed)
    if pairs is None or x.dtype != PAIRED[pairs.type][0] or not _are_wide(packed, pairs, x):
        return False
    stream = packed.layout.streams[pairs.stream]
    return bool(LAUNCHES[stream.coding].has_skinny(packed.shape, _stream_info(packed, pairs.stream)))


def skinny_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> Iterator[Call]:
    """The launches that write x @ w.T + bias to `out`; requires has_skinny.  A row's bits do not depend on other rows.

    Raises FormatError.
    """
    pairs = _pairs(packed)
    assert pairs is not None
    stream = packed.layout.streams[pairs.stream]
    if out.numel():
        yield from LAUNCHES[stream.coding].skinny_calls(
            pairs.weights, pairs.at, _tensors(stream, packed.tensors), packed.tensors[pairs.uncoded].contiguous(),
            _stream_info(packed, pairs.stream), x, bias, out, PAIRED[pairs.type][1])


def _pairs(packed: PackedWeight) -> Pairs | None:
    return packed.layout.kernels.pairs if packed.layout.streams else None


def _are_wide(packed: PackedWeight, pairs: Pairs, other: Tensor) -> bool:
    """Whether rows are whole lines of 128 columns, and tensors are aligned for loads of 16 bytes."""
    wide = [packed.tensors[name] for name in (*packed.layout.streams[pairs.stream].names.values(), pairs.uncoded)]
    return packed.shape[1] % 128 == 0 and all(
        tensor.is_meta or tensor.data_ptr() % 16 == 0 for tensor in (*wide, other) if tensor.numel())
