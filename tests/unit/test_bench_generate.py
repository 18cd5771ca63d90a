"""What the benchmark of whole models concludes from its samples."""

from __future__ import annotations

from pathlib import Path

import pytest

from bench.generate import families
from bench.generate.figures import LLAMA, SMOLLM2, Model, figures
from bench.generate.machine import QUIET, caches, load
from bench.generate.runs import Sample, Samples

MODELS = (SMOLLM2, LLAMA)


def samples_of(model: Model, speeds: dict[str, float], foreign: list[float]) -> Samples:
    """Samples of all jobs, one of each round, with the milliseconds of each side."""
    return {(side, job): [Sample(wall, wall, own) for own in foreign]
            for side, wall in speeds.items() for job in model.jobs((1, 2))}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_quiet_rounds_are_judged(model: Model) -> None:
    rows = list(figures(model, samples_of(model, {"exact": 10, "int8": 5, "llama.cpp": 8, "dense": 30, "floor": 2}, [QUIET] * 3)))
    assert all(row.met is not None for row in rows if row.goal is not None)
    assert {row.median for row in rows if row.what.endswith("exact to llama.cpp")} == {0.8}
    assert {row.median for row in rows if row.what.endswith("exact to dense")} == {3.0}
    assert {row.median for row in rows if "bytes per second" in row.what} == {1.0}


@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_nothing_is_concluded_from_disturbed_rounds(model: Model) -> None:
    rows = list(figures(model, samples_of(model, {"exact": 1, "llama.cpp": 8, "dense": 30}, [0.0, 1.5, 1.5, 0.0])))
    assert rows and all(row.met is None and "2 of 4" in row.doubt and row.verdict == row.doubt for row in rows)


def test_a_disturbed_round_does_not_count() -> None:
    samples = samples_of(LLAMA, {"exact": 10, "llama.cpp": 8}, [0.0, 0.0, 1.5])
    for own in samples.values():
        own[2] = Sample(1000.0, 1.0, 1.5)
    rows = [row for row in figures(LLAMA, samples) if row.what.endswith("exact to llama.cpp")]
    assert rows and all(list(row.samples) == [0.8, 0.8] for row in rows)


def test_families_are_measured_beside_dense_bfloat16() -> None:
    """Each with the goal of its speed on two threads."""
    for name in families.FAMILIES:
        model = families.model_of(name)
        rows = list(figures(model, samples_of(model, {name: 5, families.DENSE: 10}, [0.0] * 3)))
        assert {row.median for row in rows} == {2.0} and [row.met for row in rows if row.goal] == [True]


@pytest.mark.skipif(not Path("/proc/stat").is_file(), reason="needs /proc")
def test_own_work_is_no_foreign_load() -> None:
    before = load([])
    sum(range(3_000_000))
    after = load([])
    assert after.own >= before.own
    assert after.foreign(before) <= (after.busy - before.busy) / (after.wall - before.wall)
    assert all(size[-1] in "KM" for size in caches().values())
