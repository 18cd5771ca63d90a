"""Starts the sides and gives them jobs in turn, A B A B ..., so that a drift of the machine's speed affects all of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from bench.generate import machine
from bench.timing import PAUSE, ROOT, WrongResult


@dataclass(frozen=True, slots=True)
class Job:
    """A prompt of so many tokens, or the decoding of so many, on a number of threads."""

    work: str
    tokens: int
    threads: int

    @property
    def name(self) -> str:
        """As the table has it."""
        return f"{self.work} {self.tokens}" if self.work == "prompt" else self.work


@dataclass(frozen=True, slots=True)
class Sample:
    """A job that a side did once: milliseconds and CPU milliseconds per token, and processors that others used meanwhile."""

    wall: float
    cpu: float
    foreign: float

    @property
    def is_quiet(self) -> bool:
        return self.foreign <= machine.QUIET


Samples = dict[tuple[str, Job], list[Sample]]                    # by side and job, one of every round


class _Worker:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.about: dict[str, str] = self._answer()

    def run(self, job: Job) -> tuple[float, float]:
        """Seconds and CPU seconds."""
        assert self.process.stdin is not None
        line = json.dumps({"work": job.work, "tokens": job.tokens, "threads": job.threads})
        with suppress(BrokenPipeError):                          # a process that has ended gives no answer either
            self.process.stdin.write(line + "\n")
            self.process.stdin.flush()
        answer = self._answer()
        return float(answer["seconds"]), float(answer["cpu"])

    def _answer(self) -> dict[str, str]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise WrongResult(f"a side ended with status {self.process.wait()}")
        answer: dict[str, str] = json.loads(line)
        return answer


@contextmanager
def _worker(side: str, path: Path, dtype: str) -> Iterator[_Worker]:
    command = [sys.executable, "-m", "bench.generate.worker", side, str(path), dtype]
    with subprocess.Popen(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path[1:]])},
                          stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield _Worker(process)
        finally:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()


def run(path: Path, sides: Sequence[str], jobs: Sequence[Job], rounds: int, patience: float,
        dtype: str) -> tuple[Samples, dict[str, dict[str, str]]]:
    """Samples of all sides and jobs, and what the sides are; a first round is not counted.

    patience: seconds to wait in all for a machine that others leave alone.
    """
    samples: Samples = {}
    with ExitStack() as stack:
        workers = {side: stack.enter_context(_worker(side, path, dtype)) for side in sides}
        ids = [worker.process.pid for worker in workers.values()]
        for number in range(rounds + 1):
            for job in jobs:
                for side, worker in workers.items():
                    patience -= machine.wait_for_quiet(ids, patience) if number else 0
                    sample = _sample(worker, job, ids)
                    if number:
                        samples.setdefault((side, job), []).append(sample)
            print(f"{path.name}: round {number} of {rounds}", file=sys.stderr)
        return samples, {side: worker.about for side, worker in workers.items()}


def _sample(worker: _Worker, job: Job, ids: Sequence[int]) -> Sample:
    time.sleep(PAUSE)                                            # the threads of the side before stop waiting for work
    before = machine.load(ids)
    wall, cpu = worker.run(job)
    foreign = machine.load(ids).foreign(before)
    return Sample(1e3 * wall / job.tokens, 1e3 * cpu / job.tokens, foreign)
