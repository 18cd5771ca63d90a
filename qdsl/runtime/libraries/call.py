"""A kernel launch as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Argument = Tensor | int | None
Plane = Tensor | tuple[Tensor] | tuple[Tensor, int, int] | None  # a stored tensor; with gaps (strides.py) if some has them


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: a kernel, its arguments in order, its constexpr constants and its compile options.

    An argument may be a tuple of tensors, None among them, or of tensors with their gaps.

    options: keywords of the compiler.  enable_fp_fusion is on unless they say otherwise: Triton's default differs by release.

    scratch: if programs share K, the tensors for their partial sums and for the counters of finished programs.

    For `qdsl analyze`: the weights that a program takes, and those of one loop iteration, 0 without a loop.  workspace: arguments
    in memory that was allocated for this launch and the next ones, which write it before they read it.  aligned: arguments whose
    address the kernel requires to be a multiple of so many bytes.
    """

    kernel: Any
    arguments: tuple[Argument | tuple[Argument | Plane, ...], ...]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    options: Mapping[str, Any]
    weights: int = 0
    step: int = 0
    workspace: tuple[Tensor, ...] = ()
    aligned: tuple[tuple[Tensor, int], ...] = ()
    scratch: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "options", {"enable_fp_fusion": True, **self.options})

    @property
    def tensors(self) -> Iterator[Tensor]:
        """All tensors among the arguments."""
        yield from _tensors(self.arguments)

    @property
    def family(self) -> str:
        """The kernel's name."""
        name: str = self.kernel.fn.__name__
        return name

    def run(self) -> Any:
        """Launch the kernel.  Returns what Triton compiled, or None if Triton interprets."""
        return self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
