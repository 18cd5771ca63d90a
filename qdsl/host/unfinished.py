"""What a command leaves where it ends early: unfinished work, and marks of complete work, which are removed last.

A command that is killed between its last byte and its end has done its work: a mark tells the same command so.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_places: list[Path] = []                                         # of the work under way
_marks: list[list[Path]] = []                                    # of complete work, while a command runs


@contextmanager
def command() -> Iterator[None]:
    """Keeps marks of complete work until the block ends without an error."""
    _marks.append([])
    try:
        yield
        for mark in _marks[-1]:
            mark.unlink(missing_ok=True)
    finally:
        _marks.pop()


def remove_last(mark: Path) -> None:
    """Removes a mark of complete work: at the end of the command, at once outside of one."""
    if _marks:
        _marks[-1].append(mark)
    else:
        mark.unlink(missing_ok=True)


def begin(place: Path) -> None:
    """Notes where unfinished work lies that a repeated command resumes, for the message after an interrupt."""
    _places.append(place)


def end(place: Path) -> None:
    """Forgets unfinished work that is complete, or was removed."""
    _places[:] = [other for other in _places if other != place]


def interrupt_text() -> str:
    """What to say after an interrupt.  Work that has just been put in its place lies nowhere else."""
    if not _places:
        return "interrupted"
    lies = f": what is complete lies in {_places[-1]}" if _places[-1].exists() else ""
    return f"interrupted; run the same command again to resume{lies}"
