"""Run with failing_calls.c preloaded: every job, with a drawn read, write or flush that fails; prints the faults, one a line."""

from __future__ import annotations

import ctypes
import errno
import os
import random
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from tests.support.jobs import CHECKS, JOBS, command, files, job_inputs, succeed

READS, WRITES, FLUSHES = 1, 2, 4


def faults(library: ctypes.CDLL, place: Path, rounds: int, draw: random.Random, jobs: Sequence[str]) -> list[str]:
    """What is wrong after failing calls: an error that is not one sentence with its cause, a changed input, a lost byte."""
    library.fail_after.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int]
    inputs, problems = job_inputs(place / "in"), list[str]()
    before = files(inputs)
    for job in jobs:
        arguments, name = (JOBS | CHECKS)[job]
        asked = [*arguments.replace("{}", str(inputs)).split(), *(("-o", str(place / "out" / name)) if name else ())]
        expected = whole(asked, job, place / "out")
        for _ in range(rounds):
            (place / "out").mkdir()
            if job == "merge-index":
                succeed(*asked)
            retry = ["merge-index", str(place / "out" / name)] if job == "merge-index" else asked
            folder, kinds = draw.choice([("in", READS), ("out", READS), ("out", WRITES), ("out", FLUSHES)])
            code, count = draw.choice([errno.EIO, errno.ENOSPC, errno.EDQUOT]), int(2 ** draw.uniform(0, 5)) - 1
            library.fail_after(os.fsencode(place / folder), count, kinds, code)
            result = command(*retry)
            library.fail_after(b"", -1, 0, 0)
            if result.exit_code not in (0, 1) or (result.exit_code and not is_clear(result.stderr, place, os.strerror(code))):
                problems.append(f"{job}: {folder} {kinds} {code} after {count}: {result.exit_code}, {result.output!r}")
            if result.exit_code:
                succeed(*retry)
            if files(place / "out") != expected or files(inputs) != before:
                problems.append(f"{job}: {folder} {kinds} {code} after {count}: other bytes")
            shutil.rmtree(place / "out")
    return problems


def is_clear(message: str, place: Path, cause: str) -> bool:
    """Whether a message is one sentence with the path and the cause."""
    return message.startswith("error: ") and message.count("\n") == 1 and f"{place}/" in message and cause in message


def whole(asked: list[str], job: str, out: Path) -> dict[str, bytes]:
    """What a job writes where nothing fails."""
    out.mkdir()
    succeed(*asked)
    if job == "merge-index":
        succeed("merge-index", asked[-1])
    written = files(out)
    shutil.rmtree(out)
    return written


if __name__ == "__main__":
    _, path, folder, count, seed, *names = sys.argv
    print("\n".join(faults(ctypes.CDLL(path), Path(folder), int(count), random.Random(int(seed)), names)))
