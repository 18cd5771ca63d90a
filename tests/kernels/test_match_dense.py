"""Products with match_dense have the bits of torch's linear with the dequantized weight; other products need not."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import qdsl
from qdsl.generated import df11, hlane, int8_channel, int_group, q4_k
from qdsl.models.experts import Experts
from qdsl.models.fused import FusedLinear
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu.int4 import operation_for
from qdsl.runtime.gpu import launch
from qdsl.runtime.torch import decode
from qdsl.runtime.weight import packed as weight_packed
from tests.formats.test_branches import WEIGHTS as BRANCHED
from tests.formats.test_branches import branched
from tests.support.formats import Case, cases, fixed_shape, random_packed, same_bits, shapes, shuffled_fields, smallest
from tests.support.interpreter import INTERPRETED
from tests.support.packed_layers import sample

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def small(case: Case) -> tuple[int, int]:
    """A shape of a few records along each axis."""
    n, k = fixed_shape(case, (64, 256))
    return next(shapes(case, (n,), (k, 2 * k)), None) or smallest(case)


def dense_product(x: Tensor, packed: PackedWeight, bias: Tensor | None = None) -> Tensor:
    """torch's linear with the decoded weight."""
    weight = packed.format.dequantize(packed, x.dtype)
    return functional.linear(x, weight, None if bias is None else bias.to(x.dtype))


def check(packed: PackedWeight, dtype: torch.dtype) -> None:
    """Products of 1, 3 and 40 rows of x, with a bias and without."""
    n, k = packed.shape
    bias = sample(n, seed=1).to(packed.device)
    for shape, added in (((1, k), bias), ((3, k), None), ((2, 20, k), bias)):
        x = sample(*shape, seed=len(shape)).to(packed.device, dtype)
        assert same_bits(packed.format.linear(x, packed, added, match_dense=True), dense_product(x, packed, added)), shape


@pytest.mark.parametrize("case", cases(), ids=str)
def test_every_storage(case: Case) -> None:
    packed = random_packed(case, small(case))
    for dtype in DTYPES:
        check(packed, dtype)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
@pytest.mark.parametrize(("name", "storage"), BRANCHED)
def test_side_branches(name: str, storage: str, dtype: torch.dtype) -> None:
    check(branched(name, storage=storage), dtype)


@pytest.mark.parametrize("storage", ["gptq_v2", "planar"])
def test_columns_in_any_order(storage: str) -> None:
    case = next(case for case in cases() if str(case) == f"int_group.{storage}-bits4-group128-scale_typef16")
    packed = case.module.pack(shuffled_fields(case, (64, 512)), case.storage, **case.choice)
    for dtype in DTYPES:
        check(packed, dtype)


def test_kernels_decode_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel that dequantizes, then torch's linear; streams and columns in any order, too."""
    calls: list[Tensor] = []
    dequantize = launch.dequantize

    def counted(packed: PackedWeight, out: Tensor) -> None:
        calls.append(out)
        dequantize(packed, out)

    for module in (decode, weight_packed):
        monkeypatch.setattr(module, "runs_kernels", lambda device: True)
    monkeypatch.setattr(launch, "dequantize", counted)
    act_order = {**int_group.unpack(int_group.quantize(sample(16, 128), "gptq_v2", bits=4, group=32)),
                 "g": torch.arange(128, dtype=torch.int32).flip(0) // 32}
    for packed in (int8_channel.quantize(sample(16, 128)), hlane.quantize(sample(16, 128).bfloat16()),
                   int_group.pack(act_order, "gptq_v2", bits=4, group=32)):
        packed, x = packed.to(DEVICE), sample(3, 128).to(DEVICE, torch.bfloat16)
        weight = packed.format.dequantize(packed, x.dtype)
        assert same_bits(packed.format.linear(x, packed, match_dense=True), functional.linear(x, weight))
        assert len(calls) == 2 and all(out.shape == packed.shape for out in calls)
        calls.clear()


def test_the_default_has_other_bits() -> None:
    """The compiled loop for few rows on a CPU multiplies unrounded weights."""
    packed, x = int8_channel.quantize(sample(256, 512)), sample(1, 512).bfloat16()
    cpu.compile_products()
    try:
        assert not torch.equal(int8_channel.linear(x, packed), dense_product(x, packed))
        assert same_bits(int8_channel.linear(x, packed, match_dense=True), dense_product(x, packed))
    finally:
        cpu.compile_products(False)


def test_modes_exclude_each_other() -> None:
    packed, x = int8_channel.quantize(sample(16, 128)), sample(1, 128)
    for mode in ("quantize_x", "batch_invariant"):
        with pytest.raises(FormatError, match=f"{mode} and match_dense exclude each other"):
            int8_channel.linear(x, packed, match_dense=True, **{mode: True})


# -- gradients, compilers and layers -----------------------------------------------------------------------------------


def gradients(product: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """The product of x, and the gradient of x for a gradient of random numbers."""
    x = x.detach().requires_grad_()
    out = product(x)
    [gradient] = torch.autograd.grad(out, x, sample(*out.shape, seed=9).to(out.dtype))
    return out, gradient


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_of_x_and_compiled_programs(dtype: torch.dtype) -> None:
    packed, bias, x = q4_k.quantize(sample(64, 256)), sample(64).to(dtype), sample(2, 20, 256).to(dtype)

    def product(x: Tensor) -> Tensor:
        return q4_k.linear(x, packed, bias, match_dense=True)

    weight = q4_k.dequantize(packed, dtype)
    wanted = gradients(lambda x: functional.linear(x, weight, bias), x)
    torch.compiler.reset()
    for run in (product, torch.compile(product, backend="aot_eager", fullgraph=True)):
        assert all(map(same_bits, gradients(run, x), wanted))


def test_a_layer() -> None:
    """Under autocast, changed in place, in a copy, planar, and over torch's fused operation; as its dense layer."""
    weight = int_group.quantize(sample(80, 256), "gptq_v2", bits=4, group=64)
    x = sample(2, 3, 256).bfloat16()
    fused = [FusedLinear(weight, sample(80), torch.bfloat16)] if operation_for(torch.device("cpu")) else []
    for layer in (int_group.Linear(weight, sample(80), torch.bfloat16), *fused):
        model, wanted = nn.Sequential(layer), functional.linear(x, layer.dequantize(x.dtype), sample(80).bfloat16())
        qdsl.match_dense_(model)
        for own in (model, copy.deepcopy(model)):
            with torch.autocast("cpu", torch.bfloat16):
                assert same_bits(own(x.float()), wanted)
            assert same_bits(own(x), wanted) and same_bits(torch.compile(own, backend="eager", fullgraph=True)(x), wanted)
        trained = torch.zeros_like(wanted, requires_grad=True)
        assert same_bits(model(x).add_(trained).detach(), wanted)
        qdsl.planar_(model)
        assert model[0].match_dense and same_bits(model(x), wanted)
        qdsl.match_dense_(model, False)
        assert not model[0].match_dense


# -- experts -----------------------------------------------------------------------------------------------------------

OFFSETS = [0, 3, 3, 8, 48]                                       # of four experts, one without rows


def dense_experts(x: Tensor, weights: Tensor, bias: Tensor, offsets: Sequence[int] = OFFSETS) -> Tensor:
    parts = [functional.linear(x[start:stop], weights[e], bias[e]) for e, (start, stop) in enumerate(pairwise(offsets))]
    return torch.cat([*parts, x.new_zeros(len(x) - offsets[-1], weights.shape[1])])


@pytest.mark.parametrize(("module", "dtype"), [*zip((q4_k, int8_channel, df11), DTYPES, strict=True)],
                         ids=lambda value: value.SPEC.name if hasattr(value, "SPEC") else str(value)[6:])
def test_grouped_products(module: Any, dtype: torch.dtype) -> None:
    packed = module.quantize(sample(4 * 32, 256).bfloat16())
    x, bias = sample(48, 256).to(dtype), sample(4, 32).to(dtype)
    weights = module.dequantize(packed, dtype).view(4, 32, 256)

    def product(x: Tensor, offsets: Any = OFFSETS) -> Tensor:
        return module.grouped_linear(x, packed, offsets, bias, partial=True, match_dense=True)

    wanted = gradients(lambda x: dense_experts(x, weights, bias), x)
    torch.compiler.reset()
    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    for run in (product, lambda x: compiled(x, torch.tensor(OFFSETS))):
        assert all(map(same_bits, gradients(run, x), wanted))
    short = [0, 3, 3, 8, 40]
    assert same_bits(product(x, short), dense_experts(x, weights, bias, short))
    rows = torch.arange(48).flip(0)
    assert same_bits(module.grouped_linear(x, packed, OFFSETS, bias, rows=rows, match_dense=True),
                     dense_experts(x[rows], weights, bias))


@pytest.mark.parametrize("is_joined", [False, True])
def test_stacks_of_experts(is_joined: bool) -> None:
    """Called as a layer, and used as the parameter that they stand for, in its layout."""
    weights = [q4_k.quantize(sample(16, 256, seed=seed)) for seed in range(8)]
    stack = Experts(PackedWeight.join(weights) if is_joined else weights, 4, True, torch.bfloat16)
    qdsl.match_dense_(stack)
    x, bias = sample(48, 256).bfloat16(), sample(4, 32)
    dense = stack.dequantize()
    assert dense.shape == (4, 256, 32) and dense.is_contiguous() and stack[2].is_contiguous()
    assert same_bits(stack(x, OFFSETS, bias), dense_experts(x, dense.mT.contiguous(), bias.bfloat16()))
