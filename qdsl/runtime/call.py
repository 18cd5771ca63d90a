"""A launch of a kernel, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Call:
    """One launch: a kernel, its arguments in order, the constants it is specialised on, and how it is compiled.

    For `qdsl analyze`: the weights that one program takes, and those of a trip of its loop, 0 without one.
    """

    kernel: Any
    arguments: tuple[Tensor | int | None, ...]
    constants: Mapping[str, Any]
    grid: tuple[int, ...]
    options: Mapping[str, Any]
    weights: int = 0
    step: int = 0

    def run(self) -> Any:
        """Launch.  Returns the kernel that Triton compiled, None where it interprets."""
        return self.kernel[self.grid](*self.arguments, **self.constants, **self.options)
