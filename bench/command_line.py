"""Times the command line: whole processes, from the start of Python to its end."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

from bench.figure import Figure
from bench.timing import ROOT, commands
from qdsl.checkpoint.files.ggml_types import BY_NAME
from qdsl.checkpoint.files.gguf_metadata import Value
from qdsl.checkpoint.files.gguf_write import NewTensor, write

HEAVY = ("torch", "numpy", "triton")
CHECK = ["-m", "qdsl", "check", "q4_0"]
HELP = ["-m", "qdsl", "--help"]


def figures(rounds: int) -> Iterator[Figure]:
    """`check` and `--help` beside a Python that does nothing; a build of every spec into an empty folder; `inspect`."""
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
    yield from _inspected(rounds)


def _inspected(rounds: int) -> Iterator[Figure]:
    """A file as large as they come, with a hole for its data, and a mebibyte of tensors that nobody can read."""
    with tempfile.TemporaryDirectory() as folder:
        large, hostile = Path(folder) / "large.gguf", Path(folder) / "hostile.gguf"
        tokens = Value.of("string[]", [f"token {i}" for i in range(700_000)])
        write(large, {"tokens": tokens}, [NewTensor(f"blk.{i}.weight", BY_NAME["I8"], (0, 1), []) for i in range(900)])
        os.truncate(large, 1 << 35)
        infos = b"".join(struct.pack("<Q5sIIQ", 5, b"%05x" % i, 0, 99, 0) for i in range((1 << 20) // 29))
        hostile.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, len(infos) // 29, 0) + infos)
        inspect = [_python("-m", "qdsl", "inspect", str(path)) for path in (large, hostile)]
        read, refused = commands(inspect, rounds, most_status=1)     # 1: there are tensors that no format reads
        peaks = [_peak(str(hostile)) for _ in range(rounds if sys.platform == "linux" else 0)]
    yield Figure("qdsl inspect of 32 GiB, whole process", "s", read, 0.5, more=False, note="900 tensors, 700 000 tokens")
    yield Figure("qdsl inspect of a hostile MiB, whole process", "s", refused, 1, more=False, note="36 157 tensors")
    if peaks:
        yield Figure("qdsl inspect of a hostile MiB, peak memory", "MB", peaks, 200, more=False)


def _peak(path: str) -> float:
    """Megabytes that inspecting a file takes at most, Python's own among them."""
    program = ("import sys\n"
               "from contextlib import suppress\n"
               "from qdsl.cli import app\n"
               "with suppress(SystemExit):\n"
               "    app(['inspect', sys.argv[1]], standalone_mode=False)\n"
               "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')), file=sys.stderr)")
    inspection = subprocess.run([sys.executable, "-c", program, path], cwd=ROOT, capture_output=True, text=True, check=True)
    return int(inspection.stderr.split()[1]) / 1000


def _python(*arguments: str) -> Callable[[], list[str]]:
    return lambda: [sys.executable, *arguments]


def heavy_imports(arguments: list[str]) -> list[str]:
    """Which of the heavy packages a command imports, as Python's own -X importtime says."""
    listing = subprocess.run([sys.executable, "-X", "importtime", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=True)
    imported = {line.rsplit("|", 1)[-1].strip().split(".")[0] for line in listing.stderr.splitlines() if "|" in line}
    assert "qdsl" in imported, "-X importtime printed nothing of qdsl"
    return [name for name in HEAVY if name in imported]
