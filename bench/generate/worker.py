"""Runs one side in a process of its own: `python -m bench.generate.worker SIDE FILE DTYPE`, started by bench/generate/runs.py.

Prints what the side is, then for each line that it reads, a job as JSON, the seconds and the CPU seconds that it took.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

from bench.generate import families
from bench.generate.sides import CONTEXT, SIDES, START, Side

FIRST = 1000                                                     # a token; prompts count on from it


def main() -> None:
    name, path, dtype = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)                                                # what libraries print is no answer
    side: Side = SIDES[name](Path(path), dtype) if name in SIDES else families.Synthetic(name, Path(path))
    print(json.dumps(side.about), file=answers, flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        side.set_threads(job["threads"])
        print(json.dumps(timed(side, job["work"], job["tokens"])), file=answers, flush=True)


def timed(side: Side, work: str, tokens: int) -> dict[str, float]:
    """The seconds of a prompt of so many tokens, or of an answer of so many after a short prompt."""
    prompt = list(range(FIRST, FIRST + (tokens if work == "prompt" else START)))
    assert len(prompt) + (tokens if work == "decode" else 0) <= CONTEXT
    token = FIRST if work == "prompt" else side.read(prompt)
    wall, cpu = time.perf_counter(), time.process_time()
    if work == "prompt":
        side.read(prompt)
    else:
        for _ in range(tokens):
            token = side.write(token)
    return {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


if __name__ == "__main__":
    main()
