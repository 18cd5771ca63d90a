"""Layers compiled one by one share a code object only where they share a program: torch.compile limits the programs of one."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from qdsl.generated import df11, fp8_tensor, int_group, q4_0
from qdsl.models.experts import Experts
from qdsl.models.fused import FusedLinear
from tests.support.covering import by_turns
from tests.support.formats import SHIPPED, Case, cases, random_packed, same_bits, smallest
from tests.support.packed_layers import sample

INDEX = torch.tensor([0, 0])
OFFSETS = torch.tensor([0, 2, 4, 8, 8])


@pytest.fixture(autouse=True)
def one_program_per_code() -> Iterator[None]:
    """A second program of a code object is an error."""
    torch.compiler.reset()
    with torch._dynamo.config.patch(recompile_limit=1):          # type: ignore[attr-defined]
        yield


@cache
def storages() -> list[list[Case]]:
    """Two storages of each of 12 formats."""
    formats: dict[str, dict[str, Case]] = {}
    for case in cases():
        if case.path in SHIPPED:
            formats.setdefault(case.path.stem, {}).setdefault(case.storage, case)
    several = [list(choices.values())[:2] for choices in formats.values() if len(choices) > 1]
    return several[::len(several) // 12][:12]


def test_formats_and_storages() -> None:
    """Compiled in place, as the layers of a model."""
    for number, (choices, storage) in enumerate(by_turns(storages(), (0, 1))):
        case = choices[storage]
        packed = random_packed(case, smallest(case))
        is_embedding = number % 4 == 3
        layer = case.module.Embedding(packed) if is_embedding else case.module.Linear(packed)
        x = INDEX if is_embedding else sample(2, packed.shape[1])
        wanted = layer(x)
        layer.compile(fullgraph=True, backend="eager")
        assert same_bits(layer(x), wanted), case


WEIGHTS = [q4_0.quantize(sample(n, k)) for n, k in ((16, 64), (32, 96))]
EIGHT = fp8_tensor.quantize(sample(16, 64))


def fused_layers() -> list[nn.Module]:
    return [FusedLinear(int_group.quantize(sample(64, 128), "gptq_v2", group=group)) for group in (32, 64)]


def static_layers() -> list[nn.Module]:
    """Layers that quantize x by static scales, in the end."""
    first = fp8_tensor.Linear(EIGHT, quantize_x=True, input_scale=torch.tensor(0.01))
    second = fp8_tensor.Linear(EIGHT, input_scale=torch.tensor(0.02))
    second.quantize_x = True
    return [first, second]


@pytest.mark.parametrize(("make", "arguments"), [
    (lambda: [q4_0.Linear(packed) for packed in WEIGHTS], lambda layer: [sample(2, layer.in_features)]),
    (lambda: [q4_0.Embedding(packed) for packed in WEIGHTS], lambda layer: [INDEX]),
    (fused_layers, lambda layer: [sample(2, 128).bfloat16()]),
    (lambda: [Experts(packed, 4) for packed in WEIGHTS], lambda layer: [sample(8, layer.shape[2]), OFFSETS]),
    (lambda: [Experts([packed] * 2, 2) for packed in WEIGHTS], lambda layer: [sample(8, layer.shape[2]), [0, 2, 8]]),
    (static_layers, lambda layer: [sample(2, 64)])],
    ids=["linear", "embedding", "fused", "experts", "separate experts", "static scale"])
def test_shapes_and_parameters(make: Callable[[], list[nn.Module]], arguments: Callable[[Any], list[Any]]) -> None:
    for layer in make():
        own = arguments(layer)
        assert same_bits(torch.compile(layer, fullgraph=True, backend="eager")(*own), layer(*own))


def test_layers_of_one_description_share_a_program() -> None:
    """Copied, pickled and loaded ones too; blocks of them are compiled once."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    first = q4_0.Linear(WEIGHTS[0])
    loaded = q4_0.Linear.empty(WEIGHTS[0].shape)
    loaded.load_state_dict(first.state_dict(), assign=True)
    pickled = pickle.loads(pickle.dumps(first))                  # noqa: S301
    same = [first, q4_0.Linear(q4_0.quantize(sample(16, 64, seed=1))), copy.deepcopy(first), pickled, loaded]
    for layer in same:
        assert same_bits(torch.compile(layer, fullgraph=True, backend=backend)(sample(2, 64)), layer(sample(2, 64)))
    assert len(graphs) == 1 and {type(layer) for layer in same} == {type(first)} and type(first) is not q4_0.Linear

    class Block(nn.Module):
        def __init__(self, layer: nn.Module) -> None:
            super().__init__()
            self.layer = layer

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = self.layer(x)
            return result

    for layer in same:
        torch.compile(Block(layer), fullgraph=True, backend=backend)(sample(2, 64))
    assert len(graphs) == 2


def test_classes() -> None:
    """A layer's class looks like the class that made it, and follows the weight that is loaded."""
    first, second = [df11.Linear(df11.quantize(sample(64, 64, seed=seed).bfloat16())) for seed in (0, 1)]
    assert type(first) is not type(second) and isinstance(first, df11.Linear) and repr(first).startswith("Linear(")
    first.load_state_dict(second.state_dict())
    assert type(first) is type(second) and type(first).forward.__code__ is not df11.Linear.forward.__code__

    class Doubled(q4_0.Linear):                                  # type: ignore[misc,name-defined]
        def forward(self, input: Tensor) -> Tensor:
            result: Tensor = 2 * super().forward(input)
            return result

    own, x = Doubled(WEIGHTS[0]), sample(2, 64)
    assert same_bits(own(x), 2 * q4_0.linear(x, WEIGHTS[0])) and same_bits(copy.deepcopy(own)(x), own(x))
