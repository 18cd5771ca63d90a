"""Stored tables: AQLM's codebook of 65536 rows, which other tests do not go through, and tables of rows and blocks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.runtime import FormatError, PackedWeight, entries, lookup
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


SQUEEZE = module(ROOT / "specs" / "squeezellm.yaml")


def squeezed(codes: np.ndarray, bits: int) -> np.ndarray:
    """Codes [K, N] as SqueezeLLM's pack2 lays them into int32 [K / 32 * bits, N]: of 3 bits, two codes straddle words."""
    k, n = codes.shape
    words = np.zeros((k // 32 * bits, n), np.uint32)
    places = [(j // 8, 4 * (j % 8), 0) for j in range(32)] if bits == 4 else [
        *((0, 3 * j, 0) for j in range(10)), (0, 30, 2), *((1, 3 * j + 1, 0) for j in range(10)), (1, 31, 1),
        *((2, 3 * j + 2, 0) for j in range(10))]
    for i in range(k):
        word, shift, inside = places[i % 32]
        code = codes[i].astype(np.uint32)
        words[i // 32 * bits + word] |= code << np.uint32(shift)
        if inside:                                               # the high bits go on in the next word
            words[i // 32 * bits + word + 1] |= code >> np.uint32(inside)
    return words.view(np.int32)


@pytest.mark.parametrize("bits", [4, 3])
def test_squeezellm(bits: int) -> None:
    draw = torch.Generator().manual_seed(bits)
    codes = torch.randint(0, 1 << bits, (24, 64), generator=draw)
    levels = torch.randn(24, 1 << bits, generator=draw)
    wanted = levels.gather(1, codes)
    packed: PackedWeight = SQUEEZE.wrap({"qweight": torch.from_numpy(squeezed(codes.t().numpy(), bits)), "lookup_table": levels})
    assert packed.params["bits"] == bits
    assert same_bits(SQUEEZE.dequantize(packed, torch.float32), wanted)
    assert same_bits(dequantized(packed.to(DEVICE)).cpu(), wanted)
    rows = packed.cut("N", 3, 9)
    assert rows.tensors["lookup_table"].shape == (6, 1 << bits)
    assert same_bits(SQUEEZE.dequantize(rows, torch.float32), wanted[3:9])


def test_tables_of_blocks_are_looked_up_by_broadcasting() -> None:
    draw = torch.Generator().manual_seed(2)
    tables, codes = torch.randn(3, 1, 4, generator=draw), torch.randint(0, 4, (3, 5), generator=draw)
    assert same_bits(lookup(tables, codes), torch.stack([tables[i, 0][codes[i]] for i in range(3)]))
    rows = torch.randn(2, 4, 8, generator=draw)                  # of two blocks of columns, for every row
    picked = entries(rows, codes[:, :2])
    assert same_bits(picked, torch.stack([torch.stack([rows[j, codes[i, j]] for j in range(2)]) for i in range(3)]))
