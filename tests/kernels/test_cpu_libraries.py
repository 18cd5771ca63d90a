"""Compiled libraries are kept in a folder of the user's own, once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from qdsl.host import library

SOURCE = "int run(void) { return 41 + 1; }"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "qdsl"))
    return tmp_path / "qdsl" / "cpu"


def test_a_library_is_compiled_once(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert library.load(SOURCE).run() == 42
    assert [path.suffix for path in cache.iterdir()] == [".so"] and cache.stat().st_mode & 0o077 == 0
    monkeypatch.setattr(subprocess, "run", None)                 # would be called
    assert library.load(SOURCE).run() == 42


@pytest.mark.parametrize("spoiled", [lambda data: data[:-100], lambda data: b"", lambda data: data[:64] + b"x" + data[65:]])
def test_spoiled_libraries_are_compiled_anew(cache: Path, spoiled: Callable[[bytes], bytes]) -> None:
    library.load(SOURCE)
    path = next(cache.iterdir())
    whole = path.read_bytes()
    changed = path.with_name("changed")                          # a new file: the old one is mapped into this process
    changed.write_bytes(spoiled(whole))
    changed.chmod(0o700)
    changed.replace(path)
    assert library.load(SOURCE).run() == 42 and library._is_whole(path)


def test_processes_at_once_compile_one_library(cache: Path) -> None:
    code = f"from qdsl.host import library; print(library.load({SOURCE!r}).run())"
    processes = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(2)]
    assert [process.communicate()[0] for process in processes] == ["42\n"] * 2
    assert len(list(cache.iterdir())) == 1
