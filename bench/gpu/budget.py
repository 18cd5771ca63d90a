"""A time budget: each part of a run ends at a share of the total time, and skipped work is named."""

from __future__ import annotations

import time
from collections.abc import Callable

SHARES = {"checks": 0.4, "answers": 0.5, "times": 0.75, "candidates": 0.97}            # of the whole time, by when a part ends
LATE = 20.0                                                      # seconds that a part may take even where earlier ones were late


class Budget:
    """Seconds from now on.  clock: says the time in seconds."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds = seconds
        self._clock = clock
        self._start = clock()

    @property
    def used(self) -> float:
        return self._clock() - self._start

    def part(self, name: str) -> Part:
        """The part's time, from now on; a part that ends early leaves its time to those that follow."""
        return Part(self, max(SHARES[name] * self.seconds, min(self.used + LATE, max(SHARES.values()) * self.seconds)))


class Part:
    """Until when a part may run, in seconds of its budget."""

    def __init__(self, budget: Budget, until: float) -> None:
        self.budget = budget
        self.until = until

    @property
    def left(self) -> float:
        return self.until - self.budget.used

    def allows(self, seconds: float = 0.0) -> bool:
        """Whether something that takes so long can still be done."""
        return self.left > seconds
