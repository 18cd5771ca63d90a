"""Runs tasks in worker processes and yields their results in the order of the tasks.

A process imports only the module of the function that it runs, so that light work starts in a tenth of a second.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from importlib import import_module
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from qdsl.host import progress, system

Task = TypeVar("Task")
Result = TypeVar("Result")
WORTH = 1 << 29                                                  # weights that are converted while a process starts, at least
LONGEST_WAIT = 1                                                 # seconds until processes are checked again


def results(work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, start: Callable[..., None] | None = None,
            arguments: tuple[Any, ...] = ()) -> Generator[Result, None, None]:
    """work(task) for each task, in `jobs` processes that work a few tasks ahead of the requested result.

    start: a function that each process calls first, with `arguments`.  A single job runs in this process, which calls `start`.
    Raises what `work` raises, and ChildProcessError if a process ended by itself.
    """
    if jobs <= 1:
        if start is not None:
            start(*arguments)
        yield from map(work, tasks)
        return
    waiting: deque[Future[Result]] = deque()
    with _worker_pool(jobs, start, arguments) as pool:
        for task in tasks:
            with system.interrupts_blocked():
                waiting.append(pool.submit(work, task))
            if len(waiting) > 2 * jobs:
                yield _task_result(pool, waiting.popleft())
        while waiting:
            yield _task_result(pool, waiting.popleft())


def shared_results(work: Callable[[Task], Result], tasks: Sequence[Task], jobs: int, effort: Callable[[Task], int],
                   start: Callable[..., None] | None = None) -> Generator[Result, None, None]:
    """`results` by this process and jobs - 1 others, which begin with the tasks of most effort, and this one with those of least.

    Other processes have their tasks before this one calls `work`: what it imports is imported by all of them at once.
    """
    if jobs <= 1:
        yield from map(work, tasks)
        return
    order = sorted(range(len(tasks)), key=lambda place: effort(tasks[place]))
    with _worker_pool(jobs - 1, start, ()) as pool:
        with system.interrupts_blocked():
            waiting = {place: pool.submit(work, tasks[place]) for place in reversed(order)}
        if start is not None:
            start()
        for place in order:
            if waiting[place].cancel():                          # no other process has begun it
                waiting[place] = Future()
                try:
                    waiting[place].set_result(work(tasks[place]))
                except Exception as error:                       # raised when it is this task's turn
                    waiting[place].set_exception(error)
        for place in range(len(tasks)):
            yield _task_result(pool, waiting[place])


def call(module: str, function: str, arguments: tuple[Any, ...]) -> Any:
    """The result of a function of a module that may not be imported yet."""
    return getattr(import_module(module), function)(*arguments)


@contextmanager
def _worker_pool(jobs: int, start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, at once where it fails.  Raises ChildProcessError where one ended by itself."""
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin_worker, (start, arguments, progress.share_counters(jobs)))
    try:
        yield pool
    except BaseException as error:                               # after an interrupt, do not wait for unread results
        for process in list((pool._processes or {}).values()):
            process.terminate()
        if (queue := pool._result_queue) is not None:            # whose reader waits for the end of a result that was cut off,
            queue._writer.close()  # type: ignore[attr-defined]  # until no process can write it: this one neither
        if isinstance(error, BrokenExecutor):
            why = "for want of memory, or because a file that it read was cut"
            raise ChildProcessError(f"a process ended before its work was done, perhaps {why}") from None
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _task_result(pool: ProcessPoolExecutor, future: Future[Result]) -> Result:
    """The result of a task.  Raises BrokenExecutor where a process ended, even one that had sent a part of its result.

    The pool itself does not see that end, because it waits for the other part.
    """
    while not wait([future], LONGEST_WAIT).done:
        if not all(process.is_alive() for process in list((pool._processes or {}).values())):
            raise BrokenExecutor
    return future.result()


def _begin_worker(start: Callable[..., None] | None, arguments: tuple[Any, ...], counters: progress.Counters | None) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)                 # the parent handles it, and ends this process
    Thread(target=_end_with_parent, daemon=True).start()
    progress.join_counters(counters)
    if start is not None:
        start(*arguments)


def _end_with_parent() -> None:
    """Ends this process when the parent ends, even if it was killed."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def needed(nbytes: int) -> int:
    """Memory of a process with torch, in bytes, for matrices of `nbytes` that are in memory together."""
    return 5 * nbytes // 2 + 160_000_000                         # torch's own memory, besides shared libraries


def affordable(nbytes: int, work: int | None = None) -> int:
    """The number of processes that processors and memory allow if each needs `nbytes`; at least one.

    work: weights to convert, if several processes for few of them would take longer to start.
    """
    worth = system.processors() if work is None else work // WORTH
    return max(1, min(system.processors(), system.free_memory() // max(1, nbytes), worth))
