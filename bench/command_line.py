"""The command line: whole processes, from the start of Python to its end."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from bench.figure import Figure
from bench.timing import ROOT, commands

HEAVY = ("torch", "numpy", "triton")
CHECK = ["-m", "qdsl", "check", "q4_0"]
HELP = ["-m", "qdsl", "--help"]


def figures(rounds: int) -> Iterator[Figure]:
    """`check` and `--help` beside a Python that does nothing; a build of every spec into an empty folder."""
    nothing, check, help_ = commands([_python("-c", "pass"), _python(*CHECK), _python(*HELP)], rounds)
    yield Figure("qdsl check q4_0, whole process", "s", check, 0.3, more=False)
    yield Figure("qdsl --help, whole process", "s", help_, 0.3, more=False)
    yield Figure("python -c pass, for comparison", "s", nothing, more=False)
    for arguments in (CHECK, HELP):
        names = heavy_imports(arguments)
        what = f"{' '.join(arguments[1:])}: of {', '.join(HEAVY)} imported"
        yield Figure(what, "modules", [len(names)], 0, more=False, note=", ".join(names) or "none")
    with tempfile.TemporaryDirectory() as folder:
        fresh = (str(Path(folder) / str(i)) for i in count())
        [build] = commands([lambda: [sys.executable, "-m", "qdsl", "build", "--all", "--out", next(fresh)]], rounds)
        modules = len(list((Path(folder) / "0").rglob("*.py")))
    yield Figure("qdsl build --all, whole process", "s", build, 3, more=False,
                 note=f"{modules} modules into an empty folder")


def _python(*arguments: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, *arguments]


def heavy_imports(arguments: list[str]) -> list[str]:
    """Which of the heavy packages a command imports, as Python's own -X importtime says."""
    made = subprocess.run([sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in made.stderr.splitlines() if "|" in line}
    assert "qdsl" in imported, "-X importtime printed nothing of qdsl"
    return [name for name in HEAVY if name in imported]
