"""Configurations that were timed: few are, the fastest is kept and used, and a file that is none is as if it were not there."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import qdsl.tune
from qdsl.generated import q4_0
from qdsl.runtime import PackedWeight, configure, launch
from qdsl.runtime.call import Call

NONSENSE = '{"few q4_0.planar  64x4096 float16": {"R": 7, "WN": 1, "WK": 3, "EVEN": true}}'


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[PackedWeight]:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    configure.forget()
    yield q4_0.convert(q4_0.quantize(torch.randn(64, 4096)), "planar")
    configure.forget()


def config(packed: PackedWeight, rows: int) -> dict[str, object]:
    x, out = torch.empty(rows, 4096, dtype=torch.float16), torch.empty(rows, 64, dtype=torch.float16)
    return dict(next(iter(launch.linear_calls(x, packed, None, out))).constants)


def test_the_fastest_is_kept_and_used(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    timed: list[Call] = []

    def time(call: Call) -> float:
        timed.append(call)
        return abs(call.constants["WK"] - 2) + call.constants["R"]

    monkeypatch.setattr(qdsl.tune, "_time", time)
    before = config(packed, 1), config(packed, 3)
    assert before[0]["WK"] != 2
    found = qdsl.tune.tune(packed, rows=(1, 3))
    assert len(timed) <= 2 * qdsl.tune.MOST
    assert {each["WK"] for each in found.values()} == {2} and {each["R"] for each in found.values()} == {1}
    configure.forget()                                           # as a process that starts later
    assert (config(packed, 1)["WK"], config(packed, 3)["WK"], config(packed, 1)["R"]) == (2, 2, 1)
    other = q4_0.convert(q4_0.quantize(torch.randn(32, 4096)), "planar")
    assert config(other, 1)["WK"] != 2                           # another shape was not timed


def test_invariant_products_are_launched_by_rule(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    x, out = torch.empty(3, 4096, dtype=torch.float16), torch.empty(3, 64, dtype=torch.float16)
    rule = next(iter(launch.linear_calls(x, packed, None, out, invariant=True))).constants
    monkeypatch.setattr(qdsl.tune, "_time", lambda call: call.constants["WK"])
    qdsl.tune.tune(packed, rows=(3,))
    assert next(iter(launch.linear_calls(x, packed, None, out, invariant=True))).constants == rule
    assert config(packed, 3) != rule


@pytest.mark.parametrize("text", ["", "{", "[]", "null", NONSENSE])
def test_a_file_that_is_none(packed: PackedWeight, text: str) -> None:
    rule = config(packed, 3)
    path = configure.tuned_file(torch.device("cpu"))
    path.parent.mkdir(parents=True)
    path.write_text(text)
    configure.forget()
    assert config(packed, 3) == rule


def test_what_no_fused_kernel_serves_is_left_out(packed: PackedWeight, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qdsl.tune, "_time", lambda call: 1.0)
    assert qdsl.tune.tune(packed, rows=(4096,)) == {}
    assert qdsl.tune.tune(packed, rows=(1,), dtype=torch.float32) == {}
