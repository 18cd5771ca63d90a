"""Weights quantized by a format: the same in tiles, what is refused and how it is said, importances, nearest codes."""

from __future__ import annotations

import math
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.generated import (
    bf16,
    f16,
    fp8_block,
    int8_channel,
    int_group,
    q2_k,
    q3_k,
    q4_0,
    q4_k,
    q6_k,
    q8_0,
)
from qdsl.runtime import FormatError
from qdsl.runtime.weight import tiles
from tests.support.covering import quarter_of
from tests.support.formats import (
    NO_QUANTIZER,
    Case,
    cases,
    fixed_shape,
    module,
    same_bits,
    shapes,
    smallest,
)

CASES = cases()


def refused(match: str):  # type: ignore[no-untyped-def]
    return pytest.raises(FormatError, match=match)


# -- quantize -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("module", [bf16, fp8_block, int8_channel, int_group, q4_0], ids=lambda module: module.SPEC.name)
def test_weights_that_are_no_numbers_are_refused(module: object, value: float) -> None:
    weight = torch.zeros(64, 128)
    weight[3, 5] = value
    with refused(rf"the weight is {value} at row 3, column 5"):
        module.quantize(weight)  # type: ignore[attr-defined]


def test_weights_beyond_float32_are_refused() -> None:
    """They are quantized as float32; powers of two would be scales of infinity as of any other number."""
    weight = torch.ones(64, 128, dtype=torch.float64)
    weight[3, 5] = 1e39
    with refused("the weight is inf at row 3, column 5"):
        fp8_block.quantize(weight, scale_type="e8m0")


QUANTIZED = [case for case in CASES if case.module.FORMAT.variant(case.choice).encode is not None]


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_a_weight_is_quantized_the_same_in_tiles(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = smallest(case, tiles=3)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0))
    whole = case.module.quantize(weight, case.storage, **case.choice)
    monkeypatch.setattr(tiles, "TILE", 1)
    tiled = case.module.quantize(weight, case.storage, **case.choice)
    assert all(same_bits(tiled.tensors[name], tensor) for name, tensor in whole.tensors.items())


@pytest.mark.parametrize("module", [bf16, fp8_block, int8_channel, int_group, q4_0], ids=lambda module: module.SPEC.name)
def test_what_is_wrong_in_a_late_tile_is_said_with_its_row(module: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 1)
    weight = torch.zeros(384, 128)
    weight[300, 5] = math.nan
    with refused("the weight is nan at row 300, column 5"):
        module.quantize(weight)  # type: ignore[attr-defined]
    weight[300, 5] = 3e38                                        # finite, though their sum, which is checked first, is not
    weight[300, 6] = 3e38
    if module is q4_0:
        with refused(r"the scale .* of block \[300, 0\] does not fit f16"):
            q4_0.quantize(weight)
        with refused("the weight 3e.38 at row 300, column 5 does not fit f16"):
            f16.quantize(weight)


def test_a_weight_with_something_wrong_is_encoded_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    """Searches take long, so no tile is searched again to say where it is."""
    monkeypatch.setattr(tiles, "TILE", 1)
    rows: list[int] = []

    def encode(part: Tensor) -> dict[str, Tensor]:
        rows.append(len(part))
        return q4_k.encode(part)

    variant = replace(q4_k.FORMAT.variant({}), encode=encode)
    weight = torch.zeros(8, 256)
    weight[5] = 3e38
    with refused(r"the scale .* of block \[5, 0\] does not fit f16"):
        list(tiles.encode_rows(variant, weight, {}, {}))
    assert rows == [1] * 6


@pytest.mark.parametrize("case", list({(case.path, case.storage): case for case in reversed(QUANTIZED)}.values()), ids=str)
def test_tiles_of_rows_make_the_weight_that_is_made_at_once(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k = smallest(case)
    weight = torch.randn(fixed_shape(case, (3 * n, 2 * k)), generator=torch.Generator().manual_seed(0)).bfloat16()
    at_once = case.module.quantize(weight, storage=case.storage, **case.choice)
    monkeypatch.setattr(tiles, "TILE", 1)
    by_tiles = case.module.quantize(weight, storage=case.storage, **case.choice)
    assert by_tiles.shape == at_once.shape == weight.shape
    assert by_tiles.tensors.keys() == at_once.tensors.keys()
    assert all(same_bits(tensor, at_once.tensors[name]) for name, tensor in by_tiles.tensors.items())


def test_what_has_no_numbers_is_not_quantized() -> None:
    """On every path FormatError, as of any weight that does not fit."""
    wrong: list[object] = [torch.empty(4, 32, device="meta"), torch.ones(4, 32).to_sparse(), torch.ones(4, 32).numpy(), [[1.0]]]
    for weight in wrong:
        with pytest.raises(FormatError, match="a weight is"):
            q4_0.quantize(weight)


@pytest.mark.parametrize("case", list({case.path: case for case in reversed(QUANTIZED)}.values()), ids=str)
def test_fp8_weights_are_the_floats_that_they_are(case: Case) -> None:
    n, k = smallest(case)
    weight = torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)
    packed, expected = (case.module.quantize(source, storage=case.storage, **case.choice) for source in (weight, weight.float()))
    assert all(same_bits(tensor, expected.tensors[name]) for name, tensor in packed.tensors.items())
    assert case.module.quantize(weight[:0], storage=case.storage, **case.choice).shape == (0, k)


def test_quantize_refuses_what_it_cannot_do() -> None:
    with refused("int4_rows has no quantizer yet"):
        module(NO_QUANTIZER).quantize(torch.zeros(1, 256))
    with refused(r"a weight is floats \[N, K\], not int32 \[2, 32\]"):
        q4_0.quantize(torch.zeros(2, 32, dtype=torch.int32))
    with refused(r"a weight is floats \[N, K\], not float32 \[32\]"):
        q4_0.quantize(torch.zeros(32))
    with refused("the scale 7.8.*e.33 of block .* does not fit f16"):
        int8_channel.quantize(torch.full((2, 8), 1e36), scale_type="f16")
    with refused("the weight 1e.06 at row 1, column 0 does not fit f16"):
        f16.quantize(torch.tensor([[0.0], [1e6]]))
    with refused("q4_0: by is one of stored, exact, inverse, ratio, not nearest"):
        q4_0.quantize(torch.zeros(1, 32), by="nearest")
    with refused("q4_0 has no parameter 'rounding'"):
        q4_0.quantize(torch.zeros(1, 32), rounding="up")


@pytest.mark.parametrize("module", [q4_0, q4_k, q8_0], ids=lambda module: module.SPEC.name)
def test_an_importance_that_does_not_fit_is_refused(module: ModuleType) -> None:
    """Also by a format that has no use for it."""
    weight, importance = torch.zeros(2, 256), torch.ones(256)
    name = module.SPEC.name
    for wrong, what in ((torch.ones(255), r"float32 \[255\]"), (torch.ones(2, 256), r"float32 \[2, 256\]"),
                        (torch.ones(256, dtype=torch.int32), r"int32 \[256\]")):
        with refused(rf"{name}: importance is floats \[256\], one for each column, not {what}"):
            module.quantize(weight, importance=wrong)
    for value in (-1.0, math.nan, math.inf):
        importance[7] = value
        with refused(f"{name}: the importance of column 7 is {value:g}"):
            module.quantize(weight, importance=importance)


@pytest.mark.parametrize("case", quarter_of(QUANTIZED), ids=str)
def test_an_importance_changes_what_a_search_finds_and_nothing_else(case: Case) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(next(shapes(case, (64, 128), (512, 1024))), generator=generator)
    importance = torch.rand(weight.shape[1], generator=generator) ** 4
    plain = case.module.quantize(weight, case.storage, **case.choice)
    weighted = case.module.quantize(weight, case.storage, importance=importance, **case.choice)
    same = all(same_bits(weighted.tensors[name], tensor) for name, tensor in plain.tensors.items())
    assert same != case.module.FORMAT.variant(case.choice).importance
    if not same:
        errors = [(case.module.dequantize(packed, torch.float32) - weight).square() @ importance for packed in (weighted, plain)]
        assert errors[0].sum() < errors[1].sum()


@pytest.mark.parametrize("module", [q2_k, q3_k, q4_k, q6_k], ids=lambda module: module.SPEC.name)
@pytest.mark.parametrize("size", [1e12, 1e20, 1e30, 3e38])
def test_weights_too_large_for_their_scales_are_refused(module: ModuleType, size: float) -> None:
    """ggml makes zeros of some of them: their squares are too large for float32, so no scale is found."""
    weight = torch.ones(2, 512)
    weight[1, 300] = size
    weight[1, 301] = -size / 3
    with refused(r"the scale .* of block \[1, 1\] does not fit f16"):
        module.quantize(weight)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", quarter_of([case for case in CASES if case.module.FORMAT.variant(case.choice).encode]), ids=str)
def test_quantizing_what_was_quantized_changes_little(case: Case, dtype: torch.dtype) -> None:
    """A weight that a format made stays within one code of itself, and values of zero stay zero.

    Where scales are searched for the least sum of squares, their mean is what does not grow.
    """
    searched = case.spec.encode is not None and case.spec.encode.name.startswith("kquant_")
    shape = (4, 512) if searched else smallest(case, tiles=2)
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(1)).to(dtype)
    params = {**case.choice}
    first = case.module.dequantize(case.module.quantize(weight, case.storage, **params), torch.float32)
    spread = float(weight.float().abs().max())
    again = case.module.dequantize(case.module.quantize(first, case.storage, **params), torch.float32)
    assert (first - weight.float()).abs().max() <= spread
    if searched:
        assert (again - first).square().mean() <= (first - weight.float()).square().mean()
    else:
        assert (again - first).abs().max() <= (first - weight.float()).abs().max() + spread * 2 ** -7
    zero = case.module.quantize(torch.zeros(shape, dtype=dtype), case.storage, **params)
    assert not case.module.dequantize(zero, torch.float32).any()


@settings(max_examples=30, deadline=None, derandomize=True)
@given(st.integers(0, 1 << 30), st.sampled_from(["even", "away", "up"]), st.booleans())
def test_codes_of_minmax_are_the_nearest(seed: int, ties: str, symmetric: bool) -> None:
    """No other code of the same scale and zero point is nearer, by more than float32 loses."""
    weight = torch.randn(8, 64, generator=torch.Generator().manual_seed(seed)) * 10 ** (seed % 5 - 2)
    packed = int_group.quantize(weight, "gptq_v2", group=32, symmetric=symmetric)
    fields = int_group.unpack(packed)
    scale, zero = (fields[name].double().repeat_interleave(32, 1) for name in ("s", "z"))
    every = (torch.arange(16).double()[:, None, None] - zero) * scale
    best = (every - weight.double()).abs().amin(0)
    errors = (int_group.dequantize(packed, torch.float32).double() - weight.double()).abs()
    # A zero point is a whole code: it may be half a step off, and so may the ends of the range.
    assert (errors <= best + 1e-6 * weight.abs().max()).all()
