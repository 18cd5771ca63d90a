"""Starts the sides and gives them jobs in turn, A B A B ..., so that a drift of the machine's speed affects all of them."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from bench.generate import machine
from bench.timing import PAUSE, ROOT, Worker, worker


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


class _Side:
    """A process that holds a model and runs jobs.  about: what it says of itself."""

    def __init__(self, own: Worker) -> None:
        self.worker = own
        self.about: dict[str, str] = json.loads(own.answer())

    @property
    def pid(self) -> int:
        """The number of the process."""
        return self.worker.process.pid

    def run(self, job: Job) -> tuple[float, float]:
        """Seconds and CPU seconds."""
        answer = json.loads(self.worker.ask(json.dumps({"work": job.work, "tokens": job.tokens, "threads": job.threads})))
        return float(answer["seconds"]), float(answer["cpu"])


@contextmanager
def _worker(side: str, path: Path, dtype: str) -> Iterator[_Side]:
    with worker("bench.generate.worker", side, str(path), dtype,
                PYTHONPATH=os.pathsep.join([str(ROOT), *sys.path[1:]])) as own:
        yield _Side(own)


def run(path: Path, sides: Sequence[str], jobs: Sequence[Job], rounds: int, patience: float,
        dtype: str) -> tuple[Samples, dict[str, dict[str, str]]]:
    """Samples of all sides and jobs, and what the sides are; a first round is not counted.

    patience: seconds to wait in all for a machine that others leave alone.
    """
    samples: Samples = {}
    with ExitStack() as stack:
        running = {side: stack.enter_context(_worker(side, path, dtype)) for side in sides}
        ids = [own.pid for own in running.values()]
        for number in range(rounds + 1):
            for job in jobs:
                for side, own in running.items():
                    patience -= machine.wait_for_quiet(ids, patience) if number else 0
                    sample = _sample(own, job, ids)
                    if number:
                        samples.setdefault((side, job), []).append(sample)
            print(f"{path.name}: round {number} of {rounds}", file=sys.stderr)
        return samples, {side: own.about for side, own in running.items()}


def _sample(side: _Side, job: Job, ids: Sequence[int]) -> Sample:
    time.sleep(PAUSE)                                            # the threads of the side before stop waiting for work
    before = machine.load(ids)
    wall, cpu = side.run(job)
    foreign = machine.load(ids).foreign(before)
    return Sample(1e3 * wall / job.tokens, 1e3 * cpu / job.tokens, foreign)
