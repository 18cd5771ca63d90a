"""Codes chosen by the inputs of a layer: less loss than rounding for every format, and rounding where inputs are independent."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import cycle
from pathlib import Path

import pytest
import torch
from torch import Tensor

from qdsl.encode.calibrated import descent, solve
from qdsl.encode.calibrated.affine import affine, decoded
from qdsl.encode.calibrated.descent import Descent, Run, descend
from qdsl.encode.calibrated.hessian import Hessian, factor
from qdsl.encode.calibrated.levels import code_choices, code_field, levels
from qdsl.encode.calibrated.scales import quantize_clipped
from qdsl.encode.calibrated.solve import IMPORTANCE, quantize, quantize_codes
from qdsl.generated import hqq_axis0, int_group, iq2_xs, mxfp4, nf4, q4_k
from qdsl.runtime.format import Format
from qdsl.runtime.weight.layout import Variant
from qdsl.runtime.weight.packed import FormatError
from qdsl.runtime.weight.tiles import decode_fields
from tests.support.covering import quarter_of
from tests.support.formats import SHIPPED, module

# K is a multiple of all blocks but those of any_precision, and N of all rows of tiles
SHAPE = (128, 512)
LENGTHS = {"any_precision": 1024, "aqlm_1x16": 8, "aqlm_2x8": 64, "vptq": 8, "vptq_residual": 64}
OPTIONS = {"vptq": {"bits": 12}, "vptq_residual": {"bits": 8, "more": 8}}  # larger tables hold all vectors of a small weight
OF_CACHES = ("fp8_ds_mla",)                                      # rows of 512 columns


def with_quantizer() -> list[Path]:
    """The specs of formats that quantize weights, and that are no exact copies."""
    variants = {path: next(iter(module(path).FORMAT.variants.values())) for path in SHIPPED}
    return [path for path, variant in variants.items() if variant.encode and not variant.copies
            and path.stem not in (*OF_CACHES, "kivi")]


@cache
def layer(k: int = SHAPE[1]) -> tuple[Tensor, Hessian]:
    """A weight, and the moments of inputs that are correlated, with columns of other sizes."""
    generator = torch.Generator().manual_seed(0)
    n = SHAPE[0]
    mixed = torch.randn(k // 8, k, generator=generator) * torch.rand(k, generator=generator).exp()
    x = torch.randn(2 * k, k // 8, generator=generator) @ mixed
    hessian = Hessian.empty(k)
    hessian.add(x + x.std() * 0.1 * torch.randn(x.shape, generator=generator))
    return torch.randn((n, k), generator=generator) * torch.rand(n, 1, generator=generator), hessian


def loss(format: Format, packed: object, weight: Tensor, hessian: Hessian) -> float:
    return hessian.loss(format.dequantize(packed, torch.float32) - weight)      # type: ignore[arg-type]


@pytest.mark.parametrize("path", quarter_of(with_quantizer()), ids=lambda path: path.stem)
def test_the_loss_is_less_than_that_of_rounding(path: Path) -> None:
    """At most three quarters of it, unless a table holds all vectors of the weight."""
    format, (weight, hessian), options = module(path).FORMAT, layer(LENGTHS.get(path.stem, SHAPE[1])), OPTIONS.get(path.stem, {})
    packed = quantize(format, weight, hessian, **options)
    before, after = (loss(format, one, weight, hessian) for one in (format.quantize(weight, **options), packed))
    assert after <= (0.75 if before > 1e-4 * hessian.loss(weight) else 1) * before


def test_a_last_block_may_be_shorter() -> None:
    """Where a format allows it, along both axes: the last one has 1, 7 or 40 columns, fewer than there are codes."""
    weight, hessian = layer()
    ragged = set()
    every = {k: Hessian(hessian.matrix[:k, :k].contiguous(), hessian.rows) for k in (385, 391, 424)}
    for path, (k, moments) in zip(with_quantizer(), cycle(every.items()), strict=False):
        format, cut = module(path).FORMAT, weight[:100, :k].contiguous()
        try:
            rounded = format.quantize(cut)
        except FormatError:
            continue
        solved = quantize(format, cut, moments)
        assert loss(format, solved, cut, moments) <= 0.75 * loss(format, rounded, cut, moments), (format.name, k)
        ragged.add(format.name)
    assert ragged >= {"fp8_block", "int8_block", "coreml_lut", "nf4"}


@pytest.mark.parametrize("path", quarter_of(with_quantizer()[1:]), ids=lambda path: path.stem)
def test_independent_inputs_take_the_nearest_codes(path: Path) -> None:
    """No other code of a weight is nearer, with the scales that were chosen."""
    k = LENGTHS.get(path.stem, SHAPE[1])
    format, (weight, _) = module(path).FORMAT, layer(k)
    independent = Hessian(torch.eye(k), k)
    packed, _ = quantize_clipped(format, weight[:128], independent.importance, OPTIONS.get(path.stem, {}))
    code = code_field(packed.variant)
    if not code:
        pytest.skip("codes are of several weights")
    solved = quantize(format, weight[:128], independent)
    fields = format.unpack(solved)
    table = levels(solved, fields, code, code_choices(solved, fields[code], code))
    values = format.dequantize(solved, torch.float32)
    for column in range(0, k, 37):
        nearest, _ = table.nearest(weight[:128, column].contiguous(), column)
        best, own = ((value - weight[:128, column]).abs() for value in (nearest, values[:, column]))
        torch.testing.assert_close(own, best, rtol=1e-5, atol=1e-7)      # of two that are as near, either


def test_rounded_weights_stay_while_codes_are_solved() -> None:
    """Fields of some storages are views of the weight's tensors."""
    weight, hessian = layer()
    shared = []
    for path in with_quantizer():
        if path.stem in LENGTHS:
            continue
        format = module(path).FORMAT
        packed, fields = quantize_clipped(format, weight[:128], hessian.importance, {})
        code = code_field(packed.variant)
        if code and fields[code].data_ptr() in [tensor.data_ptr() for tensor in packed.tensors.values()]:
            before = {name: tensor.clone() for name, tensor in packed.tensors.items()}
            quantize_codes(packed, fields, code, weight[:128], hessian)
            assert all(torch.equal(before[name].view(torch.uint8), tensor.view(torch.uint8))
                       for name, tensor in packed.tensors.items() if tensor.dim()), format.name
            shared.append(format.name)
    assert {"fp8_block", "int8_channel"} <= {*shared}


@pytest.mark.parametrize("format", [int_group.FORMAT, nf4.FORMAT, q4_k.FORMAT, mxfp4.FORMAT], ids=lambda format: format.name)
def test_rows_do_not_depend_on_each_other(format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """But for the number of sweeps, which the loss of all decides."""
    monkeypatch.setattr(descent, "LEAST_GAIN", -1)
    weight, hessian = layer()
    whole, half = quantize(format, weight, hessian), quantize(format, weight[:64], hessian)
    assert torch.equal(format.dequantize(whole, torch.float32)[:64], format.dequantize(half, torch.float32))


def test_errors_reach_columns_of_the_same_product_as_those_of_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """With one column per product there is nothing but products; codes then differ by the rounding of sums alone."""
    weight, hessian = layer()
    for format in (int_group.FORMAT, q4_k.FORMAT):
        codes = []
        for step in (1, solve.STEP, SHAPE[1]):
            monkeypatch.setattr(solve, "STEP", step)
            codes.append(format.unpack(quantize(format, weight, hessian))["q"])
        assert all(float((own != codes[0]).float().mean()) < 0.02 for own in codes[1:])


def test_columns_are_chosen_alike_with_and_without_a_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    weight, hessian = layer()
    for format in (int_group.FORMAT, mxfp4.FORMAT):
        compiled = quantize(format, weight, hessian)
        monkeypatch.setenv("QDSL_CPU_COMPILE", "never")
        plain = quantize(format, weight, hessian)
        monkeypatch.delenv("QDSL_CPU_COMPILE")
        assert float((format.unpack(compiled)["q"] != format.unpack(plain)["q"]).float().mean()) < 0.02
        assert loss(format, compiled, weight, hessian) == pytest.approx(loss(format, plain, weight, hessian), rel=0.01)


@pytest.mark.parametrize("format", [iq2_xs.FORMAT, q4_k.FORMAT, nf4.FORMAT, hqq_axis0.FORMAT], ids=lambda format: format.name)
def test_fields_are_chosen_again_only_for_less_loss(format: Format) -> None:
    """Whatever they begin with: after rounding, all kinds of fields have much to gain."""
    weight, hessian = layer()
    rounded = format.quantize(weight)
    before = {name: tensor.clone() for name, tensor in rounded.tensors.items()}
    chosen = descend(Descent(rounded, weight, hessian))
    assert all(torch.equal(tensor, before[name]) for name, tensor in rounded.tensors.items())
    assert loss(format, chosen, weight, hessian) < 0.9 * loss(format, rounded, weight, hessian)
    exact = format.dequantize(rounded, torch.float32)
    assert descend(Descent(rounded, exact, hessian)) is rounded


def test_columns_are_gathered_by_an_index_only_where_they_are_not_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decoding without an index is several times as fast, and trials of ranges are mostly decoding."""
    format, (weight, _) = int_group.FORMAT, layer()
    packed = format.quantize(weight, group=64)
    fields = format.unpack(packed)
    read: list[bool] = []

    def decode(variant: Variant, own: Mapping[str, Tensor], sizes: Mapping[str, int], out: Tensor) -> None:
        read.append("g" in own)
        decode_fields(variant, own, sizes, out)

    monkeypatch.setattr("qdsl.encode.calibrated.affine.decode_fields", decode)
    for index in fields["g"], fields["g"].flip(0):
        exact = (fields["q"].float() - fields["z"].float()[:, index]) * fields["s"].float()[:, index]
        assert torch.equal(decoded(packed, {**fields, "g": index}), exact)
    assert read == [False, True]


def test_no_row_is_swept_where_the_first_ones_gain_little() -> None:
    weight, hessian = layer()
    rounded = q4_k.FORMAT.quantize(weight)
    first = int(descent.TRIED * SHAPE[0])
    exact = torch.cat([q4_k.FORMAT.dequantize(rounded, torch.float32)[:first], weight[first:]])
    assert descend(Descent(rounded, exact, hessian)) is rounded
    assert descend(Descent(rounded, weight, hessian)) is not rounded


def test_fields_that_decode_to_a_larger_loss_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even where the sums say that it fell."""
    def spoil(run: Run, name: str) -> None:
        run.fields = {**run.fields, name: torch.zeros_like(run.fields[name])}
        run.gradient.zero_()

    weight, hessian = layer()
    rounded = q4_k.FORMAT.quantize(weight)
    monkeypatch.setattr(Run, "choose", spoil)
    assert descend(Descent(rounded, weight, hessian)) is rounded


def test_the_best_row_of_a_grid_is_chosen() -> None:
    """Of all rows of it, by the loss of the whole weight: no other row for any one group has less."""
    format, (weight, hessian) = iq2_xs.FORMAT, layer()
    chosen = descend(Descent(format.quantize(weight[:1]), weight[:1], hessian))
    fields = format.unpack(chosen)
    state = Descent(chosen, weight[:1], hessian)
    kind = affine(chosen, "g", 8)
    assert kind is not None and kind.values.shape[1] == 8
    before = state.loss
    state.sweep(["g"])
    least = [min(loss(format, format.pack({**fields, "g": torch.where(torch.arange(64) == group, code, fields["g"])}),
                      weight[:1], hessian) for code in kind.choices[::37]) for group in (0, 31, 63)]
    assert state.loss <= before and all(state.loss <= one * (1 + 1e-4) for one in least)


def test_moments_do_not_depend_on_the_size_of_batches() -> None:
    x = torch.randn(96, 32, generator=torch.Generator().manual_seed(1))
    at_once, in_parts = Hessian.empty(32), Hessian.empty(32)
    at_once.add(x)
    for part in (x[:1], x[1:51], x[51:]):
        in_parts.add(part)
    assert at_once.rows == in_parts.rows == 96
    torch.testing.assert_close(at_once.matrix, in_parts.matrix, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(at_once.matrix, x.T @ x / 96, rtol=1e-5, atol=1e-6)


def test_importance_alone_lessens_the_weighted_error() -> None:
    weight, hessian = layer()
    for format in (int_group.FORMAT, nf4.FORMAT):
        plain, weighted = (((format.dequantize(packed, torch.float32) - weight).square() * hessian.importance).sum()
                           for packed in (format.quantize(weight), quantize(format, weight, hessian, IMPORTANCE)))
        assert weighted < 0.99 * plain
        without, equal = (quantize(format, weight[:8], inputs, IMPORTANCE, power=power) for inputs, power in
                          ((hessian, 0), (Hessian(torch.eye(SHAPE[1])), 1)))
        assert torch.equal(format.dequantize(without), format.dequantize(equal))


def test_columns_without_inputs_and_few_samples_are_factored() -> None:
    """The factor is that of the damped matrix, and its columns are in units of their own."""
    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(2))
    x[:, 7] = 0
    matrix = x.T @ x / 5
    upper, _ = factor(matrix)
    assert bool(torch.isfinite(upper).all()) and torch.equal(upper, upper.triu()) and bool((upper.diagonal() == 1).all())
    damped = matrix + 0.01 * (matrix.trace() + 1) / 64 * torch.eye(64)
    damped[7, 7] += 1
    inverse = torch.linalg.inv(upper.double())
    units = inverse @ damped.double() @ inverse.T
    torch.testing.assert_close(units, torch.diag(units.diagonal()), rtol=0, atol=1e-5)


def test_moments_that_do_not_fit_are_refused() -> None:
    weight, hessian = layer()
    with pytest.raises(FormatError, match="has 256 columns, and its inputs had 512"):
        quantize(int_group.FORMAT, weight[:, :256], hessian)
    with pytest.raises(FormatError, match="not finite"):
        factor(torch.full((4, 4), torch.nan))
