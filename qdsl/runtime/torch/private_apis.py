"""What qdsl uses of torch and Triton beyond their documented interfaces; nothing else names it.

tests/unit/test_private_apis.py checks what each part is relied on for, on the torch and the Triton that are installed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch._library.autograd import Info, make_autograd_impl
from torch._subclasses import FakeTensor
from torch.autograd import forward_ad
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from qdsl.runtime.gpu.triton import triton, use_writable_cache

__all__ = ["FakeTensor", "is_in_torch_dispatch_mode"]

PLAIN = (Tensor, nn.Parameter)                                   # types whose numbers are computed with directly


def allocation(tensor: Tensor) -> int:
    """What two tensors have in common that are views of the same memory, on meta too."""
    return int(tensor.untyped_storage()._cdata)


# -- who watches an operation ------------------------------------------------------------------------------------------


def is_jit_traced() -> bool:
    """Whether torch.jit.trace records this call."""
    return torch._C._get_tracing_state() is not None


def is_transformed() -> bool:
    """Whether a transform of torch.func, or forward-mode differentiation, is active."""
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0


# Looked up once: every name costs 20 ns, and a product asks for them all.
_tracing_state, _dispatch_modes = torch._C._get_tracing_state, torch._C._len_torch_dispatch_stack
_transform, _is_compiling = torch._C._functorch.peek_interpreter_stack, torch.compiler.is_dynamo_compiling
_is_grad_enabled = torch.is_grad_enabled
is_autocast_enabled = torch._C._is_any_autocast_enabled          # on any device


def is_direct(x: Tensor, bias: Tensor | None) -> bool:
    """Whether nothing watches or differentiates a product of x, and x and the bias are plain tensors.

    False is always right.  What may watch are a compiler, a tracer, a dispatch mode (that of an export too), a transform and
    forward mode.  Tensors of autograd's own vmap are not told from plain ones, because asking costs 60 ns: see is_batched.
    """
    if _is_compiling() or _tracing_state() is not None or _dispatch_modes() or _transform() is not None or \
            forward_ad._current_level >= 0 or type(x) not in PLAIN:
        return False
    if bias is None:
        return not (x.requires_grad and _is_grad_enabled())
    return type(bias) in PLAIN and not ((x.requires_grad or bias.requires_grad) and _is_grad_enabled())


def is_batched(tensor: Tensor) -> bool:
    """Whether a tensor is one of autograd's own vmap (`is_grads_batched`), which has the type of a plain tensor."""
    return bool(torch._C._functorch.is_legacy_batchedtensor(tensor))


# -- operations --------------------------------------------------------------------------------------------------------


def gradient_kernel(operator: Any, gradients: Callable[..., Any], keep: Callable[..., None]) -> Callable[..., Any]:
    """What torch.library.register_autograd has an operator do where gradients may be wanted: f(dispatch keys, *arguments).

    gradients, keep: its `backward` and `setup_context`.
    """
    return make_autograd_impl(operator, Info(gradients, keep))


# -- memory and modules ------------------------------------------------------------------------------------------------


def storage_key(tensor: Tensor) -> int:
    """A number that tensors have in common which share a storage."""
    return int(tensor.untyped_storage()._cdata)


def non_persistent_buffers(module: nn.Module) -> set[str]:
    """The names of a module's own buffers that are left out of its state dict."""
    return set(module._non_persistent_buffers_set)


def is_fsdp_shard(parameter: nn.Parameter) -> bool:
    """Whether a parameter is a DTensor, as FSDP2 makes of those that it shards."""
    return hasattr(parameter, "_local_tensor")


def ddp_ignored(model: nn.Module) -> set[str]:
    """The names of parameters and buffers that DistributedDataParallel will leave alone."""
    return set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))


def ignore_in_ddp_(model: nn.Module, names: Sequence[str]) -> None:
    """Have DistributedDataParallel leave these parameters and buffers alone, and no others."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, names)  # type: ignore[no-untyped-call]


# -- Triton ------------------------------------------------------------------------------------------------------------


def compile_kernel(kernel: Any, types: Mapping[str, str], constants: Mapping[tuple[int, ...], Any],
                   hints: Mapping[tuple[int, ...], list[list[object]]], arch: int | str, warp: int, options: Mapping[str, Any],
                   ) -> Any:
    """A kernel compiled for a GPU that need not be there.

    types: of arguments, by name.  constants, hints: values, and known divisors, by place.  arch: NVIDIA's compute capability
    times 10, or what AMD calls an architecture ('gfx942').  warp: its threads.
    """
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    use_writable_cache()
    target = GPUTarget("cuda" if isinstance(arch, int) else "hip", arch, warp)
    return triton.compile(ASTSource(kernel, types, constants, hints), target=target, options=dict(options))


def tool_path(tool: str) -> str:
    """Where one of the NVIDIA programs that come with Triton lies: 'ptxas', 'nvdisasm', 'cuobjdump'."""
    return str(getattr(triton.knobs.nvidia, tool).path)


def launch_state(device: int) -> tuple[dict[str, Any], str, str]:
    """What launches past Triton's own launcher on a GPU depend on, by its index: names, and two expressions that use them.

    The first is true where another device is current, or something asked Triton to be called at launches, as its profiler
    does.  The second is the current stream.  -1 is whichever device is current.
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
    """What allocates a tensor of sizes, strides and a type on the current device of a kind, in half the time of `new_empty`.

    Compiled programs of torch allocate by it.  None where this torch has none.
    """
    return getattr(torch._C._dynamo.guards, f"_empty_strided_{kind}", None)
