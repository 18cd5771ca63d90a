"""Tasks that this process and others do together."""

from __future__ import annotations

import os
from functools import partial

import pytest

from qdsl.host.processes import call, shared_results


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
