"""bench/dispatch.py: the choice of plans and the best candidate, by counts of compiled kernels.  Nothing is compiled here."""

from __future__ import annotations

import itertools
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import dispatch
from bench.compiled_costs import CompiledCosts, Counted, line
from qdsl.runtime import PackedWeight
from qdsl.runtime.gpu import configure, costs, plan
from qdsl.runtime.gpu.costs import Candidate, Cost
from qdsl.runtime.gpu.devices import ARCHS, GPUS

COST = Cost(64, 1024, 4, 4096, 100.25, 50.0, 200.0, 1.0, 300.0, 1.0)


class Perturbed(CompiledCosts):
    """The table's counts, each way's cycles times a factor of its own."""

    def __init__(self, seed: int) -> None:
        super().__init__(Path("nowhere.jsonl"))
        self.seed = seed
        self.asked: set[str] = set()

    def counted(self, packed: PackedWeight, candidate: Candidate, m: int, arch: str) -> Counted:
        name = f"{candidate.kind} {sorted(candidate.config.items())}"
        self.asked.add(name)
        kind = "dequantize" if candidate.kind == "decode" else candidate.kind
        cost = costs.kernel_cost(packed, kind, candidate.config, arch)
        factor = random.Random(f"{self.seed} {name}").uniform(0.5, 3)
        return Counted(replace(cost, trip=cost.trip * factor, chain=cost.chain * factor))


@pytest.mark.parametrize("product", dispatch.SAMPLE, ids=str)
def test_bounds_leave_no_better_way_out(product: dispatch.Product) -> None:
    """The ratio is that of all ways compiled, where it is not below what is exact."""
    packed, gpu = product.weight(), GPUS[product.gpu]
    with configure.assumed(ARCHS[gpu.arch].capability // 10, gpu.multiprocessors, gpu):
        ways = [option.candidate for option in plan.choice(packed, product.m, dispatch.X, dispatch.META).options]
    left_out = 0
    for seed in range(8):
        compiled = Perturbed(seed)
        seconds = [costs.seconds(packed, way, product.m, dispatch.X, gpu, compiled.counted(packed, way, product.m, gpu.arch).cost)
                   for way in ways]
        every, compiled.asked = len(compiled.asked), set()
        ratio = dispatch.compiled_ratio(product, compiled, exact=1.2)
        if (whole := seconds[0] / min(seconds)) > 1.2:
            assert ratio == pytest.approx(whole)
        else:
            assert 1 <= ratio <= whole * (1 + 1e-9)
        left_out += every - len(compiled.asked)
    assert left_out or len(ways) < 10 or product.m == 64         # where x takes longer than the weight no bound leaves a way out


def test_a_way_that_does_not_compile() -> None:
    """It is no best way; where the plan chooses it, nothing is slower."""
    class Refusing(Perturbed):
        def counted(self, packed: PackedWeight, candidate: Candidate, m: int, arch: str) -> Counted:
            return Counted(None, refused="no") if candidate.kind == "skinny" else super().counted(packed, candidate, m, arch)

    choice, other = dispatch.SAMPLE[0], dispatch.SAMPLE[8]
    assert dispatch.compiled_ratio(choice, Refusing(0)) == float("inf")
    assert dispatch.compiled_ratio(other, Refusing(0)) < float("inf")


def test_pairs_meet() -> None:
    every = list(dispatch.pairs("q4"))
    stored = {costs.storage_key(packed) for packed in dispatch.storages(dispatch.SHAPES[0], "q4")}
    assert {costs.storage_key(packed) for packed, _, _ in every} == stored
    for columns in itertools.combinations(range(3), 2):
        met = {tuple((gpu, m, packed.shape)[column] for column in columns) for packed, m, gpu in every}
        sizes = [(len(dispatch.COMPARED), len(dispatch.PAIRED_ROWS), len(dispatch.SHAPES))[column] for column in columns]
        assert len(met) == sizes[0] * sizes[1]
    assert len(every) < len(dispatch.COMPARED) * len(dispatch.PAIRED_ROWS) * len(dispatch.SHAPES)


def test_a_file_of_counts(tmp_path: Path) -> None:
    """What one process adds another reads; a line that was cut off is left out."""
    file = tmp_path / "counts.jsonl"
    kept = {"a": Counted(COST, 3), "b": Counted(None, 0, "does not compile")}
    file.write_text("".join(line(key, counted) + "\n" for key, counted in kept.items()) + '["c", [64, 10')
    compiled = CompiledCosts(file)
    assert compiled._kernels == kept
    compiled.used = {"b": None, "a": None}
    assert compiled.lines() == [line("a", kept["a"]), line("b", kept["b"])]


def test_the_record_is_of_products_that_exist() -> None:
    kept = dispatch.recorded()
    assert len({str(row.product) + str(row.product.params) for row in kept}) == len(kept) > 0
    assert {row.product.gpu for row in kept} <= {*dispatch.COMPARED} and {row.product.shape for row in kept} == {*dispatch.SHAPES}
    assert all(row.ratio <= dispatch.WORST for row in kept)
    assert kept[0].product.weight().device == torch.device("meta")
