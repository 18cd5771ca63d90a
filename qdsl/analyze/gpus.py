"""The GPUs that predictions are for, and what fits on one of their multiprocessors.

Limits per multiprocessor (SM) are those of the CUDA C++ Programming Guide's table of compute capabilities.  Multiprocessors,
boost clocks and bandwidths are those of NVIDIA's data sheets; an SM has four schedulers, each issues one warp instruction a
clock.
"""

from __future__ import annotations

from dataclasses import dataclass

SCHEDULERS = 4                                                   # of each multiprocessor, on all of these
WARP = 32                                                        # threads
REGISTER_STEP = 8                                                # registers of a thread are handed out in steps of it
RESERVED = 1024                                                  # bytes of shared memory that the driver takes per program
SHARED_STEP = 128                                                # bytes


class AnalyzeError(ValueError):
    """A kernel that cannot be examined, or a target that is not known; the message is one line."""


@dataclass(frozen=True, slots=True)
class Arch:
    """What a multiprocessor holds: registers, warps, programs, and shared memory in bytes."""

    name: str
    capability: int
    warps: int
    programs: int
    shared: int
    registers: int = 65536

    def resident(self, registers: int, shared: int, warps: int) -> int:
        """How many programs run on a multiprocessor at once.

        registers: of a thread.  shared: bytes of a program.  warps: of a program.
        """
        per_warp = -(-max(1, registers) // REGISTER_STEP) * REGISTER_STEP * WARP
        by_registers = self.registers // SCHEDULERS // per_warp * SCHEDULERS // warps
        taken = -(-(shared + RESERVED) // SHARED_STEP) * SHARED_STEP
        return min(self.programs, self.warps // warps, by_registers, self.shared // taken)


@dataclass(frozen=True, slots=True)
class Gpu:
    """A product.  clock: boost, in GHz; bandwidth: of its memory, in 1e9 bytes per second."""

    name: str
    title: str
    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float

    @property
    def cycles(self) -> float:
        """Scheduler cycles of the whole GPU in a second."""
        return self.multiprocessors * SCHEDULERS * self.clock * 1e9


ARCHS = {arch.name: arch for arch in (
    Arch("sm_80", 80, warps=64, programs=32, shared=164 << 10),
    Arch("sm_89", 89, warps=48, programs=24, shared=100 << 10),
    Arch("sm_90", 90, warps=64, programs=32, shared=228 << 10),
    Arch("sm_100", 100, warps=64, programs=32, shared=228 << 10),
)}
GPUS = {gpu.name: gpu for gpu in (
    Gpu("a100", "A100 80 GB SXM", "sm_80", 108, 1.41, 2039),
    Gpu("rtx4090", "RTX 4090", "sm_89", 128, 2.52, 1008),
    Gpu("h100", "H100 SXM", "sm_90", 132, 1.98, 3350),
    Gpu("h200", "H200 SXM", "sm_90", 132, 1.98, 4800),
    Gpu("b200", "B200", "sm_100", 148, 1.965, 8000),
)}


def arch_of(name: str) -> Arch:
    """An architecture by its name.  Raises AnalyzeError."""
    if name not in ARCHS:
        raise AnalyzeError(f"no architecture '{name}': expected one of {', '.join(ARCHS)}")
    return ARCHS[name]


def gpu_of(name: str) -> Gpu:
    """A GPU by its name, written in any case, with or without spaces.  Raises AnalyzeError."""
    key = name.lower().replace(" ", "")
    if key not in GPUS:
        raise AnalyzeError(f"no GPU '{name}': expected one of {', '.join(GPUS)}")
    return GPUS[key]
