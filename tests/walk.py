"""Walks the README and the documentation as a new user would: a fresh clone, an empty environment, only what the pages say.

    python3 tests/walk.py [--folder FOLDER] [PAGE ...]

clones this repository, runs the README's first command, and then the blocks of each page in a folder that is empty at first, with
the model itself.  It prints the time from `git clone` to the first answer of the model, and that of each page.  By default it
takes the README and all pages of docs/ with commands or Python.  It needs git, python3 with venv, and the
package registries; nothing of the environment that runs it is used.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
ANSWER = "The capital of France is"
LIMIT = 180.0                                                    # seconds from the clone to the answer
BLOCKS = ("```sh", "```python")                                  # what runs of a page
PAGE = """
import subprocess, sys
from pathlib import Path
from tests.support.pages import run_page

def run(words):
    if words[0] == "export":
        import os
        os.environ.update([words[1].split("=")])
        return ""
    print("$", *words, flush=True)
    done = subprocess.run(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    print(done.stdout, flush=True)
    if done.returncode:
        sys.exit(f"exit code {done.returncode}: {words}")
    return done.stdout

run_page(Path(sys.argv[1]), Path.cwd(), run)
"""


def first_answer(clone: Path) -> float:
    """Run the README's first command; returns the seconds from the beginning of the clone to the model's answer."""
    began = time.monotonic()
    subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
    answered = 0.0
    with subprocess.Popen(["make", "demo"], cwd=clone, env=environment(), stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            if line.startswith(ANSWER) and not answered:
                answered = time.monotonic() - began
    if process.returncode or not answered:
        sys.exit(f"make demo: exit code {process.returncode}, answer {'given' if answered else 'missing'}")
    print(f"make demo: {time.monotonic() - began:.0f} s with the clone", flush=True)
    return answered


def environment(clone: Path | None = None) -> dict[str, str]:
    """The caller's environment without what leads to another Python; with a clone's programs first."""
    plain = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")}
    return plain | ({} if clone is None else {"PATH": f"{clone / '.venv' / 'bin'}{os.pathsep}{plain['PATH']}"})


def walk(page: str, clone: Path, folder: Path) -> float:
    """Run a page's blocks in an empty folder; returns the seconds.  Ends the program where one fails."""
    folder.mkdir(parents=True)
    began = time.monotonic()
    done = subprocess.run([str(clone / ".venv" / "bin" / "python"), "-c", PAGE, str(clone / page)], cwd=folder,
                          env=environment(clone) | {"PYTHONPATH": str(clone)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                          text=True)
    seconds = time.monotonic() - began
    print(f"{page}: {'done' if not done.returncode else 'FAILED'} in {seconds:.0f} s", flush=True)
    if done.returncode:
        sys.exit(done.stdout[-4000:])
    shutil.rmtree(folder)
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description="Walk the README and docs on a fresh clone.")
    parser.add_argument("--folder", type=Path, help="a folder to work in, which must not exist")
    parser.add_argument("pages", nargs="*")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="qdsl-walk-"))
    clone = folder / "clone"
    answered = first_answer(clone)
    print(f"first answer {answered:.0f} s after git clone began, limit {LIMIT:.0f} s", flush=True)
    every = ["README.md", *sorted(str(path.relative_to(ROOT)) for path in (ROOT / "docs").rglob("*.md"))]
    for page in arguments.pages or [page for page in every if any(block in (clone / page).read_text() for block in BLOCKS)]:
        walk(page, clone, folder / "page")
    if answered > LIMIT:
        sys.exit("the first answer was too late")


if __name__ == "__main__":
    main()
