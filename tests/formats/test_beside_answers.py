"""What the recorded answers do not tell, as their weights are small: mutants.CAUGHT_ELSEWHERE names the mistakes."""

from __future__ import annotations

import torch

import qdsl


def test_rows_of_an_odd_number_of_bytes() -> None:
    module = qdsl.load("coreml_vectors")
    packed = module.FORMAT.empty((8, 33), "coreml", "cpu", bits=8)
    assert packed.tensors["indices"].shape == (2, 33)


def test_codes_are_quotients() -> None:
    """Not products with the reciprocal of a scale, which round otherwise for some of many weights."""
    weight = torch.randn(512, 512, generator=torch.Generator().manual_seed(0))
    fields = qdsl.load("fp8_ds_mla").unpack(qdsl.load("fp8_ds_mla").quantize(weight))
    units, scales = weight.view(512, 4, 128), fields["s"].unsqueeze(-1)
    codes = (units / scales).to(torch.float8_e4m3fn)
    assert not torch.equal(codes, (units * (1 / scales)).to(torch.float8_e4m3fn))
    assert torch.equal(codes.view(512, 512), fields["q"].view(torch.float8_e4m3fn))
