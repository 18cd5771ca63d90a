"""Ctrl-C that ends a step of the work, and only a second one the program."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def first_interrupt_is_a_request() -> Iterator[Callable[[], bool]]:
    """A function that says whether there was an interrupt since the start; a second one raises KeyboardInterrupt.

    In threads other than the main one interrupts are as before.
    """
    count = 0

    def count_one(number: int, frame: Any) -> None:
        nonlocal count
        count += 1
        if count > 1:
            raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, count_one)
    try:
        yield lambda: count > 0
    finally:
        signal.signal(signal.SIGINT, before)
