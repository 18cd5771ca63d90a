"""A line on a terminal that says how far a work is, how fast, and how long it will take."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

CLEAR = "\r\x1b[K"


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """What a work tells how many units are done, and of what; it writes to stderr where that is a terminal, nothing elsewhere."""
    if not sys.stderr.isatty():
        yield lambda done, name: None
        return
    begun = monotonic()

    def tell(done: int, name: str) -> None:
        rate = done / max(1e-3, monotonic() - begun)
        left = "?:??" if not rate else "{}:{:02d}".format(*divmod(round((total - done) / rate), 60))
        print(f"{CLEAR}{100 * done // max(1, total):3d}%  {rate / 1e6:.1f} M{unit}/s  {left} left  {name[:60]!r}",
              end="", file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        print(CLEAR, end="", file=sys.stderr, flush=True)
