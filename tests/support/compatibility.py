"""The pairs of a program and an artefact that live tests check, listed in tests/data/compatibility.yaml.

    python -m tests.support.compatibility 'make live' REPORT.xml ...

checks that all pairs of a target passed, by pytest's reports of its runs.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from xml.etree import ElementTree

import yaml

from tests.support.paths import ROOT

FILE = ROOT / "tests" / "data" / "compatibility.yaml"
KINDS = ("exact", "tolerance", "refused", "not run")


@dataclass(frozen=True)
class Pair:
    """A program and an artefact.

    direction: who reads what.  result: exact, or one of the other KINDS and the reason after a colon.  test: the function that
    proves it, as FILE::NAME.  case: its parameters in brackets, '' for all of them.  target: what runs the test.
    """

    program: str
    direction: str
    artefact: str
    result: str
    test: str
    case: str
    target: str

    @property
    def kind(self) -> str:
        return next(kind for kind in KINDS if self.result.startswith(kind))

    @property
    def node(self) -> str:
        return f"{self.test}[{self.case}]" if self.case else self.test


@cache
def pairs() -> tuple[Pair, ...]:
    """All pairs, in the order of the file.

    A group holds `pairs`, artefact: result, whose artefact is the case of the test, or artefact: [case, result].  Where it has
    `artefacts` in place of that, all cases of the test prove all of them with one `result`.
    """
    return tuple(pair for group in yaml.safe_load(FILE.read_text()) for pair in _pairs(group))


def _pairs(group: dict[str, object]) -> Iterator[Pair]:
    artefacts, rows = group.get("artefacts"), group.get("pairs")
    whole = {name: ["", group["result"]] for name in artefacts} if isinstance(artefacts, list) else {}
    for name, row in {**whole, **(rows if isinstance(rows, dict) else {})}.items():
        case, result = row if isinstance(row, list) else [name, row]
        yield Pair(str(group["program"]), str(group["direction"]), str(name), str(result), str(group.get("test", "")), str(case),
                   str(group.get("target", "make live")))


def cases(function: str) -> list[str]:
    """The cases of a test, named FILE::NAME, that pairs name."""
    return [pair.case for pair in pairs() if pair.test == function]


def lines() -> list[str]:
    """The table of docs/compatibility.md: pairs with the same result in a row, after their numbers."""
    merged: dict[tuple[str, str, str, str], list[str]] = {}
    for pair in pairs():
        merged.setdefault((pair.program, pair.direction, pair.result, pair.test), []).append(pair.artefact)
    counts = Counter(pair.kind for pair in pairs())
    rows = [f"{len(pairs())} pairs: " + ", ".join(f"{counts[kind]} {kind}" for kind in KINDS) + ".", "",
            "| program | direction | artefacts | result | test |", "| --- | --- | --- | --- | --- |"]
    for (program, direction, result, test), artefacts in merged.items():
        place, _, name = test.partition("::")
        shown = f"[{name}](../{place})" if test else ""
        rows.append(f"| {program} | {direction} | {'; '.join(artefacts)} | {result} | {shown} |".replace("|  |", "| |"))
    return rows


def outcomes(reports: Iterable[Path]) -> dict[str, str]:
    """'passed', 'failed' or 'skipped' of every test in reports of pytest, by its node id."""
    by_test: dict[str, str] = {}
    for report in reports:
        for case in ElementTree.parse(report).iter("testcase"):
            place = str(case.get("classname")).replace(".", "/")
            marks = {child.tag for child in case}
            outcome = "failed" if marks & {"failure", "error"} else "skipped" if "skipped" in marks else "passed"
            by_test[f"{place}.py::{case.get('name')}"] = outcome
    return by_test


def failures(target: str, results: dict[str, str]) -> list[str]:
    """The pairs of a target that did not pass, each with what became of its test."""
    wrong = []
    for pair in pairs():
        if pair.target == target and pair.kind != "not run":
            own = {outcome for node, outcome in results.items()
                   if node == pair.node or (not pair.case and node.startswith(f"{pair.test}["))}
            if own != {"passed"}:
                wrong.append(f"{pair.program}, {pair.artefact}: {pair.node} {' and '.join(sorted(own)) or 'was not run'}")
    return wrong


def main() -> None:
    target, *reports = sys.argv[1:]
    wrong = failures(target, outcomes(map(Path, reports)))
    checked = [pair for pair in pairs() if pair.target == target and pair.kind != "not run"]
    print("\n".join([*wrong, f"{len(checked) - len(wrong)} of {len(checked)} pairs of `{target}` have their listed result"]))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
