"""What tests of products on a CPU share: random numbers, the bound of a product, and weights without an order of columns."""

from __future__ import annotations

import torch
from torch import Tensor

from qdsl.runtime.cpu import linear as cpu
from qdsl.runtime.weight.packed import PackedWeight
from tests.support.formats import Case, random_fields


def sample(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Random numbers of the size of weights."""
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) / 16).to(dtype)


def check(product: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None, what: object = "", terms: int = 1,
          rounds_weight: bool = False) -> None:
    """Against float64: a float32 sum of K + 1 terms in any order, rounded to x's dtype once.

    terms: times as large that terms, or as many that roundings, are where a scale is multiplied with sums of codes.
    rounds_weight: weights are rounded to x's dtype, too.
    """
    extra = torch.zeros(weight.shape[0], dtype=torch.float64) if bias is None else bias.double()
    wanted = x.double() @ weight.double().t() + extra
    spread = x.double().abs() @ weight.double().abs().t() + extra.abs()
    info = torch.finfo(x.dtype)
    sums = (1.01 * terms * (weight.shape[1] + 1) * 2.0 ** -24 + (info.eps / 2 if rounds_weight else 0.0)) * spread
    assert product.dtype == x.dtype and product.shape == wanted.shape
    allowed = sums + info.eps / 2 * (wanted.abs() + sums) + info.smallest_normal * info.eps
    assert ((product.double() - wanted).abs() <= allowed).all(), what


def plain(packed: PackedWeight) -> Tensor:
    """The weight as torch decodes it, in float32."""
    cpu.compile_products(False)
    weight: Tensor = packed.format.dequantize(packed, torch.float32)
    cpu.compile_products()
    return weight


def in_order(case: Case, shape: tuple[int, int], seed: int = 0) -> PackedWeight:
    """A random weight without an order of its columns."""
    fields = case.module.FORMAT.variant(case.choice).fields
    stored = {name: value for name, value in random_fields(case, shape, seed).items() if fields[name].type != "index"}
    packed: PackedWeight = case.module.pack(stored, storage=case.storage, **case.choice)
    return packed.decode_streams()
