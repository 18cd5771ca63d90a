"""compressed-tensors' packed codes where N and K are no multiples of anything: against streams of bits made here."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from qdsl.generated import int_group
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.gpu import launch
from tests.support.formats import same_bits
from tests.support.interpreter import INTERPRETED, guarded
from tests.support.quick import examples

DEVICE = "cpu" if INTERPRETED else "cuda"
Words = npt.NDArray[np.int32]


def dense(codes: Tensor, bits: int) -> Words:
    """Codes [R, C] as a stream of bits for each row, low bits first, int32 [R, ceil(C * bits / 32)]."""
    bit_rows = codes.numpy()[:, :, None] >> np.arange(bits) & 1
    return words(bit_rows.reshape(len(codes), -1))


def apart(codes: Tensor, bits: int) -> Words:
    """As compressed-tensors did it before 0.18: as many whole codes as a word has room for, int32 [R, ceil(C / (32 // bits))]."""
    per_word = 32 // bits
    filled = np.pad(codes.numpy(), ((0, 0), (0, -codes.shape[1] % per_word))).reshape(len(codes), -1, per_word)
    bit_rows = (filled[..., None] >> np.arange(bits) & 1).reshape(*filled.shape[:2], -1)
    return words(np.pad(bit_rows, ((0, 0), (0, 0), (0, 32 - per_word * bits))).reshape(len(codes), -1))


def words(stream: npt.NDArray[np.int64]) -> Words:
    filled = np.pad(stream.astype(np.uint64), ((0, 0), (0, -stream.shape[1] % 32))).reshape(len(stream), -1, 32)
    return (filled << np.arange(32, dtype=np.uint64)).sum(-1, dtype=np.uint64).astype(np.uint32).view(np.int32)


@st.composite
def weights(draw: st.DrawFn) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Fields of a weight, whose last group may be short, and its bits and its group."""
    bits, group = draw(st.integers(2, 8)), draw(st.sampled_from([-1, 32, 64]))
    n, k = draw(st.integers(1, 70)), draw(st.integers(1, 140))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    groups = 1 if group == -1 else -(-k // group)

    def drawn(*shape: int) -> Tensor:
        return torch.randint(1 << bits, shape, generator=generator, dtype=torch.uint8)

    fields = {"q": drawn(n, k), "s": torch.randn(n, groups, generator=generator)}
    fields |= {"z": drawn(n, groups)} if draw(st.booleans()) else {}
    fields |= {"g": torch.randint(groups, (k,), generator=generator, dtype=torch.int32)} if draw(st.booleans()) else {}
    return fields, {"bits": bits, "group": group}


def expected(fields: dict[str, Tensor], bits: int, group: int) -> Tensor:
    k = fields["q"].shape[1]
    g = fields["g"].long() if "g" in fields else torch.arange(k) // (k if group == -1 else group)
    zero = fields["z"].float()[:, g] if "z" in fields else 2.0 ** (bits - 1)
    return (fields["q"].float() - zero) * fields["s"][:, g]


@given(weights(), st.sampled_from(["pack_quantized", "pack_quantized_0_17"]))
@settings(max_examples=examples(80), deadline=None)
def test_any_size(weight: tuple[dict[str, Tensor], dict[str, int]], storage: str) -> None:
    fields, params = weight
    bits = params["bits"]
    storage, stream = (storage, apart) if storage[-1] == "7" and bits in (3, 5, 6, 7) else ("pack_quantized", dense)
    packed = int_group.pack(fields, storage=storage, **params)
    assert np.array_equal(packed.tensors["weight_packed"].numpy(), stream(fields["q"], bits))
    if "z" in fields:
        assert np.array_equal(packed.tensors["weight_zero_point"].numpy(), stream(fields["z"].t().contiguous(), bits).T)
    unpacked = int_group.unpack(packed)
    assert unpacked.keys() == fields.keys() and all(torch.equal(unpacked[name], field) for name, field in fields.items())
    check_multiplied(packed, expected(fields, **params))
    check_found_and_cut(packed)


def check_multiplied(packed: PackedWeight, weight: Tensor) -> None:
    """Decoded and multiplied, by the reference; the kernels of formats run over odd shapes in test_kernels.py."""
    assert torch.equal(int_group.dequantize(packed, torch.float32), weight)
    x = torch.randn(2, packed.shape[1])
    most = float((x.abs() @ weight.abs().t()).max())
    assert torch.allclose(int_group.linear(x, packed), x @ weight.t(), rtol=0, atol=1e-5 * most)


def check_found_and_cut(packed: PackedWeight) -> None:
    params = {name: packed.params[name] for name in ("bits", "group")}
    again = int_group.wrap(packed.tensors, storage=packed.storage, **params)
    assert again.shape == packed.shape
    for name, tensor in packed.tensors.items():
        if name != "weight_shape" and tensor.shape[-1] > 1:
            with pytest.raises(FormatError):                     # a word less
                int_group.wrap({**packed.tensors, name: tensor[..., :-1]}, storage=packed.storage, **params)
    n, step = packed.shape[0], packed.step("N")
    if n > step:
        part = packed.cut("N", step, n)
        assert torch.equal(int_group.dequantize(part), int_group.dequantize(packed)[step:])


@given(weights(), st.sampled_from(["pack_quantized_0_17", "planar", "int_quantized", "gptq_v2", "xpu_int4pack"]))
@settings(max_examples=40, deadline=None)
def test_changes_of_storage(weight: tuple[dict[str, Tensor], dict[str, int]], storage: str) -> None:
    """There and back, or refused because of the sizes that the other storage needs, or of what it does not hold."""
    fields, params = weight
    packed = int_group.pack(fields, storage="pack_quantized", **params)
    if storage not in int_group.FORMAT.variant(packed.params).storages:
        return
    try:
        moved = int_group.convert(packed, storage)
    except FormatError as error:
        assert any(reason in str(error) for reason in ("must be a multiple of", "does not hold", "act-order", "in order"))
        return
    assert same_bits(int_group.dequantize(moved, torch.float32), int_group.dequantize(packed, torch.float32))
    back = int_group.unpack(int_group.convert(moved, "pack_quantized"))
    assert torch.equal(back["q"], fields["q"]) and torch.equal(back["s"], fields["s"])


@pytest.mark.parametrize("bits", [3, 5, 6, 7])
def test_kernels_read_no_word_behind_the_last(bits: int) -> None:
    for n, k in ((3, 41), (33, 7)):
        weight = torch.randn(n, k, generator=torch.Generator().manual_seed(bits))
        packed = int_group.quantize(weight, "pack_quantized", bits=bits, group=32, scale_type="f32").to(DEVICE)
        out = torch.full((n, k), torch.nan, device=DEVICE)
        with guarded(packed, out):
            launch.dequantize(packed, out)
        assert same_bits(out.cpu(), int_group.dequantize(packed.to("cpu"), torch.float32))
