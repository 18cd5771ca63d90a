"""Helpers of generated references: ceiling division, bytes as integers and bit fields, padding, and new tensors."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import torch
from torch import Tensor

from qdsl.runtime.libraries.private_apis import FakeTensor
from qdsl.runtime.weight.device_dtypes import dtype_on

CHUNK = 1 << 18                                                  # words at a time, which fit a cache
SWAP_NIBBLES = 4097                                              # factor of a word: copies its lowest bits 12 bits higher
KEPT = 31 << 20                                                  # bytes of freed memory to keep
SMALL = 1 << 20                                                  # bytes of a tensor that may be copied

# glibc returns freed pages to the system, which must clear new ones for the next tile.  It keeps twice the size of the largest
# freed block, up to 32 MiB.  A block whose pages are never touched costs nothing.
np.empty(KEPT, dtype=np.uint8)


def cdiv(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def power(value: int) -> int:
    """The smallest power of two that is at least `value`."""
    return 1 << (max(1, value) - 1).bit_length()


def as_type(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The bytes along the last axis as elements of another dtype; copied if they are not contiguous or aligned.

    8-bit floats stay bytes on a device that lacks them: decoding accepts both.
    """
    if tensor.element_size() == dtype.itemsize:
        return tensor.view(dtype_on(tensor.device, dtype))
    if tensor.storage_offset() * tensor.element_size() % dtype.itemsize:
        return tensor.clone(memory_format=torch.contiguous_format).view(dtype)
    step = 1
    for extent, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        if stride != step:                                       # torch's view checks axes of length 1
            return tensor.clone(memory_format=torch.contiguous_format).view(dtype)
        step *= extent
    return tensor.view(dtype)


def workspace(out: Tensor | None) -> Tensor | None:
    """`out` if it can hold intermediate results: float32, rounded to another dtype only at the end."""
    return out if out is not None and out.dtype == torch.float32 else None


def rounded(values: Tensor, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """float32 values rounded to a shorter dtype, ties to even, as float32, or in `out`.

    Raises RuntimeError in a traced program: a compiler may remove a cast and its inverse.
    """
    if isinstance(values, FakeTensor):
        raise RuntimeError("values are not rounded in a program that is traced")
    return values.to(dtype).float() if out is None else out.copy_(values.to(dtype))


def as_float(numbers: Tensor, out: Tensor | None) -> Tensor:
    """Integers as float32, in `out` if possible: a separate pass is faster than an operation that casts."""
    space = workspace(out)
    return numbers.float() if space is None else space.copy_(numbers)


def integer(bytes_: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Little-endian integers of the bytes along the last axis; by default int32 for up to 3 bytes, else int64."""
    wide = dtype or (torch.int32 if bytes_.shape[-1] <= 3 else torch.int64)
    value = bytes_[..., 0].to(wide)
    for i in range(1, bytes_.shape[-1]):
        value |= bytes_[..., i].to(wide) << 8 * i
    return value


@cache
@torch.inference_mode(False)
def _spreads(width: int) -> Tensor:
    """For every byte, its fields of 1 or 2 bits, one byte each, as one word."""
    fields = [[byte >> at & (1 << width) - 1 for at in range(0, 8, width)] for byte in range(256)]
    return torch.tensor(fields, dtype=torch.uint8, device="cpu").view(torch.int64 if width == 1 else torch.int32).flatten()


def spread(bytes_: Tensor, width: int, *, high_first: bool = False) -> Tensor:
    """The fields of `width` bits of each byte along a new last axis, low bits first.

    Uses operations on whole words, which are several times as fast as extracting each field.
    """
    if bytes_.device.type == "meta":
        return bytes_.new_empty((*bytes_.shape, 8 // width))
    if isinstance(bytes_, FakeTensor) or bytes_.device.type != "cpu":        # a compiler works field by field
        places = range(0, 8, width)
        return torch.stack([bytes_ >> at & (1 << width) - 1 for at in (reversed(places) if high_first else places)], -1)
    if width == 4:
        words = bytes_.to(torch.int16, memory_format=torch.contiguous_format)
        words = words * SWAP_NIBBLES >> 4 if high_first else words.bitwise_or_(words * 16)
        return words.bitwise_and_(0x0F0F).view(torch.uint8).view(*bytes_.shape, 2)
    words = _spreads(width).index_select(0, bytes_.flatten().to(torch.int32))
    return words.view(torch.uint8).view(*bytes_.shape, 8 // width)


def joined(fields: Tensor, width: int, *, high_first: bool = False) -> Tensor:
    """The inverse of spread: bytes of 8 // width adjacent fields along the last axis; bits of uint8 from `width` on must be 0."""
    count = 8 // width
    words = as_type(fields, {2: torch.int16, 4: torch.int32, 8: torch.int64}[count])
    places = SWAP_NIBBLES if high_first else sum(1 << 8 * (count - 1) - (8 - width) * i for i in range(count))
    packed = empty(words.shape, torch.uint8, words.device)
    for part, into in zip(torch.split(words.flatten(), CHUNK), torch.split(packed.view(-1), CHUNK), strict=True):
        into.copy_((part * places).bitwise_right_shift_(8 * (count - 1)))     # bits of the products do not overlap
    return packed


def pad(field: Tensor, amounts: Sequence[int]) -> Tensor:
    """Append zero bits after the last elements; amounts as (before, after) pairs from the last axis on."""
    if not any(amounts):
        return field
    if field.is_floating_point() and field.element_size() == 1:  # E8M0 has no 0
        return torch.nn.functional.pad(field.view(torch.uint8), tuple(amounts)).view(field.dtype)
    return torch.nn.functional.pad(field, tuple(amounts))


def empty(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """An uninitialised tensor.  On a CPU numpy allocates it, which is several times faster than torch."""
    if device.type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    raw = np.empty((*shape, dtype.itemsize), dtype=np.uint8)
    return torch.from_numpy(raw).view(dtype).squeeze(-1) if raw.size else torch.empty(shape, dtype=dtype, device=device)


def common_tensor(values: Sequence[Tensor]) -> Tensor | None:
    """The first tensor if all have the same bits, NaN included; None if they differ.  On meta they count as equal."""
    first = values[0]
    same = first.is_meta or all(value is first or (value.shape == first.shape and torch.equal(_bytes(value), _bytes(first)))
                                for value in values)
    return first if same else None


def _bytes(tensor: Tensor) -> Tensor:
    flat = tensor.contiguous().flatten().as_strided((tensor.numel(),), (1,))        # a single element may have any stride
    return flat.view(torch.uint8)


def aligned_copy(tensor: Tensor) -> Tensor:
    """A copy of a small tensor whose address is no multiple of 16, because bits of torch's matmul depend on that; else the
    tensor.
    """
    is_small = tensor.device.type == "cpu" and tensor.nbytes <= SMALL
    return tensor.clone() if is_small and tensor.data_ptr() % 16 else tensor
