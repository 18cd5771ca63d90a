"""Products with experts' weights: the fused kernel in the interpreter or on a GPU, and the loop over experts."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from qdsl.generated import df11, fix3, fix4, fp8_block, hlane, int8_channel, nf4, q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from qdsl.runtime.torch import experts, ops
from qdsl.runtime.weight import stream_kernels
from tests.support.covering import quarter_of
from tests.support.formats import SHIPPED, Case, cases, random_packed, shuffled_fields, smallest
from tests.support.interpreter import INTERPRETED, guarded, times

DEVICE = "cpu" if INTERPRETED else "cuda"
# Groups by values of their own and none at all, codes as rows have them and in planes, zero points, blocks of rows.
NAMES = ("q4_0.planar", "fp8_block.safetensors-bn128-bk128-scale_typef32", "int8_channel.safetensors-scale_typebf16",
         "int_group.planar-bits4-group128-scale_typef16", "q6_k.planar")
CASES = [case for case in cases() if str(case) in NAMES]
# Empty experts first, between and last; a tile of 8, more than a tile, rows that begin anywhere.
ROWS = ((0, 3, 0, 9), (8, 0, 1, 0), (0, 0, 0, 2))


def offsets_of(rows: Sequence[int]) -> list[int]:
    return [sum(rows[:i]) for i in range(len(rows) + 1)]


def experts_of(case: Case, count: int, n: int, k: int) -> PackedWeight:
    return random_packed(case, (count * n, k), 1).to(DEVICE)


def x_of(rows: int, columns: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    return (torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) / 64).to(dtype).to(DEVICE)


def close(out: torch.Tensor, x: torch.Tensor, packed: PackedWeight, offsets: Sequence[int], bias: torch.Tensor | None) -> None:
    """Every row within what rounding the result once and float32 sums of K terms may lose, by its own expert in float64."""
    weight = packed.format.dequantize(packed.to("cpu"), torch.float32).double().unflatten(0, (len(offsets) - 1, -1))
    wide, eps = x.cpu().double(), torch.finfo(x.dtype).eps
    for e, (start, stop) in enumerate(pairwise(offsets)):
        added = torch.zeros(1, dtype=torch.float64) if bias is None else bias[e].cpu().double()
        exact = wide[start:stop] @ weight[e].t() + added
        spread = wide[start:stop].abs() @ weight[e].abs().t() + added.abs()
        bound = exact.abs() * eps / 2 + spread * x.shape[1] * 2.0 ** -24 + torch.finfo(x.dtype).tiny
        assert ((out[start:stop].cpu().double() - exact).abs() <= bound).all(), (e, start, stop)


def test_the_cases_are_there() -> None:
    assert len(CASES) == len(NAMES)


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_kernel(case: Case, rows: tuple[int, ...]) -> None:
    """It reads nothing else, stores every element once, and what it adds up is within the bound."""
    n, k = (128, 256) if case.path.stem == "fp8_block" else (24, 384) if case.path.stem != "q6_k" else (24, 256)
    packed, offsets = experts_of(case, len(rows), n, k), offsets_of(rows)
    dtype = torch.bfloat16 if rows[0] else torch.float16
    x, bias = x_of(offsets[-1], k, dtype), x_of(len(rows), n, dtype, 3) if rows[1] else None
    out = torch.full((offsets[-1], n), torch.nan, dtype=dtype, device=DEVICE)
    tiles = experts.tile_map(torch.tensor(offsets, device=DEVICE), offsets[-1])
    with guarded(packed, x, bias, tiles, out) as trace:
        launch.grouped(x, packed, tiles, bias, out)
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    close(out, x, packed, offsets, bias)


def test_a_row_has_the_bits_of_its_expert_alone() -> None:
    """The map moves work between programs, and changes no sum."""
    packed, offsets = experts_of(next(c for c in CASES if c.path.stem == "q4_0"), 3, 32, 256), [0, 5, 5, 12]
    x = x_of(12, 256, torch.float16)
    whole, alone = torch.empty(12, 32, dtype=x.dtype, device=DEVICE), torch.empty(7, 32, dtype=x.dtype, device=DEVICE)
    launch.grouped(x, packed, experts.tile_map(torch.tensor(offsets, device=DEVICE), 12), None, whole)
    own = packed.cut("N", 64, 96)
    own = own.derive({name: tensor.clone() for name, tensor in own.tensors.items()})
    launch.linear(x[5:].clone(), own, None, alone, invariant=True)
    assert torch.equal(whole[5:], alone)


@pytest.mark.parametrize("offsets", [[0, 0], [0, 1], [0, 8, 8, 9, 26], [0, 0, 0, 40], [0, 16, 16, 16], [0, *range(1, 20)]],
                         ids=str)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_the_map_covers_every_row_once(offsets: list[int], dtype: torch.dtype) -> None:
    rows, count = offsets[-1], len(offsets) - 1
    tiles = experts.tile_map(torch.tensor(offsets, dtype=dtype), rows)
    assert tiles.dtype == torch.int32 and tiles.shape == (min(rows, -(-rows // 8) + count), 3)
    seen = [(e, row) for e, first, last in tiles.tolist() for row in range(first, min(first + 8, last))]
    assert seen == [(e, row) for e in range(count) for row in range(offsets[e], offsets[e + 1])]


def test_offsets_that_lie_stay_inside() -> None:
    tiles = experts.tile_map(torch.tensor([-5, 99, 3, 1 << 40]), 20)
    live = tiles[tiles[:, 1] < tiles[:, 2]]
    assert len(live) and (live[:, 1] >= 0).all() and (live[:, 2] <= 20).all() and (live[:, 0] < 3).all()


@pytest.mark.parametrize("rows", ROWS, ids=str)
@pytest.mark.parametrize("module", [q4_0, fp8_block, int8_channel], ids=lambda module: module.SPEC.name)
def test_grouped_linear(module: object, rows: tuple[int, ...]) -> None:
    """The function of a format, from a list and from a tensor, is each expert's own product."""
    n, offsets = 128, offsets_of(rows)
    packed = module.quantize(torch.randn(len(rows) * n, 256, generator=torch.Generator().manual_seed(0))).to(DEVICE)
    x, bias = x_of(offsets[-1], 256, torch.bfloat16), x_of(len(rows), n, torch.bfloat16, 4)
    product = module.grouped_linear(x, packed, offsets, bias)
    parts = [module.linear(x[a:b], packed.cut("N", e * n, (e + 1) * n), bias[e])
             for e, (a, b) in enumerate(pairwise(offsets))]
    if INTERPRETED:
        assert torch.equal(product, torch.cat(parts))
    assert torch.equal(product, module.grouped_linear(x, packed, torch.tensor(offsets, device=DEVICE), bias))


def test_one_launch_serves_all_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What happens on a GPU: the kernel's bits, from offsets as they come; and the loop where gradients are wanted."""
    packed, offsets = experts_of(CASES[0], 4, 128, 256), offsets_of(ROWS[0])
    x, bias = x_of(offsets[-1], 256, torch.float16), x_of(4, 128, torch.float16, 3)
    assert experts.is_on_gpu(x, bias, *packed.tensors.values()) is not INTERPRETED
    assert not experts.is_on_gpu(x.float().requires_grad_(), bias)
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    out = torch.empty(offsets[-1], 128, dtype=x.dtype, device=DEVICE)
    launch.grouped(x, packed, experts.tile_map(torch.tensor(offsets, device=DEVICE), offsets[-1]), bias, out)
    for border in (offsets, torch.tensor(offsets, device=DEVICE)):
        assert torch.equal(experts.linear(x.t().contiguous().t(), packed, border, bias), out)
    rows = torch.arange(offsets[-1], device=DEVICE).flip(0)
    assert torch.equal(experts.linear(x.flip(0), packed, offsets, bias, rows=rows), out)
    close(out, x, packed, offsets, bias)
    for m, is_fused in ((4 * 16, True), (4 * 64 + 1, False)):    # more rows per expert meet experts that were decoded
        assert experts._is_fused(x_of(1, 256, torch.float16), m, packed, 4) is is_fused


class NoWaiting(TorchDispatchMode):
    """Refuses operations for which a GPU's host waits."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default,
                            torch.ops.aten.equal.default, torch.ops.aten.bincount.default), func
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("many", [False, True], ids=["few", "many"])
@pytest.mark.parametrize(("module", "dtype"), [(q4_0, torch.float16), (fp8_block, torch.bfloat16), (nf4, torch.float32),
                                               (hlane, torch.bfloat16), (fix4, torch.float16), (fix3, torch.bfloat16),
                                               (df11, torch.float32)],
                         ids=lambda value: value.SPEC.name if hasattr(value, "SPEC") else str(value)[6:])
def test_decoded_experts(module: Any, dtype: torch.dtype, many: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Experts that have rows are decoded and multiplied, and all are where there are more rows than experts; nothing waits."""
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    monkeypatch.setattr(experts, "_is_fused", lambda *arguments: False)
    monkeypatch.setattr(experts, "DECODED", 2 * 128 * 256)       # two experts at a time
    calls = []
    monkeypatch.setattr(launch, "dequantize", lambda packed, out: calls.append(out.shape) or dequantize(packed, out))
    offsets = offsets_of((17, 1, 0, 2, 3, 0) if many else (0, 2, 0, 0, 1, 0))
    packed = module.quantize(torch.randn(6 * 128, 256, generator=torch.Generator().manual_seed(0))).to(DEVICE)
    packed = packed.decode_streams() if module is df11 else packed         # its kernel decodes whole weights: not the matter here
    x, bias, borders = x_of(9, 256, dtype), x_of(6, 128, dtype, 3), torch.tensor([*offsets[:-1], offsets[-1]], device=DEVICE)
    rows = torch.randint(9, (offsets[-1] + 1,), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    with NoWaiting(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the host waits for a tensor"))
        out = experts._product_by_tiles(x, packed, borders, bias, True, 128, rows)
    assert calls == [(256, 256)] * 3 if many else [(256, 256), (128, 256)]
    dense = module.dequantize(packed, dtype).cpu().double().unflatten(0, (6, 128))
    wide, own = x.cpu().double()[rows.cpu()], bias.cpu().double()
    for e, (start, stop) in enumerate(pairwise(offsets)):
        exact = wide[start:stop] @ dense[e].t() + own[e]
        spread = wide[start:stop].abs() @ dense[e].abs().t() + own[e].abs()
        bound = exact.abs() * torch.finfo(dtype).eps / 2 + spread * 256 * 2.0 ** -24
        assert ((out[start:stop].cpu().double() - exact).abs() <= bound).all(), e
    assert not out[-1].any()


dequantize = launch.dequantize


@pytest.mark.parametrize("case", quarter_of([case for case in cases() if case.path in SHIPPED]), ids=str)
def test_experts_are_taken_as_they_are_stored(case: Case) -> None:
    """Along whichever axis a tensor has the rows of an expert, and none where all experts share it."""
    packed = experts_of(case, 5, 128, max(256, smallest(case)[1]))
    if not packed.layout.streams and 128 % packed.step("N"):
        with pytest.raises(FormatError, match="experts of 128 rows cannot be told apart"):
            experts.linear(torch.zeros(5, packed.shape[1], device=DEVICE), packed, [0, 1, 2, 3, 4, 5])
        return
    if packed.layout.streams and not stream_kernels.can_decode_rows(packed, 128):
        packed = packed.decode_streams()
    part = experts.select_experts(packed, 128, torch.tensor([3, 0, 3], device=DEVICE))
    whole = packed.format.dequantize(packed.to("cpu"), torch.float32).unflatten(0, (5, 128))
    assert torch.equal(part.format.dequantize(part.to("cpu"), torch.float32), whole[[3, 0, 3]].flatten(0, 1))


def test_experts_with_rows_come_first() -> None:
    offsets = torch.tensor([0, 0, 2, 2, 5, 5])
    chosen, borders = experts.experts_with_rows(offsets, 3)
    assert chosen.tolist() == [1, 3, 0] and borders.tolist() == [0, 2, 5, 5]
    chosen, borders = experts.experts_with_rows(offsets, 5)
    assert chosen.tolist() == [0, 1, 2, 3, 4] and borders is offsets


def test_kernels_of_decoded_experts_stay_inside() -> None:
    """They read nothing else, and store every element once."""
    n, k, offsets = 70, 100, torch.tensor([0, 3, 3, 20], device=DEVICE)
    x, w, bias = x_of(7, k, torch.float16), x_of(3 * n, k, torch.float16, 1), x_of(3, n, torch.float16, 2)
    rows, out = torch.arange(20, device=DEVICE) % 7, torch.full((20, n), torch.nan, dtype=x.dtype, device=DEVICE)
    tiles = experts.tile_map(offsets, 20, 16)
    with guarded(x, w, bias, rows, tiles, out) as trace:
        experts.matmul_call(x, w, bias, rows, tiles, out, 16).run()
    assert not INTERPRETED or (times(trace.stores, out) == 1).all()
    exact = torch.cat([x[rows[a:b]].double() @ w[e * n:e * n + n].double().t() + bias[e].double()
                       for e, (a, b) in enumerate(pairwise(offsets.tolist()))])
    torch.testing.assert_close(out.double(), exact, rtol=2.0 ** -10, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_weighted_sum(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a kernel and of torch, where rows behind the last offset hold anything."""
    results = x_of(10, 70, dtype)
    results[8:] = torch.nan
    weights, order = x_of(5, 2, torch.float32, 1), torch.randperm(10, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    offsets = torch.tensor([0, 3, 8], device=DEVICE)
    by_torch = experts.weighted_sum(results, order, weights, offsets)         # a permutation, which is all that places are
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    by_kernel = experts.weighted_sum(results, order, weights, offsets)
    assert by_kernel.dtype == dtype and by_kernel.shape == (5, 70) and not by_kernel.isnan().any()
    if INTERPRETED:
        torch.testing.assert_close(by_kernel, by_torch.to(dtype), rtol=torch.finfo(dtype).eps, atol=0)


def test_gradients() -> None:
    packed = q4_0.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0))).to(DEVICE)
    x = torch.randn(5, 64, dtype=torch.float64, device=DEVICE, requires_grad=True)
    bias = torch.randn(3, 16, dtype=torch.float64, device=DEVICE, requires_grad=True)
    to_x, to_bias = torch.autograd.grad(q4_0.grouped_linear(x, packed, [0, 2, 2, 5], bias).sum(), (x, bias))
    weight = q4_0.dequantize(packed, torch.float32).double().unflatten(0, (3, 16)).sum(1)
    torch.testing.assert_close(to_x, weight[[0, 0, 2, 2, 2]])
    assert torch.equal(to_bias, torch.tensor([2., 0, 3], dtype=torch.float64, device=DEVICE)[:, None].expand(3, 16))


@pytest.mark.parametrize("rows", [(3, 0, 9), (0, 40, 0)], ids=str)
@pytest.mark.parametrize(("module", "dtype"), [(q4_0, torch.float64), (q4_0, torch.float16), (hlane, torch.float64),
                                               (hlane, torch.bfloat16)],
                         ids=lambda value: value.SPEC.name if hasattr(value, "SPEC") else str(value)[6:])
def test_nothing_waits_for_gradients_and_float64(module: Any, dtype: torch.dtype, rows: tuple[int, ...],
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    """Each row's gradient is that of its own expert; rows of none have 0, as their results have in float64."""
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    monkeypatch.setattr(experts, "DECODED", 2 * 64 * 64)         # two experts in float32 at a time, one in float64
    packed = module.quantize(torch.randn(3 * 64, 64, generator=torch.Generator().manual_seed(0))).to(DEVICE)
    offsets = torch.tensor(offsets_of(rows), device=DEVICE)
    m = sum(rows) + 2
    x, cotangent = x_of(m, 64, dtype).requires_grad_(), x_of(m, 64, dtype, 1).requires_grad_()
    bias = x_of(3, 64, dtype, 2).requires_grad_()
    with NoWaiting(), monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "tolist", lambda self: pytest.fail("the host waits for a tensor"))
        product = experts.linear(x, packed, offsets, bias, partial=True)
        to_x, to_bias = torch.autograd.grad(product, (x, bias), cotangent, create_graph=True)
        [again] = torch.autograd.grad(to_x, cotangent, torch.ones_like(to_x)) if dtype == torch.float64 else [None]
    own = torch.arange(3, device=DEVICE).repeat_interleave(torch.tensor(rows, device=DEVICE))
    weight = module.dequantize(packed, torch.float64).unflatten(0, (3, 64))[own]
    wide, gradient = x.detach().double(), cotangent.detach().double()
    tolerance = {"rtol": 2 * torch.finfo(dtype).eps, "atol": 2 * torch.finfo(dtype).eps}
    exact = torch.einsum("mnk,mk->mn", weight, wide[:-2]) + bias.detach().double()[own]
    torch.testing.assert_close(product[:-2].double(), exact, **tolerance)
    torch.testing.assert_close(to_x[:-2].double(), torch.einsum("mnk,mn->mk", weight, gradient[:-2]), **tolerance)
    assert not product[-2:].any() and not to_x[-2:].any()
    for e in range(3):
        torch.testing.assert_close(to_bias[e].double(), gradient[:-2][own == e].sum(0), **tolerance)
    if again is not None:
        torch.testing.assert_close(again[:-2], weight.sum(2), **tolerance)


def test_transforms_of_products() -> None:
    """Batches, forward derivatives and gradients by torch.func are those of one product after the other."""
    packed = q4_0.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    offsets = torch.tensor([0, 2, 2, 4])
    x, bias = torch.rand(3, 5, 64, dtype=torch.float64), torch.rand(3, 3, 16, dtype=torch.float64)

    def product(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return experts.linear(x, packed, offsets, bias, partial=True)

    parts = torch.stack([product(*pair) for pair in zip(x, bias, strict=True)])
    torch.testing.assert_close(torch.func.vmap(product)(x, bias), parts)
    torch.testing.assert_close(torch.func.vmap(product, (1, None), 1)(x.movedim(0, 1), bias[0]).movedim(1, 0),
                               torch.stack([product(part, bias[0]) for part in x]))
    torch.testing.assert_close(torch.func.vmap(product, (None, 0))(x[0], bias), torch.stack([product(x[0], b) for b in bias]))
    out, tangent = torch.func.jvp(product, (x[0], bias[0]), (x[1], bias[1]))
    assert torch.equal(out, parts[0])
    torch.testing.assert_close(tangent, parts[1])                 # it is linear in both
    to_x = torch.func.grad(lambda x: product(x, bias[0]).square().sum())(x[0])
    variable = x[0].clone().requires_grad_()
    [exact] = torch.autograd.grad(product(variable, bias[0]).square().sum(), variable)
    torch.testing.assert_close(to_x, exact)
    with pytest.raises(FormatError, match="offsets are the same for all of a batch"):
        torch.func.vmap(lambda offsets: experts.linear(x[0], packed, offsets, None, True))(offsets.expand(2, -1))


def test_experts_with_one_order_of_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    """act-order: the index of an experts' weight is that of them all, and so is the order of its columns."""
    case = next(case for case in CASES if case.path.stem == "int_group")
    offsets = offsets_of(ROWS[0])
    packed = case.module.pack(shuffled_fields(case, (4 * 24, 256), params={"group": 64}), "planar", bits=4, group=64).to(DEVICE)
    assert packed.order is not None
    x, bias = x_of(offsets[-1], 256, torch.float16), x_of(4, 24, torch.float16, 3)
    wide = x.double().requires_grad_()
    product = case.module.grouped_linear(wide, packed, offsets, bias)
    close(product.detach(), wide.detach(), packed, offsets, bias)
    [to_x] = torch.autograd.grad(product.sum(), wide)
    rows = case.module.dequantize(packed, torch.float32).double().unflatten(0, (4, 24)).sum(1)
    torch.testing.assert_close(to_x, rows.repeat_interleave(torch.tensor(ROWS[0], device=DEVICE), 0))
    monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
    monkeypatch.setattr(PackedWeight, "runs_kernels", True)
    close(experts.linear(x, packed, offsets, bias), x, packed, offsets, bias)


def test_rows_of_no_expert_are_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows behind the last offset, of experts that others have; without `partial` they are a mistake."""
    packed = experts_of(CASES[0], 3, 128, 256)
    offsets = [0, 2, 2, 5]
    for dtype in (torch.float32, torch.float16):                 # the kernel meets exact weights; tiles of a CPU are rounded
        x = x_of(9, 256, dtype)
        out = experts.linear(x, packed, offsets, partial=True)
        assert not out[5:].any() and out.shape == (9, 128)
        close(out[:5], x[:5], packed, offsets, None)
        monkeypatch.setattr(experts, "runs_kernels", lambda device: True)
        monkeypatch.setattr(PackedWeight, "runs_kernels", True)
        monkeypatch.setattr(experts, "_is_fused", lambda *arguments: True)       # where a plan would decode so small a weight
    assert not experts.linear(x, packed, [0, 0, 0, 0], partial=True).any()


def test_streams_decode_experts_that_have_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(6 * 64, 128, generator=torch.Generator().manual_seed(0)).bfloat16()
    packed, decoded = hlane.quantize(weight), []
    decode_rows = PackedWeight.decode_rows
    monkeypatch.setattr(PackedWeight, "decode_rows", lambda self, rows: decoded.append(rows) or decode_rows(self, rows))
    x = x_of(5, 128, torch.bfloat16).cpu()
    product = hlane.grouped_linear(x, packed, [0, 0, 2, 2, 2, 5, 5])
    assert [rows.tolist() for rows in decoded] == [[*range(64, 128), *range(256, 320)]]
    dense = weight.unflatten(0, (6, 64))
    assert torch.equal(product, torch.cat((x[:2] @ dense[1].t(), x[2:] @ dense[4].t())))


@pytest.mark.skipif(not INTERPRETED, reason="the product itself may be another one there")
@pytest.mark.parametrize("partial", [False, True])
@pytest.mark.parametrize("module", [q4_0, hlane], ids=lambda module: module.SPEC.name)
def test_a_compiled_function_has_one_operation(module: object, partial: bool) -> None:
    """No break of the graph, the bits of eager mode, and its gradients."""
    weight = torch.randn(4 * 64, 128, generator=torch.Generator().manual_seed(1)).bfloat16()
    packed = module.quantize(weight)
    x, bias = x_of(7, 128, torch.float32).requires_grad_(), x_of(4, 64, torch.float32, 2).requires_grad_()
    offsets = torch.tensor([0, 3, 3, 5, 6 if partial else 7])

    def product(x: torch.Tensor, offsets: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return module.grouped_linear(x * 2, packed, offsets, bias, partial)

    compiled = torch.compile(product, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(x, offsets, bias), product(x, offsets, bias))
    cotangent = torch.randn(7, 64, generator=torch.Generator().manual_seed(3))
    for own, other in zip(torch.autograd.grad(compiled(x, offsets, bias), (x, bias), cotangent),
                          torch.autograd.grad(product(x, offsets, bias), (x, bias), cotangent), strict=True):
        torch.testing.assert_close(own, other)


def test_the_operation_is_what_torch_asks_of_one() -> None:
    packed = q4_0.quantize(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)))
    tensors, key = ops.operation_arguments(packed)
    arguments = (torch.randn(5, 64, requires_grad=True), tensors, torch.tensor([0, 2, 2, 5]), torch.zeros(3, 16),
                 key, False, "")
    torch.library.opcheck(experts._grouped_linear, arguments)


def test_no_rows() -> None:
    packed = q4_0.quantize(torch.ones(4, 32)).to(DEVICE)
    assert q4_0.grouped_linear(x_of(0, 32, torch.float16), packed, [0, 0, 0]).shape == (0, 2)


@pytest.mark.parametrize(("offsets", "x", "bias", "message"), [
    ([0], (4, 256), None, "offsets for 0 experts do not fit a weight of 384 rows"),
    ([0] * 6, (4, 256), None, "offsets for 5 experts do not fit a weight of 384 rows"),
    ([0, 1, 2, 4, 4, 4, 4], (4, 256), None, "experts of 64 rows cannot be told apart"),
    ([0, 3, 2, 4], (4, 256), None, "do not divide 4 rows of x among 3 experts"),
    ([0, 1, 2, 3], (4, 256), None, "do not divide 4 rows"),
    ([1, 1, 2, 4], (4, 256), None, "do not divide 4 rows"),
    ([0, 1, 2, 4], (4, 128), None, "does not fit a weight"),
    ([0, 1, 2, 4], (1, 4, 256), None, "does not fit a weight"),
    ([0, 1, 2, 4], (4, 256), (128,), "expected floats \\[3, 128\\]"),
])
def test_what_does_not_fit_is_refused(offsets: list[int], x: tuple[int, ...], bias: tuple[int, ...] | None, message: str) -> None:
    packed = fp8_block.quantize(torch.ones(384, 256))
    with pytest.raises(FormatError, match=message):
        fp8_block.grouped_linear(torch.zeros(x), packed, offsets, None if bias is None else torch.zeros(bias))
