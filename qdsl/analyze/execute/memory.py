"""Global memory as separate allocations, shared memory per program, and the checks of every access.

Addresses are checked for bounds and alignment, which fault on hardware.  Other errors become findings: bytes read before they
were written, outputs stored twice or never, and unordered accesses of two threads (races.py).
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
from qdsl.analyze.execute.ptx import ExecutionError

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]

FIRST = 0x7F00_0000_0000                                         # addresses need more than 32 bits, as on a GPU
GUARD = 1 << 16                                                  # unused bytes between allocations
STEP = 512                                                       # alignment of torch's CUDA allocator


class Fault(ExecutionError):
    """An access that hardware refuses.  place: of the first such thread, among those that access."""

    def __init__(self, message: str, place: int) -> None:
        super().__init__(message)
        self.place = place


@dataclass(slots=True)
class Allocation:
    """A torch storage.  spans: first byte and end of the tensors in it.  names: of those tensors.

    written: for bytes that start as noise, 1 once they are stored.  stores: for outputs, how often each byte was stored.  before:
    first byte and end of the previous launch's output.
    """

    start: int
    data: NDArray[np.uint8]
    spans: list[tuple[int, int]]
    names: list[str]
    written: NDArray[np.uint8] | None = None
    stores: NDArray[np.uint8] | None = None
    before: list[tuple[int, int]] = field(default_factory=list)

    def as_words(self, array: NDArray[np.uint8], offset: Indices, size: int) -> tuple[NDArray[Any], Indices]:
        """A byte-wise array as words of at most 8 bytes, and the words of accesses [threads, words]."""
        word = min(size, 8)
        skipped = -self.start % word                             # the storage may begin unaligned; addresses of words do not
        whole = array[skipped:skipped + (len(array) - skipped) // word * word].view(UNSIGNED[8 * word])
        return whole, (offset // word)[:, None] + np.arange(size // word)

    def byte_name(self, offset: Any) -> str:
        """The name of a byte in messages."""
        inside = ((name, first) for name, (first, end) in zip(self.names, self.spans, strict=True) if first <= offset < end)
        name, first = next(inside, (self.names[0], 0))
        return f"byte {int(offset) - first} of '{name}'"


class InFlight:
    """Copies or products in flight, with the group of each per thread; and the shared bytes that they use."""

    def __init__(self, threads: int, shared_bytes: int) -> None:
        self.groups = np.zeros(threads, np.int64)                # groups that each thread has committed
        self.pending: list[Any] = []
        self.bytes = np.zeros(shared_bytes, np.uint8)

    def touches(self, place: Indices, size: int) -> Flags:
        """Whether accesses touch bytes in flight."""
        used: Flags = self.bytes[place[:, None] + np.arange(size)].any(1)
        return used

    def mark(self, spread: Indices, change: int) -> None:
        """Adjust the number of operations in flight on each of these bytes."""
        np.add.at(self.bytes, spread.reshape(-1), np.uint8(change & 255))

    def due(self, lanes: Indices, group: Indices, waiting: Flags, late: int) -> Flags:
        """The operations of lanes that a wait for all but the last `late` groups completes."""
        return waiting[lanes] & (group < self.groups[lanes] - late)


class GlobalMemory:
    """Tensors of a launch, in place: views of one storage are one allocation.

    An address equals the CPU address modulo 512, because launches choose kernels by alignment.  outputs: tensors whose every byte
    the launch must store once.  workspaces: tensors that start as noise.  after: tensors that the previous launch writes, if this
    one may begin before it ends.  Raises ExecutionError for tensors that are no arguments.
    """

    def __init__(self, tensors: Sequence[tuple[str, Tensor]], outputs: Sequence[Tensor] = (),
                 workspaces: Sequence[Tensor] = (), after: Sequence[Tensor] | None = None) -> None:
        self.allocations: list[Allocation] = []
        by_storage: dict[int, Allocation] = {}
        start = FIRST
        for name, tensor in tensors:
            key = tensor.untyped_storage().data_ptr()
            if key not in by_storage:
                data = torch.empty(0, dtype=torch.uint8, device="cpu").set_(tensor.untyped_storage()).numpy()
                start += key % STEP
                by_storage[key] = Allocation(start, data, [], [])
                self.allocations.append(by_storage[key])
                start = -(-(start + len(data) + GUARD) // STEP) * STEP
            by_storage[key].spans.append(_byte_span(tensor))
            by_storage[key].names.append(name)
        self.by_storage = by_storage
        self.starts = np.array([allocation.start for allocation in self.allocations], np.int64)
        self.outputs, self.is_dependent = outputs, after is not None
        for tensor in (*outputs, *workspaces):
            allocation, (first, end) = self.allocation_of(tensor), _byte_span(tensor)
            if allocation.written is None:
                allocation.written = np.ones(len(allocation.data), np.uint8)
            allocation.written[first:end] = 0
        for tensor in outputs:
            allocation = self.allocation_of(tensor)
            allocation.stores = np.zeros(len(allocation.data), np.uint8)
        for tensor in after or ():
            if tensor.untyped_storage().data_ptr() in by_storage:
                self.allocation_of(tensor).before.append(_byte_span(tensor))

    def allocation_of(self, tensor: Tensor) -> Allocation:
        """The allocation of a tensor.  Raises ExecutionError if no argument shares its storage."""
        key = tensor.untyped_storage().data_ptr()
        if key not in self.by_storage:
            raise ExecutionError(f"a tensor {list(tensor.shape)} that is declared is no argument of the launch")
        return self.by_storage[key]

    def address(self, tensor: Tensor) -> int:
        """The address of a tensor's first element."""
        return self.allocation_of(tensor).start + int(tensor.storage_offset()) * tensor.element_size()

    def locate_accesses(self, address: Indices, size: int, what: str) -> list[tuple[Allocation, Indices | None, Indices]]:
        """The allocations that are accessed, by which threads (None: all), at which bytes.  Raises Fault."""
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
        """Raises Fault for accesses outside of the bytes that belong to a tensor."""
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

    def badly_stored_outputs(self) -> list[tuple[str, int, str]]:
        """Outputs with bytes that were not stored exactly once: name, first such byte, error."""
        problems = []
        for tensor in self.outputs:
            allocation, (first, end) = self.allocation_of(tensor), _byte_span(tensor)
            assert allocation.stores is not None
            if (allocation.stores[first:end] == 1).all():
                continue
            item = tensor.element_size()
            stores = torch.from_numpy(allocation.stores[:allocation.stores.size // item * item].reshape(-1, item))
            numbers = torch.arange(len(stores), device="cpu").as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())
            counts = stores[numbers.reshape(-1)].numpy()
            name = next((name for name, span in zip(allocation.names, allocation.spans, strict=True) if span == (first, end)),
                        allocation.names[0])
            for wrong, text in ((counts == 0, "never stored"), (counts > 1, "stored more than once")):
                if wrong.any():
                    problems.append((name, int(np.flatnonzero(wrong.any(1))[0]), text))
        return problems


def _byte_span(tensor: Tensor) -> tuple[int, int]:
    """First byte and end of the bytes of a tensor's storage that it may access."""
    if not tensor.numel():
        return 0, 0
    last = sum((extent - 1) * stride for extent, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset()) * tensor.element_size()
    return first, first + (last + 1) * tensor.element_size()
