"""Shows a line of progress, speed and remaining time on a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic

CLEAR = "\r\x1b[K"


@contextmanager
def progress(total: int, unit: str) -> Iterator[Callable[[int, str], None]]:
    """A callback for the number of completed units and their description; writes to stderr if that is a terminal."""
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
