"""Counts the work of a command by kind, in all of its processes, and estimates how long the work that is left will take.

A kind is work that takes about as long for every byte, such as copies, or weights that get one type.  Kinds are measured one by
one, so that fast copies at the beginning do not promise a fast end.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from time import monotonic
from typing import Any, NamedTuple, TypeVar

Piece = TypeVar("Piece", bound="bytes | bytearray | memoryview")
COPY = "copy"
FINISHED = "finished"                                            # work that a resumed job compares with checksums
CHECK, COMPARE, ENCODE = "check", "compare", "encode"
SAMPLES, SOLVE = RUNS = ("samples", "solve")                     # of a model that runs: bytes of tokens, and of weights
COPY_PACE = 1e-9                                                 # seconds for a byte, before one is copied
COLUMNS = 5
SLOTS = 256                                                      # of memory: a process counts in its own, so that none waits


class Row(NamedTuple):
    """What is done of a kind.  before: bytes that an interrupted command wrote.  first, first_seconds: of the first step of each
    process, which also imports and compiles what others find there.
    """

    nbytes: float = 0.0
    seconds: float = 0.0
    before: float = 0.0
    first: float = 0.0
    first_seconds: float = 0.0

    @property
    def done(self) -> float:
        """All bytes that are there."""
        return self.nbytes + self.before + self.first


class Counters:
    """What processes have done, by kind, in memory that they share.

    amounts: the bytes that are to be written, by kind.  jobs: how many processes work.
    """

    def __init__(self, amounts: Mapping[str, int]) -> None:
        self.amounts = {kind: nbytes for kind, nbytes in amounts.items() if nbytes > 0}
        self.jobs = 1
        self._width = COLUMNS * max(1, len(self.amounts))
        self._values: Any = get_context("spawn").RawArray("d", SLOTS * self._width)

    def add(self, kind: str, row: Row) -> None:
        """Counts what this process did of a kind."""
        if kind in self.amounts:
            first = os.getpid() % SLOTS * self._width + COLUMNS * list(self.amounts).index(kind)
            for column, value in enumerate(row, first):
                self._values[column] += value

    def rows(self) -> dict[str, Row]:
        """What is done, by kind."""
        values = self._values[:]
        return {kind: Row(*(sum(values[column::self._width]) for column in range(COLUMNS * place, COLUMNS * (place + 1))))
                for place, kind in enumerate(self.amounts)}

    @property
    def done(self) -> float:
        """Bytes that are written, those from before too."""
        return sum(row.done for row in self.rows().values())

    @property
    def seconds_left(self) -> float | None:
        """Seconds until all bytes are written; None while no pace is measured."""
        rows = self.rows()
        others = [row for kind, row in rows.items() if kind != COPY]
        usual = _pace(sum(row.seconds for row in others), sum(row.nbytes for row in others))
        first = _pace(sum(row.first_seconds for row in others), sum(row.first for row in others))
        left = 0.0
        for kind, row in rows.items():
            if missing := max(0.0, self.amounts[kind] - row.done):
                own = _pace(row.seconds, row.nbytes)
                unseen = COPY_PACE if kind == COPY else _pace(row.first_seconds, row.first) if kind in RUNS else usual or first
                if (pace := own or unseen) is None:
                    return None
                left += missing * pace
        return left / self.jobs


def _pace(seconds: float, nbytes: float) -> float | None:
    """Seconds for a byte; None without bytes."""
    return seconds / nbytes if nbytes else None


counters: list[Counters] = []                                    # of the work under way, the last counts
_steps: list[_Step] = []
_parts: list[_Part] = []                                         # of the last of these steps, each within the one before
_begun: set[str] = set()                                         # kinds of which this process has ended a step


class _Step:
    """A step under way in this process, which may count its bytes in parts."""

    def __init__(self, kind: str) -> None:
        self.kind, self.counted, self.since = kind, 0.0, monotonic()

    def count(self, nbytes: float) -> None:
        """Counts bytes that are done, and the time since the bytes before."""
        now = monotonic()
        seconds = now - self.since
        counters[-1].add(self.kind, Row(nbytes, seconds) if self.kind in _begun else Row(first=nbytes, first_seconds=seconds))
        self.counted, self.since = self.counted + nbytes, now


@contextmanager
def step(kind: str, nbytes: int) -> Iterator[None]:
    """Counts a step of so many bytes when the block ends; `advance` counts parts of it before."""
    if not counters:
        yield
        return
    _steps.append(_Step(kind))
    try:
        yield
        _steps[-1].count(nbytes - _steps[-1].counted)
        _begun.add(kind)
    finally:
        _steps.pop()


def advance(nbytes: float) -> None:
    """Counts bytes of the step under way, if one is."""
    if _steps:
        _steps[-1].count(nbytes)


class _Part:
    """An amount that is counted in smaller units.  left: units.  rate: the amount of a unit."""

    def __init__(self, amount: float, units: float) -> None:
        self.left = max(1.0, units)
        self.rate = amount / self.left


@contextmanager
def step_share(amount: float, units: float) -> Iterator[None]:
    """Counts an amount when the block ends; `advance_units` counts some of its units before, as a search passes rows of a matrix.

    The amount is in bytes of the step under way, or in units of the part around this one.
    """
    if not _steps:
        yield
        return
    _parts.append(_Part(amount, units))
    try:
        yield
        advance_units(_parts[-1].left)
    finally:
        _parts.pop()


def advance_units(units: float) -> None:
    """Counts units of the part under way, if one is, and no more than it has."""
    for outer in reversed(_parts):
        units = min(outer.left, units)
        outer.left -= units
        units *= outer.rate
    if _parts:
        advance(units)


def counted(kind: str, pieces: Iterable[Piece]) -> Iterator[Piece]:
    """The pieces of a step, counted when the next one is taken, so with the time that writing them takes."""
    current = _Step(kind)
    for piece in pieces:
        yield piece
        if counters:
            current.count(memoryview(piece).nbytes)
            _begun.add(kind)


def skip_before(sizes: Iterable[tuple[str, int]]) -> None:
    """Counts what an interrupted command has written, where this one has done nothing yet.  sizes: kinds and bytes."""
    if counters and not counters[-1].done:
        for kind, nbytes in sizes:
            counters[-1].add(kind, Row(before=nbytes))


@contextmanager
def counting(amounts: Mapping[str, int]) -> Iterator[Counters]:
    """Counts work in this block, by kind."""
    counters.append(Counters(amounts))
    _begun.clear()
    try:
        yield counters[-1]
    finally:
        counters.pop()


def latest_counters(last: Counters) -> Counters:
    """The counters of the work that was begun last; `last` where none is."""
    return counters[-1] if counters else last


def share_counters(jobs: int) -> Counters | None:
    """The counters for processes that work; None where nobody counts."""
    if not counters:
        return None
    counters[-1].jobs = jobs
    return counters[-1]


def join_counters(other: Counters | None) -> None:
    """Counts in the counters of the process that started this one."""
    if other is not None:
        counters.append(other)
