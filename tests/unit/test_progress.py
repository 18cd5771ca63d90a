"""The line of progress: on a terminal alone, with nothing of a file's that a terminal would obey."""

from __future__ import annotations

import io
import sys

import pytest

from qdsl.host import progress as module
from qdsl.host.progress import progress


def test_progress_is_a_line_on_a_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    clock = iter([0.0, 2.0, 100.0, 100.0])
    monkeypatch.setattr(module, "monotonic", lambda: next(clock))
    with progress(200_000_000, " weights") as tell:
        tell(50, "a")
    assert shown.getvalue() == ""
    monkeypatch.setattr(shown, "isatty", lambda: True)
    with progress(200_000_000, "B") as tell:
        tell(4_000_000, "a\x1b")
        tell(200_000_000, "b")
    assert shown.getvalue() == ("\r\x1b[K  2%  2.0 MB/s  1:38 left  'a\\x1b'"
                                "\r\x1b[K100%  2.0 MB/s  0:00 left  'b'\r\x1b[K")


def test_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = io.StringIO()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setattr(shown, "isatty", lambda: True)
    with progress(0, "B") as tell:
        tell(0, "x")
    assert "?:?? left" in shown.getvalue()
