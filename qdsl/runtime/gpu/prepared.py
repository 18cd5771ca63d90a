"""Launches of compiled kernels without Triton's launcher of JIT functions, which binds and specialises arguments in every call.

The first call of a kernel goes through `kernel[grid]`, which compiles it for these very arguments: integers that are 1 or
that 16 divides, tensors that begin at multiples of 16 bytes, arguments that are None.  The compiled kernel is kept with all of
that but the addresses of tensors.  A later call has the same number of rows, the same types and aligned tensors, so that
Triton would choose the same kernel.  Every other call goes through `kernel[grid]` again, as do all while a hook is set.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from qdsl.runtime.gpu.call import Call

ALIGNMENT = 16                                                   # bytes; Triton specialises on pointers that it divides


@dataclass(frozen=True, slots=True)
class Launch:
    """A compiled kernel with its grid and arguments.

    run: launches it, from the stream and then the addresses of the tensors that it was prepared with, in that order.
    hooks: the functions that Triton would call before the kernel, which may be added at any time.
    """

    run: Callable[[Sequence[int]], None]
    hooks: Sequence[Any]


@dataclass(frozen=True, slots=True)
class Prepared:
    """The launches of a product.

    sizes: of what they write, in the type of x.  is_decoded: that is the weight, which the vendor's matmul then multiplies.
    workspace: sizes and types of other memory that they need.  scratch: for how many tiles of out, and how many sums of each,
    programs share memory; None where they share none.  aligned: places among the addresses, and which of their bits must be 0
    beyond those of ALIGNMENT.
    """

    launches: tuple[Launch, ...]
    sizes: tuple[int, ...]
    is_decoded: bool = False
    workspace: tuple[tuple[tuple[int, ...], torch.dtype], ...] = ()
    scratch: tuple[int, int] | None = None
    aligned: tuple[tuple[int, int], ...] = ()


def prepare(calls: Iterable[tuple[Call, Any]], tensors: Sequence[Tensor | None], out: Tensor, tables: Sequence[Tensor],
            is_decoded: bool) -> Prepared | None:
    """Calls and the kernels that Triton compiled for them, as launches for other tensors in place of these.

    tensors: x, those of the weight and the bias.  out: what the calls write.  tables: other tensors that arguments may be, which
    live as long as the process.  None where something else is an argument, a tensor begins at an odd place, or Triton interprets.
    """
    calls = list(calls)
    workspace = [tensor for call, _ in calls for tensor in call.workspace]
    shared = [call.scratch for call, _ in calls if call.scratch]
    memory = [*tensors, out, *workspace, *(tensor for pair in shared for tensor in pair)]
    if len(shared) > 1 or any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in memory):
        return None
    launches, aligned, scratch = [], [], None
    for call, compiled in calls:
        launch = _launch(call, compiled, memory, tables)
        places = [(_place(tensor, memory), size) for tensor, size in call.aligned]
        if launch is None or any(place is None for place, _ in places):
            return None
        launches.append(launch)
        aligned += [(place[0], size - 1) for place, size in places if place is not None]
        if call.scratch:
            tiles = call.grid[0] * call.grid[1]
            scratch = tiles, call.scratch[0].numel() // tiles
    return Prepared(tuple(launches), tuple(out.shape), is_decoded,
                    tuple((tuple(tensor.shape), tensor.dtype) for tensor in workspace), scratch, tuple(aligned))


def _launch(call: Call, compiled: Any, memory: Sequence[Tensor | None], tables: Sequence[Tensor]) -> Launch | None:
    if compiled is None:
        return None
    names = [parameter.name for parameter in call.kernel.params]
    bound = dict(zip(names, call.arguments, strict=False)) | dict(call.constants)
    if set(bound) != set(names):
        return None                                              # a default, which Triton would fill in
    values: dict[str, Any] = {"run": compiled.run, "function": compiled.function, "metadata": compiled.packed_metadata}
    arguments = [_text(bound[name], memory, tables, values) for name in names]
    if None in arguments:
        return None
    x, y, z, *_ = (*call.grid, 1, 1)
    # Python runs this in half the time that it takes to write addresses into a copy of the arguments.
    text = f"lambda a: run({x}, {y}, {z}, a[0], function, metadata, None, None, None, {', '.join(map(str, arguments))})"
    return Launch(eval(text, values), call.kernel.pre_run_hooks)  # noqa: S307 (text of this module)


def _text(value: Any, memory: Sequence[Tensor | None], tables: Sequence[Tensor], names: dict[str, Any]) -> str | None:
    """The Python expression of an argument, where `a` are the stream and the addresses of `memory`.

    names: what expressions refer to by name, which other values are added to.  None for a tensor that is neither in that memory
    nor a table.
    """
    if isinstance(value, tuple):
        inner = [_text(part, memory, tables, names) for part in value]
        return None if None in inner else f"({''.join(f'{part}, ' for part in inner)})"
    if value is None or type(value) in (int, bool):
        return repr(value)
    if not isinstance(value, Tensor) or any(value is table for table in tables):
        name = f"value_{len(names)}"
        names[name] = value
        return name
    if not value.numel():
        return "0"
    place = _place(value, memory)
    return None if place is None else f"a[{place[0]}] + {place[1]}" if place[1] else f"a[{place[0]}]"


def _place(value: Tensor, memory: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The place, among the addresses of a launch, of the one tensor in whose memory a value begins, and at what byte.

    None where it begins in none or in several.
    """
    address = value.data_ptr()
    inside = [(i, address - tensor.data_ptr()) for i, tensor in enumerate(memory, 1)
              if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes]
    return inside[0] if len(inside) == 1 else None
