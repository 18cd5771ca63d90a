"""Counts instructions of the leading kernels on several Triton releases: `python -m bench.versions FOLDER...`, in Markdown.

FOLDER holds an unpacked Triton, as made by `pip install --no-deps --target FOLDER triton==3.8.0`; without one the installed
release is counted.  Needs no GPU, takes two minutes per release, and is not part of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCH = "sm_90"
SCRIPT = f"""
import json, triton
from tests.kernels.gate_kernels import LEADING, every
print(triton.__version__)
print(json.dumps(every("{ARCH}", LEADING)))
"""


def counts(folder: str) -> tuple[str, dict[str, str]]:
    """Triton's version, and what each kernel came to: instructions per weight in the hot loop, registers, and spills."""
    path = os.pathsep.join(filter(None, (folder, str(ROOT))))
    environment = {**{key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}, "PYTHONPATH": path}
    process = subprocess.run([sys.executable, "-c", SCRIPT], cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    version, rows = process.stdout.split("\n", 1)
    results = {f"{row['gate']} {row['x']} | {row['kernel']}": f"{row['hot']:.2f}, {row['registers']}" +
               (f" ({row['spills']} spills)" if row["spills"] else "") for row in json.loads(rows)}
    return version, results


def main(folders: list[str]) -> None:
    columns = dict(counts(folder) for folder in folders or [""])
    print(f"| {ARCH}: format, rows of x, type | kernel | {' | '.join(columns)} |\n|---|---|{'---|' * len(columns)}")
    for kernel in next(iter(columns.values())):
        print(f"| {kernel} | {' | '.join(cells[kernel] for cells in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
