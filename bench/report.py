"""The output of a run: a table, and a results file with the machine and the versions."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

import qdsl
from bench.figure import Figure
from qdsl.host.files import replacing

HEADS = ["what", "measured", "min .. max", "goal", "met", "note"]
PACKAGES = ("torch", "triton", "numpy", "gguf")


def table(figures: Sequence[Figure]) -> str:
    """One line per figure, its columns aligned."""
    rows = [HEADS, *(figure.row() for figure in figures)]
    widths = [max(len(row[i]) for row in rows) for i in range(len(HEADS))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    return "\n".join([lines[0], "-" * max(map(len, lines)), *lines[1:]])


def summary(figures: Sequence[Figure]) -> str:
    """How many goals were met, and which were not."""
    judged = [figure for figure in figures if figure.met is not None]
    missed = [figure.what for figure in judged if not figure.met]
    doubtful = sum(bool(figure.doubt) for figure in figures)
    line = f"{len(judged) - len(missed)} of {len(judged)} goals met" + (f", {doubtful} figures in doubt" if doubtful else "")
    return f"{line}; not met: {'; '.join(missed)}" if missed else line


def noise(load: float) -> str:
    """What the other programs of the machine were doing when the run began."""
    busy = " (other programs were running: rates are lower than they could be)" if load > 0.5 else ""
    return f"load average before the run: {load:.2f} on {os.cpu_count()} processors{busy}"


def device() -> dict[str, object]:
    """The machine: processor as /proc/cpuinfo names it, how many of them, and the GPU if there is one."""
    cpu: dict[str, str] = {}
    path = Path("/proc/cpuinfo")
    for line in path.read_text().splitlines() if path.is_file() else []:
        key, _, value = line.partition(":")
        cpu.setdefault(key.strip(), value.strip())
    return {"cpu": cpu.get("model name", platform.machine()), "family": cpu.get("cpu family"),
            "model": cpu.get("model"), "processors": os.cpu_count(),
            "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None}


def versions() -> dict[str, str | None]:
    """What was measured and with what; None for what is not installed."""
    version_of: dict[str, str | None] = {"qdsl": qdsl.__version__, "python": platform.python_version()}
    for name in PACKAGES:
        try:
            version_of[name] = version(name)
        except PackageNotFoundError:
            version_of[name] = None
    return version_of


def results(command: str, figures: Sequence[Figure], load: float, **more: object) -> str:
    """The text of a results file.  more: what else it holds, as JSON."""
    data = {"schema": 1, "command": command, "date": datetime.now(UTC).date().isoformat(), "device": device(),
            "load_before": round(load, 2), "versions": versions(), **more, "summary": summary(figures)}
    rows = ",\n".join(f"    {json.dumps(figure.data())}" for figure in figures)
    head = json.dumps(data, indent=2).removesuffix("\n}")
    return f'{head},\n  "figures": [\n{rows}\n  ]\n}}\n'


def write_rows(path: Path, head: Mapping[str, object], name: str, rows: Sequence[object]) -> None:
    """Write a results file that grows: an object with its head, and with a list whose rows take a line each."""
    lines = ",\n".join(map(json.dumps, rows))
    with replacing(path) as file:
        file.write(f"{json.dumps(head)[:-1]}, \"{name}\": [\n{lines}\n]}}\n".encode())
