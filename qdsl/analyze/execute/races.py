"""Finds unordered accesses by happens-before: shadows of memory, with one entry per granule of bytes.

Barriers order the threads of a program; bar.warp.sync orders lanes of a warp.  Atomics order programs: a release at an address
after a barrier, then an acquire there, then a barrier.  The result does not depend on the order in which threads happen to run.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Indices = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class AccessingThreads:
    """Accessing threads: number of the program in the grid, thread in it, barriers passed by it and by its warp."""

    program: Indices
    thread: Indices
    epoch: Indices
    warp_epoch: Indices

    def repeated(self, times: int) -> AccessingThreads:
        """Each thread several times, for accesses of several granules."""
        return self if times == 1 else AccessingThreads(*(np.repeat(part, times) for part in (
            self.program, self.thread, self.epoch, self.warp_epoch)))


class ShadowMemory:
    """Last writer, and last readers, of each granule.

    Two readers since the last write are kept: the last one, and one of another warp, or else of another lane.
    """

    def __init__(self, granules: int) -> None:
        self.writer = _LastAccesses(granules)
        self.readers = (_LastAccesses(granules), _LastAccesses(granules))

    def record_read(self, place: Indices, who: AccessingThreads, ordered: Ordered) -> Flags:
        """Record a read; returns whether an earlier write is unordered."""
        race = self.writer.unordered(place, who, ordered)
        last, other = self.readers
        before = last.at(place)
        differs = (before.thread >= 0) & ((before.program != who.program) | (before.thread // 32 != who.thread // 32)
                                        | (before.thread != who.thread) & (other.thread[place] < 0))
        moved = place[differs]
        if len(moved):
            other.copy(moved, last)
        last.mark(place, who)
        return race

    def record_write(self, place: Indices, who: AccessingThreads, ordered: Ordered, changes: Callable[[], Flags]) -> Flags:
        """Record a write; returns whether it changes the granule while an earlier access is unordered.

        A write that changes nothing is no race: compilers let threads with equal values store them.
        """
        race = self.writer.unordered(place, who, ordered)
        for readers in self.readers:
            race |= readers.unordered(place, who, ordered)
            readers.thread[place] = -1
        self.writer.mark(place, who)
        return race & changes() if race.any() else race


@dataclass(frozen=True, slots=True)
class _LastAccess:
    program: NDArray[np.int32]
    thread: NDArray[np.int32]
    epoch: NDArray[np.int32]
    warp_epoch: NDArray[np.int32]


Ordered = Callable[[_LastAccess, AccessingThreads], Flags]


class _LastAccesses:
    """One access per granule; thread is -1 where there was none."""

    def __init__(self, granules: int) -> None:
        self.thread = np.full(granules, -1, np.int32)
        self.program, self.epoch, self.warp_epoch = (np.zeros(granules, np.int32) for _ in range(3))

    def at(self, place: Indices) -> _LastAccess:
        return _LastAccess(self.program[place], self.thread[place], self.epoch[place], self.warp_epoch[place])

    def unordered(self, place: Indices, who: AccessingThreads, ordered: Ordered) -> Flags:
        """Whether the access of each granule is not ordered before the threads' current one."""
        return np.zeros(len(place), bool) if (self.thread[place] < 0).all() else ~ordered(self.at(place), who)

    def mark(self, place: Indices, who: AccessingThreads) -> None:
        self.program[place], self.thread[place] = who.program, who.thread
        self.epoch[place], self.warp_epoch[place] = who.epoch, who.warp_epoch

    def copy(self, place: Indices, of: _LastAccesses) -> None:
        for name in ("program", "thread", "epoch", "warp_epoch"):
            getattr(self, name)[place] = getattr(of, name)[place]


def is_ordered_in_program(before: _LastAccess, who: AccessingThreads) -> Flags:
    """Whether an access of the same program came before, by a barrier, a barrier of the warp, or in the same thread."""
    same_warp = before.thread // 32 == who.thread // 32
    return ((before.thread < 0) | (before.epoch < who.epoch) | (before.thread == who.thread)
            | same_warp & (before.warp_epoch < who.warp_epoch))


class Clocks:
    """The knowledge of programs about each other, by releases and acquires of atomics.

    seen[p][q]: barriers of q before a release that p has acquired.  Threads of q that had not reached the last one are unordered,
    except the releasing one.  After a barrier all threads of a program know what one has acquired.
    """

    def __init__(self) -> None:
        self.released: dict[int, dict[int, tuple[int, int]]] = {}
        self.seen: dict[int, dict[int, tuple[int, int, int, int]]] = {}

    def release(self, address: int, program: int, thread: int, epoch: int) -> None:
        """Publishes at an address the accesses that a program's thread has done and seen."""
        passed_on = {q: (e, t) for q, (e, t, since, by) in self.seen.get(program, {}).items() if since < epoch or by == thread}
        self.released.setdefault(address, {}).update(passed_on | {program: (epoch, thread)})

    def acquire(self, address: int, program: int, thread: int, epoch: int) -> None:
        """Acquires the accesses that others published at an address."""
        mine = self.seen.setdefault(program, {})
        for q, (e, t) in self.released.get(address, {}).items():
            if q != program and mine.get(q, (-1, 0, 0, 0))[0] < e:
                mine[q] = (e, t, epoch, thread)

    def is_ordered(self, before: _LastAccess, who: AccessingThreads) -> Flags:
        """Whether an access is ordered before the current one, from any program."""
        fine = (before.thread < 0) | (before.program == who.program) & is_ordered_in_program(before, who)
        for place in np.flatnonzero(~fine & (before.program != who.program)):
            acquired = self.seen.get(int(who.program[place]), {}).get(int(before.program[place]))
            if acquired:
                epoch, thread, since, by = acquired
                visible = since < who.epoch[place] or by == who.thread[place]
                fine[place] = visible and (before.epoch[place] < epoch or before.thread[place] == thread)
        return fine
