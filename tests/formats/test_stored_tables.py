"""A stored table of more rows than other tests go through one by one: AQLM's codebook of 65536."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from qdsl.runtime import FormatError, PackedWeight
from tests.kernels.test_kernels import DEVICE, dequantized, linear
from tests.support.formats import ROOT, module, same_bits

AQLM = module(ROOT / "specs" / "aqlm_1x16.yaml")


def stored(n: int, k: int, dtype: torch.dtype = torch.float16) -> dict[str, Tensor]:
    """Tensors as aqlm names and shapes them, with the codes at both ends of their range."""
    draw = torch.Generator().manual_seed(n)
    codes = torch.randint(-(1 << 15), 1 << 15, (n, k // 8, 1), generator=draw).to(torch.int16)
    codes.view(-1)[:4] = torch.tensor([-(1 << 15), -1, 0, (1 << 15) - 1], dtype=torch.int16)
    return {"codes": codes, "codebooks": torch.randn(1, 1 << 16, 1, 8, generator=draw).to(dtype),
            "scales": torch.rand(n, 1, 1, 1, generator=draw).to(dtype)}


def plain(tensors: dict[str, Tensor]) -> Tensor:
    rows = tensors["codebooks"].float()[0, :, 0]
    return (rows[tensors["codes"][..., 0].int() & 65535] * tensors["scales"].float()[..., 0]).flatten(1)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_weights_bytes_and_kernels(dtype: torch.dtype) -> None:
    tensors = stored(17, 72, dtype)
    packed: PackedWeight = AQLM.wrap(tensors)
    wanted = plain(tensors)
    assert packed.shape == (17, 72)
    assert same_bits(AQLM.dequantize(packed, torch.float32), wanted)
    assert all(same_bits(tensor, tensors[name]) for name, tensor in AQLM.pack(AQLM.unpack(packed)).tensors.items())
    assert same_bits(dequantized(packed.to(DEVICE)).cpu(), wanted)
    x = torch.randn(2, 72, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(linear(x.to(DEVICE), packed.to(DEVICE), None).cpu(), x @ wanted.t())


def test_rows_and_columns_keep_the_table() -> None:
    packed: PackedWeight = AQLM.wrap(stored(16, 64))
    weight = AQLM.dequantize(packed, torch.float32)
    for dim, part in (("N", weight[5:9]), ("K", weight[:, 24:40])):
        cut = packed.cut(dim, *((5, 9) if dim == "N" else (24, 40)))
        assert same_bits(AQLM.dequantize(cut, torch.float32), part)
        assert cut.tensors["codebooks"].data_ptr() == packed.tensors["codebooks"].data_ptr()
    layer = AQLM.Linear(packed)
    x = torch.randn(3, 64)
    torch.testing.assert_close(layer(x), x @ weight.t())


def test_a_table_of_another_size_is_refused() -> None:
    tensors = stored(16, 64)
    with pytest.raises(FormatError, match="codebooks"):
        AQLM.wrap({**tensors, "codebooks": tensors["codebooks"][:, :256]})
