"""Decodes blocks of grouped weights (DF11) one block ahead, on a second stream of a GPU.

The order of blocks is recorded while they run.  Of two buffers, one has the weights of the running block, the other those of the
next one.  Speed has not been measured yet.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, Protocol
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from qdsl.models.grouped import GroupedBlock
from qdsl.models.private_apis import HOOKS


class Side(Protocol):
    """A second work queue, next to the stream that computes."""

    def run(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        """Queue work on tensors, which begins after all work so far."""

    def join(self) -> None:
        """Make the computing stream wait for all work queued here."""


class SideStream:
    """A second stream of a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def run(self, work: Callable[[], object], tensors: Iterable[Tensor]) -> None:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            work()
        for tensor in tensors:
            tensor.record_stream(self._stream)                   # keeps their memory until the work is done

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)


def prefetch_(*models: nn.Module) -> Prefetch:
    """Decode blocks of coded weights (DF11) on a GPU while the block before them runs; `close()` ends that.

    It takes memory for a second decoded block.  Models of one pipeline share both buffers if they are given together.  Blocks
    whose tensors another library loads decode their weights themselves, and so do all blocks where gradients flow.
    Raises ValueError for models without such blocks.
    """
    prefetch = Prefetch()
    blocks = [block for model in models for module in model.modules() if (block := GroupedBlock.of(module)) is not None]
    inner = {id(module) for block in blocks for module in block.block.modules() if module is not block.block}
    prefetch.blocks = [block for block in blocks if id(block.block) not in inner]   # weights around them would be overwritten
    for block in prefetch.blocks:
        block.ahead = prefetch
    if not blocks:
        raise ValueError("prefetch_: no block of these models has weights that are coded together")
    return prefetch


class Prefetch:
    """The order of blocks, two buffers, and the block that is being decoded ahead.  side: creates the second queue."""

    def __init__(self, side: Callable[[torch.device], Side] = SideStream, kind: str = "cuda") -> None:
        self.blocks: list[GroupedBlock] = []
        self._side, self._kind = side, kind
        self._sides: dict[torch.device, Side] = {}
        self._following: WeakKeyDictionary[GroupedBlock, ref[GroupedBlock]] = WeakKeyDictionary()
        self._last: ref[GroupedBlock] | None = None
        self._pending: tuple[Tensor, object] | None = None
        self._buffers: list[Tensor | None] = [None, None]
        self._turn = 0

    def __reduce__(self) -> Any:
        return type(None), ()                                    # copies of a model decode for themselves

    def close(self) -> None:
        """Let blocks decode their own weights again, and free the buffers."""
        for block in self.blocks:
            block.ahead = None
        self._join()
        self._buffers = [None, None]

    def row(self, block: GroupedBlock) -> Tensor:
        """The decoded weights of a block that runs now; the block that followed it last time is queued."""
        pending = self._join()
        if not self._is_possible(block):
            self._last = None                                    # it is no block's next one
            return block.decode()
        if pending is not None and pending[1] == _state(block):
            row = pending[0]
        else:
            row = block.decode(self._buffer(block))
        last = None if self._last is None else self._last()
        if last is not None:
            self._following[last] = ref(block)
        self._last = ref(block)
        following = self._following.get(block)
        if following is not None and (after := following()) is not None and after is not block and self._is_possible(after) and (
                after.packed.device == row.device):
            self._queue(after)
        return row

    def _queue(self, block: GroupedBlock) -> None:
        out = self._buffer(block)
        tensors = [*block.packed.tensors.values(), out]
        self._sides[out.device].run(partial(block.decode, out), tensors)
        self._pending = out.view(-1), _state(block)

    def _join(self) -> tuple[Tensor, object] | None:
        """The row that was decoded ahead and the state of its block, after waiting for it; returned once."""
        pending, self._pending = self._pending, None
        if pending is not None:
            self._sides[pending[0].device].join()
        return pending

    def _is_possible(self, block: GroupedBlock) -> bool:
        """Whether a block's tensors stay on a GPU, and nobody keeps the decoded weights."""
        device = block.packed.device
        if device.type != self._kind or torch.is_grad_enabled() or torch.compiler.is_compiling() or any(
                hasattr(block.block, hook) for hook in HOOKS):
            return False
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            return False
        if device not in self._sides:
            self._sides[device] = self._side(device)
        return True

    def _buffer(self, block: GroupedBlock) -> Tensor:
        """Memory for a block's decoded weights, other than that of the block before it."""
        self._turn = 1 - self._turn
        packed, dtype = block.packed, block.dtype
        size, buffer = math.prod(packed.shape) * dtype.itemsize, self._buffers[self._turn]
        if buffer is None or buffer.device != packed.device or buffer.numel() < size:
            buffer = self._buffers[self._turn] = torch.empty(size, dtype=torch.uint8, device=packed.device)
        return buffer[:size].view(dtype).view(packed.shape)


def _state(block: GroupedBlock) -> object:
    """A value that identifies a block, and changes with its tensors or dtype."""
    tensors = [block.block._parameters[name] for name in block.names.values()]
    return block.dtype, [(tensor.data_ptr(), tensor._version) for tensor in tensors if tensor is not None]
