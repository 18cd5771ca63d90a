"""Launches of compiled kernels without Triton's launcher of JIT functions, which binds and specialises arguments in every call.

The first call of a kernel goes through `kernel[grid]`, which compiles it for these very arguments: integers that are 1 or
that 16 divides, tensors that begin at multiples of 16 bytes, arguments that are None.  The compiled kernel is kept with all of
that but the addresses of tensors.  A later call has the same number of rows, the same types and aligned tensors, so that
Triton would choose the same kernel.  Every other call goes through `kernel[grid]` again, as do all while a hook is set.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from qdsl.runtime.gpu.call import Call

ALIGNMENT = 16                                                   # bytes; Triton specialises on pointers that it divides

Place = tuple[int, int, int]                                     # of an argument: its index, which tensor it is, and at what byte


@dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel with its grid and arguments.

    arguments: as they were, 0 for addresses.  places: where addresses go.  tuples: the same for arguments that are tuples.
    hooks: the functions that Triton would call before the kernel, which may be added at any time.
    """

    run: Any
    function: Any
    metadata: Any
    grid: tuple[int, int, int]
    arguments: tuple[Any, ...]
    places: tuple[Place, ...]
    tuples: tuple[tuple[int, tuple[Any, ...], tuple[Place, ...]], ...]
    hooks: Sequence[Any]

    def __call__(self, stream: int, addresses: Sequence[int]) -> None:
        arguments = [*self.arguments]
        for index, tensor, offset in self.places:
            arguments[index] = addresses[tensor] + offset
        for index, values, places in self.tuples:
            inner = [*values]
            for at, tensor, offset in places:
                inner[at] = addresses[tensor] + offset
            arguments[index] = tuple(inner)
        self.run(*self.grid, stream, self.function, self.metadata, None, None, None, *arguments)


@dataclass(frozen=True, slots=True)
class Prepared:
    """The launches of a product.

    is_decoded: they write the weight, which the vendor's matmul then multiplies.  scratch: for how many tiles of out, and how
    many sums of each, programs share memory; None where they share none.
    """

    launches: tuple[Launch, ...]
    is_decoded: bool
    scratch: tuple[int, int] | None = None


def prepare(calls: Iterable[tuple[Call, Any]], tensors: Sequence[Tensor | None], kept: Sequence[Tensor], is_decoded: bool,
            ) -> Prepared | None:
    """Calls and the kernels that Triton compiled for them, as launches for other tensors in place of these.

    kept: other tensors that arguments may be, which live as long as the process.  None where something else is an argument, a
    tensor begins at an odd place, or Triton interprets.
    """
    if any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in tensors):
        return None
    launches, scratch = [], None
    for call, compiled in calls:
        launch = _launch(call, compiled, tensors, kept)
        if launch is None:
            return None
        launches.append(launch)
        if call.scratch:
            tiles = call.grid[0] * call.grid[1]
            scratch = tiles, call.scratch[0].numel() // tiles
    return Prepared(tuple(launches), is_decoded, scratch)


def _launch(call: Call, compiled: Any, tensors: Sequence[Tensor | None], kept: Sequence[Tensor]) -> Launch | None:
    if compiled is None:
        return None
    names = [parameter.name for parameter in call.kernel.params]
    bound = dict(zip(names, call.arguments, strict=False)) | dict(call.constants)
    if set(bound) != set(names):
        return None                                              # a default, which Triton would fill in
    arguments: list[Any] = []
    places: list[Place] = []
    tuples: list[tuple[int, tuple[Any, ...], tuple[Place, ...]]] = []
    for index, name in enumerate(names):
        whole = isinstance(bound[name], tuple)
        values: list[Any] = []
        inner: list[Place] = []
        for at, value in enumerate(bound[name] if whole else (bound[name],)):
            place = _place(value, tensors) if isinstance(value, Tensor) else None
            if place is not None:
                inner.append((at, place[0], place[1]))
            elif isinstance(value, Tensor) and not any(value is tensor for tensor in kept):
                return None
            values.append(value if place is None else 0)
        if whole:
            tuples.append((index, tuple(values), tuple(inner)))
        else:
            places += [(index, tensor, offset) for _, tensor, offset in inner]
        arguments.append(tuple(values) if whole else values[0])
    x, y, z, *_ = (*call.grid, 1, 1)
    return Launch(compiled.run, compiled.function, compiled.packed_metadata, (x, y, z), tuple(arguments), tuple(places),
                  tuple(tuples), call.kernel.pre_run_hooks)


def _place(value: Tensor, tensors: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The one tensor in whose memory a value begins, and at what byte; None where none or several do."""
    address = value.data_ptr()
    inside = [(i, address - tensor.data_ptr()) for i, tensor in enumerate(tensors)
              if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes]
    return inside[0] if len(inside) == 1 else None
