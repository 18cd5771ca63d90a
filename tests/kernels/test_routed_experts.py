"""The experts that a router chooses: how pairs of token and expert are sorted, and what a layer launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl.generated import q4_0
from qdsl.models.experts import Experts, routed_sum
from qdsl.runtime import PackedWeight
from qdsl.runtime.libraries.call import Call
from qdsl.runtime.torch import experts, ops
from qdsl.runtime.weight.routing import Offsets
from tests.kernels.test_experts import CASES, DEVICE, experts_of, x_of
from tests.support.interpreter import INTERPRETED


@pytest.mark.parametrize("expert_map", [None, [1, -1, 0, 2, -1]], ids=["all", "some"])
@pytest.mark.parametrize("is_input_weighted", [False, True])
def test_sums_of_a_router(expert_map: list[int] | None, is_input_weighted: bool) -> None:
    """Against every token and every expert, one by one, in float64."""
    generator = torch.Generator().manual_seed(0)
    count = 5 if expert_map is None else 3
    packed = q4_0.quantize(torch.randn(count * 32, 32, generator=generator))
    stack, dense = Experts(packed, count), q4_0.dequantize(packed, torch.float64).view(count, 32, 32)
    x = torch.randn(7, 32, generator=generator, dtype=torch.float64)
    ids = torch.stack([torch.randperm(5, generator=generator)[:2] for _ in range(7)])
    weights = torch.rand(7, 2, generator=generator, dtype=torch.float64)
    places = None if expert_map is None else torch.tensor(expert_map)
    product = routed_sum(x, lambda x, offsets, tokens: stack(x, offsets, None, True, tokens).relu(), count, weights, ids, places,
                         is_input_weighted)
    exact = torch.zeros_like(x)
    for token, own in enumerate(ids.tolist()):
        for place, expert in enumerate(own):
            local = expert if expert_map is None else expert_map[expert]
            if local != -1:
                exact[token] += weights[token, place] * (dense[local] @ x[token]).relu()
    torch.testing.assert_close(product, exact)


class Operations(TorchDispatchMode):
    """Counts operations of torch, but those of kernels that Triton interprets, and views of memory."""

    VIEWS = ("aten.detach", "aten.view", "aten.split", "aten.unsqueeze")

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.is_counting = True

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.is_counting and not str(function).startswith(self.VIEWS):
            self.names.append(str(function))
        return function(*args, **(kwargs or {}))


def layer_operations(monkeypatch: pytest.MonkeyPatch, run: Any, x: torch.Tensor, *arguments: Any,
                     ) -> tuple[torch.Tensor, list[str], list[tuple[str, tuple[int, ...]]]]:
    """What routed_sum returns as on a GPU, its operations of torch, and its launches with their grids."""
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    counter, launches, launch_one = Operations(), [], Call.run

    def counted(call: Call) -> Any:
        launches.append((call.family, call.grid))
        counter.is_counting = False
        try:
            return launch_one(call)
        finally:
            counter.is_counting = True

    with monkeypatch.context() as patch, counter:
        patch.setattr(Call, "run", counted)
        patch.setattr(ops, "is_in_torch_dispatch_mode", lambda: False)
        out = routed_sum(x, run, *arguments)
    return out, counter.names, launches


@pytest.mark.parametrize(("tokens", "count", "is_mapped", "is_input_weighted"), [
    (1, 16, False, False), (1, 16, True, True), (7, 5, True, False), (7, 5, False, True), (24, 2, False, False),
    (24, 2, True, True)])
@pytest.mark.skipif(not INTERPRETED, reason="counts operations around interpreted kernels")
def test_a_layer_sorts_its_pairs_in_one_launch(tokens: int, count: int, is_mapped: bool, is_input_weighted: bool,
                                               monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits of rows that torch sorts; beside products two launches and two allocations; no more tiles than pairs.

    Weights of inputs take four operations of torch more: a product, its rounding, the rows in order, and ones for the sum.
    """
    case, generator = next(c for c in CASES if c.path.stem == "q4_0"), torch.Generator().manual_seed(tokens)
    up, down = (Experts(experts_of(case, count, n, 128), count) for n in (128, 64))
    x, ids = x_of(tokens, 128, torch.float16), torch.rand(tokens, count + 2, generator=generator).topk(2).indices
    weights = torch.rand(tokens, 2, generator=generator)
    places = torch.tensor([-1, *range(count), -1]) if is_mapped else None
    ids = ids if is_mapped else ids % count

    def run(x: torch.Tensor, offsets: Offsets, rows: torch.Tensor | None) -> torch.Tensor:
        inner = up(x, offsets, None, is_mapped, rows)
        return down(inner, offsets, None, is_mapped)

    out, names, launches = layer_operations(monkeypatch, run, x, count, weights, ids, places, is_input_weighted)
    own = [name for name in names if not name.startswith(("aten.clone", "aten.slice", "aten.new_zeros"))]      # of `run`
    assert [name for name, _ in launches] == ["route", "skinny", "skinny", "weighted_sum"]
    others = [name for name in own if "empty" not in name]
    assert len(own) - len(others) <= 2 + 2 + is_input_weighted   # two of these allocations are those of the products
    assert len(others) == 4 * is_input_weighted and not any("sort" in name for name in others), others
    assert all(grid[1] <= min(2 * tokens, -(-2 * tokens // 8) + count) for name, grid in launches if name == "skinny")
    monkeypatch.setattr("qdsl.models.experts.route", lambda *_: None)
    assert torch.equal(out, routed_sum(x, run, count, weights, ids, places, is_input_weighted))


@pytest.mark.parametrize("at_once", [2, 3])
@pytest.mark.skipif(not INTERPRETED, reason="counts operations around interpreted kernels")
def test_decoded_experts_share_the_tiles_of_the_router(at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More rows than tiles decode anew for: per part of the experts a decoded weight and two launches, and nothing else."""
    count, tokens = 3, 100
    monkeypatch.setattr(experts, "DECODED", at_once * 64 * 64)
    packed = q4_0.quantize(torch.randn(count * 64, 64, generator=torch.Generator().manual_seed(0)))
    stack, ids = Experts(packed, count), torch.tensor([[0, 2], [2, 1]]).repeat(tokens // 2, 1)
    x, weights = x_of(tokens, 64, torch.float16), torch.rand(tokens, 2, generator=torch.Generator().manual_seed(1))

    def run(x: torch.Tensor, offsets: Offsets, rows: torch.Tensor | None) -> torch.Tensor:
        return stack(x, offsets, None, False, rows)

    monkeypatch.setattr(experts, "MOST", 16)
    out, names, launches = layer_operations(monkeypatch, run, x, count, weights, ids)
    parts = -(-count // at_once)
    assert [name for name, _ in launches] == ["route", *["dequantize", "matmul"] * parts, "weighted_sum"]
    assert len([name for name in names if "slice" not in name]) == 3 + parts and all(
        "empty" in name or "slice" in name for name in names), names
    assert {grid[0] for name, grid in launches if name == "matmul"} == {-(-2 * tokens // 128) + count}
    monkeypatch.setattr("qdsl.models.experts.route", lambda *_: None)
    assert torch.equal(out, routed_sum(x, run, count, weights, ids))


def test_many_pairs_are_sorted_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than a block of any size, with experts of other ranks, as a stable sort does."""
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    ids = torch.randint(4, (experts.FEW // 2 + 1, 2), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    expert_map = torch.tensor([1, -1, 0, -1], device=DEVICE)
    routing = experts.route(x_of(1, 64, torch.float16), ids, torch.ones(1, 2, device=DEVICE), 2, expert_map)
    local = expert_map[ids.flatten()]
    order = torch.sort(torch.where(local < 0, 2, local), stable=True).indices
    assert routing is not None and torch.equal(routing.tokens.long(), order // 2)
    assert routing.offsets.tolist() == [0, *(local == 0).sum().view(1).tolist(), int((local >= 0).sum())]
    assert torch.equal(routing.places.long()[order], torch.arange(len(order), device=DEVICE))
    assert torch.equal(routing.tiles, experts.tile_map(routing.offsets, len(order), routing.height))
