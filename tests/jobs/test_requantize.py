"""Layers of folders as another format: what its producers write, and what no folder holds."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from qdsl.checkpoint.detect.layer import Layer
from qdsl.checkpoint.detect.layer_weights import weights
from qdsl.checkpoint.detect.layers import layers
from qdsl.checkpoint.files.folder import Folder
from qdsl.generated import int_group
from qdsl.jobs.convert import run, target
from qdsl.jobs.engine import RewriteError
from qdsl.runtime import PackedWeight
from tests.support import folders
from tests.support.formats import same_bits

N, K = 32, 128


def source(seed: int = 0) -> PackedWeight:
    values = torch.randn(N, K, generator=torch.Generator().manual_seed(seed)).bfloat16()
    return int_group.quantize(values, "gptq_v2", bits=8, group=32)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return folders.folder(tmp_path / "in", folders.named({"up": source()}))


def requantized(path: Path, to: str, **params: int | str) -> Path:
    out = path.parent / "out"
    with Folder(path) as folder:
        run.convert(folder, layers(folder), target.parse_conversion(to, True, params), out)
    return out


def read(path: Path) -> tuple[Layer, PackedWeight, dict[str, Tensor], dict[str, Any]]:
    """The one layer of a folder, its weight, its tensors in the file, and what the config says."""
    with Folder(path) as folder:
        [layer] = layers(folder).layers
        assert layer.format and not layer.problems, (layer.why, layer.problems)
        [weight] = weights(folder, layer)
        tensors = {name.removeprefix("up."): folder.tensor(name).clone() for name in folder.names()}
        return layer, weight, tensors, folder.config["quantization_config"]


def expected(name: str, **params: int | str) -> PackedWeight:
    values = int_group.dequantize(source(), torch.float32)
    packed: PackedWeight = import_module(f"qdsl.generated.{name}").quantize(values, **params)
    return packed


@pytest.mark.parametrize(("name", "one"), [("int8_tensor", "weight_scale"), ("nvfp4_ct", "weight_global_scale")])
def test_numbers_of_compressed_tensors_have_an_axis(path: Path, name: str, one: str) -> None:
    """Its loader takes [1] alone; files without that axis are read, too."""
    out = requantized(path, name)
    _, weight, tensors, settings = read(out)
    assert tensors[one].shape == (1,) and settings["quant_method"] == "compressed-tensors"
    assert all(same_bits(weight.tensors[key], tensor) for key, tensor in expected(name).tensors.items())
    flat = {f"up.{key}": tensor.view(()) if key == one else tensor for key, tensor in tensors.items()}
    _, again, tensors, _ = read(folders.folder(path.parent / "flat", flat, config={"quantization_config": settings}))
    assert tensors[one].shape == () and all(same_bits(again.tensors[key], weight.tensors[key]) for key in weight.tensors)


# Numbers beside a weight


@pytest.mark.parametrize("bits", [4, 3])
@pytest.mark.parametrize(("name", "axis"), [("hqq", 1), ("hqq_axis0", 0)])
def test_hqq_says_what_its_codes_leave_open(path: Path, name: str, axis: int, bits: int) -> None:
    """As HQQ's own files, numbers of 32 bits and extents of 64; without them nothing says N, K or the axis."""
    layer, weight, tensors, _ = read(requantized(path, name, bits=bits, group=32))
    assert (layer.format, layer.shape, layer.params["bits"], layer.params["group"]) == (name, (N, K), bits, 32)
    assert all(same_bits(weight.tensors[key], tensor) for key, tensor in expected(name, bits=bits, group=32).tensors.items())
    numbers = {"axis": torch.tensor(axis, dtype=torch.int32), "nbits": torch.tensor(bits, dtype=torch.int32),
               "group_size": torch.tensor(32, dtype=torch.int32), "shape": torch.tensor([N, K])}
    assert {*tensors} == {"W_q", "scale", "zero", *numbers} and {*layer.settings} == {f"up.{key}" for key in numbers}
    assert all(same_bits(tensors[key], tensor) for key, tensor in numbers.items())


def test_hqq_of_experts_in_one_tensor_is_refused(tmp_path: Path) -> None:
    every = [source(seed).tensors for seed in range(2)]
    experts = {f"up.{key}": torch.stack([tensors[key] for tensors in every]) for key in every[0]}
    path = folders.folder(tmp_path / "in", experts)
    with pytest.raises(RewriteError, match=r"cannot be hqq: .* have no form for experts in one tensor"):
        requantized(path, "hqq", bits=4, group=32)
    assert not (tmp_path / "out").exists()


# Linear layers of transformers that read the same tensors in two ways


@pytest.mark.parametrize(("name", "settings_of_class"), [
    ("bitnet", {"linear_class": "bitlinear", "quantization_mode": "offline"}),
    ("bitnet_offline", {"linear_class": "autobitlinear", "quantization_mode": "offline"})])
def test_bitnet_says_which_linear_class_reads_it(path: Path, name: str, settings_of_class: dict[str, Any]) -> None:
    layer, weight, tensors, settings = read(requantized(path, name))
    assert (layer.format, layer.storage) == (name, "transformers") and settings == {"quant_method": "bitnet", **settings_of_class}
    assert tensors["weight_scale"].shape == (1,)
    assert all(same_bits(weight.tensors[key], tensor) for key, tensor in expected(name).tensors.items())


@pytest.mark.parametrize(("settings", "name"), [
    ({}, "bitnet"), ({"linear_class": "bitlinear"}, "bitnet"),
    ({"linear_class": "bitlinear", "quantization_mode": "online"}, "bitnet"),
    ({"quantization_mode": "offline", "use_rms_norm": True}, "bitnet"),
    ({"linear_class": "autobitlinear"}, "bitnet_offline"),
    ({"linear_class": "autobitlinear", "quantization_mode": "offline"}, "bitnet_offline")])
def test_bitnet_by_what_transformers_takes_where_nothing_is_said(tmp_path: Path, settings: dict[str, Any], name: str) -> None:
    """BitLinear divides by the scale, in every mode, and is the class by default; AutoBitLinear multiplies by it, offline."""
    packed = expected(name, scale_type="bf16")
    config = {"quantization_config": {"quant_method": "bitnet", **settings}}
    layer, weight, _, _ = read(folders.folder(tmp_path / "in", folders.named({"up": packed}), config=config))
    assert layer.format == name and same_bits(weight.format.dequantize(weight), packed.format.dequantize(packed))


def test_bitnet_that_is_quantized_when_it_runs_is_not_packed(tmp_path: Path) -> None:
    config = {"quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "online"}}
    path = folders.folder(tmp_path / "in", folders.named({"up": expected("bitnet")}), config=config)
    with Folder(path) as folder:
        [layer] = layers(folder).layers
    assert layer.problems or not layer.format


# What is no target


@pytest.mark.parametrize("name", ["df11", "hlane", "fix4", "hlane.hlane"])
def test_entropy_codes_are_left_to_compress(path: Path, name: str) -> None:
    with pytest.raises(RewriteError, match=f"`qdsl compress --format {name.partition('.')[0]}` compresses plain"):
        requantized(path, name)
    assert not (path.parent / "out").exists()
