"""Rows of a packed weight, as an embedding looks them up: the bits of the whole weight's, without decoding it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.codecs.huffman_lanes import reference as huffman_lanes
from qdsl.codecs.row_window import reference as row_window
from qdsl.codecs.window import reference as window
from qdsl.generated import fix3, fix4, fp8_block, hlane, int8_block, int_group, q4_0
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.weight import streams
from tests.support.formats import same_bits
from tests.support.packed_layers import is_unchanged, module_of, quantized, sample, stored_bits


@pytest.mark.parametrize(("name", "k"), [
    *((name, 128) for name in ("q4_0", "fp8_block", "int8_block", "nf4", "hlane", "fix4", "fix3", "df11", "bitnet",
                                "awq_gemv_fast")),
    ("hlane", 2304), ("fix4", 2304), ("fix3", 2304)])
def test_rows_are_those_of_the_whole_weight(name: str, k: int) -> None:
    """In any order, some of them twice, as one number or none."""
    module = module_of(name)
    packed = module.quantize(sample(300 if name not in ("bitnet", "awq_gemv_fast") else 304, k).bfloat16())
    for dtype in (torch.float32, torch.bfloat16):
        whole = module.dequantize(packed, dtype)
        for index in (torch.tensor([[299, 0, 17], [17, 128, 127]]), torch.tensor(5), torch.zeros(0, 3, dtype=torch.int64),
                      torch.arange(299, -1, -7, dtype=torch.int32)):
            assert same_bits(packed.format.dequantize_rows(packed, index, dtype), whole[index.long()])
    for index in (torch.tensor([1, packed.shape[0]]), torch.tensor([-1])):
        with pytest.raises(IndexError, match="out of range"):
            module.Embedding(packed)(index)
    with pytest.raises(FormatError, match="int32 or int64, not float32"):
        packed.format.dequantize_rows(packed, torch.ones(2))


def test_rows_of_act_order_weights() -> None:
    packed = int_group.quantize(sample(64, 128), "gptq_v2", group=32)
    shuffled = packed.tensors["g_idx"][torch.randperm(128, generator=torch.Generator().manual_seed(1))]
    packed = int_group.wrap({**packed.tensors, "g_idx": shuffled}, storage="gptq_v2", **packed.params)
    index = torch.tensor([63, 2, 2])
    rows = packed.format.dequantize_rows(packed, index, torch.float32)
    assert same_bits(rows, int_group.dequantize(packed, torch.float32)[index])


class Decoded:
    """How many rows were decoded."""

    rows = 0

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        for module in (fp8_block, int8_block, hlane, fix4, fix3):
            real = module.FORMAT.dequantize
            patch.setattr(module.FORMAT, "dequantize", functools.partial(self._count, real))

    def _count(self, real: Callable[..., Tensor], packed: PackedWeight, *args: Any) -> Tensor:
        self.rows += packed.shape[0]
        return real(packed, *args)


def test_few_rows_are_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks of 128 rows with a shared scale; rows of streams and no others, of which groups of lanes are decoded."""
    decoded, index = Decoded(monkeypatch), torch.tensor([3, 700, 3, 701])
    symbols: list[int] = []
    real = huffman_lanes._decode_groups
    monkeypatch.setattr(huffman_lanes, "_decode_groups", lambda *args: symbols.append(len(args[2])) or real(*args))
    for module in (hlane, fix4, fix3):
        monkeypatch.setattr(streams, "decode", lambda *_: pytest.fail("all symbols were decoded"))
        decoded.rows = 0
        module.Embedding(module.quantize(sample(1024, 4096)))(index)
        assert decoded.rows == 3
    assert symbols == [2]                                        # of four rows each
    for module in (fp8_block, int8_block):
        decoded.rows = 0
        module.Embedding(module.quantize(sample(1024, 128), bn=128, bk=128))(index)
        assert decoded.rows == 256


@pytest.mark.parametrize("name", ["q4_0", "fp8_block", "hlane"])
def test_a_compiled_embedding(name: str) -> None:
    torch.compiler.reset()
    layer = module_of(name).Embedding(quantized(name))
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for ids in (torch.tensor([[5, 63, 5]]), torch.arange(9), torch.arange(7)):
        assert same_bits(compiled(ids), layer(ids))


def test_damaged_streams_are_refused_for_rows_too() -> None:
    for module, name in ((hlane, "starts"), (fix4, "patch_start"), (fix3, "patch_start")):
        packed = module.quantize(sample(64, 256))
        tensors = {**packed.tensors, name: packed.tensors[name] + 7}
        with pytest.raises(FormatError, match="stream of 'exponents' is damaged"):
            packed.format.dequantize_rows(packed.derive(tensors), torch.tensor([1]))


@pytest.mark.parametrize("coding", [huffman_lanes, window, row_window])
@pytest.mark.parametrize("shape", [(100, 2304), (33, 64), (7, 4104)])
def test_rows_of_a_code(coding: ModuleType, shape: tuple[int, int]) -> None:
    symbols = np.random.default_rng(0).binomial(40, 0.5, shape).astype(np.uint8)
    symbols[0, ::3] = 200
    tensors = coding.encode(symbols, np.bincount(symbols.reshape(-1), minlength=256))
    assert (coding.decode(tensors, shape) == symbols).all()
    for rows in (np.array([0]), np.array([0, 1, shape[0] - 1]), np.arange(shape[0]), np.zeros(0, np.int64)):
        assert (coding.decode_rows(tensors, shape, rows) == symbols[rows]).all()


def test_an_embedding_has_what_torchs_has() -> None:
    """max_norm scales decoded rows as nn.Embedding scales its table, and leaves the packed table as it is."""
    packed, ids = quantized("q4_0"), torch.tensor([1, 5, 5, 60])
    for norm_type, dtype in ((2.0, torch.float32), (1.0, torch.float32), (2.0, torch.bfloat16)):
        layer = q4_0.Embedding(packed, padding_idx=-1, dtype=dtype, max_norm=11.0, norm_type=norm_type, scale_grad_by_freq=True,
                               sparse=True)
        assert (layer.padding_idx, layer.max_norm, layer.norm_type, layer.scale_grad_by_freq, layer.sparse) == (
            63, 11.0, norm_type, True, True)
        before, dense = stored_bits(layer), layer.dense()
        assert (dense.max_norm, dense.norm_type, dense.padding_idx, dense.sparse) == (11.0, norm_type, 63, True)
        torch.testing.assert_close(layer(ids), dense(ids))
        assert (layer(ids).float() != q4_0.Embedding(packed)(ids)).any() and is_unchanged(layer, before)
    plain = q4_0.Embedding(packed)
    assert (plain.max_norm, plain.norm_type, plain.scale_grad_by_freq, plain.sparse) == (None, 2.0, False, False)
    with pytest.raises(FormatError, match="padding_idx 64"):
        q4_0.Embedding(packed, padding_idx=64)
