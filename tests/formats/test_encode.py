"""Codes from values: on every half-precision value, and where float32 comes closest to a tie; and searches for scales.

Ties that go up are ggml's, whose sums round; its own bytes are compared in test_goldens.py."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qdsl.encode import rows, search
from qdsl.encode.blocks import codes
from qdsl.generated import (
    awq_gemv_fast,
    bitnet,
    bitnet_offline,
    fp8_block,
    fp8_channel,
    fp8_tensor,
    int8_block,
    int8_channel,
    int8_tensor,
    int_group,
    nvfp4_ct,
    q2_k,
    q3_k,
    q4_0,
    q4_1,
    q4_k,
    q5_0,
    q6_k,
    q8_0,
)
from qdsl.runtime.format import Format
from qdsl.runtime.weight.packed import FormatError
from tests.support import searches
from tests.support.formats import same_bits
from tests.support.quick import examples

ROUNDED = {
    "even": lambda x: x.round(),
    "away": lambda x: (x.abs() + 0.5).floor().copysign(x),
}


def close_to_ties() -> torch.Tensor:
    """float32 halves, from small to past the codes, with the two numbers on either side."""
    halves = (torch.arange(-300, 300) + 0.5).float()
    return torch.cat([(halves.view(torch.int32) + step).view(torch.float32) for step in (-2, -1, 0, 1, 2)])


def all_halves(dtype: torch.dtype) -> torch.Tensor:
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
    return values[values.isfinite()]


@pytest.mark.parametrize("code", ["i8", "u4", "u8"])
@pytest.mark.parametrize("ties", ROUNDED)
@pytest.mark.parametrize("values", [close_to_ties(), all_halves(torch.float16), all_halves(torch.bfloat16)],
                         ids=["f32", "f16", "bf16"])
def test_codes_are_the_nearest(values: torch.Tensor, ties: str, code: str) -> None:
    """Against float64, in which adding a half to any of these is exact."""
    low, high = (-128, 127) if code == "i8" else (0, (1 << int(code[1])) - 1)
    wanted = ROUNDED[ties](values.double()).clamp(low, high).to(torch.uint8 if code[0] == "u" else torch.int8)
    assert torch.equal(codes(values.clone(), code, ties), wanted)


@pytest.mark.parametrize("first", [0.0, None])
@pytest.mark.parametrize("blocks", [1, 2, 3, 7, 1024, 4096])
@pytest.mark.parametrize("elements", [8, 16, 32, 256])
def test_sums_add_one_element_after_the_other(elements: int, blocks: int, first: float | None) -> None:
    """Whatever numpy would rather do: also of arrays whose blocks lie side by side, and of a slice."""
    x = np.random.default_rng(0).standard_normal((elements, blocks)).astype(np.float32)
    wanted = x[0] if first is None else np.float32(first) + x[0]
    for row in x[1:]:
        wanted = wanted + row
    wide = np.repeat(x, 2, axis=1)
    for terms in (x, np.asfortranarray(x), wide[:, ::2]):
        assert np.array_equal(search.sum_blocks(terms, first).view(np.int32), wanted.view(np.int32))


def test_integers_beyond_those_that_a_sum_rounds_to_are_what_its_bits_say() -> None:
    values = [0.5, 1.5, -2.5, 4194303.0, -4194303.0, 4194304.0, 5e6, -5e6, 2.0 ** 31, 1e30, -1e30, np.inf, -np.inf, np.nan]
    x = np.array(values, np.float32)
    with np.errstate(all="ignore"):
        wanted = [searches.rounded(value) for value in x]
        assert search.nearest(x.copy()).tolist() == wanted
        assert [search.nearest(x[i:i + 1].copy()).item() for i in range(len(x))] == wanted


def awkward() -> st.SearchStrategy[float]:
    special = [0.0, -0.0, 1.0, -1.0, 0.5, 1e-45, 1e-30, 1e-15, -1e-15, 3e-8, 1e4]
    return st.one_of(st.floats(-2, 2, width=32), st.sampled_from(special), st.integers(-8, 8).map(float))


@settings(max_examples=examples(150), deadline=None, derandomize=True)
@given(st.lists(awkward(), min_size=16, max_size=16),
       st.lists(st.sampled_from([0.0, 1e-9, 0.25, 1.0, 7.0]), min_size=16, max_size=16))
def test_searches_find_what_plain_loops_find(values: list[float], weights: list[float]) -> None:
    """Scale and codes, on any block and with any weights of its errors."""
    x, w = np.array(values, np.float32)[:, None], np.array(weights, np.float32)[:, None]
    with np.errstate(all="ignore"):
        scale, low, start, inverse = search.fit_counts(x, w, 15, -1, 0.1, 20)
        assert_same(searches.ranged(x[:, 0], w[:, 0], 15, -1, 0.1, 20), scale, low, search.counts(x, start, inverse, 15))
        scale, inverse = search.fit_signed(x, w, -8, 7)
        assert_same(searches.trials(x[:, 0], w[:, 0], -8, 7), scale, search.signed_or_least(x, inverse, -8, 7))
        assert_same(searches.exchanged(x[:, 0], -4, 3), *search.fit_exchange(x, -4, 3))
        size = np.abs(x)
        assert_same(searches.positive(size[:, 0], w[:, 0], 15), *search.fit_positive(size, w, 15))


def assert_same(wanted: tuple[object, ...], *outputs: search.Floats) -> None:
    *scalars, chosen = wanted
    assert outputs[-1][:, 0].tolist() == chosen
    assert [value.view(np.int32).item() for value in outputs[:-1]] == [np.float32(value).view(np.int32) for value in scalars]


FORMATS = [module.FORMAT for module in (q2_k, q3_k, q4_0, q4_1, q4_k, q5_0, q6_k, q8_0)]


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_quantized_as_the_same_numbers_in_float32(form: Format, dtype: torch.dtype) -> None:
    weight = torch.randn(4, 512, generator=torch.Generator().manual_seed(0)).to(dtype)
    assert same_bits(form.quantize(weight).tensors["blocks"], form.quantize(weight.float()).tensors["blocks"])


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_blocks_are_searched_the_same_a_few_at_a_time(form: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also one at a time, and with rows of zeros among them."""
    generator = torch.Generator().manual_seed(0)
    weight, importance = torch.randn(6, 512, generator=generator), torch.rand(512, generator=generator)
    weight[2:4] = 0
    for counts in (None, importance):
        whole = form.quantize(weight, importance=counts).tensors["blocks"]
        for elements in (1, 96):
            monkeypatch.setattr(rows, "ELEMENTS", elements)
            assert same_bits(form.quantize(weight, importance=counts).tensors["blocks"], whole)
        monkeypatch.undo()


def test_a_negative_scale_counts_as_zero() -> None:
    """An importance of few weights may come to one; the rest of the super-block is as good as ever."""
    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(64, 512, generator=generator) * 0.001 - 1
    importance = torch.exp(5 * torch.randn(512, generator=generator))
    x = rows.split_blocks(weight, 256)
    counts = rows.error_weights(x, rows.split_blocks(importance.expand_as(weight), 256), 1).reshape(-1, 16)
    with np.errstate(all="ignore"):
        scales = rows.fit_blocks(x.reshape(-1, 16), counts, lambda x, by: search.fit_counts(x, by, 3, *search.IMPORTANT))[0]
    assert (scales < 0).any()
    packed = q2_k.quantize(weight, importance=importance)
    assert not q2_k.unpack(packed)["sc"].flatten()[torch.from_numpy(scales < 0)].any()
    assert (q2_k.dequantize(packed, torch.float32) - weight).abs().max() < 0.01


def test_ranges_below_the_least_step_of_float16() -> None:
    """compressed-tensors divides by a step of 0 before that becomes epsilon: infinite zero points are cut, NaN is the middle."""
    weight = torch.zeros(3, 32, dtype=torch.float16)
    weight[0, :2], weight[1, 0] = torch.tensor([-1e-6, 1e-6]), 1e-6
    fields = int_group.unpack(int_group.quantize(weight, "pack_quantized", bits=8, group=32, span="full", rounds="sum"))
    assert fields["s"].flatten().tolist() == [torch.finfo(torch.float16).eps] * 3
    assert fields["z"].flatten().tolist() == [255, 128, 128]
    assert fields["q"].unique(dim=1).flatten().tolist() == [255, 128, 128]


def test_a_least_scale_whose_reciprocal_float16_has_not() -> None:
    """Scales by the reciprocal are not less than float16's largest allows, and none is 0."""
    weight = torch.tensor([[1e-5, 0.0], [0.5, 1.0]], dtype=torch.float16)
    packed = int8_channel.quantize(weight, by="inverse", least=1e-6, scale_type="f16")
    assert packed.tensors["weight_scale"].flatten().tolist() == [float(torch.tensor(1 / 65504).half()),
                                                                 float(1 / (127.5 / torch.tensor(1.0).half()))]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("form", "cut", "largest", "least"), [
    (fp8_tensor, (96, 256), 448, 0), (fp8_channel, (1, 256), 448, 1 / (448 * 512)), (fp8_block, (32, 128), 448, 0),
    (int8_tensor, (96, 256), 127, 0), (int8_channel, (1, 256), 127, 0), (int8_block, (32, 128), 127, 0)],
    ids=lambda value: value.SPEC.name if isinstance(value, ModuleType) else None)
def test_online_rules_of_vllm(form: ModuleType, cut: tuple[int, int], largest: float, least: float, dtype: torch.dtype) -> None:
    """float32 scales largest / 448 or / 127, of rows in FP8 not below 1 / (448 * 512), and codes w / scale, ties to even."""
    weight = torch.randn(96, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[7] *= 1e-5
    options = {"divisor": largest, **({"least": least} if least else {}),
               **({"bn": 32} if form in (fp8_block, int8_block) else {})}
    fields = form.unpack(form.quantize(weight, scale_type="f32", **options))
    blocks = weight.float().view(96 // cut[0], cut[0], 256 // cut[1], cut[1])
    scale = (blocks.abs().amax((1, 3), keepdim=True) / largest).clamp(min=least)
    codes = (blocks / scale).clamp(-largest, largest).view(96, 256)
    assert torch.equal(fields["s"].flatten(), scale.flatten())
    assert same_bits(fields["q"], codes.round().to(torch.int8) if largest == 127 else codes.to(torch.float8_e4m3fn))


@pytest.mark.parametrize("value", [0, -1.0, float("inf"), "448", True])
def test_numbers_that_are_options_are_positive(value: object) -> None:
    with pytest.raises(FormatError, match="fp8_tensor: divisor is a positive number, not"):
        fp8_tensor.quantize(torch.ones(4, 4), divisor=value)


def test_scales_of_a_whole_and_its_blocks_meet_in_float32() -> None:
    """compressed-tensors divides magnitudes in the weight's dtype, and multiplies what comes of that in float32."""
    torch.manual_seed(1)
    weight = torch.randn(64, 64).bfloat16()
    largest = weight.unflatten(1, (-1, 16)).abs().amax(2)
    whole = (6 * 448 / largest.amax()).float()
    tensors = nvfp4_ct.quantize(weight).tensors
    scales = ((largest / 6).float() * whole).to(torch.float8_e4m3fn)
    assert tensors["weight_global_scale"].equal(whole[None])
    assert same_bits(tensors["weight_scale"], scales)
    assert not same_bits(scales, ((largest / 6).float() * whole).bfloat16().to(torch.float8_e4m3fn))


def test_weights_may_share_a_super_scale() -> None:
    """amax is the largest magnitude of all; a weight that exceeds it is refused with its block."""
    weight = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    largest = float(weight.abs().max())
    own = nvfp4_ct.quantize(weight).tensors
    assert all(same_bits(tensor, own[name]) for name, tensor in nvfp4_ct.quantize(weight, amax=largest).tensors.items())
    scale = (6 * 448 / torch.tensor([2 * largest], dtype=torch.bfloat16)).float()
    assert nvfp4_ct.quantize(weight, amax=2 * largest).tensors["weight_global_scale"].equal(scale)
    row, column = divmod(int(weight.abs().argmax()), 64)
    with pytest.raises(FormatError, match=rf"block \[{row}, {column // 16}\] has a magnitude above amax = "):
        nvfp4_ct.quantize(weight, amax=largest * 0.99)


def test_scales_that_are_powers_of_two_may_be_of_any_type() -> None:
    """DeepSeek's ue8m0 in float32 tensors: the same numbers as in E8M0."""
    weight = torch.randn(64, 96, generator=torch.Generator().manual_seed(0))
    weight[0] = 0
    for options in ({}, {"power": "floor"}, {"power": "even", "by": "inverse"}):
        wanted = fp8_block.quantize(weight, bn=1, bk=32, scale_type="e8m0", **options)
        for kind in ("f32", "bf16"):
            packed = fp8_block.quantize(weight, bn=1, bk=32, scale_type=kind, **{"power": "up", **options})
            assert same_bits(packed.tensors["weight"], wanted.tensors["weight"])
            assert same_bits(packed.tensors["weight_scale_inv"].float(), wanted.tensors["weight_scale_inv"].float())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("storage", ["awq", "awq_gemv", "modelopt"])
def test_codes_of_awq(storage: str, dtype: torch.dtype) -> None:
    """Ranges without zero, and groups of zeros; symmetric, the last code is the largest weight."""
    weight = torch.randn(64, 256, generator=torch.Generator().manual_seed(0)).to(dtype)
    weight[1] += 5
    weight[2] = 0
    groups = weight.unflatten(1, (-1, 64))
    if storage == "modelopt":
        scale = groups.abs().amax(2, keepdim=True).clamp(min=1e-5) / 7
        zero = torch.full_like(scale, 8)
    else:
        low, high = groups.amin(2, keepdim=True), groups.amax(2, keepdim=True)
        scale = (high - low).clamp(min=1e-5) / 15
        zero = (-(low / scale).round()).clamp(0, 15)
    wanted = ((groups / scale).round() + zero).clamp(0, 15)
    packed = int_group.quantize(weight, storage, bits=4, group=64, scale_type="f16")
    fields = int_group.unpack(packed)
    assert torch.equal(fields["q"], wanted.flatten(1).byte()) and same_bits(fields["s"], scale.squeeze(2).half())
    assert "z" not in fields if storage == "modelopt" else torch.equal(fields["z"], zero.squeeze(2).byte())
    if storage == "awq":
        fast = awq_gemv_fast.unpack(awq_gemv_fast.quantize(weight, group=64))
        assert torch.equal(fast["q"], fields["q"]) and same_bits(fast["s"], fields["s"])
        assert same_bits(fast["z"], -(fields["s"].float() * fields["z"].float()).half())


@pytest.mark.parametrize("form", [bitnet, bitnet_offline])
def test_codes_of_bitnet(form: ModuleType) -> None:
    """Sums of these weights are exact in any order."""
    weight = torch.randint(-64, 65, (32, 48), generator=torch.Generator().manual_seed(0)) / 32
    scale = 1 / weight.abs().mean().clamp(min=1e-5)
    fields = form.unpack(form.quantize(weight, scale_type="f32"))
    assert torch.equal(fields["q"], (weight * scale).round().clamp(-1, 1).add(1).byte())
    assert fields["s"] == (scale if form is bitnet else weight.abs().mean())
    assert form.unpack(form.quantize(torch.zeros(4, 8), scale_type="f32"))["q"].unique().tolist() == [1]
