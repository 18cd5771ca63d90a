"""Quantizers of the IQ types: errors beside ggml's own, and rows that are easily got wrong.  Bytes are in test_goldens.py."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.checkpoint.files.safetensors import TensorFile
from qdsl.jobs.gguf import run
from qdsl.jobs.gguf.mixes import IMATRIX_POWERS
from qdsl.runtime import FormatError
from tests.support.formats import ROOT, SHIPPED, module, same_bits

DATA = ROOT / "tests" / "data" / "gguf"
FORMATS = {path.stem: module(path) for path in SHIPPED if path.stem.startswith("iq")}
ERRORS: dict[str, dict[str, float]] = json.loads((DATA / "errors.json").read_text())
MOST = {"iq2_xxs": 0.96}                                         # of ggml's error


@cache
def inputs() -> dict[str, Tensor]:
    with np.load(DATA / "inputs.npz") as file:
        return {name: torch.from_numpy(file[name].copy()) for name in ("x_gauss", "x_edge", "imatrix")}


@cache
def real() -> Tensor:
    """48 rows of the one weight whose columns are a multiple of 256."""
    with TensorFile(ROOT / "tests" / "data" / "weights" / "minilm_layer0_bf16.safetensors") as file:
        return file.tensor("encoder.layer.0.output.dense.weight")[:48].float()


def error(module: ModuleType, weight: Tensor, importance: Tensor | None) -> float:
    """The weighted error of what is stored."""
    return relative(weight, module.dequantize(module.quantize(weight, importance=importance), torch.float32), importance)


def relative(weight: Tensor, decoded: Tensor, importance: Tensor | None) -> float:
    """importance * sqrt(mean square of 256 + w^2) * error^2, summed, relative to the weight's own squares."""
    x = weight.double().view(-1, weight.shape[1] // 256, 256)
    counts = ((x * x).mean(-1, keepdim=True) + x * x).sqrt()
    if importance is not None:
        counts *= importance.double().view(-1, 256)
    return float((counts * (x - decoded.double().view_as(x)) ** 2).sum() / (counts * x * x).sum())


@pytest.mark.parametrize("importance", ["none", "ones", "imatrix"])
@pytest.mark.parametrize("name", ERRORS)
def test_errors_on_real_weights_are_at_most_those_of_ggml(name: str, importance: str) -> None:
    """Without an importance all columns count alike."""
    counts = {"none": None, "ones": torch.ones(1536), "imatrix": inputs()["imatrix"].repeat(3)}[importance]
    wanted = ERRORS[name][importance if importance == "imatrix" else "ones"]
    assert error(FORMATS[name], real(), counts) <= MOST.get(name, 1) * wanted


class _RealWeight:
    """One tensor, as a file of GGUF weights gives its rows."""

    path = DATA
    tensors: Mapping[str, Any] = {}

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        return real()[start:stop]


@pytest.mark.parametrize("type", IMATRIX_POWERS)
def test_an_imatrix_costs_no_signal_to_noise(type: str) -> None:
    """With the default power both errors are below ggml's: plain ones, and those that its importance matrix weighs."""
    wanted, importance = ERRORS[type.lower()], inputs()["imatrix"].repeat(3)
    default, full = (run.encode(_RealWeight(), run.Task("w", type, 0, 48, importance, power))[1].data()
                     for power in (IMATRIX_POWERS[type], 1.0))
    assert float(full["snr_db"] or 0) < wanted["imatrix_snr_db"] < float(default["snr_db"] or 0)
    weighted = 10 ** (-float(default["weighted_snr_db"] or 0) / 10)
    assert 10 ** (-float(full["weighted_snr_db"] or 0) / 10) < weighted < wanted["imatrix"]


@pytest.mark.parametrize("name", ERRORS)
def test_errors_on_rows_of_every_kind_are_hardly_above_those_of_ggml(name: str) -> None:
    """Outliers, one weight that is not 0, constants, ramps: none alone may be much worse than ggml's (1.05 of its error)."""
    weight = inputs()["x_edge"]
    with np.load(DATA / f"{name}.npz") as file:
        theirs = torch.from_numpy(file["y_edge"]).double()
    ours = FORMATS[name].dequantize(FORMATS[name].quantize(weight), torch.float32).double()
    counts = ((weight.double() ** 2).mean(1, keepdim=True) + weight.double() ** 2).sqrt()
    errors, wanted = ((counts * (weight.double() - decoded) ** 2).sum(1) for decoded in (ours, theirs))
    assert (errors > 1.05 * wanted).nonzero().flatten().tolist() == []


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_zeros_stay_zeros_and_tiny_weights_become_them(name: str) -> None:
    weight = torch.zeros(4, 256)
    weight[1] = -0.0
    weight[2] = 1e-30
    weight[3, 7] = -1e-40
    assert not FORMATS[name].dequantize(FORMATS[name].quantize(weight), torch.float32).any()


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_a_scale_that_does_not_fit_is_refused_with_its_row_and_block(name: str) -> None:
    """A block of IQ4_XS whose search fails is one of 32 columns."""
    weight = torch.ones(3, 512)
    block = {"iq4_nl": "9", "iq4_xs": "(1|9)"}.get(name, "1")
    for large in (1e9, 1e18, 3e38):
        weight[1, 300:] = large
        with pytest.raises(FormatError, match=rf"the scale \S+ of block \[1, {block}\] does not fit f"):
            FORMATS[name].quantize(weight)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_rows_are_quantized_alone(name: str) -> None:
    """Whatever rows are beside it, and on however many threads, a row has the same bytes."""
    weight, importance = inputs()["x_gauss"], inputs()["imatrix"]
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(1 if threads > 1 else 2)
        alone = [FORMATS[name].quantize(row[None], importance=importance).tensors["blocks"] for row in weight]
    finally:
        torch.set_num_threads(threads)
    both = FORMATS[name].quantize(weight, importance=importance).tensors["blocks"]
    assert same_bits(torch.cat(alone), both)


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_columns_of_more_importance_are_nearer(name: str) -> None:
    """Errors shrink where an importance says so; where all are as important, it says nothing, however small it is."""
    weight = inputs()["x_gauss"]
    importance = torch.full((512,), 0.05)
    importance[::4] = 1
    plain = FORMATS[name].quantize(weight, importance=torch.ones(512)).tensors["blocks"]
    weighted = FORMATS[name].dequantize(FORMATS[name].quantize(weight, importance=importance), torch.float32)
    usual = FORMATS[name].dequantize(FORMATS[name].wrap({"blocks": plain}), torch.float32)
    assert relative(weight, weighted, importance) < 0.95 * relative(weight, usual, importance)
    assert same_bits(FORMATS[name].quantize(weight, importance=torch.full((512,), 2.0 ** -60)).tensors["blocks"], plain)


@pytest.mark.parametrize("name", ERRORS)
def test_the_power_of_two_of_a_weight_does_not_matter(name: str) -> None:
    """The largest weights that fit, and weights whose squares are 0 in float32, have the codes of all others."""
    weight = inputs()["x_gauss"]
    wanted = FORMATS[name].unpack(FORMATS[name].quantize(weight))
    fields = FORMATS[name].unpack(FORMATS[name].quantize(weight * 2 ** 12))
    assert all(torch.equal(fields[key], value * 2 ** 12 if key == "d" else value) for key, value in wanted.items())


@pytest.mark.parametrize("name", ERRORS)
def test_what_a_format_holds_comes_back(name: str) -> None:
    """Weights that are the values of random blocks: the error is that of scales alone, which a search only comes near."""
    with np.load(DATA / f"{name}.npz") as file:
        weight = torch.from_numpy(file["y_rand"].copy()).view(-1, 256)
    assert error(FORMATS[name], weight, None) < 0.01
