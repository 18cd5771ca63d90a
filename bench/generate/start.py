"""The start of `qdsl generate`: a whole process to the first token, beside one that only imports what it needs of others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from bench.figure import Figure
from bench.generate import machine
from bench.timing import ROOT, WrongResult

IMPORTS = "import torch; from transformers.models.llama.modeling_llama import LlamaForCausalLM"
SECONDS, MEGABYTES = 1.0, 350.0                                  # goals: beyond the imports, and beyond the file


@dataclass(frozen=True, slots=True)
class Run:
    """A process that ended: seconds, CPU seconds, the most bytes of memory, and processors that others used meanwhile."""

    wall: float
    cpu: float
    resident: int
    foreign: float


def figures(path: Path, rounds: int, patience: float) -> Iterator[Figure]:
    """What the start takes beyond imports, and the memory beyond the file.  Raises WrongResult where a process fails."""
    commands = [["-c", IMPORTS], ["-m", "qdsl", "generate", str(path), "What is a cat?", "-n", "1"]]
    runs: list[list[Run]] = []
    for number in range(rounds + 1):                             # the first warms the system's caches and compiles loops
        patience -= machine.wait_for_quiet([], patience)
        both = [run(command) for command in commands]
        runs += [both] if number else []
    quiet = [both for both in runs if all(one.foreign <= machine.QUIET for one in both)]
    doubt = "" if 2 * len(quiet) > len(runs) else f"no conclusion: {len(quiet)} of {len(runs)} rounds undisturbed"
    imports, whole = zip(*(runs if doubt else quiet), strict=True)
    yield Figure("SmolLM2, generate to the first token, whole process, beyond the imports of torch and the model's class", "s",
                 [own.wall - other.wall for own, other in zip(whole, imports, strict=True)], SECONDS, more=False, doubt=doubt,
                 note=f"{_seconds(whole)}, imports {_seconds(imports)}")
    size = path.stat().st_size
    yield Figure("SmolLM2, memory of that process beyond the file", "MB", [(own.resident - size) / 1e6 for own in whole],
                 MEGABYTES, more=False, note=f"imports alone {median(other.resident for other in imports) / 1e6:.0f} MB")


def run(arguments: Sequence[str]) -> Run:
    """Run Python on one thread and wait for its end."""
    wall, busy = time.perf_counter(), machine.load([]).busy
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])}
    with subprocess.Popen([sys.executable, *arguments], env=environment, stdout=subprocess.DEVNULL,
                          stderr=subprocess.DEVNULL) as process:
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
    wall = time.perf_counter() - wall
    if process.returncode:
        raise WrongResult(f"{' '.join(arguments[:3])} ended with status {process.returncode}")
    cpu = usage.ru_utime + usage.ru_stime
    return Run(wall, cpu, 1024 * usage.ru_maxrss, max(0.0, machine.load([]).busy - busy - cpu) / wall)


def _seconds(runs: Sequence[Run]) -> str:
    return f"{median(one.wall for one in runs):.2f} s, {median(one.cpu for one in runs):.2f} CPU s"
