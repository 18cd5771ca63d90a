"""Schemes for any table of values: a second reading chooses the same, and no scale of a plain search has a smaller error."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from qdsl.generated import ik_iq2_k, ik_iq3_k, ik_iq4_k, ik_iq4_ks, ik_iq5_k
from qdsl.runtime import FormatError
from tests.support.blessing import prove_quantized, reading
from tests.support.formats import Case

HEAD = "format: {name}\nweight: [N, K]\n"
CODES = """\
storage:
  plain:
    codes: {{tensor: "u8[n<N, j<K/2]", record: "{codes}"}}
    scales: {{tensor: "{scale}[n<N, g<K/{size}]", record: "s[n, g]"}}
"""
SPECS = {
    # Microsoft floating point: a sign and a magnitude for each weight, an exponent for 16 of them.
    "shared_exponents": 'fields: {s: "e8m0[n, k // 16]", q: "u3[n, k]", m: "u1[n, k]"}\n'
                        "decode: s * (q * 0.25 * (1 - 2 * m))\nencode: least_squares(code=q, sign=m, scale=s)\n"
                        + CODES.format(codes="q[n, 2*j] m[n, 2*j] q[n, 2*j + 1] m[n, 2*j + 1]", scale="e8m0", size=16),
    # Logarithms in base the square root of 2, and signs.
    "logarithms": "tables:\n  level: [1.0, 1.4142135, 2.0, 2.828427, 4.0, 5.656854, 8.0, 11.313708]\n"
                  'fields: {s: "f16[n, k // 32]", q: "u3[n, k]", m: "u1[n, k]"}\n'
                  "decode: level[q] * s * (1 - 2 * m)\nencode: least_squares(code=q, sign=m, scale=s)\n"
                  + CODES.format(codes="q[n, 2*j] m[n, 2*j] q[n, 2*j + 1] m[n, 2*j + 1]", scale="f16", size=32),
    # Numbers in no order, some of them twice, which a row's scale of either sign multiplies.
    "unordered": "tables:\n  level: [3, -1, 0, 7, 7, -2, 1, 12, -5, 0, 4, 2, -9, 6, 5, 10]\n"
                 'fields: {s: "f32[n, k // 64]", q: "u4[n, k]"}\ndecode: s * level[q]\nencode: least_squares(code=q, scale=s)\n'
                 + CODES.format(codes="q[n, 2*j] q[n, 2*j + 1]", scale="f32", size=64),
    # Squares of integers: a formula, not a table.
    "squares": 'fields: {s: "bf16[n, k // 32]", q: "i4[n, k]"}\ndecode: s * (q * q - 20)\n'
               "encode: least_squares(code=q, scale=s)\n"
               + CODES.format(codes="q[n, 2*j] q[n, 2*j + 1]", scale="bf16", size=32),
    "floats": 'fields: {s: "f16[n, k // 32]", q: "e2m1[n, k]"}\ndecode: q * s\nencode: least_squares(code=q, scale=s)\n'
              + CODES.format(codes="q[n, 2*j] q[n, 2*j + 1]", scale="f16", size=32),
}


@pytest.fixture(params=SPECS)
def case(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.setenv("QDSL_CACHE", str(tmp_path / "cache"))
    path = tmp_path / f"{request.param}.yaml"
    path.write_text(HEAD.format(name=request.param) + SPECS[request.param])
    return Case(path, "plain", ())


def weights(rows: int, columns: int) -> Tensor:
    """Normal weights of several sizes, a row of zeros, and blocks of one sign."""
    weight = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    weight *= torch.logspace(-3, 2, rows)[:, None]
    weight[1] = 0
    weight[2, :64] = weight[2, :64].abs()
    weight[2, 64:] = -weight[2, 64:].abs()
    return weight


def test_a_second_reading_chooses_the_same(case: Case) -> None:
    weight = weights(6, 128)
    importance = torch.rand(128, generator=torch.Generator().manual_seed(2))
    for options in ({}, {"importance": importance}) if case.module.FORMAT.variant({}).importance else ({},):
        packed = case.module.quantize(weight, **options)
        prove_quantized(reading(case, {}, (6, 128)), packed, weight, options)


def decoded_codes(form: ModuleType, fields: dict[str, Tensor]) -> Tensor:
    """All values of codes with a scale of 1, rising."""
    code = fields["q"]
    signs, numbers = (2, 8) if "m" in fields else (1, 16)
    words = torch.arange(128) % (signs * numbers)
    every = {"q": words % numbers - (8 if code.dtype == torch.int8 else 0), "m": words // numbers}
    ones = torch.ones(fields["s"].shape).to(fields["s"].dtype)
    whole = {name: every[name].to(field.dtype).expand(6, -1).contiguous() if name in every else ones
             for name, field in fields.items()}
    return form.dequantize(form.pack(whole), torch.float32)[0].unique()  # type: ignore[no-any-return]


def test_no_scale_of_a_plain_search_has_a_smaller_error(case: Case) -> None:
    """From the scale with which all weights lie within the values to half of it, and a little more, with all codes tried."""
    form, weight = case.module, weights(6, 128)
    packed = form.quantize(weight)
    fields = form.unpack(packed)
    values, size = decoded_codes(form, fields).double(), 128 // fields["s"].shape[1]
    blocks = weight.view(6, -1, size).double()
    kept = (form.dequantize(packed, torch.float32).double().view_as(blocks) - blocks).square().sum(2)
    largest = torch.maximum(blocks.amax(2) / values[-1], blocks.amin(2) / values[0]).clamp(min=0)
    for share in range(16, 37):
        scale = largest * share / 32
        if case.path.stem == "shared_exponents":
            scale = torch.exp2(torch.ceil(torch.log2(scale.clamp(min=1e-30))))
        levels = scale.to(fields["s"].dtype).double()[..., None] * values
        errors = (blocks[..., None] - levels[:, :, None]).square().min(3).values.sum(2)
        assert (kept <= errors * (1 + 1e-5) + 1e-15).all(), share


@pytest.mark.parametrize(("form", "most"), [(ik_iq4_ks, 0.0052), (ik_iq2_k, 0.0851), (ik_iq3_k, 0.0183),
                                           (ik_iq4_k, 0.00414), (ik_iq5_k, 0.000951)])
def test_steps_of_a_super_scale_lose_little(form: ModuleType, most: float) -> None:
    """Small scales in steps: the error is below that of scales in float32 of one table, or within a hundredth of it."""
    weight = torch.randn(16, 1024, generator=torch.Generator().manual_seed(3))
    packed = form.quantize(weight)
    error = (form.dequantize(packed, torch.float32) - weight).square().mean()
    assert error < most, error
    assert set(form.unpack(packed)["h"].unique().tolist()) == {0, 1}


def test_a_scale_that_does_not_fit_is_refused(case: Case) -> None:
    weight = torch.full((4, 128), 1e30)
    if case.path.stem in ("logarithms", "floats"):
        with pytest.raises(FormatError, match=r"does not fit f16"):
            case.module.quantize(weight)
    else:
        assert torch.isfinite(case.module.dequantize(case.module.quantize(weight), torch.float32)).all()


