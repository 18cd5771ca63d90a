"""torch's int4pack, in tiles of CUDA and of CPUs: against torchao's and torch's files and torch itself; GPTQ and AWQ in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from qdsl.generated import int4pack, int_group
from qdsl.runtime import FormatError, PackedWeight
from qdsl.runtime.cpu import int4
from qdsl.runtime.weight import convert, tiles
from tests.support.formats import ROOT, same_bits

DATA = ROOT / "tests" / "data" / "int4pack"
STORAGES = {"AVX512": "cpu_avx512", "AVX2": "cpu_avx2", "DEFAULT": "cpu_scalar"}
TILES = {"AVX512": 64, "AVX2": 32, "DEFAULT": 32}
CAPABILITY = torch.backends.cpu.get_cpu_capability()             # which kernels torch picked, and with them the layout


def read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """The file's arrays, and what it says of them."""
    with np.load(path) as file:
        about: dict[str, Any] = json.loads(str(file["meta"]))
        tensors = {key: torch.from_numpy(file[key].copy()) for key in file.files if key != "meta"}
    tensors = {key: tensor.view(torch.bfloat16) if about["dtypes"][key] == "bf16" else tensor for key, tensor in tensors.items()}
    return tensors, about


def test_tinygemm() -> None:
    """What torchao chooses, in the tiles of torch's CUDA kernel."""
    golden, about = read(DATA / "ao_int4_tinygemm_g32_N64_K128.npz")
    tensors = {"qdata": golden["cuda.qdata_derived"], "scale_and_zero": golden["scale_and_zeros"]}
    packed = int4pack.wrap(tensors, (about["N"], about["K"]), group=about["group_size"])
    assert packed.storage == "tinygemm" and packed.params["scale_type"] == "bf16"
    assert torch.equal(int4pack.unpack(packed)["q"], golden["codes"])
    assert same_bits(int4pack.dequantize(packed, torch.float32), golden["dequant_f32"])
    quantized = int4pack.quantize(golden["W"], group=32)
    assert all(same_bits(quantized.tensors[name].flatten(), tensor.flatten()) for name, tensor in tensors.items())


@pytest.mark.parametrize(("n", "k"), [(16, 1024), (13, 1024), (16, 896), (1, 64)])
def test_padded_tiles(n: int, k: int) -> None:
    """Tiles of a whole weight hold one that ends anywhere; what is packed has zeros behind it."""
    whole = int4pack.quantize(torch.randn(16, 1024, generator=torch.Generator().manual_seed(0)), "tinygemm", group=64)
    rows = -(-n // 8)
    tensors = {"qdata": whole.tensors["qdata"][:rows], "scale_and_zero": whole.tensors["scale_and_zero"][:, :8 * rows]}
    packed = int4pack.wrap(tensors, (n, k), "tile_packed", group=64)
    weight = int4pack.dequantize(whole, torch.float32)
    assert same_bits(int4pack.dequantize(packed, torch.float32), weight[:n, :k].contiguous())
    again = int4pack.pack(int4pack.unpack(packed), "tile_packed", **packed.params)
    zeros = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    fields = int4pack.unpack(int4pack.wrap({**again.tensors}, (8 * rows, 1024), "tile_packed", group=64))
    for name, field in int4pack.unpack(packed).items():
        assert torch.equal(fields[name][:n, :field.shape[1]], field)
        assert not fields[name][n:].any() and not fields[name][:, field.shape[1]:].any()
    assert {name: tensor.shape for name, tensor in again.tensors.items()} == {name: zero.shape for name, zero in zeros.items()}


def test_groups_that_steps_do_not_hold() -> None:
    """Groups for whole 1024 columns: of one of 4096 there would be a quarter."""
    with pytest.raises(FormatError, match=r"128\*ceil\(K/1024\)/group is no whole number of elements at K = 4096, group = 4096"):
        int_group.quantize(torch.randn(8, 4096), "awq_gemv", bits=4, group=-1)


@pytest.mark.parametrize("path", sorted(DATA.glob("torch_*.npz")), ids=lambda path: path.stem)
def test_tiles_of_cpus(path: Path) -> None:
    """Whole tiles, and behind them the rows that fill none."""
    golden, about = read(path)
    (n, k), data = (about["N"], about["K"]), golden["packed"].flatten()
    whole = n // TILES[about["isa"]] * TILES[about["isa"]]
    for storage, start, stop in ((STORAGES[about["isa"]], 0, whole), ("cpu_rest", whole, n)):
        if start < stop:
            tensors = {"weight": data[start * k // 2:stop * k // 2],
                       "scales_and_zeros": golden["scales_and_zeros"][:, start:stop]}
            packed = int4pack.wrap(tensors, (stop - start, k), storage, group=about["group"])
            fields = int4pack.unpack(packed)
            assert torch.equal(fields["q"], golden["codes"][start:stop])
            again = int4pack.pack(fields, storage=packed.storage, **packed.params)
            assert all(same_bits(again.tensors[name].flatten(), tensor.flatten()) for name, tensor in tensors.items())
            assert torch.allclose(int4pack.linear(golden["x"], packed), golden["y"][:, start:stop], rtol=0, atol=2e-5)


def gptq(storage: str = "gptq_v2", scale_type: str = "f16", **options: Any) -> PackedWeight:
    weight = torch.randn(128, 256, generator=torch.Generator().manual_seed(0))
    return int_group.quantize(weight, storage, bits=4, **{"group": 64, **options}, scale_type=scale_type)


@pytest.mark.skipif(CAPABILITY not in STORAGES, reason="torch packs otherwise on this machine")
def test_torch_packs_alike_and_multiplies_it() -> None:
    packed = int4pack.convert(gptq(), STORAGES[CAPABILITY])
    torchs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(int4pack.unpack(packed)["q"].int(), 1)
    assert same_bits(packed.tensors["weight"].view(torchs.shape), torchs)
    product = torch.ops.aten._weight_int4pack_mm_for_cpu(torch.eye(256), torchs, 64, packed.tensors["scales_and_zeros"])
    assert torch.allclose(product.t(), int4pack.dequantize(packed, torch.float32), rtol=0, atol=1e-5)


@pytest.mark.skipif(CAPABILITY not in STORAGES, reason="torch packs otherwise on this machine")
@pytest.mark.parametrize("n", [16, 48, 80, 112])
def test_rows_that_fill_no_tile(n: int) -> None:
    """Torch has them behind whole tiles; and those of no 16 rows nowhere."""
    codes = torch.randint(16, (n, 64), dtype=torch.uint8)
    torchs = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes.int(), 1).flatten()
    tile = TILES[CAPABILITY]
    packed = int4pack.pack({"q": codes, "s": torch.ones(n, 2), "z": torch.zeros(n, 2)}, "cpu_rest", group=32)
    whole = int4pack.convert(packed, STORAGES[CAPABILITY]).tensors["weight"]
    padded = torch.nn.functional.pad(codes, (0, 0, 0, -n % tile)).int()
    assert torch.equal(whole.flatten(), torch.ops.aten._convert_weight_to_int4pack_for_cpu(padded, 1).flatten())
    parts = [packed.cut("N", n // tile * tile, n)]
    if n > tile:
        parts.insert(0, int4pack.convert(packed.cut("N", 0, n // tile * tile), STORAGES[CAPABILITY]))
    assert torch.equal(torch.cat([part.tensors["weight"].flatten() for part in parts]), torchs)
    with pytest.raises(RuntimeError, match="expect N to be dividable by 16"):
        torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes[1:].int(), 1)


@pytest.mark.parametrize("storage", ["gptq_v2", "gptq_v1", "awq", "pack_quantized", "marlin", "modelopt", "xpu_int4pack"])
@pytest.mark.parametrize("to", STORAGES.values())
def test_weights_of_integers(storage: str, to: str) -> None:
    """With scales of 16 bits all numbers stay, in float32."""
    for scale_type in ("f16", "bf16"):
        packed = gptq(storage, scale_type)
        converted = int4pack.convert(packed, to)
        symmetric = storage in ("marlin", "modelopt")
        assert converted.params == {"group": 64, "scale_type": "bf16" if symmetric and scale_type == "bf16" else "f32"}
        assert torch.equal(int4pack.dequantize(converted, torch.float32), int_group.dequantize(packed, torch.float32))


def test_one_group_is_a_row_of_as_many_columns() -> None:
    packed = int_group.quantize(torch.randn(64, 128), "gptq_v2", bits=4, group=-1)
    converted = int4pack.convert(packed, "cpu_avx2")
    assert converted.params["group"] == 128
    assert torch.equal(int4pack.dequantize(converted, torch.float32), int_group.dequantize(packed, torch.float32))


def test_what_floats_do_not_hold_is_refused() -> None:
    with pytest.raises(FormatError, match=r"cannot hold this weight of int_group: at row .*; requantize quantizes"):
        int4pack.convert(gptq(scale_type="f32"), "cpu_avx2")
    with pytest.raises(FormatError, match=r"cannot hold this weight of int_group: at row"):
        int4pack.convert(gptq(scale_type="bf16"), "tinygemm")
    requantized, report = int_group.FORMAT.requantize(gptq(scale_type="bf16"), int4pack.FORMAT, "tinygemm", group=64)
    assert requantized.storage == "tinygemm" and report.decibels > 15
    with pytest.raises(FormatError, match="int4pack has no storage 'tinygemm' for scale_type=f32"):
        int4pack.convert(gptq(), "tinygemm")
    with pytest.raises(FormatError, match="'q' is u8"):
        int4pack.convert(int_group.quantize(torch.randn(64, 128), "gptq_v2", bits=8, group=64), "cpu_avx2")
    with pytest.raises(FormatError, match="int_group has group = 192; int4pack has 128, 32, 64, 256"):
        int4pack.convert(int_group.quantize(torch.randn(64, 192), "gptq_v2", bits=4, group=-1), "cpu_avx2")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[torch.dtype]:
    """The dtypes in which torch's operation multiplied."""
    seen: list[torch.dtype] = []
    whole = int4.int4_product

    def watched(x: Tensor, packed: PackedWeight, bias: Tensor | None) -> Tensor | None:
        out = whole(x, packed, bias)
        seen.extend([] if out is None else [x.dtype])
        return out

    monkeypatch.setattr(int4, "int4_product", watched)
    return seen


def assert_near(weight: PackedWeight, dtype: torch.dtype, tolerance: float) -> PackedWeight:
    """The weight for this machine; its products are those of the weight, but for roundings of scales and of results."""
    converted = int4pack.for_device(weight, dtype)
    n, k = weight.shape
    x, bias = (torch.randn(*shape, generator=torch.Generator().manual_seed(3)).to(dtype) for shape in ((2, 3, k), (n,)))
    wanted = int_group.linear(x.float(), weight, bias.float())
    got = int4pack.linear(x, converted, bias)
    assert got.dtype == dtype and got.shape == (2, 3, n)
    assert float((got.float() - wanted).abs().max()) <= tolerance * float(wanted.abs().max())
    return converted


@pytest.mark.skipif(CAPABILITY not in STORAGES, reason="torch packs otherwise on this machine")
@pytest.mark.parametrize("act_order", [False, True])
@pytest.mark.parametrize("group", [32, 64, 128, 256, 512, -1])
@pytest.mark.parametrize("storage", ["gptq_v2", "awq"])
def test_for_device(storage: str, group: int, act_order: bool, calls: list[torch.dtype]) -> None:
    """Any groups and any rows, also those of no tile; groups over 256 are cut, and columns of one keep its scale."""
    weight = int_group.quantize(torch.randn(40, 1024, generator=torch.Generator().manual_seed(0)), storage, bits=4, group=group)
    if act_order:
        if storage == "awq" or group == -1:
            pytest.skip("columns are in order")
        columns = torch.randperm(1024, generator=torch.Generator().manual_seed(1))
        weight = int_group.pack(int_group.unpack(weight) | {"g": columns.int() // group}, storage, **weight.params)
    packed = assert_near(weight, torch.bfloat16, 2 ** -7)
    assert packed.storage == STORAGES[CAPABILITY] and packed.params == {"group": min(group % 1025, 256), "scale_type": "bf16"}
    assert calls == [torch.bfloat16] and packed.notes == ("scales and zeros are rounded to bfloat16",)
    exact = int4pack.for_device(weight, torch.float32)
    assert torch.equal(int4pack.dequantize(exact, torch.float32), int_group.dequantize(weight, torch.float32)) and not exact.notes
    assert_near(weight, torch.float16, 2 ** -9)


def test_for_device_of_scales_that_bfloat16_holds(calls: list[torch.dtype]) -> None:
    numbers = torch.randn(64, 256, generator=torch.Generator().manual_seed(0))
    weight = int_group.quantize(numbers, "marlin", bits=4, group=64, scale_type="bf16")
    own = assert_near(weight, torch.bfloat16, 3 * 2 ** -9)       # weights, products and their sums with the bias are rounded
    assert not own.notes and torch.equal(int4pack.dequantize(own, torch.float32), int_group.dequantize(weight, torch.float32))
    x = torch.randn(2, 256, generator=torch.Generator().manual_seed(1)).bfloat16().requires_grad_()
    int4pack.linear(x, own).sum().backward()
    assert x.grad is not None and torch.allclose(x.grad.float(), int4pack.dequantize(own, torch.float32).sum(0), atol=0.1)
    with pytest.raises(FormatError, match="torch has fused int4 operations for cpu and xpu, not for meta"):
        int4pack.for_device(weight.to("meta"))


@pytest.mark.parametrize("storage", ["gptq_v2", "xpu_int4pack"])
def test_columns_lie_by_groups(storage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As gptqmodel moves them before torch packs them; the same where a weight goes by its fields, tile by tile."""
    packed = gptq(scale_type="bf16")
    fields = int_group.unpack(packed) | {"g": torch.randperm(256, generator=torch.Generator().manual_seed(1)).int() // 64}
    packed = int_group.pack(fields, storage=storage, **packed.params)
    converted = int4pack.convert(packed, "cpu_avx2")
    assert torch.equal(converted.tensors["ret_idx"], fields["g"].argsort(stable=True).int())
    assert torch.equal(int4pack.dequantize(converted, torch.float32), int_group.dequantize(packed, torch.float32))
    x = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(int4pack.linear(x, converted), int_group.linear(x, packed), rtol=0, atol=1e-3)
    with pytest.raises(FormatError, match=r"tinygemm has columns in order; those of this weight belong to groups all over K"):
        int4pack.convert(packed, "tinygemm")
    monkeypatch.setattr(tiles, "TILE", 1 << 13)
    monkeypatch.setattr(convert, "move_by_words", lambda *args: {})
    again = int4pack.convert(packed, "cpu_avx2")
    assert all(same_bits(again.tensors[name], tensor) for name, tensor in converted.tensors.items())


def test_only_codes_that_are_there_count() -> None:
    """Others, that would change, no weight has."""
    packed = gptq(scale_type="f32")
    fields = int_group.unpack(packed)
    fields["z"].fill_(7)
    fields["q"].clamp_(7, 8)                                     # 0 and s alone
    converted = int4pack.convert(int_group.pack(fields, storage="awq", **packed.params), "cpu_avx2")
    assert torch.equal(int4pack.dequantize(converted, torch.float32), (fields["q"] - 7.) * fields["s"].repeat_interleave(64, 1))


@pytest.mark.parametrize("storage", ["gptq_v2", "gptq_v1", "awq", "pack_quantized", "marlin", "modelopt", "planar"])
def test_integers_come_back_from_floats(storage: str) -> None:
    """Zero points are solved for, block by block, and scales take the dtype that is asked for."""
    packed = int_group.convert(gptq("pack_quantized" if storage == "planar" else storage), storage)
    back = int_group.convert(int4pack.convert(packed, "cpu_avx512"), storage, **packed.params)
    assert back.params == packed.params
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items() if name != "g_idx")
    if storage != "awq":
        return
    wide = int4pack.convert(packed, "cpu_avx512")
    wide.tensors["scales_and_zeros"][0, 0, 1] += 1e-3
    with pytest.raises(FormatError, match="int_group cannot hold this weight of int4pack: at row 0, column 0"):
        int_group.convert(wide, storage, **packed.params)


def test_other_parameters_of_the_same_format() -> None:
    packed = int4pack.quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)), "torchao", group=64)
    wide = int4pack.convert(packed, "cpu_avx512", scale_type="f32")
    assert wide.params == {"group": 64, "scale_type": "f32"}
    assert torch.equal(int4pack.dequantize(wide, torch.float32), int4pack.dequantize(packed, torch.float32))
    back = int4pack.convert(wide, "torchao", scale_type="bf16")
    assert all(same_bits(back.tensors[name], tensor) for name, tensor in packed.tensors.items())
    with pytest.raises(FormatError, match="int4pack has no parameter 'bits'"):
        int4pack.convert(packed, "cpu_avx512", bits=4)
