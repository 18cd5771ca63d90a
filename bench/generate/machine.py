"""What else the machine did while something was timed, and its caches."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
IDLE = ("idle", "iowait")
FIELDS = ("user", "nice", "system", "idle", "iowait", "irq", "softirq", "steal")
QUIET = 0.1                                                      # processors that others may use
GLANCE = 0.25                                                    # seconds of a look whether they do


@dataclass(frozen=True, slots=True)
class Load:
    """A moment: wall-clock seconds, CPU seconds of the whole machine, and of some processes of ours."""

    wall: float
    busy: float
    own: float

    def foreign(self, before: Load) -> float:
        """How many processors others used since `before`, stolen time of a virtual machine included."""
        return max(0.0, (self.busy - before.busy - self.own + before.own) / max(self.wall - before.wall, 1e-9))


def load(processes: Sequence[int]) -> Load:
    """The load now.  processes: ids of ours, beside this one."""
    return Load(time.perf_counter(), _busy_seconds(), sum(map(_cpu_seconds, (os.getpid(), *processes))))


def wait_for_quiet(processes: Sequence[int], patience: float) -> float:
    """Wait until others leave the machine alone, at most `patience` seconds; returns the seconds that it took."""
    began = time.perf_counter()
    while (waited := time.perf_counter() - began) < patience:
        before = load(processes)
        time.sleep(GLANCE)
        if load(processes).foreign(before) <= QUIET:
            break
    return waited


def caches() -> dict[str, str]:
    """Sizes of the first processor's caches, such as {'L2': '1024K', 'L3': '32768K'}; {} where Linux does not say."""
    sizes: dict[str, str] = {}
    for path in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        level, kind, size = ((path / name).read_text().strip() for name in ("level", "type", "size"))
        sizes[f"L{level}{'i' if kind == 'Instruction' else 'd' if kind == 'Data' else ''}"] = size
    return sizes


def flags() -> list[str]:
    """The vector and matrix instructions of the processor that products use."""
    wanted = ("avx2", "fma", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8", "avx_vnni", "asimddp", "bf16",
              "i8mm")
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.is_file() else []
    words = next((line.split() for line in lines if line.startswith(("flags", "Features"))), [])
    return [flag for flag in wanted if flag in words]


def _busy_seconds() -> float:
    values = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    return sum(int(value) for name, value in zip(FIELDS, values, strict=False) if name not in IDLE) / TICK


def _cpu_seconds(process: int) -> float:
    """CPU seconds of a process and all its threads; 0 for one that has ended."""
    try:
        text = Path(f"/proc/{process}/stat").read_text()
    except OSError:
        return 0.0
    user, system = text.rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / TICK
