"""A figure: its samples, and the project's goal for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

DIGITS = {"s": 3, "x": 2, "GiB": 2, "GB/s": 2, "MB/s": 0, "M/s": 1, "us": 1, "bits": 3}      # of other units, such as lines, none


@dataclass(frozen=True)
class Figure:
    """One row of the table.

    samples: the figure of every round, in `unit`; their median is judged.  goal: what the median has to reach, from
    below where `more` is better and from above where it is not; None where nothing is promised.  doubt: why nothing
    may be concluded from the samples; the goal is then neither met nor missed.
    """

    what: str
    unit: str
    samples: Sequence[float]
    goal: float | None = None
    more: bool = True
    note: str = ""
    doubt: str = ""

    @property
    def median(self) -> float:
        return median(self.samples)

    @property
    def met(self) -> bool | None:
        """Whether the median reaches the goal; None without a goal, or in doubt."""
        return None if self.goal is None or self.doubt else self._reaches(self.median)

    @property
    def verdict(self) -> str:
        """The same in words, and how many rounds say otherwise: then the machine was noisy, or the goal is near."""
        if self.met is None:
            return self.doubt
        others = sum(self._reaches(sample) != self.met for sample in self.samples)
        doubt = f" ({others} of {len(self.samples)} rounds {'do' if not self.met else 'do not'})" if others else ""
        return f"{'met' if self.met else 'not met'}{doubt}"

    def _reaches(self, value: float) -> bool:
        assert self.goal is not None
        return value >= self.goal if self.more else value <= self.goal

    def text(self, value: float) -> str:
        """A value in the figure's unit."""
        return f"{value:.{DIGITS.get(self.unit, 0)}f} {self.unit}"

    def row(self) -> list[str]:
        """The cells of the table."""
        low, high = self.text(min(self.samples)).split()[0], self.text(max(self.samples)).split()[0]
        goal = "" if self.goal is None else f"{'>=' if self.more else '<='} {self.goal:g} {self.unit}"
        spread = f"{low} .. {high}" if low != high else ""
        return [self.what, self.text(self.median), spread, goal, self.verdict, self.note]

    def data(self) -> dict[str, object]:
        """The figure for a results file."""
        doubt = {"doubt": self.doubt} if self.doubt else {}
        return {"what": self.what, "unit": self.unit, "median": rounded(self.median), "min": rounded(min(self.samples)),
                "max": rounded(max(self.samples)), "goal": self.goal, "better": "more" if self.more else "less",
                "met": self.met, **doubt, "note": self.note, "samples": [rounded(sample) for sample in self.samples]}


def rounded(value: float) -> float:
    """Four digits: more would be noise."""
    return float(f"{value:.4g}")


def rates(amount: float, seconds: Sequence[float]) -> list[float]:
    """Amounts per second."""
    return [amount / one for one in seconds]


def ratios(slow: Sequence[float], fast: Sequence[float]) -> list[float]:
    """How many times as fast the second side was, pair by pair: both of a pair met the same moment of the machine."""
    return [a / b for a, b in zip(slow, fast, strict=True)]
