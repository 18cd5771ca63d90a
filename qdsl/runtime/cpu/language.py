"""Calls a storage's decode function with symbols instead of Triton tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

from qdsl.runtime.cpu.trace import ALWAYS, SIZES, Index, Node, Trace, Unsupported
from qdsl.runtime.gpu.kernels import device


def run(trace: Trace, decode: Any, tensors: Sequence[Any], n: Index, u: Index, sizes: tuple[int, ...] | None) -> None:
    """Call the decode function; `trace.uses` then has its weights."""
    N, K = trace.symbol("N", {"N"}), trace.symbol("K", {"K"})
    function = retargeted(decode, Language(trace))
    function(tuple(tensors), n, u, ALWAYS, N, K, sizes, trace.use, None)


class Language:
    """The names that decode functions use from `tl` and from the module `device`, computing on symbols."""

    constexpr = object

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self.load, self.where = trace.load, trace.where

    def __getattr__(self, name: str) -> Any:
        if name in SIZES:
            return name
        function = getattr(device, name, None)
        if function is None:
            raise Unsupported(name)
        return retargeted(function, self)

    @staticmethod
    def pointer_type(dtype: str) -> str:
        return dtype

    @staticmethod
    def static_range(*limits: int) -> range:
        return range(*limits)

    def cdiv(self, index: Any, by: int) -> Any:
        return -(-index // by) if isinstance(index, int) else self._trace.symbol(f"({index.text()} + {by - 1}) / {by}")

    def div_rn(self, a: Any, b: Any) -> Node:
        left, right = (self._trace.converted(arg, "float32", False) for arg in (a, b))
        return self._trace.node("/", (left, right), "float32")


def retargeted(kernel: Any, language: Language) -> Callable[..., Any]:
    """A Triton function as a Python function that computes on symbols."""
    code = kernel.fn.__code__
    names = {name: getattr(language, name) for name in code.co_names if name != "tl" and hasattr(device, name)}
    function = FunctionType(code, {"tl": language, "device": language, **names, "float": float}, code.co_name)
    function.__defaults__ = kernel.fn.__defaults__
    return function
