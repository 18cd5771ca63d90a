"""Tasks that this process and others do together."""

from __future__ import annotations

import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from qdsl.host.processes import call, shared_results
from tests.support.paths import ROOT


@pytest.mark.parametrize("jobs", [1, 2])
def test_results_are_in_the_order_of_their_tasks(jobs: int) -> None:
    tasks = [(3,), (-7,), (0,), (5,)]
    assert list(shared_results(partial(call, "math", "fabs"), tasks, jobs, lambda task: task[0])) == [3, 7, 0, 5]


def test_this_process_works_too() -> None:
    """It has done the least of the tasks before another one has started."""
    numbers = list(shared_results(partial(call, "os", "getpid"), [()] * 40, 2, lambda task: 0))
    assert numbers[0] == os.getpid() and len(numbers) == 40


@pytest.mark.parametrize("jobs", [1, 2])
def test_the_first_task_that_fails_is_reported(jobs: int) -> None:
    """Whichever process did it, and whatever it took: what is ahead of it has its result."""
    tasks = [("1",), ("two",), ("3",), ("four",)]
    numbers = shared_results(partial(call, "builtins", "int"), tasks, jobs, lambda task: len(task[0]))
    assert next(numbers) == 1
    with pytest.raises(ValueError, match="two"):
        next(numbers)


KILLED = """
import os, signal
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from qdsl.host import processes

def killed_while_sending():
    def send(connection, buffer):                                # half of a result, while the lock of the pipe is held
        os.write(connection._handle, bytes(buffer)[:len(buffer) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    if parent_process() is not None:
        Connection._send = send

if __name__ == "__main__":
    try:
        RUN
    except ChildProcessError as error:
        print(error)
"""


@pytest.mark.parametrize("run", ["list(processes.results(bytes, [1000] * 4, 2, killed_while_sending))",
                                 "list(processes.shared_results(bytes, [1000] * 8, 3, int, killed_while_sending))"])
def test_a_process_that_is_killed_while_it_sends_ends_the_command(tmp_path: Path, run: str) -> None:
    (tmp_path / "killed.py").write_text(KILLED.replace("RUN", run))
    ended = subprocess.run([sys.executable, str(tmp_path / "killed.py")], capture_output=True, text=True, timeout=60, check=True,
                           env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert ended.stdout.startswith("a process ended before its work was done"), ended.stderr
