"""Core tests with other releases of Python, torch and numpy: `make matrix`, which prints them for docs/platforms.md.

Takes releases of Python from PATH and wheels from the package index, and removes an environment before it makes the next one.
What cannot be installed is "not run".  Arguments: rows by number, from 1; other rows stay as they are.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "results" / "matrix.json"
FOLDER = ROOT / "build" / "matrix"
PINNED = ("torch", "triton", "numpy")
TESTS = ("pytest>=8", "pytest-xdist>=3.6", "hypothesis>=6.100", "gguf>=0.17")
CORE = (("--lacks", "triton", "tests/kernels/test_machines.py", "tests/kernels/test_without_triton.py",
         "tests/kernels/test_any_device.py"),
        ("tests/unit/test_host.py", "tests/unit/test_layout.py", "tests/checkpoint/test_safetensors.py",
         "tests/checkpoint/test_hostile_safetensors.py"),
        ("tests/kernels/test_kernels.py", "tests/unit/test_numbers.py", "-k", "test_numbers or q4_0 or q4_k or fp8_block"),
        ("tests/kernels/test_plan.py", "-k", "prepared"))        # launches that Triton does not make: see runtime/gpu/prepared.py
SECONDS = 1800                                                   # for which an installation, or a run, may last


@dataclass(frozen=True, slots=True)
class Row:
    """Releases that are tested together; 'newest' is the newest one that the index has for this Python."""

    python: str
    torch: str
    numpy: str


ROWS = (Row("3.11", "2.9", "1.26"), Row("3.11", "2.13", "1.26"), Row("3.12", "2.11", "2.3"), Row("3.13", "newest", "newest"),
        Row("3.14", "newest", "newest"))


def main(numbers: list[int]) -> None:
    """Run the rows that are asked for and keep their results."""
    for number in numbers or range(1, len(ROWS) + 1):
        row = run(ROWS[number - 1])
        print(*row.values(), sep=" | ", flush=True)
        results = json.loads(RESULTS.read_text()) if RESULTS.exists() else [None] * len(ROWS)
        results[number - 1] = row
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def run(row: Row) -> dict[str, str]:
    """The releases that were installed, or asked for, and how many tests passed, or why none ran."""
    interpreter, asked = shutil.which(f"python{row.python}"), asdict(row)
    if interpreter is None or subprocess.run([interpreter, "--version"], capture_output=True).returncode:
        return asked | {"result": "not run: this Python is not installed"}
    folder = FOLDER / f"{row.python}-{row.torch}"
    try:
        subprocess.run([interpreter, "-m", "venv", "--clear", str(folder)], check=True)
        python = str(folder / "bin" / "python")
        if why := _installed(python, row):
            return asked | {"result": f"not run: {why}"}
        versions = _output(python, "-c", "import platform; from importlib.metadata import version; "
                           f"print(platform.python_version(), *map(version, {PINNED!r}))").split()
        return dict(zip(("python", *PINNED), versions, strict=True)) | _tested(python)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _installed(python: str, row: Row) -> str:
    """Install a row's packages; why they cannot be, or '' where they are."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    others = [need for need in project["dependencies"] if re.split(r"\W", need)[0] not in PINNED]
    pins = [name if release == "newest" else f"{name}=={release}.*" for name, release in asdict(row).items() if name != "python"]
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-cache-dir"]
    pins.append("triton")                                       # some builds of torch for CPUs do not ask for it
    done = subprocess.run([*pip, f"--only-binary={','.join(PINNED)}", *pins, *others, *TESTS], capture_output=True, text=True,
                          timeout=SECONDS)
    return "" if not done.returncode else done.stderr.strip().splitlines()[-1].removeprefix("ERROR: ")


def _tested(python: str) -> dict[str, str]:
    """How many of the core tests passed and failed, and the seconds of the processor that they took."""
    counts: dict[str, int] = {}
    before = os.times()
    is_old = _output(python, "-c", "from qdsl.runtime.libraries.triton import too_old; print(too_old)").strip()
    for arguments in CORE[:-2] if is_old else CORE:
        lines = _output(python, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", "-o", "addopts=", *arguments).splitlines()
        print("\n".join(lines[-30:]), flush=True)
        for count, what in re.findall(r"(\d+) (passed|failed|error)", lines[-1] if lines else ""):
            counts[what] = counts.get(what, 0) + int(count)
        if not re.search(r"\d+ passed", lines[-1] if lines else ""):
            counts["error"] = counts.get("error", 0) + 1
    after = os.times()
    seconds = after.children_user + after.children_system - before.children_user - before.children_system
    result = ", ".join(f"{count} {what}" for what, count in counts.items()) + ("; no kernels" if is_old else "")
    return {"result": result, "seconds": f"{seconds:.0f}"}


def _output(*command: str) -> str:
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, timeout=SECONDS).stdout


if __name__ == "__main__":
    main(list(map(int, sys.argv[1:])))
