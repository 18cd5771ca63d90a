"""`python -m bench.gpu`: runs checks, questions and timings within a time limit, and saves results after every part."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import torch

from bench.gpu import answers, candidates, checks, clock, peers, plan, predicted, report, times
from bench.gpu.ahead import Ahead
from bench.gpu.budget import Budget
from bench.gpu.device import device_info
from qdsl.runtime.libraries.triton import MissingTriton, require

RESULTS = Path(__file__).resolve().parents[1] / "results"
PARTS = ("checks", "answers", "times", "candidates")
ROUNDS, QUICK_ROUNDS = 7, 3
MINUTES, QUICK_MINUTES = 8.0, 1.0


def main() -> int:
    """0 where every check that was made is right, 1 where one is wrong, 2 where there is nothing to run on."""
    options = _options()
    try:
        require()
    except MissingTriton as missing:
        print(f"bench.gpu: {missing}", file=sys.stderr)
        return 2
    command = shlex.join(["python", "-m", "bench.gpu", *sys.argv[1:]])
    if options.predict:
        report.keep(options.json or RESULTS / predicted.NAME, predicted.results(command))
        return 0
    if os.environ.get("TRITON_INTERPRET") == "1" or not torch.cuda.is_available():
        print("bench.gpu: needs a CUDA device, and kernels that are not interpreted", file=sys.stderr)
        return 2
    return Run(options, command).all()


class Run:
    """One run: what was found so far, and the time that is left."""

    def __init__(self, options: argparse.Namespace, command: str) -> None:
        self.budget = Budget(60 * options.minutes)
        self.info = device_info()
        self.quick = bool(options.quick)
        self.share: tuple[int, int] = options.share
        self.parts = tuple(options.only or PARTS)
        self.path: Path = options.json or RESULTS / report.name_of(self.info)
        self.ahead = Ahead(self.info, options.processes)
        self.data = report.head(command, self.info, self.quick) | {"minutes": options.minutes, "left_out": {}}
        self.wrong = 0
        self.device = torch.device("cuda")

    def all(self) -> int:
        share, shares = self.share
        cases = plan.cases(self.quick)[share - 1::shares]
        try:
            if "checks" in self.parts:
                self.ahead.submit(cases)
            if "answers" in self.parts:
                self.ahead.submit(answers.jobs())
            if "times" in self.parts:
                self.ahead.submit(times.jobs(self.quick))
            if "candidates" in self.parts:
                self.ahead.submit(candidates.jobs())
            report.say(f"{self.info.name}, {self.info.multiprocessors} multiprocessors, {self.info.l2 >> 20} MB of L2")
            if "checks" in self.parts:
                self._checks(cases)
            if "answers" in self.parts:
                self._answers()
            if "times" in self.parts:
                self._bandwidth()
                self._times()
            if "candidates" in self.parts:
                self._candidates()
        except Exception as error:                               # what was found before is kept
            self.data["ended"] = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:300]}"
            report.say(f"the run ended early: {self.data['ended']}")
            self.wrong += 1
        finally:
            self._keep()
            self.ahead.close()
        report.say(f"written: {self.path}")
        return 1 if self.wrong else 0

    def _keep(self) -> None:
        self.data["seconds"] = round(self.budget.used, 1)
        report.keep(self.path, self.data)

    def _checks(self, cases: list[plan.Case]) -> None:
        checked = checks.Checked(sum(len(case.checks) for case in cases), 0, [], [])
        try:
            checks.run(cases, plan.left_out(), self.ahead, self.budget.part("checks"), self.device, checked)
        finally:
            self.wrong += len(checked.wrong)
            self.data["checks"], self.data["left_out"]["checks"] = checked.data(), checked.left_out
            self._keep()
        report.say(f"checks: {checked.done} of {checked.planned} made, {len(checked.wrong)} wrong; ahead: {checked.ahead}")

    def _bandwidth(self) -> None:
        self.bandwidth = clock.copy_bandwidth(ROUNDS)
        self.data["copy_gbps"] = float(f"{self.bandwidth / 1e9:.4g}")
        report.say(f"a copy moves {self.bandwidth / 1e9:.0f} GB/s, read and written")

    def _answers(self) -> None:
        asked = answers.Asked(self.info, self.ahead)
        rows, left_out = answers.run(asked, self.budget.part("answers"))
        self.data["answers"], self.data["left_out"]["answers"] = rows, left_out
        self._keep()

    def _candidates(self) -> None:
        rows: list[dict[str, Any]] = []
        self.data["candidates"] = rows
        self.data["left_out"]["candidates"] = candidates.run(self.info, self.ahead, self.budget.part("candidates"), QUICK_ROUNDS,
                                                             rows, self._keep)
        self._keep()

    def _times(self) -> None:
        rows: list[dict[str, Any]] = []
        packages = peers.find()
        self.data["times"] = rows
        left_out = times.run(self.info, self.bandwidth, self.ahead, self.budget.part("times"),
                             QUICK_ROUNDS if self.quick else ROUNDS, self.quick, rows, packages, self._keep)
        self.data["left_out"]["times"], self.data["peers"] = left_out, packages.data()
        for name, package in packages.data().items():
            report.say(f"{name}: {package['version'] or ''} {package['note']}".rstrip())
        self._keep()


def _share(text: str) -> tuple[int, int]:
    share, _, shares = text.partition("/")
    if not 1 <= int(share) <= int(shares):
        raise ValueError(text)
    return int(share), int(shares)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description="Check, ask and time on one GPU.")
    parser.add_argument("--minutes", type=float, metavar="N", help=f"stop by itself after so long; {MINUTES:g}")
    parser.add_argument("--quick", action="store_true", help=f"a look: {QUICK_MINUTES:g} minute, fewer of everything")
    parser.add_argument("--only", action="append", choices=PARTS, help="this part, may be repeated")
    parser.add_argument("--share", type=_share, metavar="I/N", default=(1, 1), help="check each N-th weight, from the I-th on")
    parser.add_argument("--json", type=Path, metavar="FILE", help="the results; by default named after the device")
    parser.add_argument("--processes", type=int, metavar="N", default=max(1, (os.cpu_count() or 2) - 1),
                        help="that compile ahead; 0 for none")
    parser.add_argument("--predict", action="store_true", help="no GPU: write what is predicted for an H200")
    options = parser.parse_args()
    options.minutes = options.minutes or (QUICK_MINUTES if options.quick else MINUTES)
    return options


if __name__ == "__main__":
    sys.exit(main())
