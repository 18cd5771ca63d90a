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

from torch import Tensor

from qdsl.runtime.gpu.call import Call
from qdsl.runtime.gpu.scratch import scratch_of

ALIGNMENT = 16                                                   # bytes; Triton specialises on pointers that it divides


@dataclass(frozen=True, slots=True)
class Prepared:
    """The launches of a product, for other tensors of the same shapes and types.

    run: from x, the tensors of the weight, the bias, the stream and `sizes`, what the launches write; None for tensors that
    these launches do not serve.  sizes: of what they write, in the type of x.  is_decoded: that is the weight, which the
    vendor's matmul then multiplies.
    """

    run: Callable[[Tensor, Sequence[Tensor], Tensor | None, int, tuple[int, ...]], Tensor | None]
    sizes: tuple[int, ...]
    is_decoded: bool = False


def prepare(calls: Iterable[tuple[Call, Any]], tensors: Sequence[Tensor | None], out: Tensor, tables: Sequence[Tensor],
            is_decoded: bool) -> Prepared | None:
    """Calls and the kernels that Triton compiled for them, as launches for other tensors in place of these.

    tensors: x, those of the weight and the bias.  out: what the calls write.  tables: other tensors that arguments may be, which
    live as long as the process.  None where something else is an argument, a tensor begins at an odd place, or Triton interprets.
    """
    calls = list(calls)
    workspace = [tensor for call, _ in calls for tensor in call.workspace]
    shared = [call for call, _ in calls if call.scratch]
    memory = [*tensors, out, *workspace, *(tensor for call in shared for tensor in call.scratch)]
    if len(shared) > 1 or any(tensor is not None and tensor.data_ptr() % ALIGNMENT for tensor in memory):
        return None
    values: dict[str, Any] = {"scratch_of": scratch_of}
    launches = [_launch(call, compiled, memory, tables, values) for call, compiled in calls]
    places = [(_place(tensor, memory), size) for call, _ in calls for tensor, size in call.aligned]
    if None in launches or any(place is None for place, _ in places):
        return None
    aligned = [f"a{place[0]} & {size - 1}" for place, size in places if place is not None]
    lines = [*_read(tensors, [*aligned, *(name for name in values if name.startswith("hooks"))], values),
             "out = x.new_empty(*sizes)", f"a{len(tensors) + 1} = out.data_ptr()",
             *_allocate(workspace, shared, len(tensors) + 2, values), *map(str, launches), "return out"]
    # Python runs this in half the time of loops over tensors and launches.
    exec("def run(x, tensors, bias, stream, sizes):\n    " + "\n    ".join(lines), values)  # noqa: S102 (text of this module)
    return Prepared(values["run"], tuple(out.shape), is_decoded)


def _read(tensors: Sequence[Tensor | None], refused: Sequence[str], values: dict[str, Any]) -> list[str]:
    """Lines that set a1 and so on to the addresses of tensors, or return None where tensors lie otherwise.

    refused: what else is a reason for None.
    """
    names = ["x", *(f"t{i}" for i in range(2, len(tensors))), "bias"]
    present = [i for i, tensor in enumerate(tensors) if tensor is not None]
    fits = [f"{names[i]}.is_contiguous()" for i in present]
    if (bias := tensors[-1]) is not None:
        values |= {"shape": bias.shape, "device": bias.get_device()}
        fits += ["bias.shape == shape", "bias.get_device() == device"]
    addresses = " | ".join(f"a{i + 1}" for i in present)
    return [*([f"{', '.join(names[1:-1])}, = tensors"] if names[1:-1] else []),
            f"if not ({' and '.join(fits)}):", "    return None",
            *(f"a{i + 1} = {names[i]}.data_ptr()" for i in present),
            f"if {' or '.join([f'({addresses}) % {ALIGNMENT}', *refused])}:", "    return None"]


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
    return None if place is None else f"a{place[0]} + {place[1]}" if place[1] else f"a{place[0]}"


def _place(value: Tensor, memory: Sequence[Tensor | None]) -> tuple[int, int] | None:
    """The place, among the addresses of a launch, of the one tensor in whose memory a value begins, and at what byte.

    None where it begins in none or in several.
    """
    address = value.data_ptr()
    inside = [(i, address - tensor.data_ptr()) for i, tensor in enumerate(memory, 1)
              if tensor is not None and tensor.data_ptr() <= address < tensor.data_ptr() + tensor.nbytes]
    return inside[0] if len(inside) == 1 else None
