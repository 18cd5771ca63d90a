"""Shows the progress of a command on standard error: a bar on a terminal, elsewhere a line a minute."""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from threading import Event, Thread
from time import monotonic
from typing import Any

from qdsl.host.progress import FINISHED, SAMPLES, Counters, counting, latest_counters

MINUTE = 60.0                                                    # seconds between lines where there is no terminal
# What a command does first, or does not write, by the kind of work.
TITLES = {FINISHED: "comparing finished work with checksums", SAMPLES: "running the model on the text"}
NAME = 40                                                        # characters of a tensor's name
UNITS = ((10**12, "TB"), (10**9, "GB"), (10**6, "MB"), (10**3, "kB"))


class Meter:
    """What a command has done of its bytes, how fast it is, and how long it will take."""

    def __init__(self, counters: Counters) -> None:
        self.name, self._reported = "", 0
        self._follow(counters)

    def _follow(self, counters: Counters) -> None:
        self.counters, self.total = counters, sum(counters.amounts.values())
        self.title = next((TITLES[kind] for kind in counters.amounts if kind in TITLES), "")
        self._begun = monotonic()
        self._samples = deque([(self._begun, 0.0)])

    def refresh(self) -> None:
        """Turns to the work that was begun last: a job compares what it finished before it goes on."""
        if (counters := latest_counters(self.counters)) is not self.counters:
            self._follow(counters)

    def tell(self, done: int, name: str) -> None:
        """Notes the bytes that are done, and what they are of."""
        self._reported, self.name = done, name

    @property
    def done(self) -> float:
        return min(self.total, max(self._reported, self.counters.done))

    @property
    def written(self) -> float:
        """Bytes that this command has done, without those of an interrupted one."""
        return max(0.0, self.done - sum(row.before for row in self.counters.rows().values()))

    @property
    def rate(self) -> float:
        """Bytes in a second, of the last minute."""
        now = monotonic()
        self._samples.append((now, self.written))
        while self._samples[1][0] <= now - MINUTE:
            self._samples.popleft()
        since, written = self._samples[0]
        return (self._samples[-1][1] - written) / max(1e-3, now - since)

    @property
    def seconds_left(self) -> float | None:
        """Seconds until all is done; None where nothing tells yet."""
        if not self.counters.done and self.written:              # work that only reports its bytes
            return (self.total - self.done) / self.written * (monotonic() - self._begun)
        left, counted = self.counters.seconds_left, self.total - self.counters.done
        return left if left is None or counted <= 0 else left * (self.total - self.done) / counted

    def line(self) -> str:
        """The state in a line: '41 %, 1.2 of 3.0 GB, 25.1 MB/s, 1:12:04 left'."""
        share = 100 * self.done // max(1, self.total)
        title = f"{self.title}: " if self.title else ""
        return f"{title}{share:.0f} %, {amount(self.done, self.total)}, {sized(self.rate)}/s, {duration(self.seconds_left)} left"


def sized(nbytes: float) -> str:
    """Bytes in a unit that leaves one to three digits before the point."""
    factor, unit = next(((factor, unit) for factor, unit in UNITS if nbytes >= factor), (1, "B"))
    return f"{nbytes / factor:.1f} {unit}" if factor > 1 else f"{nbytes:.0f} B"


def amount(done: float, total: float) -> str:
    """'1.2 of 3.0 GB'."""
    factor, unit = next(((factor, unit) for factor, unit in UNITS if total >= factor), (1, "B"))
    return f"{done / factor:.1f} of {total / factor:.1f} {unit}" if factor > 1 else f"{done:.0f} of {total:.0f} B"


def duration(seconds: float | None) -> str:
    """Seconds as m:ss, or h:mm:ss where there are hours; -:-- for None."""
    if seconds is None:
        return "-:--"
    minutes, seconds_over = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds_over:02d}" if hours else f"{minutes}:{seconds_over:02d}"


@contextmanager
def progress(amounts: Mapping[str, int]) -> Iterator[Callable[[int, str], None]]:
    """Shows work until the block ends.  amounts: the bytes to write, by kind of work.

    The value is a callback for the bytes that are done, and the name of what they are of, for work that counts in no other way.
    """
    with counting(amounts) as counters:
        meter = Meter(counters)
        with _bar(meter) if sys.stderr.isatty() else _lines(meter):
            yield meter.tell


@contextmanager
def _lines(meter: Meter) -> Iterator[None]:
    is_done = Event()

    def write() -> None:
        while not is_done.wait(MINUTE):
            meter.refresh()
            print(meter.line(), file=sys.stderr, flush=True)

    thread = Thread(target=write, daemon=True)
    thread.start()
    try:
        yield
    finally:
        is_done.set()
        thread.join()


@contextmanager
def _bar(meter: Meter) -> Iterator[None]:
    """Shows a bar with the rate, the time that is left, and the name of the last tensor."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task
    from rich.text import Text

    class Column(ProgressColumn):
        """The text that a function gives when the bar is drawn."""

        def __init__(self, text: Callable[[], str]) -> None:
            super().__init__()
            self.text = text

        def render(self, task: Task) -> Text:
            """The text, with nothing that a terminal would obey."""
            return Text(self.text(), no_wrap=True, overflow="ellipsis")

    class Bar(Progress):
        """The bar, which asks the meter before it is drawn."""

        def get_renderables(self) -> Any:
            """The lines to draw."""
            meter.refresh()
            for task in self.tasks:
                task.total, task.completed = meter.total, meter.done
            return super().get_renderables()

    columns = [Column(lambda: f"{100 * meter.done // max(1, meter.total):3.0f} %"), BarColumn(bar_width=12),
               Column(lambda: amount(meter.done, meter.total)), Column(lambda: f"{sized(meter.rate)}/s"),
               Column(lambda: f"{duration(meter.seconds_left)} left"),
               Column(lambda: meter.title or repr(meter.name[:NAME])[1:-1])]
    with Bar(*columns, console=Console(stderr=True), transient=True, refresh_per_second=4) as bar:
        bar.add_task("", total=meter.total)
        yield
