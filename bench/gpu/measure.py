"""`python -m bench.gpu.measure`: fifteen minutes on a GPU, question by question; `bench/gpu/measure.sh` calls it.

Each question is a process of its own, which writes its JSON after every row: a device that is lost, or an end of the time, takes
one question along at most.  What is answered is not asked again: the same command resumes.  Nothing needs a network.

`--compile DEVICE` fills Triton's cache with the kernels for a GPU on a machine without one, to carry them there.  `--stand-in`
asks everything of this machine's CPU, in Triton's interpreter and in small, to try the questions themselves.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

# Questions in order, and the seconds that each has.  They sum to less than fifteen minutes, starts of processes included.
SECONDS = {"compile": 110, "correct": 120, "model": 200, "table": 150, "gemv": 50, "pdl": 30, "moe": 60, "executed": 60}
START = 20                                                       # seconds for a process to import torch and to end
MINUTES = 14.5
STATE = "answered.json"
CODE = {True: "the device", False: "a stand-in"}


def main() -> int:
    """0 if every question that was asked was answered, else 1; 2 without a GPU."""
    options = _options()
    if options.ask:
        return _answer(options)
    if not options.stand_in and not options.compile and not _has_gpu():
        print("bench.gpu.measure: needs a CUDA device; --stand-in tries the questions on a CPU", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    if not options.stand_in and not options.compile:
        from bench.gpu.ahead import relocate

        relocate(Path(os.environ.get("TRITON_CACHE_DIR", options.out / "triton")))
    return Session(options.out, 60 * options.minutes, options.stand_in, options.compile).run(
        options.only or (["compile"] if options.compile else list(SECONDS)), options.again)


class Session:
    """A run over the questions.  compile: the device to compile for where there is none."""

    def __init__(self, out: Path, seconds: float, is_stand_in: bool, compile: str = "") -> None:
        self.out, self.seconds, self.is_stand_in, self.compile = out, seconds, is_stand_in, compile
        self.begun = time.monotonic()
        state = out / STATE
        self.answered: dict[str, Any] = json.loads(state.read_text()) if state.is_file() else {}

    def run(self, questions: list[str], again: list[str]) -> int:
        """Ask in order what is not answered, while there is time."""
        failed = 0
        for name in (name for name in SECONDS if name in questions):
            left = self.seconds - (time.monotonic() - self.begun)
            if name in self.answered and self.answered[name]["code"] == 0 and name not in again:
                self._say(name, "answered before")
            elif left < START:
                self._say(name, "no time")
                failed += 1
            else:
                failed += self._ask(name, min(SECONDS[name], left - START)) != 0
        return 1 if failed else 0

    def _ask(self, name: str, seconds: float) -> int:
        begun = time.monotonic()
        file = self.out / f"{name}.json"
        command = [sys.executable, "-m", "bench.gpu.measure", "--ask", name, "--json", str(file), "--seconds", f"{seconds:.0f}"]
        if name == "model":
            command = [sys.executable, "-m", "bench.gpu.model", "--layers", "4", "--compile", "--json", str(file), "--seconds",
                       f"{seconds:.0f}"]
        command += ["--stand-in"] if self.is_stand_in else []
        command += ["--compile", self.compile] if self.compile else []
        interprets = self.is_stand_in and name not in ("compile", "executed")       # these compile
        environment = {**os.environ, **({"TRITON_INTERPRET": "1"} if interprets else {})}
        try:
            code = subprocess.run(command, env=environment, timeout=seconds + START, check=False).returncode
        except subprocess.TimeoutExpired:
            code = 124
        self.answered[name] = {"code": code, "seconds": round(time.monotonic() - begun, 1)}
        part = self.out / f"{STATE}.part"
        part.write_text(json.dumps(self.answered, indent=1) + "\n")
        part.replace(self.out / STATE)
        self._say(name, f"{self.answered[name]['seconds']} s, code {code}")
        return code

    def _say(self, name: str, what: str) -> None:
        print(f"[{time.monotonic() - self.begun:5.0f} s] {name}: {what}", file=sys.stderr, flush=True)


def _answer(options: argparse.Namespace) -> int:
    """Ask one question here: 0 if all rows were made without a wrong one, or the time was over."""
    from bench.gpu import questions, report
    from bench.gpu.where import Where

    begun, rows = time.monotonic(), list[dict[str, Any]]()
    if options.ask == "compile":
        return _compile(options)
    where = Where.of(options.stand_in)
    question = questions.QUESTIONS[options.ask]
    data = report.head(" ".join(sys.argv), where.info, False) | {
        "question": options.ask, "what": (question.__doc__ or "").split("\n")[0], "measured_on": CODE[not options.stand_in],
        "rows": rows, "complete": False}
    for row in question(where):
        rows.append(row)
        report.keep(options.json, data)
        report.say(json.dumps(row))
        if time.monotonic() - begun > options.seconds:
            break
    else:
        data["complete"] = True
    report.keep(options.json, data)
    return int(any("wrong" in row or row.get("same") is False or not row.get("worst", 0) <= 1 for row in rows))


def _compile(options: argparse.Namespace) -> int:
    """Compile all launches of the questions, in processes, into Triton's cache."""
    from bench.gpu import questions, report
    from bench.gpu.ahead import Ahead
    from bench.gpu.device import H200, device_info, launches_for

    if options.stand_in:
        rows = [questions.carried()]
        report.keep(options.json, report.head(" ".join(sys.argv), H200, False) | {
            "question": "compile", "rows": rows, "complete": True})
        return 0
    until = time.monotonic() + options.seconds
    info = H200 if options.compile else device_info()
    compiled, errors = 0, list[str]()
    with launches_for(info):
        jobs = questions.jobs()
    ahead = Ahead(info, max(1, (os.cpu_count() or 2) - 1))
    ahead.submit(jobs)
    for job in jobs:
        result = ahead.wait(job, until - time.monotonic())
        compiled += result.launches if result else 0
        errors += [result.error] if result and result.error else []
    ahead.close()
    report.keep(options.json, report.head(" ".join(sys.argv), info, False) | {
        "question": "compile", "launches": compiled, "errors": errors, "complete": time.monotonic() < until})
    return 0


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.measure", description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("measured"), metavar="FOLDER", help="of answers, which are kept")
    parser.add_argument("--minutes", type=float, default=MINUTES)
    parser.add_argument("--only", action="append", choices=list(SECONDS), help="this question, may be repeated")
    parser.add_argument("--again", action="append", choices=list(SECONDS), default=[], help="ask though it is answered")
    parser.add_argument("--stand-in", action="store_true", help="a CPU and Triton's interpreter in place of the GPU")
    parser.add_argument("--compile", default="", choices=["", "h200"], help="only compile, for a GPU that is not present")
    parser.add_argument("--ask", choices=list(SECONDS), help=argparse.SUPPRESS)
    parser.add_argument("--json", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=60.0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
