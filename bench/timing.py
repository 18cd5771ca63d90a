"""Times several sides alternately, A B A B ..., so that a drift of the machine's speed affects all of them equally.

Every side is a separate process with one thread, so that sides share neither allocations nor thread pools.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PAUSE = 0.02                                                     # seconds; OpenMP's threads spin for some milliseconds
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
# Where a side has two threads after all, each has a processor of its own: after a pause Linux may wake both on one, where the
# first waits busily while the second has no turn.
BOUND = {"OMP_PROC_BIND": "true"}


class WrongResult(Exception):
    """Sides that had to make the same bytes did not, or a side failed."""


@dataclass(frozen=True)
class Side:
    """What a process prepares and then times: `make(**arguments)` returns the function that is timed.

    make is a function at the top of a module, and its arguments are plain data, because another process calls it.
    """

    make: Callable[..., Callable[[], Any]]
    arguments: dict[str, Any] = field(default_factory=dict)


class Worker:
    """A process that waits for lines, and answers each with a line."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process

    def ask(self, line: str) -> str:
        """The answer to a line."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):                          # a process that has ended gives no answer either
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        return self.answer()

    def answer(self) -> str:
        """The next line that it writes.  Raises WrongResult where it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WrongResult(f"a process that was timed ended with status {self.process.wait()}")
        return line.strip()


@contextmanager
def worker(module: str, *arguments: str, **environment: str) -> Iterator[Worker]:
    """A process of a module, which ends with its input."""
    with subprocess.Popen([sys.executable, "-m", module, *arguments], cwd=ROOT, env={**os.environ, **environment},
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield Worker(process)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


class _Timed:
    """A worker that prepares a side, makes its result once to warm up, and waits."""

    def __init__(self, own: Worker) -> None:
        self.worker = own

    @cached_property
    def digest(self) -> str:
        """Of the first result, once there is one."""
        return self.worker.answer()

    def seconds(self) -> float:
        """One more call, timed inside the process, once the threads of the side before have stopped waiting for work."""
        time.sleep(PAUSE)
        return float(self.worker.ask(""))


@contextmanager
def _worker(side: Side) -> Iterator[_Timed]:
    maker = f"{side.make.__module__}:{side.make.__qualname__}"
    with worker("bench.worker", maker, json.dumps(side.arguments), **ONE_THREAD, **BOUND) as own:
        yield _Timed(own)


def interleave(sides: Sequence[Callable[[], float]], rounds: int) -> list[list[float]]:
    """What every side says of its own time, in turn, after a round that is not counted."""
    samples: list[list[float]] = [[] for _ in sides]
    for counted in [False] + [True] * rounds:
        for side, times in zip(sides, samples, strict=True):
            seconds = side()
            if counted:
                times.append(seconds)
    return samples


def calls(sides: Sequence[Side], rounds: int, *, same: bool = True) -> list[list[float]]:
    """Seconds per call of every side, in turn.  Raises WrongResult where results that have to be the same are not."""
    with ExitStack() as stack:
        workers = [stack.enter_context(_worker(side)) for side in sides]
        digests = {worker.digest for worker in workers}          # they prepare side by side, and are all waited for
        if same and len(digests) > 1:
            raise WrongResult(f"different bytes from {', '.join(str(side.arguments) for side in sides)}")
        return interleave([worker.seconds for worker in workers], rounds)


def commands(lines: Sequence[Callable[[], list[str]]], rounds: int, most_status: int = 0) -> list[list[float]]:
    """Seconds of whole processes, in turn; every line is made anew for each run, outside its time.

    Raises WrongResult where a process ends with a status above most_status, or by a signal.
    """

    def timed(line: Callable[[], list[str]]) -> Callable[[], float]:
        def run() -> float:
            command = line()
            start = time.perf_counter()
            process = subprocess.run(command, cwd=ROOT, stdout=subprocess.DEVNULL, check=False)
            seconds = time.perf_counter() - start
            if not 0 <= process.returncode <= most_status:
                raise WrongResult(f"{' '.join(command[1:])} ended with status {process.returncode}")
            return seconds
        return run

    return interleave([timed(line) for line in lines], rounds)
