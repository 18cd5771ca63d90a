"""Work spread over processes, its results in the order in which it was given.

A process imports the module of the function that it runs, and no more: light work starts in a tenth of a second.
"""

from __future__ import annotations

import os
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import BrokenExecutor, Future, ProcessPoolExecutor
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any, TypeVar

Task = TypeVar("Task")
Result = TypeVar("Result")


def results(work: Callable[[Task], Result], tasks: Iterable[Task], jobs: int, start: Callable[..., None] | None = None,
            given: tuple[Any, ...] = (), ahead: int | None = None) -> Generator[Result, None, None]:
    """work(task) for each task, in `jobs` processes that are `ahead` tasks, or a few, ahead of the result that is asked for.

    start: what a process does first, with `given`.  One job needs no process, and `start` is called in this one.
    Raises what `work` raises, and ChildProcessError where a process ended by itself.
    """
    if jobs <= 1:
        if start is not None:
            start(*given)
        yield from map(work, tasks)
        return
    waiting: deque[Future[Result]] = deque()
    pool = ProcessPoolExecutor(jobs, get_context("spawn"), _begin, (start, given))
    try:
        for task in tasks:
            with _interrupts_blocked():
                waiting.append(pool.submit(work, task))
            if len(waiting) > (2 * jobs if ahead is None else ahead):
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenExecutor:
        why = "for want of memory, or because a file that it read was cut"
        raise ChildProcessError(f"a process ended before its work was done, perhaps {why}") from None
    except BaseException:                                        # an interrupt does not wait for work that nobody will read
        for process in list((pool._processes or {}).values()):
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


@contextmanager
def _interrupts_blocked() -> Generator[None, None, None]:
    """Ctrl-C waits: processes that begin here inherit that, and print nothing of an interrupt while they import."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin(start: Callable[..., None] | None, given: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)                 # the process that asked hears of it, and ends this one
    Thread(target=_end_with_parent, daemon=True).start()
    if start is not None:
        start(*given)


def _end_with_parent() -> None:
    """Where it was killed, nobody else would say that the work is over."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def processors() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def affordable(nbytes: int) -> int:
    """As many processes as there are processors, and memory where each holds so many bytes; one at least."""
    return max(1, min(processors(), _memory() // max(1, nbytes)))


def resident_bytes() -> int:
    """Bytes of this process that are in memory, mapped files included; 0 where the system does not say."""
    with suppress(OSError, ValueError, IndexError):
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def _memory() -> int:
    """Bytes that are free, or that this container may have if those are fewer; without end where nothing says it."""
    found = [1 << 62]
    with suppress(OSError, ValueError, StopIteration):
        text = Path("/proc/meminfo").read_text()
        found.append(1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("MemAvailable:"))))
    with suppress(OSError, ValueError):                          # 'max' where there is no limit
        found.append(int(Path("/sys/fs/cgroup/memory.max").read_text()))
    return min(found)
