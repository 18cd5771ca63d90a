"""Architectures and GPUs by name, for analysis; runtime/gpu/devices.py has their data."""

from __future__ import annotations

from qdsl.runtime.gpu.devices import ARCHS, GPUS, SCHEDULERS, WARP, Arch, Gpu

__all__ = ["ARCHS", "GPUS", "SCHEDULERS", "WARP", "AnalyzeError", "Arch", "Gpu", "arch_of", "gpu_of"]


class AnalyzeError(ValueError):
    """A kernel that cannot be analyzed, or an unknown target; the message is one line."""


def arch_of(name: str) -> Arch:
    """An architecture by its name.  Raises AnalyzeError."""
    if name not in ARCHS:
        raise AnalyzeError(f"no architecture '{name}': expected one of {', '.join(ARCHS)}")
    return ARCHS[name]


def gpu_of(name: str) -> Gpu:
    """A GPU by its name, ignoring case and spaces.  Raises AnalyzeError."""
    key = name.lower().replace(" ", "")
    if key not in GPUS:
        raise AnalyzeError(f"no GPU '{name}': expected one of {', '.join(GPUS)}")
    return GPUS[key]
