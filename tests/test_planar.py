"""The planar storage: exact there and back, no larger than promised, made a tile of rows at a time, for layers and models."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import qdsl
from qdsl.generated import fp8_channel, int_group, q4_0, q8_0
from qdsl.passes.derive_planar import PLANAR
from qdsl.runtime import FormatError, PackedWeight, tiles
from tests.support.formats import Case, cases, random_packed, same_bits

CASES = [case for case in cases() if case.storage != PLANAR and PLANAR in case.module.FORMAT.variant(case.choice).storages]
SHAPE = (128, 1024)


def params(case: Case) -> Iterator[dict[str, int | str]]:
    format = case.module.FORMAT
    values = {size: format.params[size] for size in format.size_axes}
    for i in range(max(map(len, values.values()), default=1)):
        yield {**case.choice, **{size: found[min(i, len(found) - 1)] for size, found in values.items()}}


def weight(case: Case, chosen: dict[str, int | str], seed: int = 0) -> PackedWeight:
    """Random, its columns in order."""
    packed = random_packed(case, SHAPE, seed, chosen)
    index = [name for name, stored in packed.layout.tensors.items() if stored.dtype == "index" and name in packed.tensors]
    return case.module.FORMAT.checked(packed.derive({k: v for k, v in packed.tensors.items() if k not in index}))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_there_and_back(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tiles, "TILE", 40 * SHAPE[1])            # several tiles of rows, the last one short
    for chosen in params(case):
        packed = weight(case, chosen)
        planar = case.module.convert(packed, PLANAR)
        assert planar.storage == PLANAR and planar.shape == packed.shape and planar.params == packed.params
        back = case.module.convert(planar, case.storage)
        assert back.tensors.keys() == packed.tensors.keys()
        assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
        again = case.module.convert(back, PLANAR)
        assert all(same_bits(again.tensors[name], tensor) for name, tensor in planar.tensors.items())
        assert same_bits(case.module.dequantize(planar, torch.float32), case.module.dequantize(packed, torch.float32))


@pytest.mark.parametrize("case", [case for case in CASES if case.path.parent.name == "specs" and "tests" not in case.path.parts],
                         ids=str)
def test_no_larger_than_promised(case: Case) -> None:
    for chosen in params(case):
        packed, planar = (case.module.FORMAT.empty((4096, 4096), storage, "meta", (), **chosen)
                          for storage in (case.storage, PLANAR))
        bits = 8 * packed.nbytes / 4096 ** 2
        assert planar.nbytes <= packed.nbytes * (1.04 if bits >= 4 else 1.12), chosen


def test_repacking_needs_a_tile_beside_both_weights() -> None:
    packed = q4_0.quantize(torch.randn(2048, 4096))
    allowed = packed.nbytes // 2
    sizes: list[int] = []
    pack = q4_0.FORMAT.variants[()].storages[PLANAR].pack

    def watched(**fields: torch.Tensor) -> dict[str, torch.Tensor]:
        sizes.append(sum(field.nbytes for field in fields.values()))
        return pack(**fields)

    layout = q4_0.FORMAT.variants[()].storages[PLANAR]
    object.__setattr__(layout, "pack", watched)
    try:
        planar = q4_0.convert(packed, PLANAR)
    finally:
        object.__setattr__(layout, "pack", pack)
    assert len(sizes) > 8 and max(sizes) < allowed
    assert same_bits(q4_0.convert(planar, "gguf").tensors["blocks"], packed.tensors["blocks"])


def test_what_has_no_planar_form_stays() -> None:
    odd = q4_0.quantize(torch.randn(8, 4096 + 32))
    assert q4_0.planar(odd) is odd
    ordered = int_group.quantize(torch.randn(64, 256), group=64)
    assert int_group.planar(ordered).storage == PLANAR
    tensors = {**ordered.tensors, "g_idx": torch.arange(256, dtype=torch.int32).flip(0) // 64}
    acted = int_group.wrap(tensors, storage="gptq_v2", group=64)
    assert int_group.planar(acted) is acted
    with pytest.raises(FormatError, match="cannot hold 'g'"):
        int_group.convert(acted, PLANAR)
    assert q4_0.planar(q4_0.planar(q4_0.quantize(torch.randn(8, 256)))).storage == PLANAR


def test_a_model_in_place() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(256, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32, bias=False))
    qdsl.quantize_(model, q8_0, filter=lambda layer, name: name == "0")
    x = torch.randn(3, 256)
    before = model(x)
    bias = model[0].bias
    report = qdsl.planar_(model)
    assert list(report.quantized) == ["0"] and report.skipped == {} and "matrix units" in str(report)
    assert model[0].packed.storage == PLANAR and model[0].bias is bias and torch.equal(model(x), before)
    assert set(dict(model[0].named_parameters())) == {"q", "d", "bias"}
    assert list(qdsl.planar_(model).skipped) == ["0"]
    with pytest.raises(FormatError, match="itself a linear layer"):
        qdsl.planar_(model[0])


def test_codes_that_are_no_numbers_are_noted() -> None:
    """The kernels for matrix units take NaN codes for numbers, so weights with such codes are noted, wherever they come from."""
    packed = fp8_channel.quantize(torch.randn(16, 256))
    assert packed.finite and fp8_channel.convert(packed, PLANAR).finite
    codes = packed.tensors["weight"].view(torch.uint8).clone()
    codes[3, 5] = 0xFF
    wrapped = fp8_channel.wrap({**packed.tensors, "weight": codes.view(torch.float8_e4m3fn)})
    assert not wrapped.finite and not fp8_channel.convert(wrapped, PLANAR).finite
    layer = fp8_channel.Linear(packed)
    assert layer.packed.finite
    layer.load_state_dict({**layer.state_dict(), "weight": wrapped.tensors["weight"]}, assign=True)
    assert not layer.packed.finite


