"""Global memory as separate allocations, shared memory by program, and the checks of every access.

An address is checked for bounds and alignment, which fault on hardware.  What else is wrong becomes a finding: bytes read
before they were written, outputs stored twice or never, and accesses of two threads that nothing orders (races.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from qdsl.analyze.execute.numbers import UNSIGNED
from qdsl.analyze.execute.program import ExecutionError

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

FIRST = 0x7F00_0000_0000                                         # addresses need more than 32 bits, as on a GPU
GUARD = 1 << 16                                                  # bytes between allocations that belong to nobody
STEP = 512                                                       # torch's CUDA allocator hands out multiples of it


class Fault(ExecutionError):
    """An access that hardware refuses.  place: of the first thread, among those that access."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


@dataclass(slots=True)
class Allocation:
    """A torch storage.  spans: first byte and end of the tensors in it.  names: of those tensors.

    written: for bytes that begin as noise, whether they were stored.  stores: for outputs, how often each byte was.
    """

    start: int
    data: NDArray[np.uint8]
    spans: list[tuple[int, int]]
    names: list[str]
    written: Flags | None = None
    stores: NDArray[np.uint8] | None = None
    views: dict[int, NDArray[Any]] = field(default_factory=dict)

    def words(self, size: int) -> NDArray[Any]:
        """The bytes as words [words], or as rows of 64-bit words where an access is wider."""
        if size not in self.views:
            whole = self.data[:len(self.data) // size * size]
            self.views[size] = whole.view(UNSIGNED[8 * size]) if size <= 8 else whole.view(np.uint64).reshape(-1, size // 8)
        return self.views[size]

    def byte(self, offset: Any) -> str:
        """A byte as a message names it."""
        inside = ((name, first) for name, (first, end) in zip(self.names, self.spans, strict=True) if first <= offset < end)
        name, first = next(inside, (self.names[0], 0))
        return f"byte {int(offset) - first} of '{name}'"


class GlobalMemory:
    """Tensors of a launch, in place: views of one storage are one allocation.

    An address is that of the tensor in the CPU's memory modulo 512, because launches look at addresses to choose a kernel.
    outputs: tensors whose every byte the launch must store once.  workspaces: tensors that begin as noise.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], outputs: Sequence[Tensor] = (),
                 workspaces: Sequence[Tensor] = ()) -> None:
        self.allocations: list[Allocation] = []
        by_storage: dict[int, Allocation] = {}
        start = FIRST
        for name, tensor in tensors:
            key = tensor.untyped_storage().data_ptr()
            if key not in by_storage:
                data = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
                start += key % STEP
                by_storage[key] = Allocation(start, data, [], [])
                self.allocations.append(by_storage[key])
                start = -(-(start + len(data) + GUARD) // STEP) * STEP
            by_storage[key].spans.append(_span(tensor))
            by_storage[key].names.append(name)
        self.by_storage = by_storage
        self.starts = np.array([allocation.start for allocation in self.allocations], np.int64)
        for tensor in (*outputs, *workspaces):
            allocation = by_storage.get(tensor.untyped_storage().data_ptr())
            if allocation is not None:
                allocation.written = np.zeros(len(allocation.data), bool)
                allocation.written[:] = True
                first, end = _span(tensor)
                allocation.written[first:end] = False
        for tensor in outputs:
            allocation = by_storage.get(tensor.untyped_storage().data_ptr())
            if allocation is not None:
                allocation.stores = np.zeros(len(allocation.data), np.uint8)
        self.outputs = outputs

    def address(self, tensor: Tensor) -> int:
        return self.by_storage[tensor.untyped_storage().data_ptr()].start + int(tensor.storage_offset()) * tensor.element_size()

    def locate(self, address: Indices, size: int, what: str) -> list[tuple[Allocation, Indices | None, Indices]]:
        """Allocations that are accessed, by which of the threads (None: all), at which bytes.  Raises Fault."""
        misaligned = address % size != 0
        if misaligned.any():
            place = int(misaligned.argmax())
            raise Fault(f"{what} of {size} bytes at {int(address[place]):#x}, which {size} does not divide", place)
        owner = np.searchsorted(self.starts, address, "right") - 1
        if not len(self.starts) or owner.min() < 0:
            raise Fault(f"{what} of {size} bytes at {int(address.min()):#x}, below every tensor", int(address.argmin()))
        parts = []
        for number in ([int(owner[0])] if (owner == owner[0]).all() else np.unique(owner).tolist()):
            allocation = self.allocations[number]
            chosen = None if len(owner) and (owner == number).all() else np.flatnonzero(owner == number)
            offset = (address if chosen is None else address[chosen]) - allocation.start
            self.check_bounds(allocation, offset, size, what, chosen)
            parts.append((allocation, chosen, offset))
        return parts

    @staticmethod
    def check_bounds(allocation: Allocation, offset: Indices, size: int, what: str, chosen: Indices | None) -> None:
        first, end = int(offset.min()), int(offset.max()) + size
        if any(start <= first and end <= stop for start, stop in allocation.spans):
            return
        inside = np.zeros(len(offset), bool)
        for start, stop in allocation.spans:
            inside |= (offset >= start) & (offset + size <= stop)
        if not inside.all():
            place = int((~inside).argmax())
            start, stop = min(allocation.spans, key=lambda span: min(abs(int(offset[place]) - end) for end in span))
            name = allocation.names[allocation.spans.index((start, stop))]
            raise Fault(f"{what} of {size} bytes at byte {int(offset[place]) - start} of '{name}', which has {stop - start}",
                        place if chosen is None else int(chosen[place]))

    def unwritten(self) -> list[tuple[str, int, str]]:
        """Outputs with bytes that were not stored once: name, first such byte, what is wrong."""
        problems = []
        for tensor in self.outputs:
            allocation = self.by_storage.get(tensor.untyped_storage().data_ptr())
            if allocation is None or allocation.stores is None:
                continue
            item = tensor.element_size()
            stores = torch.from_numpy(allocation.stores[:allocation.stores.size // item * item].reshape(-1, item))
            numbers = torch.arange(len(stores)).as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            counts = stores[numbers.reshape(-1)].numpy()
            name = allocation.names[allocation.spans.index(_span(tensor))]
            for wrong, text in ((counts == 0, "never stored"), (counts > 1, "stored more than once")):
                if wrong.any():
                    problems.append((name, int(np.flatnonzero(wrong.any(1))[0]), text))
        return problems


def _span(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of what a tensor may touch in its storage."""
    if not tensor.numel():
        return 0, 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + (last + 1) * tensor.element_size()
