"""GPUs that times are predicted for, and the programs that one of their multiprocessors (SM) holds at once.

Limits of an SM are those of the CUDA C++ Programming Guide's table of compute capabilities.  SMs, boost clocks, bandwidths,
matrix rates and caches are those of NVIDIA's and AMD's data sheets.  A compute unit of AMD counts as an SM: its four SIMDs share
registers as schedulers do.  On RDNA a work-group processor counts as one, as AMD's driver counts them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

SCHEDULERS = 4                                                   # per SM; each issues one instruction per clock
WARP = 32                                                        # threads, on NVIDIA
REGISTER_STEP = 8                                                # registers per thread are allocated in steps of this
RESERVED = 1024                                                  # bytes of shared memory per program that the driver takes
SHARED_STEP = 128                                                # bytes


@dataclass(frozen=True, slots=True)
class Arch:
    """The limits of an SM: registers, warps, programs, and shared memory in bytes.

    capability: the compute capability times 10; 0 for AMD.  warp: threads per warp.  reserved: bytes of shared memory per program
    that the driver takes.  unit: the instruction for which Triton compiles a product of large tiles.
    """

    name: str
    capability: int
    warps: int
    programs: int
    shared: int
    registers: int = 65536
    warp: int = WARP
    reserved: int = RESERVED
    unit: str = "mma"

    @property
    def is_nvidia(self) -> bool:
        """Whether ptxas compiles for it."""
        return self.capability > 0

    def resident_programs(self, registers: int, shared: int, warps: int) -> int:
        """The number of programs that an SM holds at once; 0 if not even one fits.

        registers: per thread.  shared: bytes per program.  warps: per program.
        """
        per_warp = -(-max(1, registers) // REGISTER_STEP) * REGISTER_STEP * self.warp
        by_registers = self.registers // SCHEDULERS // per_warp * SCHEDULERS // warps
        taken = max(SHARED_STEP, -(-(shared + self.reserved) // SHARED_STEP) * SHARED_STEP)
        return min(self.programs, self.warps // warps, by_registers, self.shared // taken)


@dataclass(frozen=True, slots=True)
class Gpu:
    """The data sheet of a GPU.

    clock: boost, in GHz.  bandwidth: of memory, in 1e9 bytes per second.  matmul: dense bfloat16 with float32 sums, in 1e12
    floating-point operations per second.  cache: the last level, in 1e6 bytes.
    """

    name: str
    title: str
    arch: str
    multiprocessors: int
    clock: float
    bandwidth: float
    matmul: float
    cache: float

    @property
    def is_nvidia(self) -> bool:
        return ARCHS[self.arch].is_nvidia

    @property
    def cycles(self) -> float:
        """Scheduler cycles per second, over all schedulers of the GPU."""
        return self.multiprocessors * SCHEDULERS * self.clock * 1e9


ARCHS = {arch.name: arch for arch in (
    Arch("sm_75", 75, warps=32, programs=16, shared=64 << 10, reserved=0),
    Arch("sm_80", 80, warps=64, programs=32, shared=164 << 10),
    Arch("sm_89", 89, warps=48, programs=24, shared=100 << 10),
    Arch("sm_90", 90, warps=64, programs=32, shared=228 << 10, unit="wgmma"),
    Arch("sm_100", 100, warps=64, programs=32, shared=228 << 10, unit="tcgen05"),
    Arch("sm_120", 120, warps=48, programs=24, shared=100 << 10),
    Arch("gfx942", 0, warps=32, programs=32, shared=64 << 10, registers=131072, warp=64, reserved=0, unit="mfma"),
    Arch("gfx950", 0, warps=32, programs=32, shared=160 << 10, registers=131072, warp=64, reserved=0, unit="mfma"),
    Arch("gfx1201", 0, warps=64, programs=32, shared=128 << 10, registers=196608, reserved=0, unit="wmma"),
)}
GPUS = {gpu.name: gpu for gpu in (
    Gpu("t4", "T4", "sm_75", 40, 1.59, 320, 65, 4),
    Gpu("a100", "A100 80 GB SXM", "sm_80", 108, 1.41, 2039, 312, 40),
    Gpu("rtx4090", "RTX 4090", "sm_89", 128, 2.52, 1008, 165, 72),
    Gpu("h100", "H100 SXM", "sm_90", 132, 1.98, 3350, 989, 50),
    Gpu("h200", "H200 SXM", "sm_90", 132, 1.98, 4800, 989, 50),
    Gpu("b200", "B200", "sm_100", 148, 1.965, 8000, 2250, 126),
    Gpu("rtx5090", "RTX 5090", "sm_120", 170, 2.407, 1792, 209, 96),
    Gpu("mi300x", "Instinct MI300X", "gfx942", 304, 2.1, 5300, 1307, 256),
    Gpu("mi355x", "Instinct MI355X", "gfx950", 256, 2.4, 8000, 2516, 256),
    Gpu("rx9070xt", "Radeon RX 9070 XT", "gfx1201", 32, 2.97, 640, 195, 64),
)}


def of_device(title: str, capability: tuple[int, int], multiprocessors: int) -> Gpu:
    """The data sheet of a CUDA device by the name, compute capability and number of SMs that torch.cuda reports.

    For an unlisted GPU: the listed one of its architecture, else of the last one before it, else of the first.  Memory, matrix
    rate and cache are then scaled by the number of SMs.
    """
    for gpu in GPUS.values():
        if gpu.name.removeprefix("rtx").upper() in title:
            return gpu if gpu.multiprocessors == multiprocessors else _resized(gpu, multiprocessors)
    number = 10 * capability[0] + capability[1]
    before = [gpu for gpu in GPUS.values() if 0 < ARCHS[gpu.arch].capability <= number] or [GPUS["t4"]]
    return _resized(max(before, key=lambda gpu: ARCHS[gpu.arch].capability), multiprocessors)


def of_arch(name: str, multiprocessors: int) -> Gpu:
    """The data sheet of an AMD GPU by its architecture ('gfx942') and the number of multiprocessors that the driver reports.

    For an unlisted GPU: a listed one of CDNA (gfx9) or RDNA, scaled by the number of multiprocessors.
    """
    exact = next((gpu for gpu in GPUS.values() if gpu.arch == name), None)
    return _resized(exact or GPUS["mi300x" if name.startswith("gfx9") else "rx9070xt"], multiprocessors)


def _resized(gpu: Gpu, multiprocessors: int) -> Gpu:
    part = multiprocessors / gpu.multiprocessors
    return replace(gpu, multiprocessors=multiprocessors, bandwidth=gpu.bandwidth * part, matmul=gpu.matmul * part,
                   cache=gpu.cache * part)
