"""Checkpoints compared by the numbers that their layers stand for."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

from qdsl.checkpoint.files.safetensors import CheckpointError, write
from qdsl.checkpoint.report import verify_decoded as module
from qdsl.checkpoint.report.verify_decoded import decoded_differences
from qdsl.cli import app
from qdsl.generated import fp8_block, int_group
from qdsl.runtime import PackedWeight
from tests.support import folders

FP8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [32, 32]}}
AWQ = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": 32}}


def weight(n: int = 16, k: int = 64) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(n + k))


def gptq(n: int = 16, k: int = 64) -> PackedWeight:
    return int_group.quantize(weight(n, k), "gptq_v2", bits=4, group=32)


def stored(path: Path, weights: Mapping[str, PackedWeight], config: Mapping[str, Any] | None = None,
           **plain: torch.Tensor) -> Path:
    return folders.folder(path, {**folders.named(weights), **{name.replace("_", "."): tensor for name, tensor in plain.items()}},
                          config=config)


def verify(*arguments: str | Path) -> Result:
    return CliRunner().invoke(app, ["verify", *map(str, arguments)], catch_exceptions=False)


@pytest.mark.parametrize("tile", [64, 1 << 19])
def test_storages_of_one_format_are_equal(tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "PACKED", tile)
    packed = gptq()
    a = stored(tmp_path / "a", {"w": packed}, norm=torch.ones(3), w_bias=torch.ones(16))
    b = stored(tmp_path / "b", {"w": int_group.convert(packed, "awq")}, AWQ, norm=torch.ones(3), w_bias=torch.ones(16))
    assert decoded_differences(a, b) == decoded_differences(b, a) == []
    assert verify(a, b).exit_code == 1 and verify(a, b, "--decoded").stdout == "equal\n"


@pytest.mark.parametrize("name", ["qweight", "qzeros", "scales"])
@pytest.mark.parametrize("storage", ["awq", "gptq_v2"])
def test_one_changed_bit_is_found(tmp_path: Path, name: str, storage: str) -> None:
    """In the same storage and in another one."""
    packed = int_group.convert(gptq(), storage)
    bits = packed.tensors[name].clone()
    bits.view(torch.uint8)[1, 5] ^= 1
    changed = packed.derive({**packed.tensors, name: bits})
    apart = (int_group.dequantize(changed, torch.float32) - int_group.dequantize(packed, torch.float32)).abs()
    a = stored(tmp_path / "a", {"w": gptq()})
    b = stored(tmp_path / "b", {"w": changed}, AWQ if storage == "awq" else None)
    [difference] = decoded_differences(a, b)
    assert difference.values is not None and apart[difference.values.index] == difference.values.distance == apart.max() > 0


def test_equal_bits_of_other_types_are_other_numbers(tmp_path: Path) -> None:
    scales = gptq().tensors["scales"].view(torch.bfloat16)
    other = int_group.quantize(weight(), "gptq_v2", bits=4, group=32, scale_type="bf16")
    b = stored(tmp_path / "b", {"w": other.derive({**gptq().tensors, "scales": scales})})
    assert len(decoded_differences(stored(tmp_path / "a", {"w": gptq()}), b)) == 1


@pytest.mark.parametrize("tile", [64, 1 << 19])
def test_the_numbers_that_lie_farthest_apart(tmp_path: Path, tile: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of layers of two formats, and of one beside the floats that it was made of; within a tolerance they are equal."""
    monkeypatch.setattr(module, "TILE", tile)
    monkeypatch.setattr(module, "PACKED", tile)
    other = fp8_block.quantize(weight(), bn=32, bk=32)
    a, b = stored(tmp_path / "a", {"w": gptq()}), stored(tmp_path / "b", {"w": other}, FP8)
    plain = stored(tmp_path / "plain", {}, {}, w_weight=weight())
    x, y = (packed.format.dequantize(packed, torch.float32).double() for packed in (gptq(), other))
    for left, right, path in ((x, y, b), (x, weight().double(), plain)):
        apart = (left - right).abs()
        index = [int(i) for i in torch.unravel_index(apart.argmax(), apart.shape)]
        [row] = json.loads(verify(a, path, "--decoded", "--json").stdout)["differences"]
        assert (row["tensor"], row["kind"], row["index"]) == ("w.weight", "decoded", index)
        assert row["distance"] == float(apart.max()) and row["largest"] == float(left.abs().max())
        assert (float(row["a"]), float(row["b"])) == pytest.approx((float(left[tuple(index)]), float(right[tuple(index)])))
        part = row["distance"] / row["largest"]
        assert decoded_differences(a, path, part * 1.01) == [] and len(decoded_differences(a, path, part * 0.99)) == 1
    output = verify(a, b, "--decoded", "--tolerance", "2").stdout
    assert output == "equal within 2 of the largest magnitudes\n"
    line = verify(a, b, "--decoded").stdout.splitlines()[0]
    assert line.startswith("w.weight: apart by up to 0.") and " of the largest magnitude, at [" in line


def test_plain_tensors(tmp_path: Path) -> None:
    """Bit for bit where they have one dtype and no tolerance, as numbers where they have not; NaN is NaN, infinity infinity."""
    x = torch.tensor([1.0, torch.nan, torch.inf, 0.0])
    a = stored(tmp_path / "a", {}, {}, x=x, y=x, i=torch.tensor([1, 2]))
    b = stored(tmp_path / "b", {}, {}, x=x.bfloat16(), y=x, i=torch.tensor([1, 3]))
    assert [str(difference) for difference in decoded_differences(a, b)] == [
        "1 of 2 elements differ, the first at [1]: 2 (0x0000000000000002) and 3 (0x0000000000000003)"]
    other = x.clone()
    other[1], other[3] = 0, -0.0
    c = stored(tmp_path / "c", {}, {}, x=x, y=other, i=torch.tensor([1, 2]))
    [difference] = decoded_differences(a, c, 0.5)
    assert str(difference) == "apart by up to inf, inf of the largest magnitude, at [1]: nan and 0"
    assert decoded_differences(a, c)[0].kind == "values"


@pytest.mark.parametrize("shape", [(3, 0), (0, 7), (0,), ()])
def test_tensors_of_few_elements(tmp_path: Path, shape: tuple[int, ...]) -> None:
    a = stored(tmp_path / "a", {}, {}, x=torch.ones(shape), y=torch.ones(2))
    b = stored(tmp_path / "b", {}, {}, x=torch.ones(shape).half(), y=torch.ones(2))
    assert decoded_differences(a, b) == decoded_differences(a, a, 0.5) == []


def test_experts_are_compared_one_by_one(tmp_path: Path) -> None:
    packed = [gptq(), int_group.quantize(-weight(), "gptq_v2", bits=4, group=32)]
    awq = [int_group.convert(weight, "awq") for weight in packed]
    dense = torch.stack([int_group.dequantize(weight, torch.float32) for weight in packed])
    paths = []
    for name, experts, config in (("gptq", packed, None), ("awq", awq, AWQ)):
        tensors = {f"w_{key}": torch.stack([one.tensors[key] for one in experts]) for key in experts[0].tensors}
        tensors = {key.replace("_", ".", 1): tensor for key, tensor in tensors.items()}
        paths.append(folders.folder(tmp_path / name, tensors, config=config))
    plain = stored(tmp_path / "plain", {}, {}, w_weight=dense)
    assert decoded_differences(*paths) == decoded_differences(paths[0], plain) == decoded_differences(plain, paths[1]) == []
    dense[1, 7, 9] += 1
    [difference] = decoded_differences(paths[0], stored(tmp_path / "other", {}, {}, w_weight=dense))
    assert difference.values is not None and difference.values.index == (1, 7, 9)


def test_what_is_missing_or_of_another_shape(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", {"u": gptq(), "v": gptq()}, n=torch.ones(2))
    b = stored(tmp_path / "b", {"v": gptq(32, 64)}, m=torch.ones(2))
    lines = verify(a, b, "--decoded").stdout.splitlines()
    assert lines == ["n: only in A: F32 [2]", "u.weight: only in A: int_group.gptq_v2 [16, 64]",
                     "v.weight: shape [16, 64] and [32, 64]", "m: only in B: F32 [2]", "differences: 4"]


def test_what_has_no_numbers_is_trouble(tmp_path: Path) -> None:
    a = stored(tmp_path / "a", {"w": gptq()}, {})                # nothing says whether its zero points are v1 or v2
    result = verify(a, a, "--decoded")
    assert result.exit_code == 1 and "layer 'w': the tensors fit int_group.gptq_v2 and int_group.gptq_v1" in result.stderr
    b = stored(tmp_path / "b", {"w": gptq()})
    c = stored(tmp_path / "c", {}, {}, w_weight=torch.ones(16, 64, dtype=torch.int8))
    with pytest.raises(CheckpointError):
        decoded_differences(b, c)
    write(tmp_path / "d.safetensors", {"x": torch.ones(1)})
    result = verify(tmp_path / "d.safetensors", tmp_path / "d.safetensors", "--tolerance", "1")
    assert result.exit_code == 2 and "give --decoded" in result.stderr
