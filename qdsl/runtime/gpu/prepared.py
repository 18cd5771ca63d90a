"""Launches of compiled kernels without Triton's launcher of JIT functions, which binds and specialises arguments in every call.

The first call of a kernel goes through `kernel[grid]`, which compiles it for these very arguments: integers that are 1 or
that 16 divides, tensors that begin at multiples of 16 bytes, arguments that are None.  The compiled kernel is kept with all of
that but the addresses of tensors.  A later call has the same number of rows, the same types and aligned tensors, so that
Triton would choose the same kernel.  Every other call goes through `kernel[grid]` again, as do all while a hook is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.torch.private_apis import allocator, launch_state

ALIGNMENT = 16                                                   # bytes; Triton specialises on pointers that it divides
Run = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor | None]


class Prepared:
    """The launches of a product, for other tensors of the same shapes and types.

    run: the product of x, the tensors of the weight and the bias; None for tensors that these launches do not serve.
    bind: `run` for other sizes and strides of what the launches write.  is_decoded: that is the weight, which the vendor's
    matmul then multiplies.
    """

    __slots__ = ("bind", "is_decoded", "run")

    def __init__(self, bind: Callable[[tuple[int, ...], tuple[int, ...]], Run], sizes: tuple[int, ...], is_decoded: bool) -> None:
        self.bind = bind
        self.is_decoded = is_decoded
        self.run = bind(sizes, tuple(math.prod(sizes[axis + 1:]) for axis in range(len(sizes))))

    def reshaped(self, sizes: tuple[int, ...]) -> Prepared:
        """The same for an x of other axes before its last, whose product has these sizes."""
        return self if self.is_decoded else Prepared(self.bind, sizes, False)


def prepare(calls: Iterable[tuple[Call, Any]], tensors: Sequence[Tensor | None], out: Tensor, tables: Sequence[Tensor],
            is_decoded: bool, is_permuted: bool = False) -> Prepared | None:
    """Calls and the kernels that Triton compiled for them, as launches for other tensors in place of these.

    tensors: x, those of the weight and the bias.  out: what the calls write.  tables: other tensors that arguments may be, which
    live as long as the process.  is_permuted: `run` takes the order of columns behind the weight's tensors, and brings x into it.
    None where something else is an argument, a tensor begins at an odd place, or Triton interprets.
    """
    calls = list(calls)
    workspace = [tensor for call, _ in calls for tensor in call.workspace]
    shared = [call for call, _ in calls if call.scratch]
    memory = [*tensors, out, *workspace, *(tensor for call in shared for tensor in call.scratch)]
    if len(shared) > 1 or any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in memory):
        return None
    values: dict[str, Any] = {"scratch_of": scratch_of, "linear": linear, "dtype": out.dtype, "device": out.get_device()}
    launches = [_launch(call, compiled, memory, tables, values) for call, compiled in calls]
    places = [(_place(tensor, memory), size) for call, _ in calls for tensor, size in call.aligned]
    if None in launches or any(place is None for place, _ in places):
        return None
    state, is_changed, stream = launch_state(out.get_device())
    values |= state
    aligned = [f"a{place[0]} & {size - 1}" for place, size in places if place is not None]
    refused = [*aligned, *(name for name in values if name.startswith("hooks")), is_changed]
    lines = [*_read(tensors, is_permuted, refused, values),
             f"out = {_allocation(out, values)}", f"a{len(tensors) + 1} = out.data_ptr()", f"stream = {stream}",
             *_allocate(workspace, shared, len(tensors) + 2, values), *map(str, launches), _result(out, tensors[-1], is_decoded)]
    # Python runs this in half the time of loops over tensors and launches.
    text = "\n        ".join(["def bind(sizes, strides):\n    def run(x, tensors, bias):", *lines]) + "\n    return run"
    exec(text, values)  # noqa: S102 (text of this module)
    return Prepared(values["bind"], tuple(out.shape), is_decoded)


def _allocation(out: Tensor, values: dict[str, Any]) -> str:
    """The expression that allocates what launches write.  values: what it refers to by name, which is added."""
    if (allocate := allocator(out.device.type)) is None:
        return "x.new_empty(sizes)"
    values["allocate"] = allocate
    return "allocate(sizes, strides, dtype)"


def _result(out: Tensor, bias: Tensor | None, is_decoded: bool) -> str:
    """The line that returns the product, from what the launches wrote."""
    if not is_decoded:
        return "return out"
    return f"return linear(x, out, {'bias' if bias is None or bias.dtype == out.dtype else 'bias.to(dtype)'})"


def _read(tensors: Sequence[Tensor | None], is_permuted: bool, refused: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Lines that set a1 and so on to the addresses of tensors, or return None where tensors lie otherwise.

    refused: what else is a reason for None.
    """
    names = ["x", *(f"t{i}" for i in range(2, len(tensors))), "bias"]
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]
    fits = [_lies(name, tensor) for name, tensor in zip(names, tensors, strict=True) if tensor is not None]
    fits += [f"{name}.get_device() == device" for name in names[1:-1][:1]]
    if (bias := tensors[-1]) is not None:
        values["shape"] = bias.shape
        fits += ["bias.shape == shape", "bias.get_device() == device"]
    addresses = " | ".join(f"a{i + 1}" for i in present)
    own = [*names[1:-1], *(["order"] if is_permuted else [])]
    return [*([f"{', '.join(own)}, = tensors"] if own else []),
            *(["x = x.index_select(-1, order)"] if is_permuted else []),
            "try:", *(f"    a{i + 1} = {names[i]}.data_ptr()" for i in present),
            "except RuntimeError:", "    return None",           # a tensor of autograd's vmap, which has no memory
            f"if not ({' and '.join(fits)}) or {' or '.join([f'({addresses}) % {ALIGNMENT}', *refused])}:", "    return None"]


def _lies(name: str, tensor: Tensor) -> str:
    """The expression that says whether a tensor has its elements where this one has them."""
    return f"{name}.is_contiguous()" if tensor.is_contiguous() else f"{name}.stride() == {tensor.stride()}"


def _allocate(workspace: Sequence[Tensor], shared: Sequence[Call], first: int, values: dict[str, Any]) -> list[str]:
    """Lines that allocate other memory that launches write, and set its addresses, from number `first` on.

    All of it is alive at a time, so that no two are the same memory.
    """
    lines = []
    for i, tensor in enumerate(workspace, first):
        values[f"dtype{i}"] = tensor.dtype
        lines += [f"w{i} = x.new_empty({tuple(tensor.shape)}, dtype=dtype{i})", f"a{i} = w{i}.data_ptr()"]
    for call in shared:
        i, tiles = first + len(workspace), call.grid[0] * call.grid[1]
        lines += [f"sums, counters = scratch_of({tiles}, {call.scratch[0].numel() // tiles}, x.device, stream)",
                  f"a{i}, a{i + 1} = sums.data_ptr(), counters.data_ptr()"]
    return lines


def _launch(call: Call, compiled: Any, memory: Sequence[Tensor | None], tables: Sequence[Tensor], values: dict[str, Any],
            ) -> str | None:
    """The line that launches a kernel.  values: what it refers to by name, which is added."""
    if compiled is None:
        return None
    names = [parameter.name for parameter in call.kernel.params]
    bound = dict(zip(names, call.arguments, strict=False)) | dict(call.constants)
    if set(bound) != set(names):
        return None                                              # a default, which Triton would fill in
    arguments = [_text(bound[name], memory, tables, values) for name in names]
    if None in arguments:
        return None
    x, y, z, *_ = (*call.grid, 1, 1)
    own = len(values)
    values |= {f"run{own}": compiled.run, f"function{own}": compiled.function, f"metadata{own}": compiled.packed_metadata,
               f"hooks{own}": call.kernel.pre_run_hooks}         # may be added at any time
    shown = ", ".join(map(str, arguments))
    return f"run{own}({x}, {y}, {z}, stream, function{own}, metadata{own}, None, None, None, {shown})"


def _text(value: Any, memory: Sequence[Tensor | None], tables: Sequence[Tensor], names: dict[str, Any]) -> str | None:
    """The Python expression of an argument, where a1 and so on are the addresses of `memory`.

    names: what expressions refer to by name, which other values are added to.  None for a tensor that is neither in that memory
    nor a table.
    """
    if isinstance(value, tuple) and _has_tensors(value):
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
    return None if place is None else f"a{place[0]} + {place[1]}" if place[1] else f"a{place[0]}"


def _has_tensors(value: Any) -> bool:
    return any(map(_has_tensors, value)) if isinstance(value, tuple) else isinstance(value, Tensor)


def _place(value: Tensor, memory: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The place, among the addresses of a launch, of the one tensor in whose memory a value begins, and at what byte.

    None where it begins in none or in several.
    """
    address = value.data_ptr()
    inside = [(i, address - tensor.data_ptr()) for i, tensor in enumerate(memory, 1)
              if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes]
    return inside[0] if len(inside) == 1 else None
