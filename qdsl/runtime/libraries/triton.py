"""Triton if an installed release can compile the kernels; else stand-ins, so that kernel modules can be imported.

Modules with kernels write `from qdsl.runtime.libraries.triton import tl, triton`.
Without Triton, `triton.jit` returns an object that raises MissingTriton at launch; all other names that a module reads at import
are stand-ins.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from pathlib import Path
from typing import Any, NoReturn

import torch

from qdsl.host import system
from qdsl.host.files import is_writable
from qdsl.host.private import private_folder

__all__ = ["MissingKernel", "MissingTriton", "is_installed", "libdevice", "on_device", "require", "runs_kernels", "tl", "triton",
           "use_writable_cache"]


LEAST = (3, 6)                                                   # the oldest release that can compile the kernels
too_old = ""                                                     # the installed release, if it is older
release: tuple[int, ...] = LEAST                                 # the installed release, major and minor


class MissingTriton(ImportError):
    """A GPU kernel was asked for where Triton is not installed."""


def missing() -> MissingTriton:
    """The exception that says why GPU kernels cannot run."""
    name = system.name()
    reason = "which is not installed: pip install triton" if name == "Linux" else f"which has no wheel for {name}"
    if too_old:
        reason = f"{'.'.join(map(str, LEAST))} or later, and {too_old} is installed; PyTorch 2.10 and later bring it"
    return MissingTriton(f"GPU kernels need Triton{' ' if too_old else ', '}{reason}")


class MissingKernel:
    """A stand-in for a kernel: it has the name, source and arguments, and raises MissingTriton at launch."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.fn, self.__name__, self.__doc__ = function, function.__name__, function.__doc__
        self.arg_names = function.__code__.co_varnames[:function.__code__.co_argcount]

    def __getitem__(self, grid: Any) -> NoReturn:
        raise missing()

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise missing()


class MissingName:
    """A stand-in for a name of Triton that a module reads at import, such as `tl.constexpr` or `tl.float16`."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> MissingName:
        if name.startswith("__"):
            raise AttributeError(name)
        return MissingName(f"{self._name}.{name}")

    def __call__(self, *arguments: Any, **options: Any) -> NoReturn:
        raise missing()

    def __repr__(self) -> str:
        return self._name


class _MissingTriton(MissingName):
    @staticmethod
    def jit(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        return MissingKernel if function is None else MissingKernel(function)


try:
    import triton
    import triton.language as tl
    from triton.language.extra.cuda import libdevice
    release = tuple(map(int, triton.__version__.split(".")[:2]))
    if release < LEAST:
        too_old = triton.__version__
        raise ImportError
    is_installed = True
except ImportError:
    triton, tl, libdevice = _MissingTriton("triton"), MissingName("tl"), MissingName("libdevice")
    is_installed = False


def require() -> None:
    """Raises MissingTriton if Triton is not installed."""
    if not is_installed:
        raise missing()


def runs_kernels(device: torch.device) -> bool:
    """Whether Triton kernels run on a device: GPUs of NVIDIA and AMD ('cuda') and Intel ('xpu'), if Triton is installed.

    On other devices torch decodes and multiplies the weights there.
    """
    return is_installed and device.type in ("cuda", "xpu")


@cache
def use_writable_cache() -> None:
    """Have Triton keep compiled kernels in qdsl's cache if its own cache folder is not writable, where it would fail."""
    home = Path(os.environ.get("TRITON_HOME") or Path.home())
    if "TRITON_CACHE_DIR" not in os.environ and not is_writable(home / ".triton"):
        os.environ["TRITON_CACHE_DIR"] = str(private_folder("triton"))


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """A context in which kernels launch on this GPU: Triton launches on the current device and stream."""
    if runs_kernels(device):
        use_writable_cache()
    if device.type == "cuda":
        return torch.cuda.device(device)
    return torch.xpu.device(device) if device.type == "xpu" else nullcontext()
