"""The gates' instruction counts on several versions of Triton: `python -m bench.versions FOLDER...`, a table in Markdown.

FOLDER holds an unpacked Triton, as `pip install --no-deps --target FOLDER triton==3.8.0` makes it; without one the installed
version is counted.  Needs no GPU, takes a minute per version, and is no part of the tests.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ARCHS = ("sm_80", "sm_90", "sm_100")


def counts(folder: str, arch: str) -> tuple[str, dict[str, str]]:
    """Triton's version, and what each gate came to: instructions per weight in the hot loop, spills where there are any."""
    path = os.pathsep.join(filter(None, (folder, str(ROOT))))
    environment = {**{key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}, "PYTHONPATH": path}
    script = "import triton, sys; print(triton.__version__, file=sys.stderr); from tests.kernels.gate_kernels import main; main()"
    process = subprocess.run([sys.executable, "-c", script, arch], cwd=ROOT, env=environment, capture_output=True, text=True)
    if process.returncode:
        raise SystemExit(process.stderr[-2000:])
    results = {f"{row['gate']} {row['x']}": f"{row['hot']:.2f}" + (f" ({row['spills']} spills)" if row["spills"] else "")
             for row in json.loads(process.stdout)}
    return process.stderr.split()[0], results


def main(folders: list[str]) -> None:
    for arch in ARCHS:
        columns = dict(counts(folder, arch) for folder in folders or [""])
        print(f"\n| {arch} | {' | '.join(columns)} |\n|---|{'---|' * len(columns)}")
        for gate in next(iter(columns.values())):
            print(f"| {gate} | {' | '.join(cells[gate] for cells in columns.values())} |")


if __name__ == "__main__":
    main(sys.argv[1:])
