"""Stored tables: AQLM's codebook of 65536 rows, which other tests do not go through, and tables of rows and blocks."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.generated import any_precision, coreml_lut, squeezellm
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


# -- levels by k-means ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("form", "params"), [(squeezellm, {"bits": 3}), (squeezellm, {"bits": 4, "level_type": "f16"}),
                                              (coreml_lut, {"bits": 2, "rows": 16}), (coreml_lut, {"bits": 6, "rows": -1}),
                                              (any_precision, {})], ids=str)
def test_codes_are_of_the_nearest_levels(form: ModuleType, params: dict[str, int | str]) -> None:
    """By all distances, in float64; the last block of rows is short."""
    weight = torch.randn(37, 1024, generator=torch.Generator().manual_seed(3)) / 16
    packed = form.quantize(weight, **params)
    fields = form.unpack(packed)
    levels = fields["lut"].double().reshape(-1, fields["lut"].shape[-1])
    levels = levels.repeat_interleave({16: 16, -1: 37}.get(params.get("rows"), 1), 0)[:37, None]    # type: ignore[arg-type]
    errors = (weight.double()[..., None] - levels).abs()
    assert torch.equal(errors.gather(2, fields["q"].long()[..., None])[..., 0], errors.min(2).values)
    assert (levels.diff(dim=2) >= 0).all()


def test_levels_of_normal_weights_are_near_the_best() -> None:
    """Max's quantizers of a normal density, with 4, 16 and 64 levels: mean squares of 0.1175, 0.009497 and 0.000642."""
    weight = torch.randn(64, 4096, generator=torch.Generator().manual_seed(4))
    for bits, best in ((2, 0.1175), (4, 0.009497), (6, 0.000642)):
        packed = coreml_lut.quantize(weight, bits=bits, rows=-1, level_type="f32")
        assert (coreml_lut.dequantize(packed, torch.float32) - weight).square().mean() < 1.02 * best


def test_weights_of_few_numbers_are_kept() -> None:
    """Bit by bit, but for the sign of zero; so what a format decodes to is quantized without loss."""
    weight = torch.tensor([0.0, -0.0, 3e-8, -7.0, 2.5, 2.5, 2.5, 1e4])[torch.randint(0, 8, (5, 64))]
    decoded = squeezellm.dequantize(squeezellm.quantize(weight, bits=3), torch.float32)
    assert torch.equal(decoded, weight)
    again = squeezellm.dequantize(squeezellm.quantize(decoded, bits=4), torch.float32)
    assert torch.equal(again, weight)


def test_levels_that_do_not_fit_are_refused_with_their_block() -> None:
    weight = torch.randn(37, 64)
    weight[35, 7] = 1e30
    with pytest.raises(FormatError, match=r"the level 1e\+30 of block 35 does not fit f16"):
        squeezellm.quantize(weight, bits=4, level_type="f16")
    with pytest.raises(FormatError, match=r"the level 1e\+30 of block 1 does not fit f16"):
        coreml_lut.quantize(weight, bits=4, rows=32)


def test_tables_of_blocks_are_looked_up_by_broadcasting() -> None:
    draw = torch.Generator().manual_seed(2)
    tables, codes = torch.randn(3, 1, 4, generator=draw), torch.randint(0, 4, (3, 5), generator=draw)
    assert same_bits(lookup(tables, codes), torch.stack([tables[i, 0][codes[i]] for i in range(3)]))
    rows = torch.randn(2, 4, 8, generator=draw)                  # of two blocks of columns, for every row
    picked = entries(rows, codes[:, :2])
    assert same_bits(picked, torch.stack([torch.stack([rows[j, codes[i, j]] for j in range(2)]) for i in range(3)]))
