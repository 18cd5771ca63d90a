"""Launches of compiled kernels without Triton's JIT launcher, which binds and specialises arguments in every call.

The first call goes through `kernel[grid]`.  Triton compiles the kernel for these arguments: integers that are 1 or multiples of
16, tensors aligned to 16 bytes, arguments that are None.  The compiled kernel is kept with all arguments but tensor addresses.  A
later call with the same rows, dtypes and alignment would get the same kernel from Triton, so it is launched directly.  Every
other call goes through `kernel[grid]` again, and so do all while a launch hook is set.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import linear

from qdsl.runtime.gpu.scratch import scratch_of
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.private_apis import allocator, launch_state

ALIGNMENT = 16                                                   # bytes; Triton specialises on pointers that are multiples of it
Run = Callable[[Tensor, Sequence[Tensor], Tensor | None], Tensor | None]


class Prepared:
    """The prepared launches of a product, for other tensors of the same shapes and dtypes.

    run: computes the product of x, the weight's tensors and the bias; None for tensors that these launches do not fit.  make_run:
    returns `run` for other sizes and strides of the output.  is_decoded: the launches write the dequantized weight, which the
    vendor's matmul then multiplies.
    """

    __slots__ = ("is_decoded", "make_run", "run")

    def __init__(self, make_run: Callable[[tuple[int, ...], tuple[int, ...]], Run], sizes: tuple[int, ...],
                 is_decoded: bool) -> None:
        self.make_run = make_run
        self.is_decoded = is_decoded
        self.run = make_run(sizes, tuple(math.prod(sizes[axis + 1:]) for axis in range(len(sizes))))

    def reshaped(self, sizes: tuple[int, ...]) -> Prepared:
        """The same launches for an x with other leading axes, whose product has these sizes."""
        return self if self.is_decoded else Prepared(self.make_run, sizes, False)


def prepare(calls: Iterable[tuple[Call, Any]], tensors: Sequence[Tensor | None], out: Tensor, tables: Sequence[Tensor],
            is_decoded: bool, is_permuted: bool = False, tiles: Sequence[tuple[int, int, int]] = ()) -> Prepared | None:
    """Compiled calls as launches that take other tensors in place of these.

    tensors: x, those of the weight and the bias.  out: the output of the calls.  tables: further tensors among the arguments,
    alive as long as the process.  is_permuted: `run` takes the permutation of columns after the weight's tensors and applies it
    to x.  tiles: of a weight that is decoded in several tiles, each the number of its calls, and its first and last row.  None if
    an argument is another tensor, a tensor is unaligned, or Triton interprets.
    """
    calls = list(calls)
    workspace = [tensor for call, _ in calls for tensor in call.workspace]
    shared = [call for call, _ in calls if call.scratch]
    memory = [*tensors, out, *workspace, *(tensor for call in shared for tensor in call.scratch)]
    if len(shared) > 1 or any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in memory):
        return None
    values: dict[str, Any] = {"scratch_of": scratch_of, "linear": linear, "multiply_rows": multiply_rows, "dtype": out.dtype,
                              "device": out.get_device()}
    launches = [_launch(call, compiled, memory, tables, values) for call, compiled in calls]
    places = [(_place_in_memory(tensor, memory), size) for call, _ in calls for tensor, size in call.aligned]
    if None in launches or any(place is None for place, _ in places):
        return None
    state, is_changed, stream = launch_state(out.get_device())
    values |= state
    aligned = [f"a{place[0]} & {size - 1}" for place, size in places if place is not None]
    refused = [*aligned, *(name for name in values if name.startswith("hooks")), is_changed]
    lines = [*_address_lines(tensors, is_permuted, refused, values),
             f"out = {_allocation(out, values)}", f"a{len(tensors) + 1} = out.data_ptr()", f"stream = {stream}",
             *_allocate(workspace, shared, len(tensors) + 2, values),
             *(_tile_lines([*map(str, launches)], tiles, _rounded(out, tensors[-1])) if tiles else
               [*map(str, launches), _result_line(out, tensors[-1], is_decoded)])]
    # Generated straight-line Python takes half the time of loops over tensors and launches.
    text = "\n        ".join(["def make_run(sizes, strides):\n    def run(x, tensors, bias):", *lines]) + "\n    return run"
    exec(text, values)  # noqa: S102 (text of this module)
    return Prepared(values["make_run"], tuple(out.shape), is_decoded)


def _allocation(out: Tensor, values: dict[str, Any]) -> str:
    """The expression that allocates the output.  Adds the objects that it refers to by name to `values`."""
    if (allocate := allocator(out.device.type)) is None:
        return "x.new_empty(sizes)"
    values["allocate"] = allocate
    return "allocate(sizes, strides, dtype)"


def _result_line(out: Tensor, bias: Tensor | None, is_decoded: bool) -> str:
    """The line that returns the product, given the output of the launches."""
    if not is_decoded:
        return "return out"
    return f"return linear(x, out, {_rounded(out, bias)})"


def _rounded(out: Tensor, bias: Tensor | None) -> str:
    """The expression of the bias in the dtype of the decoded weight."""
    return "bias" if bias is None or bias.dtype == out.dtype else "bias.to(dtype)"


def _tile_lines(launches: Sequence[str], tiles: Sequence[tuple[int, int, int]], bias: str) -> list[str]:
    """Lines that decode and multiply tile by tile, and return the product."""
    lines, first = [f"product, added = x.new_empty((*x.shape[:-1], {tiles[-1][2]})), {bias}"], 0
    for count, start, stop in tiles:
        lines += [*launches[first:first + count], f"multiply_rows(x, out, added, product, {start}, {stop})"]
        first += count
    return [*lines, "return product"]


def multiply_rows(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor, start: int, stop: int) -> None:
    """Write columns [start, stop) of x [..., K] @ w.T + bias into out [..., N], by the vendor's matmul.

    weight: rows [start, stop) of w, then other memory.
    """
    out[..., start:stop] = linear(x, weight[:stop - start], None if bias is None else bias[start:stop])


def _address_lines(tensors: Sequence[Tensor | None], is_permuted: bool, refused: Sequence[str],
                   values: dict[str, Any]) -> list[str]:
    """Lines that set a1, a2, ... to the addresses of tensors, or return None if a tensor has another layout.

    refused: further conditions for None.
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
            "except RuntimeError:", "    return None",           # tensors of autograd's vmap have no memory
            f"if not ({' and '.join(fits)}) or {' or '.join([f'({addresses}) % {ALIGNMENT}', *refused])}:", "    return None"]


def _lies(name: str, tensor: Tensor) -> str:
    """The expression that tells whether a tensor has this one's strides."""
    return f"{name}.is_contiguous()" if tensor.is_contiguous() else f"{name}.stride() == {tensor.stride()}"


def _allocate(workspace: Sequence[Tensor], shared: Sequence[Call], first: int, values: dict[str, Any]) -> list[str]:
    """Lines that allocate the other memory that launches write, and set its addresses, from number `first` on.

    All of it is alive at once, so that no two share memory.
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
    """The line that launches a kernel.  Adds the objects that it refers to by name to `values`."""
    if compiled is None:
        return None
    names = [parameter.name for parameter in call.kernel.params]
    bound = dict(zip(names, call.arguments, strict=False)) | dict(call.constants)
    if set(bound) != set(names):
        return None                                              # a default argument, which Triton would fill in
    arguments = [_argument_text(bound[name], memory, tables, values) for name in names]
    if None in arguments:
        return None
    x, y, z, *_ = (*call.grid, 1, 1)
    own = len(values)
    values |= {f"run{own}": compiled.run, f"function{own}": compiled.function, f"metadata{own}": compiled.packed_metadata,
               f"hooks{own}": call.kernel.pre_run_hooks}         # users may add hooks at any time
    shown = ", ".join(map(str, arguments))
    return f"run{own}({x}, {y}, {z}, stream, function{own}, metadata{own}, None, None, None, {shown})"


def _argument_text(value: Any, memory: Sequence[Tensor | None], tables: Sequence[Tensor], names: dict[str, Any]) -> str | None:
    """The Python expression of an argument, in which a1, a2, ... are the addresses of `memory`.

    names: the objects that expressions refer to by name; others are added.  None for a tensor that is neither in that memory nor
    a table.
    """
    if isinstance(value, tuple) and _has_tensors(value):
        inner = [_argument_text(part, memory, tables, names) for part in value]
        return None if None in inner else f"({''.join(f'{part}, ' for part in inner)})"
    if value is None or type(value) in (int, bool):
        return repr(value)
    if not isinstance(value, Tensor) or any(value is table for table in tables):
        name = f"value_{len(names)}"
        names[name] = value
        return name
    if not value.numel():
        return "0"
    place = _place_in_memory(value, memory)
    return None if place is None else f"a{place[0]} + {place[1]}" if place[1] else f"a{place[0]}"


def _has_tensors(value: Any) -> bool:
    return any(map(_has_tensors, value)) if isinstance(value, tuple) else isinstance(value, Tensor)


def _place_in_memory(value: Tensor, memory: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The index of the one tensor of a launch in whose memory a value begins, and the byte offset.

    None if it begins in none of them or in several.
    """
    address = value.data_ptr()
    inside = [(i, address - tensor.data_ptr()) for i, tensor in enumerate(memory, 1)
              if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes]
    return inside[0] if len(inside) == 1 else None
