"""The undocumented interfaces of torch and Triton that qdsl uses; no other module names them.

tests/unit/test_private_apis.py checks each of them on the installed torch and Triton.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._library.autograd import Info, make_autograd_impl
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qdsl.runtime.libraries.triton import triton, use_writable_cache

__all__ = ["FakeTensor", "is_in_torch_dispatch_mode"]

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")
PLAIN = (Tensor, nn.Parameter)                                   # tensor types to compute with directly


def allocation(tensor: Tensor) -> int:
    """A key that is equal for views of the same memory, on meta too."""
    return int(tensor.untyped_storage()._cdata)


# -- observers of an operation --------------------------------------------------------------------------------------------


def is_jit_traced() -> bool:
    """Whether torch.jit.trace records this call."""
    return torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# Looked up once: a lookup costs 20 ns, and every product calls them all.
_tracing_state, _dispatch_modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_transform, _is_compiling = torch._C._functorch.peek_interpreter_stack, torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
is_autocast_enabled = torch._C._is_any_autocast_enabled          # on any device


def without_autocast(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """The function, computed in the dtypes of its tensors: autocast chooses only the dtype of x of a product."""
    @wraps(function)
    def computed(*arguments: Parameters.args, **named: Parameters.kwargs) -> Result:
        if not is_autocast_enabled():
            return function(*arguments, **named)
        with torch._C._DisableAutocast():
            return function(*arguments, **named)

    return computed


def is_direct(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing observes or differentiates a product of x, and x and the bias are plain tensors.

    False is always safe.  Observers are a compiler, a tracer, a dispatch mode (also of an export), a transform and forward mode.
    Tensors of autograd's own vmap count as plain, because testing for them costs 60 ns: see is_batched.
    """
    if _is_compiling() or _tracing_state() is not None or _dispatch_modes() or _transform() is not None or \
            forward_ad._current_level >= 0 or type(x) not in PLAIN:
        return False
    if bias is None:
        return not (x.requires_grad and _is_grad_enabled())
    return type(bias) in PLAIN and not ((x.requires_grad or bias.requires_grad) and _is_grad_enabled())


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is one of autograd's own vmap (`is_grads_batched`), whose type is that of a plain tensor."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


# -- operations --------------------------------------------------------------------------------------------------------


def gradient_kernel(operator: Any, gradients: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """The function that torch.library.register_autograd gives an operator for gradients: f(dispatch keys, *arguments).

    gradients, keep: its `backward` and `setup_context`.
    """
    return make_autograd_impl(operator, Info(gradients, keep))


# -- memory and modules ------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """A key that is equal for tensors that share a storage."""
    return int(tensor.untyped_storage()._cdata)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that its state dict omits."""
    return set(module._non_persistent_buffers_set)


def is_fsdp_shard(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor, as made by FSDP2 for shards."""
    return hasattr(parameter, "_local_tensor")


def ddp_ignored(model: nn.Module) -> set[str]:
    """The names of parameters and buffers that DistributedDataParallel ignores."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp_(model: nn.Module, names: Sequence[str]) -> None:
    """Have DistributedDataParallel ignore exactly these parameters and buffers."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


# -- threads -----------------------------------------------------------------------------------------------------------


def openmp_parallel() -> Any:
    """GOMP_parallel of the OpenMP library that torch uses, as a function of ctypes; None if torch uses another kind of threads.

    Compilers call it for `omp parallel`: libgomp has it, and so have libomp and libiomp5 on Linux.  It is looked up among the
    libraries that torch's own depends on, because a process may have loaded a second OpenMP.
    """
    try:
        return ctypes.CDLL(torch._C.__file__).GOMP_parallel
    except (OSError, AttributeError):
        return None


# -- Triton ------------------------------------------------------------------------------------------------------------


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[tuple[int, ...], Any],
                   hints: Mapping[tuple[int, ...], list[list[object]]], arch: int | str, warp: int, options: Mapping[str, Any],
                   ) -> Any:
    """A kernel compiled for a GPU, which need not be present.

    types: of arguments, by name.  constants, hints: values, and known divisors, by index.  arch: NVIDIA's compute capability
    times 10, or AMD's name of the architecture ('gfx942').  warp: threads per warp.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    use_writable_cache()
    target = GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, warp)
    return triton.compile(ASTSource(kernel, types, constants, hints), target=target, options=dict(options))


def tool_path(tool: str) -> str:
    """The path of an NVIDIA program that comes with Triton: 'ptxas', 'nvdisasm', 'cuobjdump'."""
    return str(getattr(triton.knobs.nvidia, tool).path)


def launch_state(device: int) -> tuple[dict[str, Any], str, str]:
    """The state that direct launches on a GPU must check, by its index: names, and two expressions that use them.

    The first expression is true if another device is current, or a launch hook of Triton is set, for example by its profiler.
    The second is the current stream.  -1 is the current device.
    """
    driver, runtime = triton.runtime.driver.active, triton.knobs.runtime
    before, after = runtime.launch_enter_hook, runtime.launch_exit_hook
    names = {"current": driver.get_current_device, "stream_of": driver.get_current_stream, "runtime": runtime, "before": before,
             "after": after}
    hooks = ["runtime.launch_enter_hook is not before", "runtime.launch_exit_hook is not after",
             *(f"{name}.calls" for name in ("before", "after") if hasattr(names[name], "calls"))]
    if device < 0:
        return names, " or ".join(hooks), "stream_of(current())"
    return names, " or ".join([*hooks, f"current() != {device}"]), f"stream_of({device})"


# -- memory on a GPU ---------------------------------------------------------------------------------------------------


def allocator(kind: str) -> Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] | None:
    """A function that allocates a tensor from sizes, strides and a dtype on the current device, in half the time of `new_empty`.

    Compiled programs of torch allocate with it.  kind: of the device.  None if this torch has none.
    """
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
