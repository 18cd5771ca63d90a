"""Products on a CPU where nothing is compiled, by torch's own kernel for int8 codes with a scale per row."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qdsl.generated import bnb_int8, fp8_block, int8_block, int8_channel, int8_tensor
from qdsl.host import library
from qdsl.runtime import PackedWeight
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.cpu import loops
from tests.support.formats import same_bits


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16).to(dtype)


def assert_rounded_once(product: Tensor, x: Tensor, packed: PackedWeight) -> None:
    """Against float64, with exact weights: a float32 sum of K terms in any order, rounded to bfloat16 once."""
    weight = packed.format.dequantize(packed, torch.float32).double()
    wanted, spread = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    sums = 1.01 * weight.shape[1] * 2.0 ** -24 * spread
    assert product.dtype == torch.bfloat16 and product.shape == wanted.shape
    allowed = sums + 2.0 ** -8 * (wanted.abs() + sums) + 2.0 ** -134
    assert ((product.double() - wanted).abs() <= allowed).all(), (packed.storage, packed.shape)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int]]:
    """M, N and K of every call of torch's kernel without a compiler.  Calls are checked: wrong ones would end this process."""
    if not torch.backends.cpu.get_cpu_capability().startswith("AVX"):
        pytest.skip("torch has no vectors for int8 codes here")
    monkeypatch.setattr(library, "has_compiler", lambda: False)
    monkeypatch.setattr(loops, "are_compiled", lambda packed: True)
    monkeypatch.setattr(loops, "find_loop", lambda *_: None)
    seen: list[tuple[int, int, int]] = []
    multiply = torch.ops.aten._weight_int8pack_mm

    def watched(x: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
        assert x.dtype == scales.dtype == torch.bfloat16 and x.is_contiguous() and codes.is_contiguous()
        assert x.data_ptr() % 32 == codes.data_ptr() % 16 == x.shape[1] % 16 == 0
        seen.append((len(x), *codes.shape))
        product: Tensor = multiply(x, codes, scales)
        return product

    monkeypatch.setattr(torch.ops.aten, "_weight_int8pack_mm", watched)
    return seen


def int8_weight(n: int, k: int, scale_type: str = "bf16", storage: str = "safetensors") -> PackedWeight:
    """Codes int8 with a scale per row that bfloat16 holds, whatever its type."""
    packed = int8_channel.quantize(sample(n, k), storage, scale_type="bf16")
    fields = int8_channel.unpack(packed)
    wide = fields["s"].to({"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}[scale_type])
    return int8_channel.pack({**fields, "s": wide * 64 if scale_type == "f16" else wide}, storage)


@pytest.mark.parametrize(("k", "m"), [(16, 1), (48, 2), (64, 5), (272, 16), (1024, 3)])
def test_int8_codes_meet_x_in_bfloat16_without_rounding(k: int, m: int, calls: list[tuple[int, int, int]]) -> None:
    """Tiles would round weights to bfloat16 and leave this bound."""
    x = sample(m, k, seed=1, dtype=torch.bfloat16)
    weights = [int8_weight(n, k) for n in (1, 3, 70)]
    weights += [int8_weight(37, k, "f32"), int8_weight(37, k, "f16"), int8_weight(37, k, storage="torchao"),
                int8_weight(37, k, storage="quanto"), int8_tensor.quantize(sample(37, k), scale_type="bf16")]
    for packed in weights:
        product = packed.format.linear(x, packed)
        assert_rounded_once(product, x, packed)
        assert calls.pop() == (m, *packed.shape) and not calls
        assert same_bits(product[-1:], packed.format.linear(x[-1:], packed)) and calls.pop()
        bias = sample(packed.shape[0], seed=2)
        added = packed.format.linear(x, packed, bias)
        assert same_bits(added, (product.float() + bias).bfloat16()) and calls.pop()


def test_int8_codes_and_x_may_lie_at_any_address(calls: list[tuple[int, int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tensor in a mapped file does: the kernel then gets copies, a tile of codes at a time."""
    monkeypatch.setattr(cpu, "TILE", 1 << 10)
    packed, x = int8_weight(40, 64), sample(2, 64, dtype=torch.bfloat16)
    wanted = int8_channel.linear(x, packed)
    codes = packed.tensors["weight"]
    for at in (1, 8, 16, 31):
        moved = torch.empty(codes.numel() + 64, dtype=torch.int8)[at:at + codes.numel()].view(codes.shape).copy_(codes)
        near = torch.empty(x.numel() + 32, dtype=x.dtype)[at:at + x.numel()].view(x.shape).copy_(x)
        for own in (x, near, near.t().contiguous().t()):
            assert same_bits(wanted, int8_channel.linear(own, packed.derive({**packed.tensors, "weight": moved})))
    strided = torch.empty(*codes.shape, 2, dtype=torch.int8)[..., 0].copy_(codes)
    assert same_bits(wanted, int8_channel.linear(x, packed.derive({**packed.tensors, "weight": strided})))
    assert set(calls) == {(2, 16, 64), (2, 8, 64)}


def test_what_the_int8_kernel_does_not_take_goes_by_tiles(calls: list[tuple[int, int, int]],
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """A row of 40 columns, other x, too many rows, zero points, scales that bfloat16 lacks, other decodes and storages."""
    x = sample(2, 64, dtype=torch.bfloat16)
    shifted = int8_channel.pack({**int8_channel.unpack(int8_weight(48, 64)), "z": torch.ones(48, dtype=torch.int8)})
    others = [shifted, int8_channel.quantize(sample(48, 64), scale_type="f32"), int8_weight(48, 64, storage="eetq"),
              int8_channel.convert(int8_weight(48, 64), "planar"), bnb_int8.quantize(sample(48, 64)),
              int8_block.quantize(sample(48, 64), bn=32, bk=32), fp8_block.quantize(sample(48, 64), bn=128, bk=128)]
    blocks = others[5]
    others.append(blocks.format.pack({**blocks.format.unpack(blocks), "s": torch.ones(2, 2)}, **blocks.params))
    pairs = [(x, packed) for packed in others] + [(x[:, :40], int8_weight(48, 40))]
    pairs += [(other, int8_weight(48, 64)) for other in (x.float(), x.half(), x.repeat(cpu.INT8_ROWS, 1))]
    for own, packed in pairs:
        weight = packed.format.dequantize(packed, torch.float32).double()
        wanted, spread = own.double() @ weight.t(), own.double().abs() @ weight.abs().t()
        product = packed.format.linear(own, packed)
        assert product.dtype == own.dtype and ((product.double() - wanted).abs() <= 2.0 ** -7 * spread).all(), packed
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    int8_channel.linear(x, int8_weight(48, 64))
    assert not calls


def test_the_int8_kernel_stands_in_for_loops_that_cannot_be_compiled(calls: list[tuple[int, int, int]],
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that would not be compiled have the bits of tiles, on every machine."""
    packed, x = int8_weight(48, 64), sample(2, 64, dtype=torch.bfloat16)
    tiles = torch.nn.functional.linear(x, int8_channel.dequantize(packed, torch.bfloat16))
    for module, name, answer in ((library, "has_compiler", True), (loops, "are_compiled", False)):
        with monkeypatch.context() as patch:
            patch.setattr(module, name, lambda *_, answer=answer: answer)
            assert same_bits(int8_channel.linear(x, packed), tiles) and not calls
    int8_channel.linear(x, packed)
    assert calls
