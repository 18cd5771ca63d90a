"""Numbers do not depend on what a caller has set for all of torch: every state, with compiled loops and without."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from qdsl.generated import coreml_lut, fp8_block, q4_k, q8_0
from qdsl.host import library
from tests.support import global_state

SHAPE = (256, 512)
MODULES = (q8_0, q4_k, fp8_block, coreml_lut)                    # loops by codes and by tables; searches in float64
pytestmark = pytest.mark.own_state


@pytest.fixture(autouse=True, params=["never", "always"])
def compiled(request: pytest.FixtureRequest) -> Iterator[None]:
    library.choose(request.param)
    yield
    library.choose("")


def results(weight: Tensor, x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Everything that is computed from a weight and x, by name."""
    for module in MODULES:
        packed = module.quantize(weight)
        planar = module.planar(packed, larger=True)
        own = {"quantize": packed, "planar": planar, "convert": module.convert(planar, packed.storage)}
        for kind, stored in own.items():
            yield from ((f"{module.SPEC.name} {kind} {name}", tensor) for name, tensor in stored.tensors.items())
        for dtype in (torch.float32, torch.bfloat16):
            yield f"{module.SPEC.name} dequantize {dtype}", module.dequantize(packed, dtype)
        for rows in (1, 4, 40):
            yield f"{module.SPEC.name} linear {rows}", module.linear(x[:rows], packed)


@pytest.mark.parametrize("state", [*global_state.STATES, global_state.FORK])
def test_results_are_the_same_in_every_state(state: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(SHAPE, generator=generator), torch.randn(40, SHAPE[1], generator=generator)
    wanted = dict(results(weight, x))

    def compare() -> None:
        got = dict(results(weight, x))
        assert {name: (tensor.dtype, tensor.device.type) for name, tensor in got.items()} == {
            name: (tensor.dtype, "cpu") for name, tensor in wanted.items()}
        assert [name for name, tensor in got.items() if not tensor.equal(wanted[name])] == []

    global_state.run(state, compare)
