"""Runs tasks in worker processes and yields their results in the order of the tasks.

A process imports only the module of the function that it runs, so that light work starts in a tenth of a second.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from multiprocessing import get_context, parent_process
from threading import Thread
from typing import Any, TypeVar

from qdsl.host import system

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, start: Callable[..., None] | None = None,
            arguments: tuple[Any, ...] = (), ahead: int | None = None) -> Generator[Result, None, None]:
    """work(task) for each task, in `jobs` processes that work `ahead` tasks, or a few, ahead of the requested result.

    start: a function that each process calls first, with `arguments`.  A single job runs in this process, which calls `start`.
    Raises what `work` raises, and ChildProcessError if a process ended by itself.
    """
    if jobs <= 1:
        if start is not None:
            start(*arguments)
        yield from map(work, tasks)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (start, arguments))
    try:
        for task in tasks:
            with system.interrupts_blocked():
                waiting.append(pool.submit(work, task))
            if len(waiting) > (2 * jobs if ahead is None else ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenExecutor:
        why = "for want of memory, or because a file that it read was cut"
        raise ChildProcessError(f"a process ended before its work was done, perhaps {why}") from None
    except BaseException:                                        # after an interrupt, do not wait for unread results
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin(start: Callable[..., None] | None, arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)                 # the parent handles it, and ends this process
    Thread(target=_end_with_parent, daemon=True).start()
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


def affordable(nbytes: int) -> int:
    """The number of processes that processors and memory allow if each needs `nbytes`; at least one."""
    return max(1, min(system.processors(), system.free_memory() // max(1, nbytes)))
