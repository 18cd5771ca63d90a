"""The numbers of a packed weight: all of them, or chosen rows for an embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.gpu.scratch import is_captured
from qdsl.runtime.libraries.private_apis import storage_key
from qdsl.runtime.torch import ops
from qdsl.runtime.torch.decode import decode_into
from qdsl.runtime.weight.arrays import empty
from qdsl.runtime.weight.packed import FormatError, PackedWeight


def dequantize(packed: PackedWeight, dtype: torch.dtype, out: Tensor | None = None) -> Tensor:
    """The weight [N, K]: exact by the formula in float32, rounded to nearest even once for other dtypes.

    out determines the dtype, if given.  Raises FormatError if it does not fit.
    """
    if not isinstance(dtype, torch.dtype):
        raise FormatError(f"dtype is one of torch's, such as torch.bfloat16, not {dtype!r}")
    if not (dtype if out is None else out.dtype).is_floating_point:
        raise FormatError(f"weights are floats; {str(dtype if out is None else out.dtype)[6:]} is none")
    if out is not None and out.shape != packed.shape:
        raise FormatError(f"out {list(out.shape)} does not fit the weight {list(packed.shape)}")
    if not ops.is_plain(out, *packed.tensors.values()):
        result = ops.dequantize(packed, dtype if out is None else out.dtype)
        return result if out is None else out.copy_(result)
    if out is not None and not _is_own_memory(out, packed):
        raise FormatError("out has several elements in one place, or lies in the weight's tensors; give it memory of its own")
    return decode_into(packed, empty(packed.shape, dtype, packed.device) if out is None else out)


def _is_own_memory(out: Tensor, packed: PackedWeight) -> bool:
    """Whether an output tensor has separate memory per element, and none of the tensors that are read."""
    if out.layout is not torch.strided or out.device.type == "meta":
        return True
    if any(step == 0 and size > 1 for step, size in zip(out.stride(), out.shape, strict=True)):
        return False
    return all(tensor.layout is not torch.strided or storage_key(tensor) != storage_key(out)
               for tensor in packed.tensors.values())


def dequantize_rows(packed: PackedWeight, index: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [*index.shape, K] of the decoded weight.  index: int32 or int64, of any shape.

    Rows that are stored separately are gathered.  Otherwise only blocks with a wanted row are decoded: 128 rows of fp8_block, a
    lane group of hlane.  The whole weight is decoded for df11, for every stream on a GPU, and in traced or captured programs,
    unless rows are stored separately.  Raises IndexError for a row that does not exist (on a CPU), FormatError for an index that
    is not of integers.
    """
    if index.dtype not in (torch.int32, torch.int64):
        raise FormatError(f"row numbers are int32 or int64, not {str(index.dtype)[6:]}")
    if ops.is_plain(index) and index.device.type == "cpu":
        _check_row_numbers(index, packed.shape[0])
    return _decoded_rows(packed, index.flatten(), dtype).view(*index.shape, packed.shape[1])


def _check_row_numbers(index: Tensor, rows: int) -> None:
    if not index.numel():
        return
    least, largest = (int(bound) for bound in index.aminmax())
    if least < 0 or largest >= rows:
        raise IndexError(f"row {least if least < 0 else largest} is out of range: the weight has rows 0 to {rows - 1}")


def _decoded_rows(packed: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [R, K] for row numbers [R]."""
    if packed.has_separate_rows:
        return packed.format.dequantize(packed.rows(rows), dtype)
    plain = ops.is_plain(rows, *packed.tensors.values())
    if plain and rows.numel() and not is_captured(packed.device):    # the number of blocks is known on the host alone
        if not packed.layout.streams:
            return _decode_row_blocks(packed, rows, dtype)
        if packed.device.type == "cpu" and (decoded := _decode_stream_rows(packed, rows, dtype)) is not None:
            return decoded
    return packed.format.dequantize(packed, dtype).index_select(0, rows)


def _decode_row_blocks(packed: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of a weight that can be sliced into blocks of rows, decoded block by block."""
    step = packed.step("N")
    wanted, origin = torch.unique(rows, return_inverse=True)     # sorted
    blocks, counts = torch.unique_consecutive(wanted // step, return_counts=True)
    out = torch.empty(len(wanted), packed.shape[1], dtype=dtype, device=packed.device)
    first = 0
    for block, count in zip(blocks.tolist(), counts.tolist(), strict=True):
        start = block * step
        part = packed.cut("N", start, min(packed.shape[0], start + step))
        decoded = packed.format.dequantize(part, dtype)
        torch.index_select(decoded, 0, wanted[first:first + count] - start, out=out[first:first + count])
        first += count
    return out.index_select(0, origin)


def _decode_stream_rows(packed: PackedWeight, rows: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Rows of a weight with streams, on a CPU; None if a stream, or another tensor, has no separate rows."""
    wanted, origin = torch.unique(rows.long(), return_inverse=True)
    part = packed.decode_rows(wanted)
    return None if part is None else packed.format.dequantize(part, dtype).index_select(0, origin)
