"""A kernel launch as data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

Argument = Tensor | int | None
Plane = Tensor | tuple[Tensor] | tuple[Tensor, int, int] | None  # a weight's tensor, with its gaps (strides.py) where some has


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: a kernel, its arguments in order, the constants it is specialised on, and how it is compiled.

    An argument may be a tuple of tensors, None among them, or of tensors with their gaps.

    options: what else the compiler takes, but for the contraction of a product and a sum, which is on unless they say otherwise.
    Releases of Triton differ in their own default.

    scratch: of a launch whose programs share K, the tensors for their sums and for the counters of those that have arrived.

    For `qdsl analyze`: the weights that one program takes, and those of a trip of its loop, 0 without one.
    workspace: arguments in memory that was allocated for this launch and the next ones, and that they write before they read.
    aligned: arguments whose address is a multiple of so many bytes, on which the kernel relies.
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
        """The kernel's name: 'gemv', 'skinny', 'dequantize', 'matvec'."""
        name: str = self.kernel.fn.__name__
        return name

    def run(self) -> Any:
        """Launch.  Returns the kernel that Triton compiled, None where it interprets."""
        return self.kernel[self.grid](*self.arguments, **self.constants, **self.options)


def _tensors(values: tuple[Any, ...]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, tuple):
            yield from _tensors(value)
