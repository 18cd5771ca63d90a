"""Factors of columns: planar weights keep them, products meet x with them, and pieces of a weight have their own."""

from __future__ import annotations

from types import ModuleType

import pytest
import torch
from torch import Tensor

from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.gpu.costs import Candidate
from qdsl.runtime.torch.linear import packed_linear
from qdsl.runtime.weight import algebra
from tests.support.formats import EXTRA, module, same_bits

N, K = 32, 512


def smoothed() -> ModuleType:
    return module(next(path for path in EXTRA if path.stem == "smoothed"))


def fields(seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {"a": (torch.rand(K, generator=generator) + 0.5).half(), "s": torch.rand(N, K // 64, generator=generator).half(),
            "b": torch.randn(N, K // 64, generator=generator).half(),
            "q": torch.randint(0, 16, (N, K), generator=generator).byte()}


@pytest.fixture(params=["rows", "planar"])
def packed(request: pytest.FixtureRequest) -> PackedWeight:
    weight: PackedWeight = smoothed().pack(fields(), storage=request.param)
    return weight


def plain(parts: dict[str, Tensor]) -> Tensor:
    scale, shift = (parts[name].float().repeat_interleave(64, 1) for name in "sb")
    return (parts["q"].float() * scale + shift) / parts["a"].float()


def test_weights_and_products_on_a_cpu(packed: PackedWeight) -> None:
    weight = smoothed().dequantize(packed, torch.float32)
    assert same_bits(weight, plain(fields()))
    x = torch.randn(3, K, generator=torch.Generator().manual_seed(1))
    wanted = x.double() @ weight.double().t()
    bound = (x.abs().double() @ weight.abs().double().t()) * K * 2.0 ** -24
    assert ((packed_linear(x, packed, None).double() - wanted).abs() <= bound).all()


@pytest.mark.parametrize(("dim", "middle", "end"), [("N", 16, N), ("K", 256, K)])
def test_pieces(packed: PackedWeight, dim: str, middle: int, end: int) -> None:
    parts = [packed.shard(dim, 0, middle), packed.shard(dim, middle, end)]
    whole = smoothed().dequantize(packed, torch.float32)
    weights = [smoothed().dequantize(part, torch.float32) for part in parts]
    assert same_bits(torch.cat(weights, int(dim == "K")), whole)
    assert same_bits(smoothed().dequantize(algebra.join(parts, dim), torch.float32), whole)


def test_rows_with_other_factors_are_not_joined(packed: PackedWeight) -> None:
    other = smoothed().pack({**fields(), "a": fields(1)["a"]}, storage=packed.storage)
    with pytest.raises(FormatError):
        algebra.join([packed, other], "N")


def test_a_missing_factor_is_one() -> None:
    without = smoothed().quantize(torch.randn(N, K, generator=torch.Generator().manual_seed(2)))
    assert "a" not in without.tensors and "a" not in smoothed().unpack(without)
    ones = smoothed().pack({**smoothed().unpack(without), "a": torch.ones(K).to(torch.float16)})
    assert same_bits(smoothed().dequantize(without, torch.float32), smoothed().dequantize(ones, torch.float32))


@pytest.mark.parametrize("has_factor", [True, False])
def test_kernels_for_matrix_units_take_x_with_the_factor(has_factor: bool) -> None:
    own = {name: field for name, field in fields().items() if has_factor or name != "a"}
    weight = smoothed().pack(own, storage="planar").to("meta")
    x, out = torch.empty(4, K, dtype=torch.float16, device="meta"), torch.empty(4, N, dtype=torch.float16, device="meta")
    config = {"R": 1, "WN": 2, "WK": 2}
    calls = list(launch.linear_calls(x, weight, None, out, candidate=Candidate("skinny", config, (1,))))
    assert [call.family for call in calls] == (["scale_columns"] if has_factor else []) + ["skinny"]
    assert any(tensor is x for tensor in calls[0].tensors) or not has_factor
    plain = Candidate("matvec", {"BN": 16, "BK": 16, "EVEN": True}, (1,))
    (matvec, *_) = launch.linear_calls(x, weight, None, out, candidate=plain)
    assert matvec.family == "matvec"
