"""A launch compiled for a GPU that need not be there, as Triton's launcher would compile it, and disassembled.

Needs neither a GPU nor a driver: ptxas and the disassembler come with Triton.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from qdsl.analyze.gpus import AnalyzeError, Arch
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.libraries.private_apis import compile_kernel, tool_path
from qdsl.runtime.libraries.triton import MissingTriton, require, triton

POINTERS = {
    torch.float64: "*fp64", torch.float32: "*fp32", torch.float16: "*fp16", torch.bfloat16: "*bf16", torch.int64: "*i64",
    torch.int32: "*i32", torch.int16: "*i16", torch.int8: "*i8", torch.uint8: "*u8", torch.bool: "*i1",
    torch.uint16: "*u16", torch.uint32: "*u32",
    torch.float8_e4m3fn: "*fp8e4nv", torch.float8_e5m2: "*fp8e5",
}
TENSOR_MEMORY = 512                                              # columns in an SM; kernels that need more are made to trap
ALIGNED = 16                                                     # what Triton asks of pointers, in bytes, and of integers
HINT = [["tt.divisibility", ALIGNED]]
_FOR = re.compile(r"^(?P<indent> *)(?:%[^=]+= )?scf\.for %\S+ = %\S+ to %\S+ step %(?:c(?P<step>\d+)_i\d+)?")
_FETCH = re.compile(r"\btt\.load\b|buffer_load\b|tt\.descriptor_load\b|async_copy_global_to_local|async_tma_copy_global_to_local")
_PTX_LOAD = re.compile(r"\bld\.global\b|\bcp\.async\.c[ag]\.shared\.global\b")


@dataclass(frozen=True, slots=True)
class Compiled:
    """A compiled kernel.

    registers: of a thread.  stack: bytes of a thread.  shared: bytes of a program.  stages: how many trips' loads a
    pipelined loop holds.  text: the disassembly.  step: how far the source's loop moves its counter in a trip; None where it
    has no loop, or a step that is no constant.  loads: load instructions in the loop that is handed to ptxas, which may
    unroll it.  x: where the address of x lies in the constant bank of arguments, if one is x.
    """

    name: str
    warps: int
    stages: int
    registers: int
    stack: int
    shared: int
    text: str
    step: int | None
    loads: int
    x: int | None = None


def compile_with_triton(call: Call, arch: Arch) -> Any:
    """Triton's compiled kernel of a launch, whose tensors may be on any device, meta too.  Raises AnalyzeError."""
    try:
        require()
    except MissingTriton as error:
        raise AnalyzeError(str(error)) from None
    if not isinstance(call.kernel, triton.JITFunction):
        raise AnalyzeError("kernels that Triton interprets cannot be compiled: unset TRITON_INTERPRET")
    types, constants, hints = specialize_arguments(call)
    try:
        kernel = compile_kernel(call.kernel, types, constants, hints, arch.capability or arch.name, arch.warp, call.options)
    except Exception as error:
        message = str(getattr(error, "error_message", None) or error)       # without the source, where Triton shows some
        reason = next((line.strip() for line in message.splitlines() if line.strip()), type(error).__name__)
        raise AnalyzeError(f"{call.kernel.__name__} does not compile for {arch.name}: {reason}") from error
    if (columns := getattr(kernel.metadata, "tmem_size", None) or 0) > TENSOR_MEMORY:
        raise AnalyzeError(f"{call.kernel.__name__} needs {columns} columns of tensor memory; an SM has {TENSOR_MEMORY}")
    return kernel


def compile_launch(call: Call, arch: Arch) -> Compiled:
    """A launch compiled and disassembled.  Raises AnalyzeError."""
    kernel = compile_with_triton(call, arch)
    if not arch.is_nvidia:
        text = kernel.asm["amdgcn"]
        usage = dict(re.findall(r"\.(vgpr_count|private_segment_fixed_size):\s+(\d+)", text))
        registers, stack = int(usage["vgpr_count"]), int(usage["private_segment_fixed_size"])
        return Compiled(kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.num_stages, registers, stack,
                        kernel.metadata.shared, text, hot_loop_step(kernel.asm["ttgir"]), 0)
    text, resources = _disassemble(kernel.asm["cubin"])
    return Compiled(kernel.metadata.name, kernel.metadata.num_warps, kernel.metadata.num_stages, resources["REG"],
                    resources["STACK"], kernel.metadata.shared, text, hot_loop_step(kernel.asm["ttgir"]),
                    most_loop_loads(kernel.asm["ptx"]), argument_offset(specialize_arguments(call)[0], "x", arch))


# -- arguments as the launcher sees them ------------------------------------------------------------------------------


def specialize_arguments(call: Call,
                         ) -> tuple[dict[str, Any], dict[tuple[int, ...], Any], dict[tuple[int, ...], list[list[object]]]]:
    """Types of a kernel's arguments by name, values of the constant ones by place, and what is known of the others.

    Triton's launcher compiles a kernel anew for integers that are 1, for integers that 16 divides, and for tensors whose first
    byte lies at a multiple of 16; torch's allocations do.  Of a tuple each element has a place of its own.
    """
    parameters = call.kernel.params
    arguments = dict(zip((parameter.name for parameter in parameters), call.arguments, strict=False)) | dict(call.constants)
    types: dict[str, Any] = {}
    constants: dict[tuple[int, ...], Any] = {}
    hints: dict[tuple[int, ...], list[list[object]]] = {}

    def type_of(parameter: Any, value: Any, place: tuple[int, ...]) -> Any:
        if isinstance(value, tuple) and not parameter.is_constexpr:
            return tuple(type_of(parameter, element, (*place, i)) for i, element in enumerate(value))
        kind = "constexpr" if parameter.is_constexpr else _argument_type(parameter, value)
        if kind == "constexpr":
            constants[place] = value
        elif _is_16_aligned(value) and not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment):
            hints[place] = HINT
        return kind

    for parameter in parameters:
        if parameter.name not in arguments and not parameter.has_default:
            raise AnalyzeError(f"{call.kernel.__name__} is launched without its argument '{parameter.name}'")
        value = arguments.get(parameter.name, parameter.default if parameter.has_default else None)
        types[parameter.name] = type_of(parameter, value, (parameter.num,))
    return types, constants, hints


def argument_offset(types: Mapping[str, Any], name: str, arch: Arch) -> int | None:
    """Where an argument lies in the constant bank; None where a kernel has none of that name, or its value is a constant.

    Arguments lie at multiples of their sizes, after what the driver puts first.
    """
    place = 0x380 if arch.capability >= 100 else 0x210 if arch.capability >= 90 else 0x160
    for argument, kind in types.items():
        for part in _runtime_types(kind):
            size = 8 if part.startswith("*") or part.endswith("64") else 4
            place = -(-place // size) * size
            if argument == name:
                return place
            place += size
    return None


def _runtime_types(kind: Any) -> list[str]:
    """The types that a kernel has for an argument: of a tuple its elements', of a constant none."""
    if isinstance(kind, tuple):
        return [part for element in kind for part in _runtime_types(element)]
    return [] if kind == "constexpr" else [str(kind)]


def runtime_values(types: Any, value: Any) -> list[Any]:
    """The values of an argument that a compiled kernel still takes, those of a tuple one by one: all that are no constants."""
    if isinstance(types, tuple):
        return [variable for kind, part in zip(types, value, strict=True) for variable in runtime_values(kind, part)]
    return [] if types == "constexpr" else [value]


def _argument_type(parameter: Any, value: Tensor | int | None) -> str:
    """An argument's type; 'constexpr' where its value becomes part of the kernel."""
    if value is None:
        return "constexpr"
    if isinstance(value, Tensor):
        if value.dtype not in POINTERS:
            raise AnalyzeError(f"argument '{parameter.name}' is {str(value.dtype)[6:]}, which no kernel takes")
        return POINTERS[value.dtype]
    if parameter.annotation_type:
        return str(parameter.annotation_type)
    return "constexpr" if value == 1 and not parameter.do_not_specialize else "i32" if -(1 << 31) <= value < 1 << 31 else "i64"


def _is_16_aligned(value: Tensor | int | None) -> bool:
    """Whether 16 divides an integer, or the place of a tensor's first byte in its allocation."""
    if isinstance(value, Tensor):
        return value.storage_offset() * value.element_size() % ALIGNED == 0
    return isinstance(value, int) and value % ALIGNED == 0


# -- the compiler's texts ---------------------------------------------------------------------------------------------


def hot_loop_step(ttgir: str) -> int | None:
    """How far the hot loop moves its counter in a trip, before anything unrolls it; None where it is not a constant.

    The loop with the most loads; of a loop around another one that one, where it has more than half of them, as in sass.hot_loop.
    """
    lines = ttgir.splitlines()
    loops: list[tuple[range, int, int | None]] = []              # lines, loads among them, step
    for place, line in enumerate(lines):
        if head := _FOR.match(line):
            end = next((i for i in range(place + 1, len(lines)) if lines[i].startswith(head["indent"] + "}")), len(lines))
            loads = sum(bool(_FETCH.search(inner)) for inner in lines[place:end])
            loops.append((range(place, end), loads, int(head["step"]) if head["step"] else None))
    hot = max(loops, key=lambda loop: loop[1], default=None)
    if hot is None or not hot[1]:
        return None
    for inner in loops:
        if inner[0].start > hot[0].start and inner[0].stop <= hot[0].stop and 2 * inner[1] > hot[1]:
            hot = inner
    return hot[2]


def most_loop_loads(ptx: str) -> int:
    """Load instructions of the loop that has the most of them."""
    lines = ptx.splitlines()
    labels = {line.partition(":")[0]: place for place, line in enumerate(lines) if line.startswith("$L")}
    most = 0
    for place, line in enumerate(lines):
        branch = re.search(r"\bbra(?:\.uni)?\s+(\$\w+);", line)
        start = labels.get(branch[1]) if branch else None
        if start is not None and start < place:
            most = max(most, sum(bool(_PTX_LOAD.search(inner)) for inner in lines[start:place]))
    return most


def _disassemble(cubin: bytes) -> tuple[str, dict[str, int]]:
    """The instructions of a cubin as text, and the resources that it needs by name."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        text = _run_triton_tool("nvdisasm", "-c", "-ndf", path)          # without data flow, of which nothing is printed
        usage = dict(re.findall(r"\b(REG|STACK):(\d+)", _run_triton_tool("cuobjdump", "-res-usage", path)))
    if usage.keys() != {"REG", "STACK"}:
        raise AnalyzeError("cuobjdump does not say how many registers the kernel needs")
    return text, {name: int(count) for name, count in usage.items()}


def _run_triton_tool(tool: str, *arguments: str | Path) -> str:
    """What one of the tools that come with Triton prints.  Raises AnalyzeError."""
    program = tool_path(tool)
    done = subprocess.run([program, *map(str, arguments)], capture_output=True, text=True)
    if done.returncode:
        raise AnalyzeError(f"{tool}: {(done.stderr.strip().splitlines() or ['failed'])[0]}")
    return done.stdout
