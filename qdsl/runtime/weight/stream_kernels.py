"""Launches of kernels that decode the entropy codes of a weight, or dequantize and multiply it in registers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import torch
from torch import Tensor

from qdsl.core.codecs import implementation
from qdsl.core.shapes import extents
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.triton import tl
from qdsl.runtime.weight import streams
from qdsl.runtime.weight.layout import Pairs
from qdsl.runtime.weight.packed import PackedWeight

PAIRED = {"bf16": (torch.bfloat16, tl.bfloat16), "f16": (torch.float16, tl.float16)}
SKINNY_ROWS = 16                                                 # rows of x up to which kernels decode in registers (predicted)


def decoded_with_calls(packed: PackedWeight) -> tuple[PackedWeight, list[Call]]:
    """The weight with decoded tensors instead of its streams, and the launches that fill them; itself if it has no streams.

    Raises FormatError.
    """
    if not packed.layout.streams:
        return packed, []
    plain, calls = decode_calls(packed)
    return packed.with_plain(plain), calls


def decode_calls(packed: PackedWeight, rows: Tensor | None = None) -> tuple[dict[str, Tensor], list[Call]]:
    """Empty tensors for the decoded streams, and the launches that fill them.  Raises FormatError.

    rows: int64 [R] on the device: decode only these rows, in runs for which can_decode_rows holds.
    """
    plain: dict[str, Tensor] = {}
    calls: list[Call] = []
    for name, stream in packed.layout.streams.items():
        launches = implementation(stream.coding, "launch")
        shape = extents(stream.plain.axes, packed.shape[0] if rows is None else len(rows), packed.shape[1], packed.sizes)
        assert shape is not None
        plain[name] = torch.empty(shape, dtype=torch.uint8, device=packed.device)
        if plain[name].numel():
            height = 1 if rows is None else launches.block_rows(packed.shape)
            blocks = None if rows is None else (rows[::height] // height).to(torch.int32)
            decoding = launches.decode_calls(streams.tensors_of(stream, packed.tensors), _stream_info(packed, name), plain[name],
                                             packed.shape, blocks)
            calls += [replace(call, workspace=(plain[name],)) for call in decoding]
    return plain, calls


def can_decode_rows(packed: PackedWeight, run: int) -> bool:
    """Whether kernels can decode chosen rows: runs of `run` rows that begin at a multiple of it."""
    heights = [implementation(stream.coding, "launch").block_rows(packed.shape) for stream in packed.layout.streams.values()]
    return streams.has_plain_rows(packed.layout, packed.tensors, packed.sizes) and all(
        height and run % height == 0 for height in heights)


def row_band(packed: PackedWeight, start: int, stop: int) -> PackedWeight | None:
    """Rows [start, stop) as a weight in the same codes, without decoding; None for borders inside groups of rows, and on meta.

    Raises FormatError for a damaged stream.
    """
    n, k = packed.shape
    groups = [implementation(stream.coding, "launch").group_rows(packed.shape) for stream in packed.layout.streams.values()]
    if packed.device.type == "meta" or not groups or not streams.has_plain_rows(packed.layout, packed.tensors, packed.sizes) or \
            any(not rows or start % rows or (stop % rows and stop != n) for rows in groups):
        return None
    tensors = dict(packed.tensors)
    for name, axes in streams.plain_axes(packed.layout, packed.tensors).items():
        for place, axis in enumerate(axes):
            tensors[name] = tensors[name].narrow(place, start, stop - start) if axis.dim == "N" else tensors[name]
    for name, stream in packed.layout.streams.items():
        _stream_info(packed, name)                               # validates the starts of groups
        launches = implementation(stream.coding, "launch")
        band = launches.row_band(streams.tensors_of(stream, packed.tensors), packed.shape, start, stop)
        tensors |= {stream.names[role]: tensor for role, tensor in band.items()}
    result = packed.derive(tensors, (stop - start, k))
    result.stream_info = streams.stream_info(packed.format.name, packed.layout, result.tensors, result.shape)
    return result


def with_typical_streams(packed: PackedWeight) -> PackedWeight:
    """A weight on meta with streams as large as those of normally distributed weights."""
    tensors = dict(packed.tensors)
    for stream in packed.layout.streams.values():
        for role, shape in implementation(stream.coding, "launch").typical_shapes(packed.shape).items():
            name = stream.names[role]
            tensors[name] = torch.empty(shape, dtype=tensors[name].dtype, device="meta")
    return packed.derive(tensors)


def has_dequantize(packed: PackedWeight, out: Tensor) -> bool:
    """Whether kernels can decode and dequantize in one launch, in registers: needs out's dtype and whole words."""
    pairs = _pairs(packed)
    return pairs is not None and out.dtype == PAIRED[pairs.type][0] and out.is_contiguous() and _has_wide_rows(packed, pairs, out)


def dequantize_calls(packed: PackedWeight, out: Tensor) -> Iterator[Call]:
    """The launches that decode streams and write weights to `out`; requires has_dequantize.  Raises FormatError."""
    pairs = _pairs(packed)
    assert pairs is not None
    stream = packed.layout.streams[pairs.stream]
    if out.numel():
        yield from implementation(stream.coding, "launch").dequantize_calls(
            pairs.weights, pairs.at, streams.tensors_of(stream, packed.tensors), packed.tensors[pairs.uncoded].contiguous(),
            _stream_info(packed, pairs.stream), out)


def program_weights(packed: PackedWeight) -> int:
    """The weights that a program of `dequantize` decodes, to bfloat16; 0 if no kernel does, or its launch does not state them."""
    out = torch.empty(packed.shape, dtype=torch.bfloat16, device="meta")
    return sum(call.weights for call in dequantize_calls(packed, out)) if has_dequantize(packed, out) else 0


def has_skinny(x: Tensor, packed: PackedWeight) -> bool:
    """Whether kernels can decode weights in registers and multiply x [M, K] by them."""
    pairs = _pairs(packed)
    if pairs is None or x.dtype != PAIRED[pairs.type][0] or not _has_wide_rows(packed, pairs, x):
        return False
    stream = packed.layout.streams[pairs.stream]
    return bool(implementation(stream.coding, "launch").has_skinny(packed.shape, _stream_info(packed, pairs.stream)))


def skinny_calls(x: Tensor, packed: PackedWeight, bias: Tensor | None, out: Tensor) -> Iterator[Call]:
    """The launches that write x @ w.T + bias to `out`; requires has_skinny.  A row's bits do not depend on other rows.

    Raises FormatError.
    """
    pairs = _pairs(packed)
    assert pairs is not None
    stream = packed.layout.streams[pairs.stream]
    if out.numel():
        yield from implementation(stream.coding, "launch").skinny_calls(
            pairs.weights, pairs.at, streams.tensors_of(stream, packed.tensors), packed.tensors[pairs.uncoded].contiguous(),
            _stream_info(packed, pairs.stream), x, bias, out, PAIRED[pairs.type][1])


def _pairs(packed: PackedWeight) -> Pairs | None:
    return packed.layout.kernels.pairs if packed.layout.streams else None


def _has_wide_rows(packed: PackedWeight, pairs: Pairs, other: Tensor) -> bool:
    """Whether rows are whole lines of 128 columns, and tensors are aligned for loads of 16 bytes."""
    wide = [packed.tensors[name] for name in (*packed.layout.streams[pairs.stream].names.values(), pairs.uncoded)]
    return packed.shape[1] % 128 == 0 and all(
        tensor.is_meta or tensor.data_ptr() % 16 == 0 for tensor in (*wide, other) if tensor.numel())


def _stream_info(packed: PackedWeight, name: str) -> Mapping[str, int]:
    """The stream info of a tensor's stream; typical values on meta.  Raises FormatError."""
    if not packed.stream_info and packed.device.type == "meta":
        assumed: Mapping[str, int] = implementation(packed.layout.streams[name].coding, "launch").ASSUMED
        return assumed
    if not packed.stream_info:
        packed.stream_info = streams.stream_info(packed.format.name, packed.layout, packed.tensors, packed.shape)
    return _read(packed.stream_info, name)


@lru_cache(maxsize=1024)
def _read(stream_info: str, name: str) -> Mapping[str, int]:
    words = (word.partition("=") for word in stream_info.split())
    return {key.removeprefix(f"{name}."): int(value) for key, _, value in words if key.startswith(f"{name}.")}
