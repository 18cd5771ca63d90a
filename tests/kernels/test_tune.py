"""Candidates that were timed: few are, the fastest is kept and used, and a file that is none is as if it were not there."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qdsl
from qdsl.generated import q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import configure, launch, plan, tune
from qdsl.runtime.gpu.costs import Candidate

CPU = torch.device("cpu")


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedWeight]:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "runs_kernels", lambda device: True)
    plan.forget()
    yield weight(4096)
    plan.forget()


def weight(rows: int) -> PackedWeight:
    return q4_0.FORMAT.empty((rows, 4096), "planar", "cpu")


def chosen(packed: PackedWeight, rows: int) -> Candidate:
    return plan.best(packed, rows, torch.float16, CPU)


def timed(x: torch.Tensor, packed: PackedWeight, candidate: Candidate) -> float:
    """Two warps along K, and then two tiles of rows, are fastest; what decodes is slowest."""
    return 99.0 if candidate.kind == "decode" else abs(candidate.config.get("WK", 8) - 2) + abs(candidate.config.get("R", 8) - 2)


def test_the_fastest_is_kept_and_used(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[Candidate] = []
    monkeypatch.setattr(tune, "_time", lambda x, packed, candidate: times.append(candidate) or timed(x, packed, candidate))
    before = chosen(packed, 1), chosen(packed, 3)
    assert before[0].config["WK"] != 2
    tuned = qdsl.tune(packed, rows=(1, 3))
    assert len(times) <= 2 * tune.MOST
    assert {best["config"]["WK"] for best in tuned.values()} == {2} and {best["config"]["R"] for best in tuned.values()} == {2}
    plan.forget()                                                # as a process that starts later
    for rows in (1, 3, 5):                                       # what 3 rows took stands for 2 to 8
        choice = plan.choice(packed, rows, torch.float16, CPU)
        assert choice.is_tuned and (choice.candidate.config["WK"], choice.candidate.config["R"]) == (2, 2)
    assert not plan.choice(packed, 9, torch.float16, CPU).is_tuned
    assert not plan.choice(weight(2048), 1, torch.float16, CPU).is_tuned  # another shape was not timed


def test_a_weight_on_a_cpu_is_an_error_that_says_so() -> None:
    with pytest.raises(FormatError, match="tune times kernels on a GPU, and this weight is on cpu: move it"):
        qdsl.tune(weight(64))


def test_decoding_may_be_fastest(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune, "_time", lambda x, packed, candidate: float(candidate.kind != "decode"))
    assert chosen(packed, 8).kind == "skinny"
    qdsl.tune(packed, rows=(8,))
    assert chosen(packed, 8) == Candidate("decode")


def test_invariant_products_are_launched_by_rule(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.empty(3, 4096, dtype=torch.float16), torch.empty(3, 4096, dtype=torch.float16)
    rule = next(iter(launch.linear_calls(x, packed, None, out, invariant=True))).constants
    monkeypatch.setattr(tune, "_time", timed)
    qdsl.tune(packed, rows=(3,))
    assert next(iter(launch.linear_calls(x, packed, None, out, invariant=True))).constants == rule
    assert next(iter(launch.linear_calls(x, packed, None, out))).constants != rule


def nonsense(packed: PackedWeight) -> str:
    """A configuration that no kernel has, under the key that is asked for."""
    wrong = {"kind": "skinny", "config": {"R": 7, "WN": 1, "WK": 3, "EVEN": True}}
    return json.dumps({configure.key(packed, 3, torch.float16): wrong})


@pytest.mark.parametrize("text", ["", "{", "[]", "null", "nonsense"])
def test_a_file_that_is_none(packed: PackedWeight, text: str) -> None:
    rule = chosen(packed, 3)
    path = configure.tuned_file(CPU)
    path.parent.mkdir(parents=True)
    path.write_text(nonsense(packed) if text == "nonsense" else text)
    plan.forget()
    assert chosen(packed, 3) == rule
