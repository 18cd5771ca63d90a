"""Weights of lossless codes on a CPU: products with decoded copies have the bits of dense layers, and follow their weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from qdsl.generated import df11, fix4, hlane, q4_0
from qdsl.models.processor import arithmetic_text
from qdsl.runtime.cpu import dense, kept
from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.torch import siblings
from tests.support.cpu_products import sample

MODULES = [df11, fix4, hlane]


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch, cache_folder: Path) -> Iterator[None]:
    monkeypatch.setenv("QDSL_CACHE", str(cache_folder))
    monkeypatch.setattr(kept, "_entries", {})
    cpu.compile_products()
    yield
    cpu.compile_products(False)


def quantized(module: Any, weight: Tensor) -> Any:
    """A packed weight, of tensors that count their changes: those of inference mode do not."""
    return module.quantize(weight).apply(Tensor.clone)


def layer(module: Any, weight: Tensor) -> Any:
    """A layer that keeps a copy, as in models that loaders fill."""
    own = module.Linear(quantized(module, weight), sample(len(weight), seed=1, dtype=torch.bfloat16))
    own.keeps_copy = True
    return own


@pytest.mark.parametrize("module", MODULES)
def test_products_have_the_bits_of_a_dense_layer(module: Any) -> None:
    """Also prepared ones, those of many rows, and x with further axes."""
    weight = sample(64, 256, dtype=torch.bfloat16)
    own = layer(module, weight)
    with torch.no_grad():
        for turn in range(2):
            for sizes in ((1, 256), (1, 1, 256), (2, 9, 256), (70, 256)):
                x = sample(1, 18 * 256 * 4, seed=turn, dtype=torch.bfloat16).flatten()[:torch.Size(sizes).numel()].view(sizes)
                assert torch.equal(own(x), linear(x, weight, own.bias))
    assert len(kept._entries) == 1 and own._packed.plan.ready
    copy = dense.kept_decoded(own.packed)
    assert copy is not None and torch.equal(copy, weight) and copy.dtype == torch.bfloat16


@pytest.mark.parametrize("module", MODULES)
def test_changed_weights_get_new_copies(module: Any) -> None:
    first, second = (sample(64, 256, seed=seed, dtype=torch.bfloat16) for seed in (1, 2))
    own, x = layer(module, first), sample(1, 256, dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(own(x), linear(x, first, own.bias))
        own.load_state_dict(layer(module, second).state_dict(), assign=True)
        for _ in range(2):
            assert torch.equal(own(x), linear(x, second, own.bias))


def test_which_weights_have_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = sample(64, 256, dtype=torch.bfloat16)
    packed = quantized(fix4, weight)
    assert dense.kept_decoded(packed) is None                         # of no layer
    packed.keeps_copy = True
    monkeypatch.setenv(kept.INTERLEAVE.variable, "never")
    assert dense.kept_decoded(packed) is None
    monkeypatch.delenv(kept.INTERLEAVE.variable)
    monkeypatch.setattr(dense, "free_memory", lambda: 2 * weight.nbytes - 1)
    assert dense.kept_decoded(packed) is None and torch.equal(fix4.linear(weight[:1], packed), linear(weight[:1], weight))
    monkeypatch.setattr(kept, "_entries", {})
    monkeypatch.setattr(dense, "free_memory", lambda: 2 * weight.nbytes)
    assert dense.kept_decoded(packed) is not None
    assert [way.kind for way in cpu.candidates(packed, 1, torch.bfloat16)][:2] == ["dense", "stored"]
    assert cpu.candidates(packed, 1, torch.float32)[0].kind != "dense"
    lossy = quantized(q4_0, weight)
    lossy.keeps_copy = True
    assert dense.kept_decoded(lossy) is None


def test_loaders_make_the_copies() -> None:
    model = nn.Sequential(layer(hlane, sample(64, 256, dtype=torch.bfloat16)))
    for dtype in (torch.bfloat16, torch.float32):                # in which weights are decoded for every product
        model[0].compute_dtype = dtype
        siblings.make_ready(model, lambda name: True)
        assert [entry is not None for entry in kept._entries.values()] == [True]
    model.dtype, model.device = torch.bfloat16, torch.device("cpu")
    assert "lossless weights kept decoded" in arithmetic_text(model)
    model[0].keeps_copy = False
    assert "decoded" not in arithmetic_text(model)
